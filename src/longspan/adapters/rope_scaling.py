"""Reads which scaling a rope block means, by what else its config.json says."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal

from longspan.adapters.config_fields import ROUNDING, agreed_value, max_length
from longspan.adapters.families import Family
from longspan.adapters.origin import origin_block
from longspan.adapters.spelling import RopeBlock, require_keys
from longspan.errors import ConfigError
from longspan.rotary.scaling import (
    METHODS,
    NTKAware,
    NTKByParts,
    PositionInterpolation,
    RopeScaling,
    Yarn,
)
from longspan.rotary.scaling.base import check_factor, check_length
from longspan.rotary.scaling.yarn import yarn_mscale

OnConflict = Literal["refuse", "factor", "length"]


class ScalingReader:
    """Reads the scaling of each block of one text config.

    Args:
        config: a text config.
        family: its family, where known.
        original: the trained length, for a config that leaves it out.
        on_conflict: see `rope_from_config`.
        notes: gathers what was assumed on the way.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        family: Family | None,
        original: int | None,
        on_conflict: OnConflict,
        notes: list[str],
    ) -> None:
        if on_conflict not in ("refuse", "factor", "length"):
            raise ConfigError(
                f"on_conflict must be 'refuse', 'factor' or 'length', got {on_conflict!r}."
            )
        self.config, self.family, self.original = config, family, original
        self.on_conflict: OnConflict = on_conflict
        self.notes = notes

    def read(self, block: RopeBlock) -> RopeScaling | None:
        """Returns the block's scaling, None where it has none."""
        if block.rope_type in ("default", "proportional"):
            factor = block.values.get("factor")
            return None if factor is None else PositionInterpolation(factor=factor)
        values = {
            key: value
            for key, value in block.values.items()
            if key not in ("rope_theta", "partial_rotary_factor")
        }
        self._complete(block.rope_type, values)
        require_keys(block.rope_type, values)
        if block.rope_type == "yarn":
            self._settle_conflict(values)
        scaling = METHODS[block.rope_type]
        accepted = inspect.signature(scaling).parameters
        return self._named(scaling(**{key: values[key] for key in values if key in accepted}))

    def _complete(self, rope_type: str, values: dict[str, Any]) -> None:
        """Adds what other parts of the config say: the trained length, and a ratio of lengths."""
        key = "original_max_position_embeddings"
        named = agreed_value(
            {f"the rope block's {key}": values.get(key), f"the root's {key}": self.config.get(key)}
        )
        original = named if self.original is None else self.original
        if original is None and rope_type == "dynamic":
            original = max_length(self.config)
        if original is not None:
            check_length(key, original)
            values[key] = original
        longest = max_length(self.config)
        settled = "factor" in values or (rope_type == "longrope" and "attention_factor" in values)
        if rope_type in ("yarn", "longrope") and not settled and original and longest:
            values["factor"] = max(1.0, longest / original)
            if rope_type == "yarn":
                self.notes.append(f"no factor in the config: {longest} / {original} is used")

    def _settle_conflict(self, values: dict[str, Any]) -> None:
        """Refuses a length beyond factor · original, unless told which of them to believe."""
        longest = max_length(self.config)
        factor, original = values["factor"], values["original_max_position_embeddings"]
        check_factor(factor)
        check_length("original_max_position_embeddings", original)
        if longest is None or longest <= factor * original * (1 + ROUNDING):
            return
        if self.on_conflict == "refuse":
            raise ConfigError(
                f"max_position_embeddings {longest} exceeds factor · original = {factor:g} · "
                f"{original} = {factor * original:g}. Say which to believe: "
                "on_conflict='factor' or 'length'."
            )
        if self.on_conflict == "length":
            values["factor"] = longest / original

    def _named(self, scaling: RopeScaling) -> RopeScaling:
        """Returns NTK-by-parts for the yarn that longspan itself wrote for it."""
        written = origin_block(self.config) or {}
        if written.get("method") == NTKByParts.method and isinstance(scaling, Yarn):
            if scaling.explicit_attention_factor != 1.0:
                raise ConfigError(
                    "the longspan block says ntk-by-parts, but the rope block's attention_factor "
                    f"is {scaling.explicit_attention_factor}, not 1.0. Remove the longspan block "
                    "if the rope block was edited on purpose."
                )
            return NTKByParts(
                factor=scaling.factor,
                original_max_position_embeddings=scaling.original_max_position_embeddings,
                beta_fast=scaling.beta_fast,
                beta_slow=scaling.beta_slow,
            )
        return scaling

    def unraised(
        self, scaling: RopeScaling | None, theta: float, rotary_dim: int
    ) -> tuple[RopeScaling | None, float]:
        """Returns NTK-aware with the trained base for a base that longspan raised."""
        written = origin_block(self.config) or {}
        if written.get("method") != NTKAware.method or scaling is not None:
            return scaling, theta
        ntk = NTKAware(factor=written["factor"])
        raised = ntk.raised_theta(rotary_dim, written["rope_theta"])
        if math.isclose(raised, theta, rel_tol=1e-9):
            return ntk, float(written["rope_theta"])
        if theta in _sliding_thetas(self.config, self.family):
            return scaling, theta
        raise ConfigError(
            f"the longspan block says NTK-aware with factor {written['factor']:g} from rope_theta "
            f"{written['rope_theta']:g}, which makes {raised:.4f}, but rope_theta is {theta:g}. "
            "Remove the longspan block if rope_theta was edited on purpose."
        )


def _sliding_thetas(config: Mapping[str, Any], family: Family | None) -> set[float]:
    block = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    found = (
        block.get("rope_theta"),
        config.get("rope_local_base_freq"),
        family.sliding_theta if family else None,
    )
    return {float(theta) for theta in found if theta is not None}


def softmax_scale_multiplier(scaling: RopeScaling | None) -> float:
    """Returns what an MLA model multiplies its softmax scale by: (0.1·mscale_all_dim·ln s + 1)².

    >>> yarn = Yarn(factor=40, original_max_position_embeddings=4096,
    ...             mscale=1.0, mscale_all_dim=1.0)
    >>> round(softmax_scale_multiplier(yarn), 5)
    1.87385
    """
    if not isinstance(scaling, Yarn) or not scaling.mscale_all_dim:
        return 1.0
    return yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
