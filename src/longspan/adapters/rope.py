"""The one reader and writer of config.json's rope: config → ropes → config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from longspan.adapters.families import (
    Family,
    family_of,
    layer_types,
    positions_without_rope,
    rotating_layers,
    text_part,
)
from longspan.adapters.ropes import Ropes
from longspan.adapters.spelling import RopeBlock, canonical_block, raw_blocks, require_keys
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.rotary.frequencies import check_rope_theta
from longspan.rotary.rope import Rope
from longspan.rotary.scaling import (
    METHODS,
    DynamicNTK,
    NTKAware,
    NTKByParts,
    PositionInterpolation,
    RopeScaling,
    Yarn,
)
from longspan.rotary.scaling.base import check_factor, check_length
from longspan.rotary.scaling.yarn import yarn_mscale

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ConfigLike: TypeAlias = "PreTrainedConfig | Mapping[str, Any]"
OnConflict = Literal["refuse", "factor", "length"]

# Root keys an extension replaces: what they say moves into rope_parameters and longspan.
REPLACED_KEYS = ("rope_scaling", "rope_local_base_freq", "rope_theta", "longspan")


def rope_from_config(
    config_or_dict: ConfigLike,
    *,
    original_max_position_embeddings: int | None = None,
    on_conflict: OnConflict = "refuse",
) -> Ropes:
    """Returns the ropes a config.json describes, in whichever spelling.

    Args:
        config_or_dict: a config, or the content of a config.json; a multimodal one is read at
            its text part.
        original_max_position_embeddings: the trained length, for a config that leaves it out.
        on_conflict: what to believe where max_position_embeddings exceeds factor · original:
            `factor`, `length`, or refuse.

    Returns:
        A mapping by layer type that rotates; `{"full_attention": …}` when all layers share one.

    Raises:
        UnsupportedModelError: for a model without rotation (ALiBi, learned positions).
        ConfigError: for unknown, unused, missing or contradictory keys.

    >>> config = {"model_type": "llama", "head_dim": 64, "num_hidden_layers": 2,
    ...           "max_position_embeddings": 8192, "rope_theta": 1e5,
    ...           "rope_scaling": {"type": "linear", "factor": 2.0}}
    >>> rope_from_config(config)["full_attention"].scaling
    PositionInterpolation(factor=2.0)
    """
    config = text_part(as_mapping(config_or_dict))
    instead = positions_without_rope(config)
    if instead is not None:
        raise UnsupportedModelError(
            f"{config.get('model_type')!r} has no rope: its positions come from {instead}. "
            "Rope scaling does not apply to it."
        )
    reader = _Reader(config, original_max_position_embeddings, on_conflict)
    return reader.read()


def as_mapping(config_or_dict: ConfigLike) -> Mapping[str, Any]:
    """Returns a config object's content as a dict; a mapping as it is."""
    if isinstance(config_or_dict, Mapping):
        return config_or_dict
    content = config_or_dict.to_dict()
    content.setdefault("model_type", config_or_dict.model_type)
    return content


class _Reader:
    """Reads one text config; gathers notes on the way."""

    def __init__(
        self, config: Mapping[str, Any], original: int | None, on_conflict: OnConflict
    ) -> None:
        if on_conflict not in ("refuse", "factor", "length"):
            raise ConfigError(
                f"on_conflict must be 'refuse', 'factor' or 'length', got {on_conflict!r}."
            )
        self.config = config
        self.family = family_of(config)
        self.original = original
        self.on_conflict = on_conflict
        self.notes: list[str] = []

    def read(self) -> Ropes:
        self._check_has_rope()
        self.spelling, raw = raw_blocks(self.config)
        blocks = {kind: canonical_block(block, self.family) for kind, block in raw.items()}
        kinds = layer_types(self.config, self.family)
        rotating = rotating_layers(self.config, self.family)
        flat = blocks.pop(None, None)
        if flat is not None:
            wanted = [kind for kind, rotates in zip(kinds, rotating, strict=True) if rotates]
            blocks.update(self._spread(flat, wanted or ["full_attention"]))
        ropes = {str(kind): self._rope(str(kind), block) for kind, block in blocks.items()}
        layers = tuple(
            kind if rotates and kind in ropes else None
            for kind, rotates in zip(kinds, rotating, strict=True)
        )
        ropes, layers = self._shared(ropes, layers) if flat is not None else (ropes, layers)
        found = Ropes(ropes, layers, tuple(dict.fromkeys(self.notes)))
        self._check_origin(found[found.reaching].method)
        return found

    def _check_has_rope(self) -> None:
        keys = ("rope_scaling", "rope_parameters", "rope_theta", "rotary_dim", "rotary_pct")
        if self.family is None and not any(self.config.get(key) for key in keys):
            raise UnsupportedModelError(
                f"model_type {self.config.get('model_type')!r} is not known to longspan and its "
                "config names no rope (rope_theta, rope_scaling or rope_parameters)."
            )

    def _spread(self, block: RopeBlock, kinds: list[str]) -> dict[str | None, RopeBlock]:
        """Gives a flat block to each layer type; sliding layers may have a base of their own."""
        block = replace(block, values={**block.values, "rope_theta": self._flat_theta(block)})
        blocks: dict[str | None, RopeBlock] = {}
        blocks.update(dict.fromkeys(kinds, block))
        local = self.config.get("rope_local_base_freq") or (
            self.family.sliding_theta if self.family else None
        )
        if local and "sliding_attention" in blocks:
            blocks["sliding_attention"] = RopeBlock("default", {"rope_theta": local})
        return blocks

    def _shared(
        self, ropes: dict[str, Rope], layers: tuple[str | None, ...]
    ) -> tuple[dict[str, Rope], tuple[str | None, ...]]:
        """Names one rope for all layers full_attention, unless only sliding layers rotate."""
        distinct = list(dict.fromkeys(ropes.values()))
        if len(distinct) > 1:
            return ropes, layers
        only_sliding = set(layers) == {"sliding_attention", None}
        name = "sliding_attention" if only_sliding else "full_attention"
        return {name: distinct[0]}, tuple(kind and name for kind in layers)

    def _check_origin(self, scaling: RopeScaling) -> None:
        """Refuses a longspan block that the rope block no longer agrees with."""
        written = self.config.get("longspan")
        if written is None:
            return
        if written.get("method") != scaling.method or written.get("factor") != scaling.factor:
            raise ConfigError(
                f"the longspan block says {written.get('method')} with factor "
                f"{written.get('factor')}, the rope block {scaling.method} with factor "
                f"{scaling.factor}. Remove the longspan block if the other was edited on purpose."
            )

    def _rope(self, kind: str, block: RopeBlock) -> Rope:
        self.notes += block.notes
        head_dim = self._head_dim(kind)
        theta = self._theta(block)
        rotary_dim = self._rotary_dim(block, head_dim)
        scaling = self._scaling(block)
        scaling, theta = self._unraised(scaling, theta, rotary_dim)
        mla = self.family is not None and self.family.mla
        return Rope(
            head_dim=head_dim,
            rope_theta=theta,
            rotary_dim=rotary_dim,
            layout=self.family.layout if self.family else None,
            frequencies="proportional" if block.rope_type == "proportional" else "default",
            scaling=scaling,
            softmax_scale_multiplier=softmax_scale_multiplier(scaling) if mla else 1.0,
        )

    def _head_dim(self, kind: str) -> int:
        config, family = self.config, self.family
        if family and family.mla:
            return _whole(config, "qk_rope_head_dim")
        if family and family.full_head_dim_key and kind == "full_attention":
            full = config.get(family.full_head_dim_key)
            if full:
                return int(full)
        for key in ("head_dim", "kv_channels"):
            if config.get(key):
                return int(config[key])
        return _whole(config, "hidden_size", "n_embd") // _whole(
            config, "num_attention_heads", "n_head"
        )

    def _flat_theta(self, block: RopeBlock) -> float:
        """Returns the base of a flat block, which may stand inside it, at the root, or nowhere."""
        outside = self._root_theta()
        inside = block.values.get("rope_theta")
        if inside is not None and outside is not None and inside != outside:
            raise ConfigError(
                f"rope_theta is {inside} in the rope block and {outside} at the root. Keep one."
            )
        theta = inside if inside is not None else outside
        theta = self._default_theta() if theta is None else theta
        ratio_key = self.family.theta_ratio_key if self.family else None
        return theta * self.config.get(ratio_key, 1) if ratio_key else theta

    def _root_theta(self) -> float | None:
        keys = self.family.theta_keys if self.family else ("rope_theta",)
        return next((self.config[key] for key in keys if self.config.get(key) is not None), None)

    def _theta(self, block: RopeBlock) -> float:
        theta = block.values.get("rope_theta", self._root_theta())
        theta = self._default_theta() if theta is None else theta
        check_rope_theta(theta)
        return float(theta)

    def _default_theta(self) -> float:
        if self.spelling == "rope_parameters":
            raise ConfigError(
                "rope_parameters has no rope_theta. This spelling keeps it inside the block; "
                "add it (published values run from 10000 to 10000000)."
            )
        if self.family is None or self.family.rope_theta is None:
            raise ConfigError(
                f"the config names no rope_theta, and model_type "
                f"{self.config.get('model_type')!r} has no documented default. Add it."
            )
        self.notes.append(
            f"no rope_theta in the config: the family's default {self.family.rope_theta:g} is used"
        )
        return self.family.rope_theta

    def _rotary_dim(self, block: RopeBlock, head_dim: int) -> int:
        if self.config.get("rotary_dim"):
            return int(self.config["rotary_dim"])
        if self.family and self.family.mla:
            return head_dim
        keys = self.family.partial_keys if self.family else ("partial_rotary_factor",)
        share = block.values.get("partial_rotary_factor")
        if share is None:
            share = next(
                (self.config[key] for key in keys if self.config.get(key) is not None),
                self.family.partial_rotary_factor if self.family else 1.0,
            )
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"partial_rotary_factor must be in (0, 1], got {share!r}.")
        return int(head_dim * share)

    def _scaling(self, block: RopeBlock) -> RopeScaling | None:
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
        inside = values.get("original_max_position_embeddings")
        outside = self.config.get("original_max_position_embeddings")
        if inside is not None and outside is not None and inside != outside:
            raise ConfigError(
                f"original_max_position_embeddings is {inside} in the rope block and {outside} at "
                "the root. Keep one."
            )
        original = self.original or inside or outside
        if original is None and rope_type == "dynamic":
            original = max_length(self.config)
        if original is not None:
            values["original_max_position_embeddings"] = original
        longest = max_length(self.config)
        if rope_type in ("yarn", "longrope") and "factor" not in values and original and longest:
            values["factor"] = max(1.0, longest / original)
            if rope_type == "yarn":
                self.notes.append(f"no factor in the config: {longest} / {original} is used")

    def _settle_conflict(self, values: dict[str, Any]) -> None:
        """Refuses a length beyond factor · original, unless told which of them to believe."""
        longest = max_length(self.config)
        factor, original = values["factor"], values["original_max_position_embeddings"]
        check_factor(factor)
        check_length("original_max_position_embeddings", original)
        if longest is None or longest <= factor * original:
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
        written = self.config.get("longspan") or {}
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

    def _unraised(
        self, scaling: RopeScaling | None, theta: float, rotary_dim: int
    ) -> tuple[RopeScaling | None, float]:
        """Returns NTK-aware with the trained base for a base that longspan raised."""
        written = self.config.get("longspan") or {}
        if written.get("method") != NTKAware.method or scaling is not None:
            return scaling, theta
        check_origin_keys(written)
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


def check_origin_keys(written: Mapping[str, Any]) -> None:
    """Refuses a longspan block without the keys that longspan writes."""
    missing = {"factor", "original_max_position_embeddings", "rope_theta"} - set(written)
    if missing:
        raise ConfigError(
            f"the longspan block lacks {', '.join(sorted(missing))}. Remove it, or extend the "
            "original checkpoint again."
        )


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


def max_length(config: Mapping[str, Any]) -> int | None:
    """Returns the length a config declares, under its family's name for it; None if it does not."""
    family = family_of(config)
    keys = family.length_keys if family else ("max_position_embeddings", "n_positions")
    found = next((config[key] for key in keys if config.get(key) is not None), None)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(f"{keys[0]} must be a positive whole number of tokens, got {found!r}.")
    return found


def _whole(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return config[key]
    raise ConfigError(f"the config lacks {' or '.join(keys)}, needed for the heads' size.")


def rope_to_config(
    ropes: Mapping[str, Rope], max_position_embeddings: int, *, trained_length: int | None = None
) -> dict[str, Any]:
    """Returns the config.json keys that say these ropes, in transformers 5's spelling.

    Flat for one rope, nested by layer type for several. Beside `rope_parameters` and
    `max_position_embeddings` there is a root block `longspan` with the method, its factor and the
    trained length and base, so that NTK-aware (a raised base) and NTK-by-parts (a yarn) are read
    back as what they are, and extending twice composes against the same origin.

    Args:
        ropes: by layer type, as `rope_from_config` returns them.
        max_position_embeddings: tokens to serve. For dynamic NTK transformers takes it as the
            trained length, so that is what is written.
        trained_length: tokens before any extension; max_position_embeddings / factor unless given
            or named by the scaling.
    """
    blocks = {kind: _block(rope) for kind, rope in ropes.items()}
    flat = len(blocks) == 1
    written: dict[str, Any] = {
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": next(iter(blocks.values())) if flat else blocks,
    }
    scaled = next((rope for rope in ropes.values() if rope.method.method != "none"), None)
    if scaled is not None:
        trained = trained_length or round(max_position_embeddings / scaled.method.factor)
        written["longspan"] = _origin(scaled, trained)
        if isinstance(scaled.scaling, DynamicNTK):
            written["max_position_embeddings"] = scaled.scaling.original_max_position_embeddings
    return written


def _block(rope: Rope) -> dict[str, Any]:
    scaling = rope.method
    block: dict[str, Any] = {"rope_type": scaling.rope_type, "rope_theta": rope.rope_theta}
    if isinstance(scaling, NTKAware):
        block = {
            "rope_type": "default",
            "rope_theta": scaling.raised_theta(rope.turning, rope.rope_theta),
        }
    elif isinstance(scaling, NTKByParts):
        block |= {"rope_type": "yarn", **_written(scaling.as_yarn())}
    else:
        block |= _written(scaling)
    if rope.frequencies == "proportional":
        block["rope_type"] = "proportional"
    if rope.turning != rope.head_dim:
        block["partial_rotary_factor"] = rope.turning / rope.head_dim
    return block


def _written(scaling: RopeScaling) -> dict[str, Any]:
    """Returns a scaling's keys as transformers reads them: its defaults left out."""
    if scaling.method == "none":
        return {}
    keys = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in scaling.parameters().items()
    }
    if keys.pop("ramp", "index") != "index":
        raise ConfigError(
            "YaRN's ramp in rotations cannot be written to a config: every reader's ramp is "
            "linear in the pair's index. Use ramp='index'."
        )
    if keys.get("truncate") is True:
        del keys["truncate"]
    if isinstance(scaling, DynamicNTK):  # transformers reads max_position_embeddings instead
        del keys["original_max_position_embeddings"]
    return keys


def _origin(rope: Rope, trained: int) -> dict[str, Any]:
    scaling = rope.method
    return {
        "method": scaling.method,
        "factor": scaling.factor,
        "original_max_position_embeddings": getattr(
            scaling, "original_max_position_embeddings", trained
        ),
        "rope_theta": rope.rope_theta,
    }


def updated_config(
    config: Mapping[str, Any], written: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a config with `written` in place, and the keys dropped since they would contradict.

    Args:
        config: the whole content of a config.json; a multimodal one is changed at its text part.
        written: what `rope_to_config` returned.
    """
    text = text_part(config)
    family = family_of(text)
    stale = set(REPLACED_KEYS) | set(family.theta_keys if family else ())
    removed = tuple(sorted((stale & set(text)) - set(written)))
    updated = {key: value for key, value in text.items() if key not in stale} | dict(written)
    if text is config:
        return updated, removed
    key = next(key for key in config if config[key] is text)
    return {**config, key: updated}, removed
