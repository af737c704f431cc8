"""The memory of a key-value cache, layer by layer, from the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.adapters.families import (
    family_of,
    layer_types,
    text_part,
)
from longspan.errors import ConfigError

BFLOAT16_BYTES = 2


def kv_cache_bytes(config: Mapping[str, Any], tokens: int, *, element: int = BFLOAT16_BYTES) -> int:
    """Returns the bytes one sequence of `tokens` keeps: 2 · K · head_dim · kept tokens a layer.

    Sliding layers keep no more than their window; multi-head latent attention keeps one latent of
    kv_lora_rank and one rotary key a token.

    Args:
        config: the content of a config.json; a multimodal one is read at its text part.
        tokens: length of the sequence.
        element: bytes a number, 2 for bfloat16.

    >>> config = {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9,
    ...           "num_key_value_heads": 3, "head_dim": 64}
    >>> kv_cache_bytes(config, 8192)  # 2 · 3 · 64 · 8192 · 30 · 2
    188743680
    """
    text = text_part(config)
    kinds = layer_types(text, family_of(text))
    if not kinds:
        raise ConfigError("the config lacks num_hidden_layers, needed for the cache's size.")
    return (
        sum(numbers_per_token(text, kind) * kept_tokens(text, kind, tokens) for kind in kinds)
        * element
    )


def kept_tokens(config: Mapping[str, Any], kind: str, tokens: int) -> int:
    """Returns how many tokens a layer of this type keeps."""
    bounds = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    bound = config.get(bounds.get(kind, ""))
    return min(tokens, int(bound)) if bound else tokens


def numbers_per_token(config: Mapping[str, Any], kind: str) -> int:
    """Returns the numbers one layer keeps for one token."""
    if config.get("kv_lora_rank"):
        return config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return 2 * key_value_heads(config, kind) * head_dim(config, kind)


def key_value_heads(config: Mapping[str, Any], kind: str) -> int:
    """Returns the key-value heads of a layer: all query heads where nothing else is said."""
    keys = ("num_key_value_heads", "multi_query_group_num", "n_head_kv", "num_attention_heads")
    if kind == "full_attention":
        keys = ("num_global_key_value_heads", *keys)
    return _first(config, *keys, "n_head")


def head_dim(config: Mapping[str, Any], kind: str) -> int:
    """Returns the channels of a head in a layer of this type."""
    if kind == "full_attention" and config.get("global_head_dim"):
        return config["global_head_dim"]
    if config.get("head_dim") or config.get("kv_channels"):
        return _first(config, "head_dim", "kv_channels")
    return _first(config, "hidden_size", "n_embd") // _first(
        config, "num_attention_heads", "n_head"
    )


def _first(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        if config.get(key) is not None:
            return int(config[key])
    raise ConfigError(f"the config lacks {' or '.join(keys)}, needed for the cache's size.")
