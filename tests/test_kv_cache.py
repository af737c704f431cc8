"""The cache's bytes by hand for published configs, and by count for live ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longspan.adapters.kv_cache import kv_cache_bytes
from longspan.errors import ConfigError
from test_configs import load
from tiny_families import OWN, SHAPE, tiny, tokens

# layers · (keys and values) · heads · head_dim · tokens · bytes, by layer type
BY_HAND: dict[str, tuple[int, int]] = {
    "llama-3.1-8b": (131072, 32 * 2 * 8 * 128 * 131072 * 2),
    "gemma3-1b-it": (32768, (4 * 32768 + 22 * 512) * 2 * 1 * 256 * 2),
    "gemma2-2b": (8192, (13 * 8192 + 13 * 4096) * 2 * 4 * 256 * 2),
    # its full layers have 2 key-value heads of 512, its sliding ones 8 of 256
    "gemma-4-26b-a4b": (262144, (5 * 2 * 2 * 512 * 262144 + 25 * 2 * 8 * 256 * 1024) * 2),
    "deepseek-v3": (131072, 61 * (512 + 64) * 131072 * 2),
    "deepseek-v2-lite": (163840, 27 * (512 + 64) * 163840 * 2),
    "glm-5-interleaved": (202752, 78 * (512 + 64 + 128) * 202752 * 2),  # and the indexer's key
    "qwen2.5-3b": (32768, 36 * 2 * 2 * 128 * 32768 * 2),  # use_sliding_window is false
    "starcoder2-swa": (16384, 32 * 2 * 4 * 128 * 4096 * 2),  # every layer slides
    "gpt-oss-20b": (131072, (12 * 131072 + 12 * 128) * 2 * 8 * 64 * 2),
    # three layers of four attend in chunks
    "llama-4-maverick": (1048576, (12 * 1048576 + 36 * 8192) * 2 * 8 * 128 * 2),
    "smollm3-3b-nope": (65536, 36 * 2 * 4 * 128 * 65536 * 2),  # a NoPE layer keeps as much
    "chatglm3-6b": (8192, 28 * 2 * 2 * 128 * 8192 * 2),  # multi_query_group_num
    "phi-2-msft-partial": (2048, 32 * 2 * 32 * 80 * 2048 * 2),  # n_head_kv is null
    "gpt-j-6b-interleaved": (2048, 28 * 2 * 16 * 256 * 2048 * 2),
    "ministral3-3b-2512": (262144, 26 * 2 * 8 * 128 * 262144 * 2),  # at its text part
}


@pytest.mark.parametrize("name", BY_HAND)
def test_published_configs_by_hand(name: str) -> None:
    length, expected = BY_HAND[name]
    assert kv_cache_bytes(load(name), length) == expected


def test_the_numbers_are_those_quoted() -> None:
    assert kv_cache_bytes(load("llama-3.1-8b"), 131072) == 17_179_869_184
    assert kv_cache_bytes(load("gemma3-1b-it"), 32768) == 145_752_064
    assert kv_cache_bytes(load("gemma-4-26b-a4b"), 262144) == 5_578_424_320
    assert kv_cache_bytes(load("deepseek-v3"), 131072) == 9_210_691_584
    assert kv_cache_bytes(load("llama-4-maverick"), 1048576) == 52_747_567_104


def test_gemma_4s_other_heads_are_for_shared_keys_and_values() -> None:
    config = {**load("gemma-4-26b-a4b")["text_config"], "attention_k_eq_v": False}
    expected = (5 * 2 * 8 * 512 * 262144 + 25 * 2 * 8 * 256 * 1024) * 2
    assert kv_cache_bytes(config, 262144) == expected
    live_config = CONFIG_MAPPING["gemma4_text"].from_dict(config).to_dict()
    assert kv_cache_bytes(live_config, 262144) == expected


def test_qwens_sliding_layers_are_the_last_where_they_are_used() -> None:
    config = {
        **load("qwen2.5-3b"),
        "use_sliding_window": True,
        "max_window_layers": 30,
        "sliding_window": 4096,
    }
    assert kv_cache_bytes(config, 32768) == (30 * 32768 + 6 * 4096) * 2 * 2 * 128 * 2


def test_bytes_of_a_number_and_short_sequences() -> None:
    config = load("gemma3-1b-it")
    assert kv_cache_bytes(config, 32768, element=1) * 2 == kv_cache_bytes(config, 32768)
    assert kv_cache_bytes(config, 100) == 26 * 2 * 256 * 100 * 2  # within every window
    assert kv_cache_bytes(config, 512) == 26 * 2 * 256 * 512 * 2
    assert kv_cache_bytes(config, 513) == (26 * 512 + 4) * 2 * 256 * 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"hidden_size": None, "head_dim": None}, "lacks hidden_size"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads must be a positive whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive whole number"),
        ({"head_dim": -64}, "head_dim must be a positive whole number"),
    ],
)
def test_what_a_config_lacks_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_cache_bytes({**load("llama-3.1-8b"), **changed}, 1024)


@pytest.mark.parametrize("length", [0, -1, 1.5, True])
def test_a_length_is_a_positive_whole_number(length: Any) -> None:
    with pytest.raises(ConfigError, match="tokens must be a positive whole number"):
        kv_cache_bytes(load("llama-3.1-8b"), length)


def numbers_kept(model: Any, length: int) -> int:
    """Counts what transformers' own cache holds after one sequence."""
    with torch.no_grad():
        cache = model(tokens(length), use_cache=True).past_key_values
    kept = 0
    for layer in cache.layers:
        parts = (getattr(layer, name, None) for name in ("keys", "values", "indexer_keys"))
        kept += sum(part.numel() for part in parts if part is not None)
    return kept


@pytest.mark.parametrize("model_type", OWN)
def test_live_caches_hold_as_many_numbers(model_type: str) -> None:
    model = tiny(model_type)
    config = model.config.to_dict()
    assert kv_cache_bytes(config, 10, element=1) == numbers_kept(model, 10)
    # past the window of 16: a sliding layer there keeps a token fewer, for the next to come
    sliding = (config.get("layer_types") or []).count("sliding_attention")
    row = 2 * config.get("num_key_value_heads", 1) * 16
    assert kv_cache_bytes(config, 40, element=1) - numbers_kept(model, 40) == sliding * row


def live(model_type: str, **changed: Any) -> Any:
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **changed})
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_live_chunked_cache_holds_as_many_numbers() -> None:
    model = live(
        "llama4_text",
        head_dim=16,
        attention_chunk_size=16,
        intermediate_size_mlp=16,
        num_local_experts=2,
        num_hidden_layers=4,
    )
    config = model.config.to_dict()
    assert config["layer_types"] == ["chunked_attention"] * 3 + ["full_attention"]
    assert kv_cache_bytes(config, 10, element=1) == numbers_kept(model, 10)
    bare = {key: value for key, value in config.items() if key != "layer_types"}
    assert kv_cache_bytes(bare, 40, element=1) == (3 * 16 + 40) * 2 * 16
    assert kv_cache_bytes(config, 40, element=1) == (3 * 16 + 40) * 2 * 16


def test_layers_that_reuse_keys_hold_none() -> None:
    layers = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    whole, sharing = (
        tiny("gemma4_text", **layers, num_kv_shared_layers=shared, hidden_size_per_layer_input=8)
        for shared in (0, 2)
    )
    for model in (whole, sharing):
        assert kv_cache_bytes(model.config.to_dict(), 10, element=1) == numbers_kept(model, 10)
    assert numbers_kept(whole, 10) == 2 * numbers_kept(sharing, 10)
