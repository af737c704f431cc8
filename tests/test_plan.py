"""Plans compose against the trained length, and refuse what would not extend."""

from __future__ import annotations

import math
from typing import Any

import pytest

from longspan.adapters.families import text_part
from longspan.adapters.kv_cache import kv_cache_bytes
from longspan.adapters.rope import rope_from_config
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.rotary.scaling import METHODS, DynamicNTK, PositionInterpolation, Yarn
from longspan.tools.plan import Plan, plan
from test_configs import ROWS, load

SMALL = {
    "model_type": "llama",
    "head_dim": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
}
NEW = ["linear", "ntk", "dynamic", "ntk-by-parts", "yarn", "llama3"]
UNSCALED = [
    "smollm2-135m",
    "tinyllama-1.1b",
    "qwen3-0.6b-base-rope",
    "gemma3-1b-it",
    "redpajama-3b-gpt-neox",
    "stablelm-partial",
    "aya-23-cohere-interleaved",
    "chatglm3-6b",
    "gpt-j-6b-interleaved",
]
STEPS = [(65536, 131072), (100_000, 130_000), (70_001, 99_999)]


def test_the_methods_tried_are_all_but_those_that_need_data() -> None:
    assert {*NEW, "none", "longrope"} == METHODS.keys()


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("method", NEW)
@pytest.mark.parametrize("name", UNSCALED)
def test_two_steps_equal_one(name: str, method: str, steps: tuple[int, int]) -> None:
    config, (first, second) = load(name), steps
    once = plan(config, to=second, method=method)
    assert plan(plan(config, to=first, method=method), to=second) == once
    assert plan(plan(config, to=first, method=method).config, to=second) == once
    assert once != plan(config, to=second + 1, method=method)


SCALED = {
    "llama-3.1-8b": (200_000, 262144),
    "llama-3.2-1b": (196608, 524288),
    "qwen3-8b-yarn-recipe": (200_000, 262144),
    "qwen2.5-14b-instruct-yarn-recipe": (131073, 200_003),
    "deepseek-v3": (200_000, 327_680),
    "kimi-k2.5": (300_001, 524_288),
    "gpt-oss-20b": (150_000, 262_144),
    "ministral3-3b-2512": (300_000, 400_001),
    "yarn-llama-2-70b-32k": (40_000, 65_537),
    "internlm2.5-7b-dynamic": (100_000, 262_144),
}


@pytest.mark.parametrize("name", SCALED)
def test_two_steps_equal_one_from_a_scaled_config(name: str) -> None:
    config, (first, second) = load(name), SCALED[name]
    once = plan(config, to=second)
    assert plan(plan(config, to=first), to=second) == once
    own = rope_from_config(config)["full_attention"].method
    assert once.method == own.method
    assert {**once.ropes["full_attention"].method.parameters(), "factor": 0} == {
        **own.parameters(),
        "factor": 0,
    }


def test_a_factor_is_relative_to_the_trained_length() -> None:
    config = {
        **SMALL,
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "type": "linear",
            "factor": 2.0,
            "original_max_position_embeddings": 32768,
        },
    }
    planned = plan(config, to=131072)
    assert planned.ropes["full_attention"].scaling == PositionInterpolation(factor=4.0)
    assert (planned.trained_length, planned.usable_length) == (32768, 65536)
    assert planned.config["longspan"]["original_max_position_embeddings"] == 32768


def test_a_llama3_factor_grows_with_the_served_length() -> None:
    planned = plan(load("llama-3.1-8b"), to=262144)
    assert planned.factor == 16.0
    assert (planned.trained_length, planned.usable_length) == (8192, 131072)
    assert plan(load("llama-3.2-1b"), to=262144).factor == 64.0
    assert plan(load("llama-3.1-8b"), to=262144, factor=10.0).factor == 10.0  # no length ratio


def test_deepseeks_softmax_scale_follows_its_factor() -> None:
    planned = plan(load("deepseek-v3"), to=327_680)
    assert planned.factor == 80.0
    multiplier = planned.ropes["full_attention"].softmax_scale_multiplier
    assert multiplier == pytest.approx((0.1 * math.log(80) + 1) ** 2)
    other = plan(load("deepseek-v3"), to=327_680, method="linear")
    assert other.ropes["full_attention"].softmax_scale_multiplier == 1.0


def test_dynamic_is_the_papers_form_unless_a_factor_is_given() -> None:
    planned = plan(SMALL, to=32768, method="dynamic")
    assert planned.ropes["full_attention"].scaling == DynamicNTK(
        factor=1.0, original_max_position_embeddings=8192
    )
    assert plan(SMALL, to=32768, method="dynamic", factor=4.0).factor == 4.0
    assert planned.config["max_position_embeddings"] == 8192


def test_only_the_layers_that_reach_far_are_scaled() -> None:
    planned = plan(load("gemma3-1b-it"), to=131072)
    before = planned.before
    assert planned.ropes["sliding_attention"] == before["sliding_attention"]
    assert planned.ropes["full_attention"].scaling == Yarn(
        factor=4.0, original_max_position_embeddings=32768
    )


def test_vicuna_is_ambiguous_until_told() -> None:
    config = load("vicuna-7b-v1.5-16k-linear")
    message = r"pass original_max_position_embeddings=4096 or 1024"
    with pytest.raises(ConfigError, match=message):
        plan(config, to=32768)
    planned = plan(config, to=32768, original_max_position_embeddings=4096)
    assert (planned.trained_length, planned.usable_length, planned.factor) == (4096, 16384, 8.0)
    other = plan(config, to=32768, original_max_position_embeddings=1024)
    assert (other.trained_length, other.usable_length, other.factor) == (1024, 4096, 32.0)
    assert plan(planned, to=65536) == plan(config, to=65536, original_max_position_embeddings=4096)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_target_within_reach_is_refused(name: str) -> None:
    row = ROWS[name]
    for to in (1, (row.usable or 16384) - 1, row.usable or 16384):
        with pytest.raises(ConfigError, match=rf"to must be above {row.usable or 16384}, .*{to}"):
            plan(load(name), to=to, original_max_position_embeddings=row.trained or 4096)


@pytest.mark.parametrize("to", [0, -1, 1.5, True, "16384", None])
def test_a_target_is_a_number_of_tokens(to: Any) -> None:
    with pytest.raises(ConfigError, match="to must be a positive whole number of tokens"):
        plan(SMALL, to=to)


@pytest.mark.parametrize("method", ["linear", "ntk", "ntk-by-parts", "yarn"])
def test_a_factor_that_does_not_reach_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=r"factor 3 reaches 3 · 8192 = 24576 tokens.*at least 4"):
        plan(SMALL, to=32768, method=method, factor=3.0)
    assert plan(SMALL, to=32768, method=method, factor=5.0).factor == 5.0


@pytest.mark.parametrize("factor", [0.5, 0, -4, math.nan, math.inf, "4", True])
def test_a_factor_is_a_number_from_1(factor: Any) -> None:
    with pytest.raises(ConfigError, match="factor must be"):
        plan(SMALL, to=32768, factor=factor)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("yarm", "Did you mean 'yarn'"),
        ("YaRN", "unknown method 'YaRN'"),
        ("lama3", "Did you mean 'llama3'"),
        ("none", "does not extend"),
        ("longrope", "cannot be applied by factor alone"),
    ],
)
def test_a_method_that_is_none_is_refused(method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(SMALL, to=32768, method=method)


@pytest.mark.parametrize("alias", ["pi", "ntk-aware", "ntk_by_parts"])
def test_aliases_plan_the_same(alias: str) -> None:
    name = {"pi": "linear", "ntk-aware": "ntk", "ntk_by_parts": "ntk-by-parts"}[alias]
    assert plan(SMALL, to=32768, method=alias) == plan(SMALL, to=32768, method=name)


def test_a_config_that_contradicts_itself_is_planned_only_when_told() -> None:
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = {**SMALL, "max_position_embeddings": 65536, "rope_scaling": block}
    with pytest.raises(ConfigError, match="65536 exceeds"):
        plan(config, to=131072)
    by_factor = plan(config, to=131072, on_conflict="factor")
    assert (by_factor.usable_length, by_factor.factor) == (16384, 32.0)
    by_length = plan(config, to=131072, on_conflict="length")
    assert (by_length.usable_length, by_length.factor) == (65536, 32.0)


@pytest.mark.parametrize("name", ["mpt-7b-alibi", "step-3.7-flash"])
def test_models_without_a_known_rope_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError):
        plan(load(name), to=131072)


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"vicuna-7b-v1.5-16k-linear"}))
def test_every_published_config_can_be_planned(name: str) -> None:
    config, row = load(name), ROWS[name]
    to = 2 * (row.usable or 0)
    method = {"gemma-4-26b-a4b": "linear"}.get(name)
    if "longrope" in name:
        method = "ntk"
    planned: Plan = plan(config, to=to, method=method)
    assert (planned.trained_length, planned.usable_length) == (row.trained, row.usable)
    assert planned.smallest_factor == to / planned.trained_length
    assert rope_from_config(planned.config) == planned.ropes
    assert planned.before == rope_from_config(config)
    assert planned.kv_cache_bytes == kv_cache_bytes(config, to)
    text = text_part(planned.config)
    assert set(planned.removed).isdisjoint(text)
    assert load(name) == config  # nothing given was changed


def test_the_query_scale_of_ministral_stays() -> None:
    planned = plan(load("ministral3-3b-2512"), to=524288)
    block = planned.config["text_config"]["rope_parameters"]
    assert block["llama_4_scaling_beta"] == 0.1
    assert (block["factor"], block["original_max_position_embeddings"]) == (32.0, 16384)


def test_a_llama3_factor_grown_twice_is_the_one_grown_once():
    config = load("llama-3.1-8b")
    for first, second in [(150_001, 262_147), (199_999, 1_000_003), (140_000, 300_001)]:
        assert plan(plan(config, to=first), to=second) == plan(config, to=second)


def test_the_smallest_sufficient_factor_is_enough_whatever_its_rounding():
    for to in range(180_300, 180_400):
        smallest = plan(SMALL, to=to).smallest_factor
        assert plan(SMALL, to=to, factor=smallest).factor == smallest


def test_searched_factors_are_not_stretched():
    with pytest.raises(ConfigError, match="searched for 131072 tokens"):
        plan(load("phi-3.5-mini-longrope"), to=262_144)


def test_what_changes_is_what_is_written():
    planned = plan(load("ministral3-3b-2512"), to=524_288)
    assert planned.changed["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    told = plan(load("phi-2-msft-partial"), to=4096).changed
    assert told["n_positions"] == 4096
    assert "max_position_embeddings" not in told


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({**SMALL, "model_type": "mistral", "sliding_window": 4096}, "slides over 4096 tokens"),
        ({**SMALL, "model_type": "phi3"}, "not saved"),
    ],
)
def test_plans_that_do_little_or_cannot_be_saved_say_so(config, word):
    assert any(word in line for line in plan(config, to=16384).warnings)
    assert not any(word in line for line in plan(SMALL, to=16384).warnings)


@pytest.mark.parametrize(
    ("method", "to", "told"),
    [
        ("linear", 16_384, "200 to 1000 steps"),
        ("yarn", 16_384, None),
        ("yarn", 24_576, "400 to 600 steps"),
        ("ntk", 24_576, "past what its authors report to hold (2×)"),
        ("llama3", 24_576, None),
    ],
)
def test_a_plan_past_what_holds_untuned_asks_for_training(method, to, told):
    asked = [line for line in plan(SMALL, to=to, method=method).warnings if "fine-tuning" in line]
    assert len(asked) == (told is not None)
    assert all(str(told) in line for line in asked)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("dynamic", "need theirs set to 16384 by hand"),
        ("dynamic", "past 8192, so its keys mix several tables"),
        ("ntk", "raised rope_theta"),
        ("ntk-by-parts", "attention_factor 1.0"),
    ],
)
def test_a_plan_says_what_other_readers_get_wrong_of_its_method_alone(method, told):
    for other in NEW:
        found = any(told in line for line in plan(SMALL, to=16_384, method=other).warnings)
        assert found == (other == method)
