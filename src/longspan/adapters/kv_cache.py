"""The memory of a key-value cache, layer by layer, from the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.adapters.config_fields import size_of
from longspan.adapters.families import as_layers_see_it, family_of, layer_types, text_part
from longspan.errors import ConfigError
from longspan.rotary.scaling.base import check_length

BFLOAT16_BYTES = 2


def kv_cache_bytes(config: Mapping[str, Any], tokens: int, *, element: int = BFLOAT16_BYTES) -> int:
    """Returns the bytes one sequence of `tokens` keeps: 2 · K · head_dim · kept tokens a layer.

    Sliding layers keep no more than their window, layers that reuse another's keys nothing.
    Multi-head latent attention keeps one latent of kv_lora_rank and one rotary key a token, and
    the key of a sparse attention's indexer.

    Args:
        config: the content of a config.json; a multimodal one is read at its text part.
        tokens: length of the sequence.
        element: bytes a number, 2 for bfloat16.

    >>> config = {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9,
    ...           "num_key_value_heads": 3, "head_dim": 64}
    >>> kv_cache_bytes(config, 8192)  # 2 · 3 · 64 · 8192 · 30 · 2
    188743680
    """
    check_length("tokens", tokens)
    text = text_part(config)
    kinds = layer_types(text, family_of(text))
    if not kinds:
        raise ConfigError("the config lacks num_hidden_layers, needed for the cache's size.")
    shared = size_of(text, "num_kv_shared_layers") if text.get("num_kv_shared_layers") else 0
    return (
        sum(
            numbers_per_token(text, kind) * kept_tokens(text, kind, tokens)
            for kind in kinds[: len(kinds) - shared]
        )
        * element
    )


def kept_tokens(config: Mapping[str, Any], kind: str, tokens: int) -> int:
    """Returns how many tokens a layer of this type keeps."""
    bounds = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    bound = bounds.get(kind, "")
    return min(tokens, size_of(config, bound)) if config.get(bound) else tokens


def numbers_per_token(config: Mapping[str, Any], kind: str) -> int:
    """Returns the numbers one layer keeps for one token."""
    if config.get("kv_lora_rank"):
        latent = size_of(config, "kv_lora_rank") + size_of(config, "qk_rope_head_dim")
        return latent + (size_of(config, "index_head_dim") if config.get("index_head_dim") else 0)
    layer = as_layers_see_it(config, kind)
    return 2 * key_value_heads(layer) * head_dim(layer)


def key_value_heads(config: Mapping[str, Any]) -> int:
    """Returns the key-value heads of a layer: all query heads where nothing else is said."""
    return size_of(
        config,
        "num_key_value_heads",
        "multi_query_group_num",
        "n_head_kv",
        "num_attention_heads",
        "n_head",
    )


def head_dim(config: Mapping[str, Any]) -> int:
    """Returns the channels of a head."""
    family = family_of(config)
    if config.get("head_dim") or config.get("kv_channels"):
        return size_of(config, "head_dim", "kv_channels")
    if family and family.head_dim:
        return family.head_dim
    return size_of(config, "hidden_size", "n_embd") // size_of(
        config, "num_attention_heads", "n_head"
    )
