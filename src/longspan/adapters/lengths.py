"""How far a checkpoint was trained to read, and how far its config reaches today."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longspan.adapters.config_fields import ROUNDING, ConfigLike, as_mapping, max_length
from longspan.adapters.families import family_of, layer_types, text_part
from longspan.adapters.ropes import Ropes
from longspan.errors import ConfigError
from longspan.rotary.scaling import DynamicNTK, Llama3, LongRope, NTKByParts, RopeScaling, Yarn
from longspan.rotary.scaling.base import check_length

ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Lengths:
    """Tokens a checkpoint was trained to read before any extension, and reaches as configured."""

    trained: int
    usable: int
    notes: tuple[str, ...] = ()


def lengths_of(
    config_or_dict: ConfigLike, ropes: Ropes, *, original_max_position_embeddings: int | None = None
) -> Lengths:
    """Returns the trained and the usable length of a config.

    Args:
        config_or_dict: a config, or the content of a config.json.
        ropes: what `rope_from_config` read from it.
        original_max_position_embeddings: the trained length, where the config leaves it open.

    Raises:
        ConfigError: where the config declares no length, or one that may be either of the two.

    >>> from longspan.adapters.rope import rope_from_config
    >>> config = {"model_type": "qwen3", "head_dim": 128, "num_hidden_layers": 1,
    ...           "max_position_embeddings": 40960, "rope_theta": 1e6, "rope_scaling":
    ...           {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    >>> lengths = lengths_of(config, rope_from_config(config))
    >>> lengths.trained, lengths.usable
    (32768, 131072)
    """
    config = text_part(as_mapping(config_or_dict))
    scaling = ropes[ropes.reaching].method
    declared = max_length(config)
    if declared is None:
        raise ConfigError(
            "the config declares no max_position_embeddings. Add it: the tokens the checkpoint "
            "was trained to read."
        )
    trained = original_max_position_embeddings or _trained(config, scaling, declared)
    if scaling.method == "none":
        return _chunked_lengths(config, declared) or Lengths(trained, declared)
    if isinstance(scaling, (Llama3, LongRope)):
        return Lengths(trained, declared)
    if isinstance(scaling, (Yarn, NTKByParts)):
        return _yarn_lengths(scaling, trained, declared)
    return Lengths(trained, reach_of(scaling.factor, trained))


def endless(ropes: Ropes) -> bool:
    """Returns whether the table follows the length, however long: dynamic NTK's."""
    return isinstance(ropes[ropes.reaching].method, DynamicNTK)


def sliding_layers(
    config_or_dict: ConfigLike, ropes: Ropes, *, original_max_position_embeddings: int | None = None
) -> tuple[bool, ...]:
    """Returns which layers slide within what the model reads; a wider window never drops anything.

    Args:
        config_or_dict, ropes, original_max_position_embeddings: see `lengths_of`.

    >>> from longspan.adapters.rope import rope_from_config
    >>> config = {"model_type": "mistral", "head_dim": 64, "num_hidden_layers": 2,
    ...           "max_position_embeddings": 8192, "rope_theta": 1e4, "sliding_window": 4096}
    >>> sliding_layers(config, rope_from_config(config))
    (True, True)
    >>> config["sliding_window"] = 8192
    >>> sliding_layers(config, rope_from_config(config))
    (False, False)
    """
    config, given = text_part(as_mapping(config_or_dict)), original_max_position_embeddings
    slides = [kind == "sliding_attention" for kind in layer_types(config, family_of(config))]
    window = config.get("sliding_window")
    if any(slides) and window and not endless(ropes):
        lengths = lengths_of(config, ropes, original_max_position_embeddings=given)
        slides = [slide and window < lengths.usable for slide in slides]
    return tuple(slides)


def _trained(config: Mapping[str, Any], scaling: RopeScaling, declared: int) -> int:
    if scaling.method == "none":
        return declared
    inside = getattr(scaling, "original_max_position_embeddings", None)
    if inside is not None:
        return inside
    written = config.get("longspan")
    if written is not None:
        return written["original_max_position_embeddings"]
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for place in (block, block.get("full_attention") or {}, config):
        if place.get(ORIGINAL):
            check_length(ORIGINAL, place[ORIGINAL])
            return place[ORIGINAL]
    raise ConfigError(
        f"max_position_embeddings {declared} with {scaling.method} factor {scaling.factor:g} may "
        f"be the length before extension (Vicuna) or after it. Say which: pass "
        f"original_max_position_embeddings={declared} or {int(declared / scaling.factor)}."
    )


def _chunked_lengths(config: Mapping[str, Any], declared: int) -> Lengths | None:
    """Dual chunk attention is no rotation; whoever does not have it reads the trained length."""
    chunks = config.get("dual_chunk_attention_config")
    trained = chunks.get(ORIGINAL) if isinstance(chunks, Mapping) else None
    if trained is None:
        return None
    check_length(ORIGINAL, trained)
    if trained >= declared:
        return None
    note = (
        f"max_position_embeddings {declared} is reached with dual chunk attention alone, which "
        f"transformers does not have; without it {trained} tokens are read"
    )
    return Lengths(trained, trained, (note,))


def reach_of(factor: float, trained: int) -> int:
    """Returns factor · trained in whole tokens; a ratio of lengths gives the longer one back.

    >>> reach_of(130_000 / 32_768, 32_768)
    130000
    """
    reach = factor * trained * (1 + ROUNDING)
    if not math.isfinite(reach):
        raise ConfigError(f"factor {factor} times {trained} tokens is beyond any length.")
    return int(reach)


def _yarn_lengths(scaling: Yarn | NTKByParts, trained: int, declared: int) -> Lengths:
    """Published recipes leave max_position_embeddings at the trained length, or a little above.

    So a declared length is read as the extended one when it lies nearer to it (in octaves) than
    to the trained one.
    """
    reach = reach_of(scaling.factor, trained)
    if declared >= trained * math.sqrt(scaling.factor):
        return Lengths(trained, min(declared, reach))
    note = (
        f"max_position_embeddings {declared} was left near the trained length; the usable length "
        f"is factor · original = {reach}"
    )
    return Lengths(trained, reach, (note,))
