"""`plan`: what it takes to read further, from the config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from longspan.adapters.config_fields import ROUNDING, ConfigLike, as_mapping
from longspan.adapters.families import text_part
from longspan.adapters.kv_cache import kv_cache_bytes
from longspan.adapters.lengths import Lengths, lengths_of
from longspan.adapters.rope import rope_from_config
from longspan.adapters.rope_scaling import OnConflict, softmax_scale_multiplier
from longspan.adapters.rope_writing import rope_to_config, updated_config
from longspan.adapters.ropes import Ropes
from longspan.errors import ConfigError
from longspan.rotary.rope import Rope
from longspan.rotary.scaling import (
    DynamicNTK,
    Llama3,
    LongRope,
    RopeScaling,
    scaling_for_method,
)
from longspan.rotary.scaling.base import check_factor, check_length
from longspan.tools.cautions import cautions

DEFAULT_METHOD = "yarn"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one config is made to read `to` tokens.

    Plans are equal when they write the same: what the config reached before is not compared.

    Attributes:
        to: tokens to read.
        method: the scaling method's name.
        factor: the method's factor; a ratio of lengths except for llama3, and for dynamic NTK,
            which follows the length by itself.
        trained_length: tokens before any extension.
        usable_length: tokens the given config reaches.
        smallest_factor: to / trained_length, the least that suffices.
        ropes: the planned rotation.
        config: the whole config.json to write.
        changed: the keys of it that differ from the given one, with their values.
        removed: keys of the given config that must go, since they would contradict.
        kv_cache_bytes: of `to` tokens in bfloat16, one sequence.
        notes: what was assumed in reading the config.
        warnings: what other readers of this config get wrong.
    """

    to: int
    method: str
    factor: float
    trained_length: int
    usable_length: int = field(compare=False)
    smallest_factor: float
    ropes: Ropes
    before: Ropes = field(compare=False)
    config: Mapping[str, Any]
    changed: Mapping[str, Any] = field(compare=False)
    removed: tuple[str, ...] = field(compare=False)
    kv_cache_bytes: int
    notes: tuple[str, ...] = field(compare=False)
    warnings: tuple[str, ...] = field(compare=False)


def plan(
    config: ConfigLike | Plan,
    *,
    to: int,
    method: str | None = None,
    factor: float | None = None,
    original_max_position_embeddings: int | None = None,
    on_conflict: OnConflict = "refuse",
) -> Plan:
    """Returns the plan that lets a checkpoint read `to` tokens; only its config is read.

    Args:
        config: a config, the content of a config.json, or an earlier plan to go on from.
        to: tokens to read, more than the config reaches.
        method: a scaling method; the config's own if it is scaled already, else YaRN.
        factor: instead of the smallest sufficient one.
        original_max_position_embeddings: the trained length, where the config leaves it open.
        on_conflict: see `rope_from_config`.

    Raises:
        ConfigError: for a target the config already reaches, or a factor too small for it.
        UnsupportedModelError: for a model without rotation.

    >>> config = {"model_type": "llama", "head_dim": 64, "num_hidden_layers": 30,
    ...           "num_attention_heads": 9, "num_key_value_heads": 3,
    ...           "max_position_embeddings": 8192, "rope_theta": 1e5}
    >>> plan(config, to=16384).changed["rope_parameters"]["factor"]
    2.0
    >>> plan(plan(config, to=16384), to=32768) == plan(config, to=32768)
    True
    """
    check_length("to", to)
    whole = config.config if isinstance(config, Plan) else as_mapping(config)
    before = rope_from_config(
        whole,
        original_max_position_embeddings=original_max_position_embeddings,
        on_conflict=on_conflict,
    )
    lengths = lengths_of(
        whole, before, original_max_position_embeddings=original_max_position_embeddings
    )
    check_target(to, lengths)
    rope = before[before.reaching]
    scaling = planned_scaling(rope.method, lengths, to, method, factor)
    ropes = with_reaching(before, scaled_rope(rope, scaling))
    written = rope_to_config(ropes, to, trained_length=lengths.trained)
    updated, removed = updated_config(whole, written)
    return Plan(
        to=to,
        method=scaling.method,
        factor=scaling.factor,
        trained_length=lengths.trained,
        usable_length=lengths.usable,
        smallest_factor=to / lengths.trained,
        ropes=ropes,
        before=before,
        config=updated,
        changed=differing(text_part(updated), text_part(whole)),
        removed=removed,
        kv_cache_bytes=kv_cache_bytes(updated, to),
        notes=(*before.notes, *lengths.notes),
        warnings=cautions(whole, ropes, lengths, to),
    )


def differing(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of `after` to write over `before`; the rope's whether or not they differ."""
    always = ("rope_parameters", "longspan")
    return {key: value for key, value in after.items() if key in always or before.get(key) != value}


def check_target(to: int, lengths: Lengths) -> None:
    """Refuses a target that needs no extension."""
    if lengths.usable < to <= lengths.trained:
        raise ConfigError(
            f"to must be above the trained length {lengths.trained}, got {to}. If that length is "
            "wrong, give another original_max_position_embeddings (--original)."
        )
    if to <= lengths.usable:
        raise ConfigError(
            f"to must be above {lengths.usable}, the tokens this config already reaches, got {to}. "
            "To shorten, lower the serving limit."
        )


def planned_scaling(
    current: RopeScaling, lengths: Lengths, to: int, method: str | None, factor: float | None
) -> RopeScaling:
    """Returns the scaling that reaches `to`, composed against the trained length.

    A config's own method keeps its other settings and only gets the new factor.
    """
    if method is None:
        method = current.method if current.method != "none" else DEFAULT_METHOD
    wanted = scaling_for_method(method)
    if wanted.method == "none":
        raise ConfigError("method 'none' does not extend; choose another, such as 'yarn'.")
    if factor is not None:
        check_factor(factor)
    check_enough(wanted, lengths, to, factor)
    if wanted is LongRope and isinstance(current, LongRope):
        raise ConfigError(
            f"this checkpoint's LongRoPE factors were searched for {lengths.usable} tokens; more "
            "need a search of their own. Choose another method, such as 'yarn'."
        )
    if wanted is not type(current):
        stretched = wanted.for_factor(factor or to / lengths.trained, lengths.trained)
        return with_factor(stretched, factor) if factor is not None else stretched
    if isinstance(current, Llama3):
        return with_factor(current, factor or grown_llama3_factor(current, lengths, to))
    if isinstance(current, DynamicNTK):
        return with_factor(current, factor or current.factor)
    return with_factor(current, factor or to / lengths.trained)


def grown_llama3_factor(current: Llama3, lengths: Lengths, to: int) -> float:
    """Returns a Llama-3 factor grown with the length, as a ratio so that two steps equal one."""
    if current.factor == lengths.usable / lengths.trained:
        return to / lengths.trained
    grown = Fraction(current.factor) * to / lengths.usable
    return float(grown.limit_denominator(2**22))


def check_enough(
    wanted: type[RopeScaling], lengths: Lengths, to: int, factor: float | None
) -> None:
    """Refuses a factor that does not reach; for llama3 and dynamic it is not a length ratio."""
    if factor is None or wanted in (Llama3, DynamicNTK):
        return
    if factor * lengths.trained * (1 + ROUNDING) < to:
        raise ConfigError(
            f"factor {factor:g} reaches {factor:g} · {lengths.trained} = "
            f"{factor * lengths.trained:g} tokens, fewer than {to}. It must be at least "
            f"{to / lengths.trained:g}."
        )


def with_factor(scaling: RopeScaling, factor: float) -> RopeScaling:
    """Returns the same method and settings with another factor."""
    return type(scaling)(**{**scaling.parameters(), "factor": factor})


def scaled_rope(rope: Rope, scaling: RopeScaling) -> Rope:
    """Returns the rope under another scaling, its softmax multiplier following where it has one."""
    if rope.softmax_scale_multiplier == 1.0:
        return replace(rope, scaling=scaling)
    return replace(
        rope, scaling=scaling, softmax_scale_multiplier=softmax_scale_multiplier(scaling)
    )


def with_reaching(ropes: Ropes, rope: Rope) -> Ropes:
    """Returns the ropes with the far-reaching layers' one replaced.

    Layers with a sliding window of their own rope never see a distance beyond it: they stay.
    """
    return Ropes({**ropes.by_type, ropes.reaching: rope}, ropes.layers, ropes.notes)
