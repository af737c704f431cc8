"""Every spelling of a rope block gives one object; the unread and the contrary are refused."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.adapters.lengths import lengths_of
from longspan.adapters.rope import rope_from_config
from longspan.adapters.spelling import COMMON_KEYS, INERT_KEYS, TYPE_KEYS
from longspan.errors import ConfigError, LongspanError, UnsupportedModelError
from longspan.rotary.rope import Rope
from longspan.rotary.scaling import (
    DynamicNTK,
    Llama3,
    LongRope,
    NTKAware,
    PositionInterpolation,
    Yarn,
)

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
}
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096}


def config(**changed: Any) -> dict[str, Any]:
    return {**SIZES, **changed}


def one(content: dict[str, Any], **how: Any) -> Rope:
    return rope_from_config(content, **how)["full_attention"]


# CASE 6: twelve and more spellings of YaRN 32 over 4096 with theta 5e5.
SPELLINGS: dict[str, dict[str, Any]] = {
    "v4, type": config(rope_theta=5e5, rope_scaling={"type": "yarn", **YARN}),
    "v4, rope_type": config(rope_theta=5e5, rope_scaling={"rope_type": "yarn", **YARN}),
    "v4, both types": config(
        rope_theta=5e5, rope_scaling={"type": "yarn", "rope_type": "yarn", **YARN}
    ),
    "v4, theta inside": config(rope_scaling={"type": "yarn", "rope_theta": 5e5, **YARN}),
    "v4, theta twice": config(
        rope_theta=500000, rope_scaling={"type": "yarn", "rope_theta": 5e5, **YARN}
    ),
    "v4, length at the root": config(
        rope_theta=5e5,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "yarn", "factor": 32},
    ),
    "v4, length twice": config(
        rope_theta=5e5,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "yarn", **YARN},
    ),
    "v4, nulls": config(
        rope_theta=5e5,
        rope_parameters=None,
        rope_scaling={"type": "yarn", **YARN, "attention_factor": None, "mscale": None},
    ),
    "v4, finetuned": config(
        rope_theta=5e5, rope_scaling={"type": "yarn", **YARN, "finetuned": True}
    ),
    "v4, defaults written out": config(
        rope_theta=5e5,
        rope_scaling={
            "type": "yarn",
            **YARN,
            "beta_fast": 32,
            "beta_slow": 1.0,
            "truncate": True,
        },
    ),
    "v4, no factor": config(
        rope_theta=5e5,
        rope_scaling={"type": "yarn", "original_max_position_embeddings": 4096},
    ),
    "v5, flat": config(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **YARN}),
    "v5, flat, theta at the root": config(
        rope_theta=5e5, rope_parameters={"rope_type": "yarn", **YARN}
    ),
    "v5, flat, whole heads": config(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "partial_rotary_factor": 1.0,
            **YARN,
        }
    ),
    "v5, by layer type": config(
        rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}}
    ),
    "v5, by layer type, one null": config(
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
            "sliding_attention": None,
        }
    ),
    "both": config(
        rope_theta=5e5,
        rope_scaling={"type": "yarn", **YARN},
        rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **YARN},
    ),
    "multimodal": {
        "model_type": "llava",
        "text_config": config(rope_theta=5e5, rope_scaling={"type": "yarn", **YARN}),
        "vision_config": {"rope_theta": 100.0},
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_case_6_every_spelling_gives_one_object(spelling: str) -> None:
    before = copy.deepcopy(SPELLINGS[spelling])
    rope = one(SPELLINGS[spelling])
    assert rope == Rope(
        head_dim=64,
        rope_theta=5e5,
        layout="half",
        scaling=Yarn(factor=32.0, original_max_position_embeddings=4096),
    )
    assert before == SPELLINGS[spelling]  # reading changes nothing


LISTS = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
LENGTH = {"original_max_position_embeddings": 4096}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

ALIASES: dict[str, tuple[dict[str, Any], Any]] = {
    "su": (
        {"type": "su", **LISTS, **LENGTH},
        LongRope(**LISTS, factor=32.0, original_max_position_embeddings=4096),
    ),
    "longrope": (
        {"rope_type": "longrope", **LISTS, **LENGTH, "factor": 32.0},
        LongRope(**LISTS, factor=32.0, original_max_position_embeddings=4096),
    ),
    "longrope, its factor explicit": (
        {"rope_type": "longrope", **LISTS, **LENGTH, "factor": 8, "attention_factor": 1.5},
        LongRope(**LISTS, factor=8.0, attention_factor=1.5, original_max_position_embeddings=4096),
    ),
    "su and longrope": (
        {"type": "su", "rope_type": "longrope", **LISTS, **LENGTH},
        LongRope(**LISTS, factor=32.0, original_max_position_embeddings=4096),
    ),
    "ntk": ({"type": "ntk", "factor": 4.0}, NTKAware(factor=4.0)),
    "ntk-aware": ({"type": "ntk-aware", "factor": 4}, NTKAware(factor=4.0)),
    "linear": ({"type": "linear", "factor": 4.0}, PositionInterpolation(factor=4.0)),
    "dynamic": (
        {"type": "dynamic", "factor": 2.0},
        DynamicNTK(factor=2.0, original_max_position_embeddings=131072),
    ),
    "dynamic, its length said": (
        {"type": "dynamic", "factor": 2.0, **LENGTH},
        DynamicNTK(factor=2.0, original_max_position_embeddings=4096),
    ),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, **BANDS, **LENGTH},
        Llama3(factor=8.0, **BANDS, original_max_position_embeddings=4096),
    ),
    "mrope": ({"type": "mrope", "mrope_section": [8, 12, 12]}, None),
    "gptj": ({"rope_type": "gptj"}, None),
    "default": ({"rope_type": "default"}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("spelling", ALIASES)
def test_every_types_names_give_its_scaling(spelling: str) -> None:
    block, scaling = ALIASES[spelling]
    found = one(config(rope_theta=1e4, rope_scaling=block))
    assert found == Rope(head_dim=64, rope_theta=1e4, layout="half", scaling=scaling)


def test_case_6_inert_keys_are_listed() -> None:
    content = config(
        rope_theta=1e4,
        rope_scaling={"type": "default", "finetuned": True, "mrope_section": [8, 12, 12]},
    )
    notes = rope_from_config(content).notes
    assert [note.split()[0] for note in notes] == ["finetuned", "mrope_section"]
    assert {"finetuned", "mrope_section", "mrope_interleaved"} == INERT_KEYS


def refused(content: dict[str, Any], message: str, **how: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_from_config(content, **how)


FULL = {"rope_type": "yarn", "rope_theta": 1e4, **YARN}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "types disagree": (
        config(rope_scaling={"type": "linear", "rope_type": "yarn", **YARN}),
        "rope_type 'yarn' and type 'linear' disagree",
    ),
    "spellings disagree": (
        config(rope_scaling={"type": "yarn", **YARN}, rope_parameters={**FULL, "factor": 16.0}),
        "rope_parameters and rope_scaling disagree",
    ),
    "spellings disagree on theta": (
        config(rope_theta=5e5, rope_scaling={"type": "yarn", **YARN}, rope_parameters=FULL),
        "disagree|is 10000.0, but rope_theta is 500000",
    ),
    "misspelt key": (
        config(rope_scaling={"type": "yarn", **YARN, "beta_fsat": 16}),
        "'beta_fsat', which rope_type 'yarn' does not read. Did you mean 'beta_fast'",
    ),
    "misspelt type": (config(rope_scaling={"type": "yarm", **YARN}), "Did you mean 'yarn'"),
    "type of no known name": (config(rope_scaling={"type": "ntk_yarn"}), "unknown rope_type"),
    "unused: factor of default": (
        config(rope_scaling={"rope_type": "default", "factor": 4.0}),
        "'factor', which rope_type 'default' does not read",
    ),
    "unused: factor without a type": (config(rope_scaling={"factor": 4.0}), "'factor', which"),
    "unused: beta of linear": (
        config(rope_scaling={"type": "linear", "factor": 4.0, "beta_fast": 32}),
        "'beta_fast', which rope_type 'linear'",
    ),
    "unused: attention_factor of llama3": (
        config(rope_scaling={"type": "llama3", "factor": 8, **BANDS, "attention_factor": 1.0}),
        "'attention_factor', which rope_type 'llama3'",
    ),
    "missing factor": (config(rope_scaling={"type": "linear"}), "needs 'factor'"),
    "missing band": (
        config(rope_scaling={"type": "llama3", "factor": 8, "low_freq_factor": 1.0, **LENGTH}),
        "needs 'high_freq_factor'",
    ),
    "missing list": (
        config(rope_scaling={"type": "longrope", "short_factor": [1.0] * 32, **LENGTH}),
        "needs 'long_factor'",
    ),
    "too few factors": (
        config(rope_scaling={"type": "su", **LISTS, "long_factor": [2.0] * 31, **LENGTH}),
        "long_factor must hold one number a pair, 32",
    ),
    "theta conflict": (
        config(rope_theta=1e6, rope_parameters=FULL),
        "the rope block's rope_theta is 10000.0, but rope_theta is 1000000",
    ),
    "theta conflict at the root": (
        config(model_type="gpt_neox", rotary_emb_base=10000, rope_theta=20000),
        "rotary_emb_base is 10000, but rope_theta is 20000",
    ),
    "length conflict": (
        config(original_max_position_embeddings=8192, rope_parameters=FULL),
        "original_max_position_embeddings is 4096, but .* is 8192",
    ),
    "share conflict": (
        config(partial_rotary_factor=0.5, rope_parameters={**FULL, "partial_rotary_factor": 0.25}),
        "partial_rotary_factor is 0.5, but the rope block's partial_rotary_factor is 0.25",
    ),
    "share conflict under another name": (
        config(model_type="gpt_neox", rotary_pct=0.5, partial_rotary_factor=0.25),
        "rotary_pct is 0.5, but partial_rotary_factor is 0.25",
    ),
    "share against rotary_dim": (
        config(rope_theta=1e4, rotary_dim=16, partial_rotary_factor=0.5),
        "rotary_dim is 16, but partial_rotary_factor 0.5 of head_dim 64 is 32",
    ),
    "flat and nested": (
        config(rope_parameters={"full_attention": FULL, "rope_theta": 1e4}),
        "mixes layer types",
    ),
    "misspelt layer type": (
        config(rope_parameters={"full_atention": FULL}),
        "'full_atention', which is no layer's type. Did you mean 'full_attention'",
    ),
    "layer type without a block": (
        config(
            model_type="gemma3_text",
            sliding_window=512,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"full_attention": FULL},
        ),
        "no block for 'sliding_attention'",
    ),
    "no block, but an object it is not": (config(rope_scaling="yarn"), "must be an object"),
    "a list": (config(rope_parameters=[FULL]), "must be an object or null"),
    "layers and types": (
        config(rope_theta=1e4, layer_types=["full_attention"]),
        "layer_types must list one entry for each of 2 layers",
    ),
    "layers and NoPE layers": (
        config(model_type="smollm3", no_rope_layers=[1]),
        "no_rope_layers must list one entry for each of 2 layers",
    ),
    "NoPE interval 0": (config(model_type="smollm3", no_rope_layer_interval=0), "interval must"),
    "no heads": ({"model_type": "llama", "hidden_size": 64}, "lacks num_attention_heads"),
    "no head at all": (config(num_attention_heads=0), "num_attention_heads must be a positive"),
    "odd rotary share": (config(partial_rotary_factor=0.3, rope_theta=1e4), "rotary_dim must be"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_contrary_unread_or_missing_is_refused(why: str) -> None:
    content, message = REFUSED[why]
    refused(content, message)


WRONG = [True, "8", math.nan, math.inf, -1, 0, [4.0], "", {}]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize(
    "key",
    [
        "factor",
        "original_max_position_embeddings",
        "rope_theta",
        "partial_rotary_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    ],
)
def test_values_of_a_wrong_kind_are_refused(key: str, value: Any) -> None:
    refused(config(rope_parameters={**FULL, key: value}), "must be|no layer's type|mixes layer")


@pytest.mark.parametrize("value", [True, "64", math.nan, 64.0, -64, [64]], ids=repr)
@pytest.mark.parametrize("key", ["head_dim", "rotary_dim", "max_position_embeddings"])
def test_sizes_of_a_wrong_kind_are_refused(key: str, value: Any) -> None:
    refused(config(rope_parameters=FULL, **{key: value}), f"{key} must be a positive whole number")


@pytest.mark.parametrize("value", [1, "false", 0], ids=repr)
def test_truncate_is_a_truth_value(value: Any) -> None:
    refused(config(rope_parameters={**FULL, "truncate": value}), "truncate must be true or false")


def test_case_4_a_length_beyond_the_reach_is_refused_naming_both() -> None:
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    content = config(max_position_embeddings=65536, rope_theta=1e4, rope_scaling=block)
    refused(content, r"65536 exceeds factor · original = 4 · 4096 = 16384")
    believed = one(content, on_conflict="factor")
    assert believed.attention_factor == pytest.approx(1.13863, abs=5e-6)
    assert believed.inv_freq()[-1] == pytest.approx(1e4 ** (-62 / 64) / 4)
    assert lengths_of(content, rope_from_config(content, on_conflict="factor")).usable == 16384
    longer = one(content, on_conflict="length")
    assert longer.method.factor == 16.0
    with pytest.raises(ConfigError, match="on_conflict must be"):
        rope_from_config(content, on_conflict="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(("longest", "original"), [(32768, 32768), (40960, 32768)])
def test_case_4_qwens_recipes_are_accepted_with_a_note(longest: int, original: int) -> None:
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    content = config(max_position_embeddings=longest, rope_theta=1e6, rope_scaling=block)
    lengths = lengths_of(content, rope_from_config(content))
    assert (lengths.trained, lengths.usable) == (32768, 131072)
    assert f"max_position_embeddings {longest} was left" in lengths.notes[0]


def test_case_5_a_missing_original_length_is_ambiguous() -> None:
    block = {"type": "yarn", "factor": 16.0}
    content = config(max_position_embeddings=65536, rope_theta=1e4, rope_scaling=block)
    refused(content, "needs 'original_max_position_embeddings', which is missing.*before extension")
    said = one(content, original_max_position_embeddings=4096)
    assert said.scaling == Yarn(factor=16.0, original_max_position_embeddings=4096)


def test_case_7_gpt_oss_ramp_follows_its_original_length() -> None:
    block = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    scaling = one(config(rope_theta=150000, rope_scaling=block)).scaling
    assert isinstance(scaling, Yarn)
    assert scaling.ramp_range(64, 150000) == pytest.approx((8.0928, 17.3980), abs=5e-5)
    rounded = one(
        config(
            rope_theta=150000,
            max_position_embeddings=4194304,
            rope_scaling={**block, "original_max_position_embeddings": 131072, "truncate": True},
        )
    ).scaling
    assert isinstance(rounded, Yarn)
    assert rounded.ramp_range(64, 150000) == (17, 27)


def test_case_8_the_usable_length_is_not_multiplied_again() -> None:
    block = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    content = config(rope_theta=1e4, rope_scaling=block)
    assert lengths_of(content, rope_from_config(content)).usable == 131072


# CASE 9: for each type, a block with every key it reads, and another value of each.
WHOLE: dict[str, dict[str, Any]] = {
    "default": {},
    "proportional": {"factor": 2.0},
    "linear": {"factor": 2.0, "original_max_position_embeddings": 65536},
    "ntk": {"factor": 2.0, "original_max_position_embeddings": 65536},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 65536},
    "yarn": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.5,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
    },
    "yarn, DeepSeek's": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "longrope": {**LISTS, "original_max_position_embeddings": 4096, "factor": 32.0},
    "longrope, its factor explicit": {
        **LISTS,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.2,
    },
}
COMMON = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
ANOTHER: dict[str, Any] = {
    "factor": 48.0,
    "original_max_position_embeddings": 16384,
    "attention_factor": 1.1,
    "beta_fast": 16,
    "beta_slow": 2,
    "truncate": False,
    "mscale": 0.5,
    "mscale_all_dim": 1.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "short_factor": [1.5] * 32,
    "long_factor": [3.0] * 32,
    "rope_theta": 1e6,
    "partial_rotary_factor": 1.0,
}
MUTATIONS = [(name, key) for name, block in WHOLE.items() for key in (*block, *COMMON)]


def outcome(name: str, changed: dict[str, Any]) -> tuple[Any, ...]:
    """What a config makes of a model: frequencies short and long, factors, lengths."""
    rope_type = name.split(",")[0]
    block = {"rope_type": rope_type, **COMMON, **WHOLE[name], **changed}
    whole = rope_type == "longrope" and block["partial_rotary_factor"] == 1.0
    content = config(head_dim=64 if whole else 128, rope_parameters=block)
    ropes = rope_from_config(content)
    rope = ropes["full_attention"]
    try:
        lengths = lengths_of(content, ropes)
    except ConfigError:  # a proportional rope does not say which length was trained
        lengths = None
    return (
        rope.head_dim - rope.turning,
        rope.inv_freq(1).tolist(),
        rope.inv_freq(100_000).tolist(),
        rope.attention_factor,
        lengths,
    )


@pytest.mark.parametrize(("name", "key"), MUTATIONS)
def test_case_9_every_key_changes_something(name: str, key: str) -> None:
    assert outcome(name, {key: ANOTHER[key]}) != outcome(name, {})


def test_case_9_every_key_of_every_type_is_mutated() -> None:
    mutated: dict[str, set[str]] = {}
    for name, key in MUTATIONS:
        mutated.setdefault(name.split(",")[0], set()).add(key)
    accepted = {
        rope_type: needed | optional | (COMMON_KEYS - {"rope_type"})
        for rope_type, (needed, optional) in TYPE_KEYS.items()
    }
    assert mutated == accepted


def test_case_9_every_needed_key_is_missed() -> None:
    for name, block in WHOLE.items():
        rope_type = name.split(",")[0]
        for key in TYPE_KEYS[rope_type][0]:
            fewer = {other: value for other, value in block.items() if other != key}
            content = config(
                max_position_embeddings=None,
                rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, **fewer},
            )
            refused(content, f"needs '{key}'")


@pytest.mark.parametrize(
    "rope_type", ["linear", "ntk", "dynamic", "yarn", "llama3", "proportional"]
)
def test_case_10_a_factor_below_1_is_refused(rope_type: str) -> None:
    block = {"rope_type": rope_type, "rope_theta": 1e4, **WHOLE[rope_type], "factor": 0.5}
    refused(config(rope_parameters=block), r"factor must be ≥ 1, got 0\.5")


def test_case_10_linear_4_at_p_is_plain_at_a_quarter() -> None:
    scaled = one(config(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0}))
    assert (scaled.inv_freq() * 4).tolist() == pytest.approx(
        [1e4 ** (-pair / 32) for pair in range(32)], rel=1e-12
    )


def test_case_29_two_layer_types_of_their_own() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    far = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    gemma = config(model_type="gemma3_text", num_hidden_layers=12, sliding_window=512, head_dim=64)
    new = {**gemma, "rope_parameters": {"sliding_attention": plain, "full_attention": far}}
    old = {
        **gemma,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    silent = {**gemma, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for content in (new, old, silent):
        ropes = rope_from_config(content)
        assert ropes["sliding_attention"] == Rope(head_dim=64, rope_theta=1e4)
        assert ropes["full_attention"] == Rope(
            head_dim=64, rope_theta=1e6, scaling=PositionInterpolation(factor=8.0)
        )
        five_to_one = ["sliding_attention"] * 5 + ["full_attention"]
        assert list(ropes.layers) == five_to_one * 2
    assert rope_from_config(new) != rope_from_config({**old, "rope_local_base_freq": 2e4})


def test_a_sliding_layers_base_may_stand_at_the_root() -> None:
    content = config(
        model_type="gemma3_text",
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention"],
        rope_theta=1e6,
        rope_local_base_freq=2e4,
        rope_parameters={
            "sliding_attention": {"rope_type": "default"},
            "full_attention": {"rope_type": "default"},
        },
    )
    ropes = rope_from_config(content)
    assert ropes["sliding_attention"].rope_theta == 2e4
    assert ropes["full_attention"].rope_theta == 1e6
    del content["rope_local_base_freq"]
    refused(content, "rope_parameters has no rope_theta")


def test_case_30_the_new_spelling_without_theta_is_refused() -> None:
    refused(config(rope_parameters={"rope_type": "yarn", **YARN}), "has no rope_theta")
    refused(config(rope_parameters={}), "has no rope_theta")


@pytest.mark.parametrize(
    ("model_type", "theta"),
    [("llama", 1e4), ("mixtral", 1e6), ("cohere", 5e5), ("smollm3", 2e6), ("qwen2_vl_text", 1e6)],
)
def test_case_30_the_old_one_takes_the_familys_default_aloud(model_type: str, theta: float) -> None:
    ropes = rope_from_config(config(model_type=model_type))
    assert ropes["full_attention"].rope_theta == theta
    assert f"the family's default {theta:g} is used" in ropes.notes[0]


def test_case_30_a_family_without_a_default_is_refused() -> None:
    content = config(model_type="unheard_of", rope_scaling={"type": "linear", "factor": 2.0})
    refused(content, "no rope_theta, and model_type 'unheard_of' has no documented default")
    with pytest.raises(UnsupportedModelError, match="names no rope"):
        rope_from_config(config(model_type="unheard_of"))
    with pytest.raises(UnsupportedModelError, match="names no rope"):
        rope_from_config({})


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "bloom"},
        {"model_type": "gpt2"},
        {"model_type": "falcon", "alibi": True},
        {"model_type": "mpt_like", "attn_config": {"alibi": True}},
        {"model_type": "bert_like", "position_embedding_type": "absolute"},
    ],
    ids=str,
)
def test_models_without_rope_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="has no rope"):
        rope_from_config({**SIZES, **content})


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats()
    | st.sampled_from([*TYPE_KEYS, "su", "mrope", "", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
KEYS = sorted({key for keys in TYPE_KEYS.values() for part in keys for key in part} | COMMON_KEYS)
BLOCKS = st.dictionaries(
    st.sampled_from([*KEYS, "type", "finetuned", "full_attention"]) | st.text(max_size=3), JUNK
)


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(["rope_scaling", "rope_parameters", "longspan"]),
    block=BLOCKS | JUNK,
    rope_type=st.none() | st.sampled_from([*TYPE_KEYS]),
    root=st.dictionaries(st.sampled_from(["rope_theta", *COMMON_KEYS]), JUNK, max_size=1),
    model_type=st.sampled_from(["llama", "gemma3_text", "gpt_neox", "deepseek_v3", "unknown"]),
)
def test_junk_never_raises_anything_else(
    name: str, block: Any, rope_type: str | None, root: dict[str, Any], model_type: str
) -> None:
    if isinstance(block, dict) and rope_type is not None:
        block = {"rope_type": rope_type, **WHOLE[rope_type], **block}
    content = config(model_type=model_type, qk_rope_head_dim=64, **{**root, name: block})
    with contextlib.suppress(LongspanError):
        ropes = rope_from_config(content)
        lengths_of(content, ropes)
        for rope in ropes.values():
            assert rope.inv_freq(100_000).isfinite().all()
            assert math.isfinite(rope.attention_factor)
