"""The one reader of config.json's rope: config → ropes. `rope_writing` is its writer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longspan.adapters.config_fields import (
    ConfigLike,
    agreed_value,
    as_mapping,
    checked_share,
    size_of,
)
from longspan.adapters.families import (
    as_layers_see_it,
    family_of,
    layer_types,
    positions_without_rope,
    rotating_layers,
    text_part,
)
from longspan.adapters.origin import origin_block, origin_of
from longspan.adapters.rope_scaling import OnConflict, ScalingReader, softmax_scale_multiplier
from longspan.adapters.ropes import Ropes
from longspan.adapters.spelling import (
    BLOCK_NAMES,
    RopeBlock,
    canonical_block,
    raw_blocks,
)
from longspan.errors import ConfigError, UnsupportedModelError, did_you_mean
from longspan.rotary.frequencies import check_rope_theta
from longspan.rotary.rope import Rope
from longspan.rotary.rotate import Layout
from longspan.rotary.scaling.base import check_number


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


class _Reader:
    """Reads one text config; gathers notes on the way."""

    def __init__(
        self, config: Mapping[str, Any], original: int | None, on_conflict: OnConflict
    ) -> None:
        self.config = config
        self.family = family_of(config)
        self.notes: list[str] = []
        self.scaling = ScalingReader(config, self.family, original, on_conflict, self.notes)

    def read(self) -> Ropes:
        self._check_has_rope()
        self.spelling, raw = raw_blocks(self.config)
        blocks = {kind: canonical_block(block, self.family) for kind, block in raw.items()}
        kinds = layer_types(self.config, self.family)
        rotating = rotating_layers(self.config, self.family)
        wanted = [kind for kind, rotates in zip(kinds, rotating, strict=True) if rotates]
        flat = blocks.pop(None, None)
        if flat is not None:
            blocks.update(self._spread(flat, wanted or ["full_attention"]))
        self._check_layer_types(blocks, wanted)
        ropes = {str(kind): self._rope(str(kind), block) for kind, block in blocks.items()}
        layers = tuple(
            kind if rotates and kind in ropes else None
            for kind, rotates in zip(kinds, rotating, strict=True)
        )
        ropes, layers = self._shared(ropes, layers) if flat is not None else (ropes, layers)
        found = Ropes(ropes, layers, tuple(dict.fromkeys(self.notes)))
        self._check_origin(found[found.reaching])
        return found

    def _check_has_rope(self) -> None:
        keys = ("rope_scaling", "rope_parameters", "rope_theta", "rotary_dim", "rotary_pct")
        if self.family is None and not any(self.config.get(key) for key in keys):
            raise UnsupportedModelError(
                f"model_type {self.config.get('model_type')!r} is not known to longspan and its "
                "config names no rope (rope_theta, rope_scaling or rope_parameters)."
            )
        if self.family and self.family.needs_block and not any(map(self.config.get, BLOCK_NAMES)):
            raise ConfigError(
                f"the config has no rope_parameters, and a {self.config['model_type']!r} without "
                "them is not plain rope. Add the checkpoint's own."
            )

    def _check_layer_types(self, blocks: Mapping[str | None, RopeBlock], wanted: list[str]) -> None:
        """Refuses a block that no layer reads, and a rotating layer without a block."""
        listed = self.config.get("layer_types") or ("full_attention", "sliding_attention")
        for kind in blocks:
            if kind not in wanted and kind not in listed:
                raise ConfigError(
                    f"{self.spelling} has a block for {kind!r}, which is no layer's type."
                    f"{did_you_mean(str(kind), listed)} Types: {', '.join(dict.fromkeys(listed))}."
                )
        written = self.config.get(self.spelling) or {}
        for kind in {"full_attention", "sliding_attention"} & set(wanted):
            if kind not in blocks and kind not in written:  # null says that it does not rotate
                raise ConfigError(
                    f"{self.spelling} has no block for {kind!r} layers. Add it, or null where they "
                    "do not rotate."
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

    def _check_origin(self, rope: Rope) -> None:
        """Refuses a longspan block that the rope block no longer agrees with."""
        written = origin_block(self.config)
        if written is None:
            return
        found = origin_of(rope, written["original_max_position_embeddings"])
        for key, value in found.items():
            if written[key] != value:
                raise ConfigError(
                    f"the longspan block says {key} {written[key]!r}, the rope block {value!r}. "
                    "Remove the longspan block if the other was edited on purpose."
                )

    def _rope(self, kind: str, block: RopeBlock) -> Rope:
        self.notes += block.notes
        head_dim = self._head_dim(kind)
        theta = self._theta(kind, block)
        rotary_dim = self._rotary_dim(block, head_dim)
        scaling, theta = self.scaling.unraised(self.scaling.read(block), theta, rotary_dim)
        mla = self.family is not None and self.family.mla
        rope = Rope(
            head_dim=head_dim,
            rope_theta=theta,
            rotary_dim=rotary_dim,
            layout=self._layout(),
            frequencies="proportional" if block.rope_type == "proportional" else "default",
            scaling=scaling,
            softmax_scale_multiplier=softmax_scale_multiplier(scaling) if mla else 1.0,
        )
        rope.inv_freq()  # refuses what only shows in the table, such as too few long factors
        return rope

    def _layout(self) -> Layout | None:
        if self.family is None:
            return None
        if self.family.mla and self.config.get("rope_interleave") is False:
            return "half"
        return self.family.layout

    def _head_dim(self, kind: str) -> int:
        if self.family and self.family.mla:
            return size_of(self.config, "qk_rope_head_dim")
        config = as_layers_see_it(self.config, kind)
        if config.get("head_dim") or config.get("kv_channels"):
            return size_of(config, "head_dim", "kv_channels")
        if self.family and self.family.head_dim:
            self.notes.append(
                f"no head_dim in the config: the family's default {self.family.head_dim} is used"
            )
            return self.family.head_dim
        return size_of(config, "hidden_size", "n_embd") // size_of(
            config, "num_attention_heads", "n_head"
        )

    def _flat_theta(self, block: RopeBlock) -> float:
        """Returns the base of a flat block, which may stand inside it, at the root, or nowhere."""
        inside = {"the rope block's rope_theta": block.values.get("rope_theta")}
        theta = agreed_value(inside | self._root_thetas())
        theta = self._default_theta() if theta is None else theta
        check_rope_theta(theta)
        ratio = self.config.get(self.family.theta_ratio_key or "") if self.family else None
        if ratio is None:
            return theta
        check_number("rope_ratio", ratio, above=0)
        return theta * ratio

    def _root_thetas(self) -> dict[str, Any]:
        keys = self.family.theta_keys if self.family else ("rope_theta",)
        return {key: self.config.get(key) for key in keys}

    def _theta(self, kind: str, block: RopeBlock) -> float:
        """Returns the base of one layer type's block; sliding layers have one of their own."""
        theta = block.values.get("rope_theta")
        if theta is None and kind == "sliding_attention":
            theta = self.config.get("rope_local_base_freq")
        elif theta is None:
            theta = agreed_value(self._root_thetas())
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
        if self.family and self.family.mla:
            return head_dim
        keys = self.family.partial_keys if self.family else ("partial_rotary_factor",)
        shares = {key: self.config.get(key) for key in keys}
        shares["the rope block's partial_rotary_factor"] = block.values.get("partial_rotary_factor")
        share = agreed_value(shares)
        rotary_dim = None if share is None else int(head_dim * checked_share(share))
        if self.config.get("rotary_dim") is None:
            default = self.family.partial_rotary_factor if self.family else 1.0
            return int(head_dim * default) if rotary_dim is None else rotary_dim
        named = size_of(self.config, "rotary_dim")
        if rotary_dim is not None and rotary_dim != named:
            raise ConfigError(
                f"rotary_dim is {named}, but partial_rotary_factor {share} of head_dim {head_dim} "
                f"is {rotary_dim}. Keep one."
            )
        return named
