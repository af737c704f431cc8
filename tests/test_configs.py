"""49 published configs, each read into the values written out, and as transformers reads it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from longspan.adapters.families import FAMILIES, layer_types, text_part
from longspan.adapters.lengths import lengths_of
from longspan.adapters.rope import rope_from_config
from longspan.errors import ConfigError, UnsupportedModelError
from tiny_families import OWN, SHAPE, UNREAD, table_by_transformers

FOLDER = Path(__file__).parent / "configs"
FLOAT32_FREQUENCIES = 1e-5  # transformers computes in float32; its YaRN blend is off by 2.5e-6

Block = dict[str, Any]


def block(
    head_dim: int,
    rope_theta: float,
    rotary_dim: int | None = None,
    *,
    layout: str = "half",
    frequencies: str = "default",
    scaling: Block | None = None,
    attention_factor: float = 1.0,
    softmax: float = 1.0,
) -> Block:
    """One layer type's rope, every value of it."""
    return dict(
        head_dim=head_dim,
        rope_theta=rope_theta,
        rotary_dim=rotary_dim or head_dim,
        layout=layout,
        frequencies=frequencies,
        scaling=scaling or {"method": "none"},
        attention_factor=attention_factor,
        softmax_scale_multiplier=softmax,
    )


@dataclass(frozen=True)
class Row:
    """What one config says: its layers, its ropes by layer type, its lengths (None: left open)."""

    layers: int
    ropes: dict[str, Block]
    trained: int | None
    usable: int | None
    nope: tuple[int, ...] = ()
    full: tuple[int, ...] = ()  # of layers with two types
    notes: tuple[str, ...] = field(default=())  # a word of each


def plain(layers: int, reach: int, one: Block, **more: Any) -> Row:
    return Row(layers, {"full_attention": one}, reach, reach, **more)


def scaled(layers: int, trained: int | None, usable: int | None, one: Block, **more: Any) -> Row:
    return Row(layers, {"full_attention": one}, trained, usable, **more)


def yarn(factor: float, original: int, **changed: Any) -> Block:
    return {
        "method": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
        "ramp": "index",
        **changed,
    }


def llama3(factor: float) -> Block:
    return {
        "method": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def dynamic(factor: float, original: int) -> Block:
    return {"method": "dynamic", "factor": factor, "original_max_position_embeddings": original}


def longrope(name: str, ends: tuple[float, float, float, float]) -> Block:
    """LongRoPE's 48 searched factors are data of the file; their ends are written out."""
    lists = load(name)["rope_scaling"]
    short, long = lists["short_factor"], lists["long_factor"]
    assert (short[0], short[-1], long[0], long[-1]) == ends
    assert len(short) == len(long) == 48
    return {
        "method": "longrope",
        "short_factor": tuple(map(float, short)),
        "long_factor": tuple(map(float, long)),
        "original_max_position_embeddings": 4096,
        "factor": 32.0,
    }


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


LATENT = dict(layout="interleaved", scaling=yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0))
DEEPSEEK = scaled(61, 4096, 163840, block(64, 1e4, **LATENT, softmax=1.87385))
LLAMA31 = block(128, 5e5, scaling=llama3(8.0))
NO_THETA = ("rope_theta",)

ROWS: dict[str, Row] = {
    "aya-23-cohere-interleaved": plain(32, 8192, block(128, 1e4, layout="interleaved")),
    "chatglm3-6b": plain(28, 8192, block(128, 1e4, 64, layout="interleaved"), notes=NO_THETA),
    "codellama-7b": plain(32, 16384, block(128, 1e6)),
    "command-r-08-2024": plain(40, 131072, block(128, 4e6, layout="interleaved")),
    "deepseek-r1": DEEPSEEK,
    "deepseek-v3": DEEPSEEK,
    "deepseek-v2-lite": scaled(
        27,
        4096,
        163840,
        block(
            64,
            1e4,
            layout="interleaved",
            scaling=yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707),
            softmax=1.58963,
        ),
    ),
    "gemma-4-26b-a4b": Row(
        30,
        {
            "full_attention": block(512, 1e6, 128, frequencies="proportional"),
            "sliding_attention": block(256, 1e4),
        },
        262144,
        262144,
        full=(5, 11, 17, 23, 29),
    ),
    "gemma2-2b": plain(26, 8192, block(256, 1e4)),
    "gemma3-1b-it": Row(
        26,
        {"full_attention": block(256, 1e6), "sliding_attention": block(256, 1e4)},
        32768,
        32768,
        full=(5, 11, 17, 23),
    ),
    "glm-5-interleaved": plain(78, 202752, block(64, 1e6, layout="interleaved")),
    "gpt-j-6b-interleaved": plain(
        28, 2048, block(256, 1e4, 64, layout="interleaved"), notes=NO_THETA
    ),
    "gpt-oss-20b": scaled(
        24,
        4096,
        131072,
        block(64, 150000, scaling=yarn(32, 4096, truncate=False), attention_factor=1.34657),
    ),
    "internlm2.5-7b-dynamic": scaled(
        32, 32768, 65536, block(128, 1e6, scaling=dynamic(2.0, 32768))
    ),
    "kimi-k2.5": scaled(
        61,
        4096,
        262144,
        block(
            64,
            5e4,
            layout="interleaved",
            scaling=yarn(64, 4096, mscale=1.0, mscale_all_dim=1.0),
            softmax=2.00474,
        ),
    ),
    "llama-3.1-405b": scaled(126, 8192, 131072, LLAMA31),
    "llama-3.1-70b": scaled(80, 8192, 131072, LLAMA31),
    "llama-3.1-8b": scaled(32, 8192, 131072, LLAMA31),
    "llama-3.2-1b": scaled(16, 8192, 131072, block(64, 5e5, scaling=llama3(32.0))),
    "llama-3.2-3b": scaled(28, 8192, 131072, block(128, 5e5, scaling=llama3(32.0))),
    "llama-4-maverick": plain(
        48, 1048576, block(128, 5e5, layout="interleaved"), nope=tuple(range(3, 48, 4))
    ),
    "minicpm-2b-128k-dynamic": scaled(
        40, 65536, 262144, block(64, 1e6, scaling=dynamic(4.0, 65536))
    ),
    "minimax-m2.5": plain(62, 196608, block(128, 5e6, 64)),
    "ministral3-3b-2512": scaled(
        26,
        16384,
        262144,
        block(128, 1e6, scaling=yarn(16, 16384, mscale=1.0, mscale_all_dim=1.0)),
        notes=("llama_4_scaling_beta",),
    ),
    "mistral-7b-v0.1-swa": plain(32, 32768, block(128, 1e4)),
    "phi-2-msft-partial": plain(32, 2048, block(80, 1e4, 32), notes=NO_THETA),
    "phi-3.5-mini-longrope": scaled(
        32,
        4096,
        131072,
        block(
            96,
            1e4,
            scaling=longrope(
                "phi-3.5-mini-longrope",
                (1.0, 2.8399994373321533, 1.0800000429153442, 64.83999633789062),
            ),
            attention_factor=1.19024,
        ),
    ),
    "phi-3.5-vision-longrope": scaled(
        32,
        4096,
        131072,
        block(
            96,
            1e4,
            scaling=longrope(
                "phi-3.5-vision-longrope",
                (1.08, 8.999999999999853, 1.0800000429153442, 64.83999633789062),
            ),
            attention_factor=1.19024,
        ),
    ),
    "phi-4-mini-longrope": scaled(
        32,
        4096,
        131072,
        block(
            128,
            1e4,
            96,
            scaling=longrope("phi-4-mini-longrope", (1.0, 1.0, 1, 47.77)),
            attention_factor=1.19024,
        ),
    ),
    "qwen2.5-14b-instruct-1m-dca": Row(
        48, {"full_attention": block(128, 1e7)}, 262144, 262144, notes=("dual chunk attention",)
    ),
    "qwen2.5-14b-instruct-yarn-recipe": scaled(
        48,
        32768,
        131072,
        block(128, 1e6, scaling=yarn(4, 32768), attention_factor=1.13863),
        notes=("max_position_embeddings 32768",),
    ),
    "qwen2.5-3b": plain(36, 32768, block(128, 1e6)),
    "qwen3-0.6b-base-rope": plain(28, 40960, block(128, 1e6)),
    "qwen3-8b-yarn-recipe": scaled(
        36,
        32768,
        131072,
        block(128, 1e6, scaling=yarn(4, 32768), attention_factor=1.13863),
        notes=("max_position_embeddings 40960",),
    ),
    "qwen3-vl-32b-mrope": plain(
        64, 262144, block(128, 5e6), notes=("mrope_interleaved", "mrope_section")
    ),
    "redpajama-3b-gpt-neox": plain(32, 2048, block(80, 1e4)),
    "smollm2-135m": plain(30, 8192, block(64, 1e5)),
    "smollm3-3b-nope": plain(36, 65536, block(128, 5e6), nope=tuple(range(3, 36, 4))),
    "stablelm-partial": plain(32, 4096, block(80, 1e4, 20)),
    "starcoder2-swa": plain(32, 16384, block(128, 1e6)),
    "tinyllama-1.1b": plain(22, 2048, block(64, 1e4)),
    "vicuna-7b-v1.5-16k-linear": scaled(
        32,
        None,
        None,
        block(128, 1e4, scaling={"method": "linear", "factor": 4.0}),
        notes=NO_THETA,
    ),
    "yarn-llama-1-7b-32k": scaled(
        32, 2048, 32768, block(128, 1e4, scaling=yarn(16, 2048), attention_factor=1.27726)
    ),
    "yarn-llama-2-70b-32k": scaled(
        80,
        4096,
        32768,
        block(128, 1e4, scaling=yarn(8, 4096), attention_factor=1.20794),
        notes=("finetuned", "max_position_embeddings 8192"),
    ),
    "yarn-llama-2-7b-128k": scaled(
        32,
        4096,
        131072,
        block(128, 1e4, scaling=yarn(32, 4096), attention_factor=1.34657),
        notes=("rope_theta", "finetuned"),
    ),
    "yarn-llama-2-7b-64k": scaled(
        32,
        4096,
        65536,
        block(128, 1e4, scaling=yarn(16, 4096), attention_factor=1.27726),
        notes=("rope_theta", "finetuned"),
    ),
}

REFUSED: dict[str, tuple[type[Exception], str]] = {
    "mpt-7b-alibi": (UnsupportedModelError, "'mpt' has no rope: its positions come from ALiBi"),
    "falcon-alfred-40b-ntk-yarn": (ConfigError, "unknown rope_type 'ntk_yarn'"),
    "step-3.7-flash": (UnsupportedModelError, "model_type 'step3p7' .* names no rope"),
}


def test_every_file_has_a_row() -> None:
    files = {path.stem for path in FOLDER.glob("*.json")}
    assert files == ROWS.keys() | REFUSED.keys()
    assert len(files) == 49


@pytest.mark.parametrize("name", ROWS)
def test_each_config_is_read_as_written_out(name: str) -> None:
    row, ropes = ROWS[name], rope_from_config(load(name))
    assert ropes.keys() == row.ropes.keys()
    for kind, expected in row.ropes.items():
        rope = ropes[kind]
        found = {key: getattr(rope, key) for key in expected if key != "scaling"}
        found["scaling"] = {"method": rope.method.method, **rope.method.parameters()}
        # FACTS give the factors to five digits
        close = {key: pytest.approx(expected[key], abs=5e-6) for key in APPROXIMATE}
        assert found == {**expected, **close}


APPROXIMATE = ("attention_factor", "softmax_scale_multiplier")


@pytest.mark.parametrize("name", ROWS)
def test_each_layer_has_its_rope(name: str) -> None:
    row, ropes = ROWS[name], rope_from_config(load(name))
    assert len(ropes.layers) == row.layers
    for layer, kind in enumerate(ropes.layers):
        if layer in row.nope:
            assert kind is None
            assert ropes.for_layer(layer) is None
        else:
            is_full = not row.full or layer in row.full
            assert kind == ("full_attention" if is_full else "sliding_attention")
            assert ropes.for_layer(layer) == ropes[kind]


@pytest.mark.parametrize("name", ROWS)
def test_lengths_and_notes_of_each_config(name: str) -> None:
    row, config = ROWS[name], load(name)
    ropes = rope_from_config(config)
    if row.trained is None:
        with pytest.raises(ConfigError, match="before extension"):
            lengths_of(config, ropes)
        notes = ropes.notes
    else:
        lengths = lengths_of(config, ropes)
        assert (lengths.trained, lengths.usable) == (row.trained, row.usable)
        notes = (*ropes.notes, *lengths.notes)
    assert len(notes) == len(row.notes)
    for word, note in zip(row.notes, notes, strict=True):
        assert word in note


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_with_the_reason(name: str) -> None:
    error, reason = REFUSED[name]
    with pytest.raises(error, match=reason):
        rope_from_config(load(name))


def naive_inv_freq(rope: Block, seq_len: int) -> list[float]:
    """FACTS 1 and 2, pair by pair in float64."""
    width = rope["head_dim"] if rope["frequencies"] == "proportional" else rope["rotary_dim"]
    theta, scaling = rope["rope_theta"], rope["scaling"]
    found = []
    for pair in range(width // 2):
        plain_speed = theta ** (-2 * pair / width)
        if pair >= rope["rotary_dim"] // 2:
            found.append(0.0)
        else:
            found.append(naive_scaled(plain_speed, pair, width, theta, scaling, seq_len))
    return found


def naive_scaled(
    speed: float, pair: int, width: int, theta: float, scaling: Block, seq_len: int
) -> float:
    method, factor = scaling["method"], scaling.get("factor", 1.0)
    original = scaling.get("original_max_position_embeddings", 0)
    if method == "linear":
        return speed / factor
    if method == "dynamic":
        stretch = factor * seq_len / original - (factor - 1) if seq_len > original else 1.0
        return (theta * stretch ** (width / (width - 2))) ** (-2 * pair / width)
    if method == "longrope":
        return speed / scaling["long_factor" if seq_len > original else "short_factor"][pair]
    if method == "llama3":
        turns = original * speed / (2 * math.pi)
        keep = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        return (1 - keep) * speed / factor + keep * speed
    if method == "yarn":
        low, high = (
            width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (32, 1)
        )
        if scaling["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        return speed * (1 - ramp) + speed / factor * ramp
    assert method == "none"
    return speed


@pytest.mark.parametrize("name", ROWS)
def test_each_configs_frequencies_equal_the_formulas(name: str) -> None:
    ropes = rope_from_config(load(name))
    for kind, expected in ROWS[name].ropes.items():
        for seq_len in (1, 4096, 4097, 200_000):
            naive = torch.tensor(naive_inv_freq(expected, seq_len), dtype=torch.float64)
            torch.testing.assert_close(ropes[kind].inv_freq(seq_len), naive, rtol=1e-12, atol=0)


# What transformers has no class for. GPT-J has one, but it computes no inv_freq: see below.
UNKNOWN_TO_TRANSFORMERS = {
    "chatglm3-6b",
    "internlm2.5-7b-dynamic",
    "kimi-k2.5",
    "minicpm-2b-128k-dynamic",
    "phi-2-msft-partial",
    "phi-3.5-vision-longrope",
}


def test_the_configs_unknown_to_transformers_are_these() -> None:
    known = transformers.CONFIG_MAPPING
    unknown = {name for name in ROWS if text_part(load(name))["model_type"] not in known}
    assert unknown == UNKNOWN_TO_TRANSFORMERS


@pytest.mark.parametrize(
    "name", sorted(ROWS.keys() - UNKNOWN_TO_TRANSFORMERS - {"gpt-j-6b-interleaved"})
)
def test_each_config_gives_transformers_own_frequencies(name: str) -> None:
    text = dict(text_part(load(name)))
    config = transformers.CONFIG_MAPPING[text["model_type"]].from_dict(text)
    ropes = rope_from_config(text)
    for kind, rope in ropes.items():
        for seq_len in (1, 200_000):
            theirs, factor = table_by_transformers(config, kind, seq_len)
            ours = rope.inv_freq(seq_len)
            torch.testing.assert_close(theirs.double(), ours, rtol=FLOAT32_FREQUENCIES, atol=0)
            assert rope.attention_factor == pytest.approx(factor, rel=FLOAT32_FREQUENCIES)
    assert dict(rope_from_config(config)) == dict(ropes)  # a live config says the same


def test_gpt_j_turns_as_transformers_turns_it() -> None:
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

    rope = rope_from_config(load("gpt-j-6b-interleaved"))["full_attention"]
    sin, cos = create_sinusoidal_positions(100, 64).chunk(2, dim=-1)
    table = rope.table(torch.arange(100))
    torch.testing.assert_close(table.sin, sin, rtol=0, atol=1e-4)
    torch.testing.assert_close(table.cos, cos, rtol=0, atol=1e-4)


# These families are never plain: a config without a rope block means another one in transformers.
NEED_A_BLOCK = {"gemma4_text", "gpt_oss", "ministral3"}
LEFT_OUT = ("head_dim", "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")


def bare(model_type: str) -> dict[str, Any]:
    """A config without any key that a family gives a default."""
    content = {"model_type": model_type, **SHAPE, **OWN[model_type]}
    return {
        key: value
        for key, value in content.items()
        if key not in (*LEFT_OUT, *UNREAD.get(model_type, ()))
    }


@pytest.mark.parametrize("model_type", sorted(OWN.keys() - NEED_A_BLOCK))
def test_the_defaults_of_a_family_are_those_of_its_class(model_type: str) -> None:
    ropes = rope_from_config(bare(model_type))
    config = transformers.CONFIG_MAPPING[model_type](**bare(model_type))
    live = rope_from_config(config)
    assert dict(ropes) == dict(live)
    assert any("rope_theta" in note for note in ropes.notes) or len(ropes) == 2
    for kind, rope in ropes.items():
        theirs, _ = table_by_transformers(config, kind, 1)
        torch.testing.assert_close(
            theirs.double(), rope.inv_freq(), rtol=FLOAT32_FREQUENCIES, atol=0
        )


@pytest.mark.parametrize("model_type", sorted(NEED_A_BLOCK))
def test_families_that_are_never_plain_need_their_block(model_type: str) -> None:
    assert {name for name, family in FAMILIES.items() if family.needs_block} == NEED_A_BLOCK
    with pytest.raises(ConfigError, match="has no rope_parameters"):
        rope_from_config({**bare(model_type), "rope_theta": 10_000.0})


def test_every_family_that_transformers_can_build_is_tested() -> None:
    known = {
        name
        for name, family in FAMILIES.items()
        if family.table is not None and name in transformers.CONFIG_MAPPING
    }
    assert known == OWN.keys()


LAYERED = [
    "cohere2",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "ministral",
    "qwen2",
    "qwen3",
]


@pytest.mark.parametrize("model_type", LAYERED)
def test_layer_types_left_out_are_those_of_the_class(model_type: str) -> None:
    content = {**bare(model_type), "num_hidden_layers": 12, "sliding_window": 16}
    content.pop("layer_types", None)
    expected = transformers.CONFIG_MAPPING[model_type](**content).layer_types
    assert list(layer_types(content, FAMILIES[model_type])) == expected
    assert ("sliding_attention" in expected) == (not model_type.startswith("qwen"))
    if model_type.startswith("qwen"):
        content |= {"use_sliding_window": True, "max_window_layers": 5}
        expected = transformers.CONFIG_MAPPING[model_type](**content).layer_types
        assert list(layer_types(content, FAMILIES[model_type])) == expected
        assert expected.count("sliding_attention") == 7


def test_more_layer_types_than_layers_are_of_layers_that_predict_further() -> None:
    content = {**bare("llama"), "layer_types": ["full_attention"] * 3}
    assert layer_types(content, FAMILIES["llama"]) == ("full_attention",) * 2
