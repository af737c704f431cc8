"""How far a checkpoint was trained to read, and how far its config reaches today."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longspan.adapters.families import text_part
from longspan.adapters.rope import ConfigLike, as_mapping, check_origin_keys, max_length
from longspan.adapters.ropes import Ropes
from longspan.errors import ConfigError
from longspan.rotary.scaling import Llama3, LongRope, NTKByParts, RopeScaling, Yarn


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
        return Lengths(trained, declared)
    if isinstance(scaling, (Llama3, LongRope)):
        return Lengths(trained, declared)
    if isinstance(scaling, (Yarn, NTKByParts)):
        return _yarn_lengths(scaling, trained, declared)
    return Lengths(trained, int(trained * scaling.factor))


def _trained(config: Mapping[str, Any], scaling: RopeScaling, declared: int) -> int:
    if scaling.method == "none":
        return declared
    inside = getattr(scaling, "original_max_position_embeddings", None)
    if inside is not None:
        return inside
    written = config.get("longspan")
    if written is not None:
        check_origin_keys(written)
        return written["original_max_position_embeddings"]
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for place in (block, block.get("full_attention") or {}, config):
        if place.get("original_max_position_embeddings"):
            return place["original_max_position_embeddings"]
    raise ConfigError(
        f"max_position_embeddings {declared} with {scaling.method} factor {scaling.factor:g} may "
        f"be the length before extension (Vicuna) or after it. Say which: pass "
        f"original_max_position_embeddings={declared} or {int(declared / scaling.factor)}."
    )


def _yarn_lengths(scaling: Yarn | NTKByParts, trained: int, declared: int) -> Lengths:
    """Published recipes leave max_position_embeddings at the trained length, or a little above.

    So a declared length is read as the extended one when it lies nearer to it (in octaves) than
    to the trained one.
    """
    reach = int(scaling.factor * trained)
    if declared >= trained * math.sqrt(scaling.factor):
        return Lengths(trained, min(declared, reach))
    note = (
        f"max_position_embeddings {declared} was left near the trained length; the usable length "
        f"is factor · original = {reach}"
    )
    return Lengths(trained, reach, (note,))
