"""What is written to a config is read back as it was, by longspan and by transformers."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from longspan.adapters.families import FAMILIES, text_part
from longspan.adapters.lengths import lengths_of
from longspan.adapters.rope import rope_from_config
from longspan.adapters.rope_writing import rope_to_config, updated_config
from longspan.adapters.ropes import Ropes
from longspan.errors import ConfigError
from longspan.rotary.rope import Rope
from longspan.rotary.scaling import (
    SCALINGS,
    DynamicNTK,
    Llama3,
    LongRope,
    NoScaling,
    NTKAware,
    NTKByParts,
    PositionInterpolation,
    RopeScaling,
    Yarn,
)
from test_configs import FLOAT32_FREQUENCIES, ROWS, UNKNOWN_TO_TRANSFORMERS, load
from tiny_families import OWN, TRAINED, table_by_transformers, tiny_config

LONG = 1_000_000
ORIGINAL = {"original_max_position_embeddings": 4096}


def longrope(pairs: int) -> LongRope:
    return LongRope(
        short_factor=[1.0 + pair / 100 for pair in range(pairs)],
        long_factor=[2.0 + pair for pair in range(pairs)],
        factor=LONG / 4096,
        **ORIGINAL,
    )


# Every method, with every setting away from its default.
EXAMPLES: dict[str, RopeScaling] = {
    "none": NoScaling(),
    "linear": PositionInterpolation(factor=LONG / 4096),
    "ntk": NTKAware(factor=7.25),
    "dynamic": DynamicNTK(factor=1.0, **ORIGINAL),
    "dynamic, factor 4": DynamicNTK(factor=4.0, **ORIGINAL),
    "ntk-by-parts": NTKByParts(factor=LONG / 4096, **ORIGINAL),
    "ntk-by-parts, betas": NTKByParts(factor=LONG / 4096, beta_fast=20, beta_slow=2, **ORIGINAL),
    "yarn": Yarn(factor=LONG / 4096, **ORIGINAL),
    "yarn, all": Yarn(
        factor=LONG / 4096, beta_fast=20, beta_slow=2, attention_factor=1.5, **ORIGINAL
    ),
    "yarn, untruncated": Yarn(factor=LONG / 4096, truncate=False, **ORIGINAL),
    "yarn, attention factor 1": Yarn(factor=LONG / 4096, attention_factor=1.0, **ORIGINAL),
    "yarn, DeepSeek's": Yarn(factor=LONG / 4096, mscale=1.0, mscale_all_dim=0.5, **ORIGINAL),
    "llama3": Llama3(factor=9.0, low_freq_factor=1.5, high_freq_factor=5.0, **ORIGINAL),
    "longrope": longrope(32),
    "longrope, explicit": LongRope(
        short_factor=[1.0] * 32, long_factor=[2.0] * 32, attention_factor=1.25, **ORIGINAL
    ),
}
PLAIN = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}


def test_every_method_has_an_example() -> None:
    assert {type(scaling) for scaling in EXAMPLES.values()} == set(SCALINGS)


def written_again(config: dict[str, Any], ropes: Ropes, longest: int = LONG) -> dict[str, Any]:
    """A config under other ropes, through JSON as on disk."""
    updated, _ = updated_config(config, rope_to_config(ropes, longest, trained_length=4096))
    return json.loads(json.dumps(updated))


def under(config: Any, scaling: RopeScaling) -> Ropes:
    """A config's ropes with the far-reaching ones scaled."""
    ropes = rope_from_config(config)
    scaled = replace(ropes[ropes.reaching], scaling=scaling)
    return Ropes({**ropes, ropes.reaching: scaled}, ropes.layers)


@pytest.mark.parametrize("method", EXAMPLES)
def test_every_method_is_read_back_as_it_was(method: str) -> None:
    ropes = under(PLAIN, EXAMPLES[method])
    again = written_again(PLAIN, ropes)
    found = rope_from_config(again)
    assert dict(found) == dict(ropes)
    assert found.layers == ropes.layers
    assert found.notes == ()
    assert "rope_theta" not in again
    if method not in ("none", "ntk", "llama3") and "dynamic" not in method:
        assert lengths_of(again, found).usable == LONG
    if method != "none":
        assert lengths_of(again, found).trained == 4096


@pytest.mark.parametrize("name", ROWS)
def test_every_published_config_is_read_back_as_it_was(name: str) -> None:
    config, row = load(name), ROWS[name]
    ropes = rope_from_config(config)
    updated, _ = updated_config(
        config, rope_to_config(ropes, row.usable or 16384, trained_length=row.trained or 4096)
    )
    found = rope_from_config(json.loads(json.dumps(updated)))
    assert dict(found) == dict(ropes)
    assert found.layers == ropes.layers
    assert lengths_of(updated, found).trained == (row.trained or 4096)
    if name not in ("internlm2.5-7b-dynamic", "minicpm-2b-128k-dynamic"):
        assert lengths_of(updated, found).usable == (row.usable or 16384)


# These blocks have no original length, by which Ministral 3 scales its queries.
UNSCALED_QUERIES = ("none", "linear", "ntk", "dynamic", "dynamic, factor 4")
NEW = [method for method in EXAMPLES if "longrope" not in method]


@pytest.mark.parametrize("method", NEW)
@pytest.mark.parametrize("name", ROWS)
def test_every_published_config_carries_every_method(name: str, method: str) -> None:
    config = load(name)
    ropes = under(config, EXAMPLES[method])
    if name == "gemma-4-26b-a4b" and method not in ("none", "linear"):
        with pytest.raises(ConfigError, match="cannot be written for proportional rope"):
            written_again(config, ropes)
    elif name == "ministral3-3b-2512" and method in UNSCALED_QUERIES:
        with pytest.raises(ConfigError, match="scales its queries by llama_4_scaling_beta"):
            written_again(config, ropes)
    else:
        found = rope_from_config(written_again(config, ropes))
        scaled = {kind: replace(rope, softmax_scale_multiplier=1.0) for kind, rope in found.items()}
        assert scaled == {
            kind: replace(rope, softmax_scale_multiplier=1.0) for kind, rope in ropes.items()
        }


def test_what_is_written_is_this() -> None:
    for method, keys in {
        "yarn": {"rope_type": "yarn", "factor": 8.0, **ORIGINAL, "beta_fast": 32, "beta_slow": 1},
        "linear": {"rope_type": "linear", "factor": 8.0},
        "none": {"rope_type": "default"},
        "ntk-by-parts": {
            "rope_type": "yarn",
            "factor": 8.0,
            **ORIGINAL,
            "beta_fast": 32,
            "beta_slow": 1,
            "attention_factor": 1.0,
        },
    }.items():
        example = EXAMPLES[method]
        scaling = example if method == "none" else type(example).for_factor(8.0, 4096)
        written = rope_to_config(under(PLAIN, scaling), 32768)
        origin = {"method": method, "factor": 8.0, **ORIGINAL, "rope_theta": 1e4}
        assert written == {
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_theta": 1e4, **keys},
            **({} if method == "none" else {"longspan": origin}),
        }


def test_ntk_aware_is_a_raised_theta_with_its_origin() -> None:
    config = {**PLAIN, "hidden_size": 512}  # heads of 128
    written = rope_to_config(under(config, NTKAware(factor=4.0)), 16384)
    assert written["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": pytest.approx(40889.9424, abs=5e-5),
    }
    assert written["longspan"] == {
        "method": "ntk",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 1e4,
    }


def test_dynamic_ntk_keeps_the_trained_length_as_transformers_reads_it() -> None:
    written = rope_to_config(under(PLAIN, EXAMPLES["dynamic"]), 65536)
    assert written["max_position_embeddings"] == 4096
    assert written["rope_parameters"] == {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0}


def test_yarns_ramp_in_rotations_has_no_spelling() -> None:
    scaling = Yarn(factor=4.0, ramp="rotations", **ORIGINAL)
    with pytest.raises(ConfigError, match="ramp in rotations cannot be written"):
        rope_to_config(under(PLAIN, scaling), 16384)


def test_layer_types_are_nested_and_only_the_far_ones_change() -> None:
    config = load("gemma3-1b-it")
    written = rope_to_config(
        under(config, Yarn(factor=4.0, original_max_position_embeddings=32768)), 131072
    )
    assert written["rope_parameters"].keys() == {"full_attention", "sliding_attention"}
    assert written["rope_parameters"]["sliding_attention"] == {
        "rope_type": "default",
        "rope_theta": 1e4,
    }
    assert written["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert written["longspan"]["rope_theta"] == 1e6


@pytest.mark.parametrize("rotary_dim", range(2, 45, 2))
def test_any_share_of_a_head_survives(rotary_dim: int) -> None:
    config = {**PLAIN, "head_dim": 44, "rotary_dim": rotary_dim}
    ropes = rope_from_config(config)
    block = rope_to_config(ropes, 4096)["rope_parameters"]
    bare = {key: value for key, value in config.items() if key not in ("rotary_dim", "rope_theta")}
    assert rope_from_config({**bare, "rope_parameters": block}) == ropes


def test_only_what_contradicts_is_dropped() -> None:
    config = {
        **PLAIN,
        "model_type": "gpt_neox",
        "rotary_emb_base": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "vocab_size": 7,
    }
    before = copy.deepcopy(config)
    updated, removed = updated_config(
        config, rope_to_config(rope_from_config(config), 8192, trained_length=4096)
    )
    assert removed == ("rope_scaling", "rope_theta", "rotary_emb_base")
    assert updated.keys() == (config.keys() - set(removed)) | {"rope_parameters", "longspan"}
    assert updated["vocab_size"] == 7
    assert config == before


def test_a_multimodal_config_changes_at_its_text_part() -> None:
    config = load("ministral3-3b-2512")
    ropes = rope_from_config(config)
    factor = ropes["full_attention"].method.factor
    updated, _ = updated_config(config, rope_to_config(ropes, 262144))
    assert {key: value for key, value in updated.items() if key != "text_config"} == {
        key: value for key, value in config.items() if key != "text_config"
    }
    block = updated["text_config"]["rope_parameters"]
    assert block["llama_4_scaling_beta"] == 0.1  # the query scale stays
    assert block["factor"] == factor == 16.0


def test_a_ratio_of_the_base_is_not_applied_twice() -> None:
    config = {**load("chatglm3-6b"), "rope_ratio": 500}
    ropes = rope_from_config(config)
    assert ropes["full_attention"].rope_theta == 5e6
    updated, removed = updated_config(config, rope_to_config(ropes, 8192))
    assert removed == ("rope_ratio",)
    assert updated["seq_length"] == 8192
    assert "max_position_embeddings" not in updated
    assert rope_from_config(updated) == ropes


def test_a_familys_own_name_of_the_length_is_kept() -> None:
    config = load("gpt-j-6b-interleaved")
    ropes = under(config, Yarn(factor=4.0, original_max_position_embeddings=2048))
    updated, _ = updated_config(config, rope_to_config(ropes, 8192))
    assert updated["n_positions"] == 8192
    assert lengths_of(updated, rope_from_config(updated)).usable == 8192


EDITS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "factor of the rope block": ("yarn", {}, {"factor": 300.0}, "factor 244.*300"),
    "length of the rope block": (
        "yarn",
        {},
        {"original_max_position_embeddings": 8192},
        "original_max_position_embeddings 4096, the rope block 8192",
    ),
    "theta of the rope block": ("yarn", {}, {"rope_theta": 5e5}, "rope_theta 10000.*500000"),
    "type of the rope block": (
        "linear",
        {},
        {"rope_type": "ntk"},
        "method 'linear', the rope block 'ntk'",
    ),
    "raised theta": ("ntk", {}, {"rope_theta": 5e5}, "NTK-aware with factor 7.25.*rope_theta is 5"),
    "attention factor of parts": (
        "ntk-by-parts",
        {},
        {"attention_factor": 1.2},
        "ntk-by-parts, but the rope block's attention_factor is 1.2, not 1.0",
    ),
    "method": ("yarn", {"method": "linear"}, {}, "method 'linear', the rope block 'yarn'"),
    "factor": ("yarn", {"factor": 2.0}, {}, "factor 2.0, the rope block 244"),
    "length": ("yarn", {"original_max_position_embeddings": 1}, {}, "embeddings 1, the rope block"),
    "theta": ("yarn", {"rope_theta": 2e4}, {}, "rope_theta 20000.0, the rope block 10000.0"),
    "factor of ntk": ("ntk", {"factor": 2.0}, {}, "NTK-aware with factor 2"),
    "theta of ntk": ("ntk", {"rope_theta": 2e4}, {}, "from rope_theta 20000"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_block_edited_by_hand_is_refused(edit: str) -> None:
    method, origin, block, message = EDITS[edit]
    config = written_again(PLAIN, under(PLAIN, EXAMPLES[method]), longest=900_000)
    config["longspan"] |= origin
    config["rope_parameters"] |= block
    with pytest.raises(ConfigError, match=message) as refused:
        rope_from_config(config)
    assert "Remove the longspan block if" in str(refused.value)
    del config["longspan"]
    rope_from_config(config, original_max_position_embeddings=None)  # that helps


@pytest.mark.parametrize(
    "key", ["method", "factor", "original_max_position_embeddings", "rope_theta"]
)
def test_a_longspan_block_lacks_nothing(key: str) -> None:
    config = written_again(PLAIN, under(PLAIN, EXAMPLES["ntk"]))
    del config["longspan"][key]
    with pytest.raises(ConfigError, match=f"the longspan block lacks {key}"):
        rope_from_config(config)


def test_a_longspan_block_is_an_object() -> None:
    with pytest.raises(ConfigError, match="the longspan block lacks"):
        rope_from_config({**PLAIN, "longspan": "yarn"})


def test_without_the_longspan_block_ntk_aware_is_a_plain_raised_theta() -> None:
    """As every other reader sees it; the frequencies are the same."""
    config = written_again(PLAIN, under(PLAIN, EXAMPLES["ntk"]))
    with_origin = rope_from_config(config)["full_attention"]
    del config["longspan"]
    without = rope_from_config(config)["full_attention"]
    assert without.scaling == NoScaling()
    torch.testing.assert_close(without.inv_freq(), with_origin.inv_freq(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("length", [100_000, 130_000, 131_071, 99_999, 70_001])
@pytest.mark.parametrize("original", [4096, 30_000, 32_768, 8193, 1_000])
def test_a_ratio_of_odd_lengths_is_not_refused_for_its_rounding(original: int, length: int) -> None:
    scaling = Yarn(factor=length / original, original_max_position_embeddings=original)
    config = {**PLAIN, "max_position_embeddings": original}
    again = written_again(config, under(config, scaling), longest=length)
    assert lengths_of(again, rope_from_config(again)).usable == length


READABLE = sorted(ROWS.keys() - UNKNOWN_TO_TRANSFORMERS - {"gpt-j-6b-interleaved"})
BY_TRANSFORMERS = ["none", "linear", "ntk", "dynamic, factor 4", "ntk-by-parts", "yarn", "llama3"]
PHI3 = ("phi-3.5-mini-longrope", "phi-4-mini-longrope")  # longrope alone is accepted there


@pytest.mark.parametrize("name", [name for name in READABLE if name not in PHI3])
def test_transformers_reads_what_is_written(name: str) -> None:
    text = dict(text_part(load(name)))
    tried = 0
    for method in BY_TRANSFORMERS:
        ropes = under(text, EXAMPLES[method])
        try:
            written = written_again(text, ropes)
        except ConfigError:
            continue
        tried += 1
        config = transformers.CONFIG_MAPPING[text["model_type"]].from_dict(written)
        for kind, rope in ropes.items():
            for seq_len in (1, 200_000):
                theirs, factor = table_by_transformers(config, kind, seq_len)
                ours = rope.inv_freq(seq_len)
                torch.testing.assert_close(theirs.double(), ours, rtol=FLOAT32_FREQUENCIES, atol=0)
                assert rope.attention_factor == pytest.approx(factor, rel=FLOAT32_FREQUENCIES)
        assert dict(rope_from_config(config)) == dict(rope_from_config(written))
    refusing = {"gemma-4-26b-a4b": 5, "ministral3-3b-2512": 4}
    assert tried == len(BY_TRANSFORMERS) - refusing.get(name, 0)


@pytest.mark.parametrize("name", PHI3)
def test_transformers_reads_longrope_as_written(name: str) -> None:
    text = load(name)
    ropes = rope_from_config(text)
    config = transformers.CONFIG_MAPPING["phi3"].from_dict(written_again(text, ropes, 131072))
    for seq_len in (4096, 4097):
        theirs, factor = table_by_transformers(config, "full_attention", seq_len)
        ours = ropes["full_attention"].inv_freq(seq_len)
        torch.testing.assert_close(theirs.double(), ours, rtol=FLOAT32_FREQUENCIES, atol=0)
        assert ropes["full_attention"].attention_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("model_type", OWN)
def test_a_live_config_is_read_back_as_it_was(model_type: str) -> None:
    config = tiny_config(model_type)
    ropes = rope_from_config(config)
    updated, _ = updated_config(
        config.to_dict(), rope_to_config(ropes, TRAINED, trained_length=TRAINED)
    )
    again = rope_from_config(json.loads(json.dumps(updated)))
    assert again == ropes
    assert again.layers == ropes.layers
    assert FAMILIES[model_type].layout == ropes[ropes.reaching].layout


def test_the_origin_is_that_of_the_layers_that_reach_furthest() -> None:
    near = Rope(head_dim=8, rope_theta=1e4, scaling=PositionInterpolation(factor=2.0))
    far = Rope(head_dim=8, rope_theta=1e6, scaling=Yarn(factor=math.pi, **ORIGINAL))
    ropes = Ropes({"sliding_attention": near, "full_attention": far})
    written = rope_to_config(ropes, 12_000)
    assert written["longspan"]["method"] == "yarn"
    linear = {**ropes, "full_attention": replace(far, scaling=near.scaling)}
    assert rope_to_config(linear, 1001)["longspan"]["original_max_position_embeddings"] == 500
    assert "longspan" not in rope_to_config(
        {**ropes, "full_attention": replace(far, scaling=None)}, 9
    )
