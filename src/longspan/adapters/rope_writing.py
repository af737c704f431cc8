"""The one writer of config.json's rope: ropes → config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from longspan.adapters.config_fields import length_keys
from longspan.adapters.families import family_of, text_part
from longspan.adapters.origin import origin_of
from longspan.adapters.ropes import Ropes
from longspan.adapters.spelling import raw_blocks
from longspan.errors import ConfigError
from longspan.rotary.rope import Rope
from longspan.rotary.scaling import DynamicNTK, NTKAware, NTKByParts, RopeScaling

# Root keys an extension replaces: what they say moves into rope_parameters and longspan.
REPLACED_KEYS = ("rope_scaling", "rope_local_base_freq", "rope_theta", "longspan")


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
    far = ropes[Ropes(ropes).reaching]
    if far.method.method != "none":
        trained = trained_length or round(max_position_embeddings / (far.method.factor or 1))
        written["longspan"] = origin_of(far, trained)
        if isinstance(far.scaling, DynamicNTK):
            written["max_position_embeddings"] = far.scaling.original_max_position_embeddings
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
        if scaling.rope_type not in ("default", "linear"):
            raise ConfigError(
                f"method {scaling.method!r} cannot be written for proportional rope (Gemma 4): "
                "transformers knows only a factor there. Use method 'linear'."
            )
        block["rope_type"] = "proportional"
    if rope.turning != rope.head_dim:
        block["partial_rotary_factor"] = _share(rope)
    return block


def _share(rope: Rope) -> float:
    """Returns the share of a head that turns, which readers multiply by head_dim and truncate."""
    share = rope.turning / rope.head_dim
    truncated = int(rope.head_dim * share) < rope.turning
    return math.nextafter(share, 1) if truncated else share


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
    if family and family.theta_ratio_key:
        stale.add(family.theta_ratio_key)
    removed = tuple(sorted((stale & set(text)) - set(written)))
    updated = {key: value for key, value in text.items() if key not in stale} | dict(written)
    updated["rope_parameters"] = with_kept_keys(text, written["rope_parameters"])
    length_key = next((key for key in length_keys(family) if key in text), None)
    if length_key:
        updated[length_key] = updated.pop("max_position_embeddings")
    if text is config:
        return updated, removed
    key = next(key for key in config if config[key] is text)
    return {**config, key: updated}, removed


def with_kept_keys(config: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a new rope block with what the old one holds beside rotation: a query scale.

    Raises:
        ConfigError: if that scale could not be computed beside the new block.
    """
    family = family_of(config)
    _, blocks = raw_blocks(config)
    inert = set(family.inert if family else ()) - {"max_position_embeddings"}
    kept = {key: value for key, value in blocks.get(None, {}).items() if key in inert}
    if "llama_4_scaling_beta" in kept and "original_max_position_embeddings" not in block:
        raise ConfigError(
            "this model scales its queries by llama_4_scaling_beta and the rope block's "
            "original_max_position_embeddings, which this method does not write. Use 'yarn'."
        )
    return {**block, **kept}
