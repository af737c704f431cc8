"""Reads every spelling of a rope block into one: canonical keys, a block a layer type.

transformers 4 wrote `rope_scaling` with `type` or `rope_type` and theta at the root; transformers 5
writes `rope_parameters` with theta inside, flat or nested by layer type; others have names of
their own. What two spellings say differently is refused, and so is a key nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longspan.adapters.families import Family
from longspan.errors import ConfigError, did_you_mean

TYPE_ALIASES: Mapping[str, str] = {
    "su": "longrope",
    "ntk-aware": "ntk",
    "mrope": "default",
    "gptj": "default",  # some tools mark GPT-J's interleaved layout as a type
}

# What each type reads beside rope_type, rope_theta and partial_rotary_factor: (needed, optional).
TYPE_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "proportional": (frozenset(), frozenset({"factor"})),
    "linear": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "ntk": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "dynamic": (frozenset({"factor", "original_max_position_embeddings"}), frozenset()),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset(
            {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        ),
    ),
    "llama3": (
        frozenset(
            {
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            }
        ),
        frozenset(),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
        frozenset({"factor", "attention_factor"}),
    ),
}

COMMON_KEYS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor"})
INERT_KEYS = frozenset({"finetuned", "mrope_section", "mrope_interleaved"})
BLOCK_NAMES = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class RopeBlock:
    """One canonical rope block: `rope_type` and the keys that type reads, and what was noted."""

    rope_type: str
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def raw_blocks(config: Mapping[str, Any]) -> tuple[str, dict[str | None, Mapping[str, Any]]]:
    """Returns the name of the spelling used and its blocks, by layer type (None when flat).

    Raises:
        ConfigError: if both spellings are present and differ, or flat and nested are mixed.
    """
    present = {name: config[name] for name in BLOCK_NAMES if isinstance(config.get(name), Mapping)}
    for name in BLOCK_NAMES:
        if config.get(name) is not None and name not in present:
            raise ConfigError(f"{name} must be an object or null, got {config[name]!r}.")
    if len(present) == 2 and not _same(present["rope_parameters"], present["rope_scaling"], config):
        raise ConfigError(
            "rope_parameters and rope_scaling disagree: "
            f"{present['rope_parameters']!r} and {present['rope_scaling']!r}. Keep one of them."
        )
    for name, block in present.items():
        return name, _by_layer_type(name, block)
    return "rope_scaling", {None: {}}


def _same(new: Mapping[str, Any], old: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether two flat spellings say the same; theta may stand inside one and outside the other."""
    merged_new, merged_old = (
        {
            "rope_theta": config.get("rope_theta"),
            "rope_type": _type_of(block),
            **{key: value for key, value in block.items() if key not in ("type", "rope_type")},
        }
        for block in (new, old)
    )
    if config.get("rope_theta") is None:
        merged_old["rope_theta"] = merged_new["rope_theta"] = None
    return merged_new == merged_old


def _by_layer_type(name: str, block: Mapping[str, Any]) -> dict[str | None, Mapping[str, Any]]:
    nested: dict[str | None, Mapping[str, Any]] = {
        key: value for key, value in block.items() if isinstance(value, Mapping)
    }
    if not nested:
        return {None: block}
    stray = sorted(key for key, value in block.items() if key not in nested and value is not None)
    if stray:
        raise ConfigError(
            f"{name} mixes layer types ({', '.join(map(str, nested))}) with plain keys "
            f"({', '.join(stray)}). Put every key inside a layer type."
        )
    return nested


def _type_of(block: Mapping[str, Any]) -> str:
    """Returns a block's canonical type; `type` and `rope_type` must agree."""
    names = {
        key: TYPE_ALIASES.get(str(block[key]), str(block[key]))
        for key in ("rope_type", "type")
        if block.get(key) is not None
    }
    if len(set(names.values())) > 1:
        raise ConfigError(
            f"rope_type {block['rope_type']!r} and type {block['type']!r} disagree. Keep rope_type."
        )
    return next(iter(names.values()), "default")


def canonical_block(block: Mapping[str, Any], family: Family | None) -> RopeBlock:
    """Returns one block with its type resolved and its keys checked; None values are dropped.

    Raises:
        ConfigError: for an unknown type, and for a key that its type does not read.
    """
    rope_type = _type_of(block)
    if rope_type not in TYPE_KEYS:
        raise ConfigError(
            f"unknown rope_type {rope_type!r}.{did_you_mean(rope_type, TYPE_KEYS)} "
            f"Known: {', '.join(TYPE_KEYS)}."
        )
    values = {
        key: value
        for key, value in block.items()
        if value is not None and key not in ("type", "rope_type")
    }
    inert = INERT_KEYS | frozenset(family.inert if family else ())
    notes = tuple(f"{key} does not change the rotation here" for key in values if key in inert)
    values = {key: value for key, value in values.items() if key not in inert}
    _check_keys(rope_type, values)
    return RopeBlock(rope_type, values, notes)


def _check_keys(rope_type: str, values: Mapping[str, Any]) -> None:
    needed, optional = TYPE_KEYS[rope_type]
    accepted = needed | optional | COMMON_KEYS
    for key in values:
        if key not in accepted:
            raise ConfigError(
                f"the rope block has key {key!r}, which rope_type {rope_type!r} does not read."
                f"{did_you_mean(key, accepted)} Accepted: {', '.join(sorted(accepted))}."
            )


def require_keys(rope_type: str, values: Mapping[str, Any]) -> None:
    """Refuses a block without a key its type cannot do without."""
    needed, _ = TYPE_KEYS[rope_type]
    for key in sorted(needed - set(values)):
        hint = ""
        if key == "original_max_position_embeddings":
            hint = (
                " It is the length before extension; max_position_embeddings may be either, so "
                "it cannot be guessed. Add it, or pass original_max_position_embeddings."
            )
        raise ConfigError(f"rope_type {rope_type!r} needs {key!r}, which is missing.{hint}")
