"""Each scaling against its formula written out in plain Python, and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rope import Rope
from longspan.rotary.scaling import (
    DynamicNTK,
    Llama3,
    LongRope,
    NTKAware,
    NTKByParts,
    PositionInterpolation,
    Yarn,
)

FLOAT64_ROUNDING = 1e-12
# transformers works in float32; its YaRN blend is off by 2.5e-6.
FLOAT32_TABLE = 1e-5

dims = st.integers(2, 64).map(lambda pairs: 2 * pairs)
thetas = st.floats(1e3, 1e7)
factors = st.floats(1.0, 16.0)
trained_lengths = st.integers(256, 2**17)
lengths_over_trained = st.floats(0.01, 16.0)
drawn = settings(max_examples=200, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _quiet_transformers():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of every factor that is no length ratio
    yield
    transformers.logging.set_verbosity(before)


def assert_close(inv_freq, expected, rel):
    assert inv_freq.tolist() == pytest.approx(list(expected), rel=rel, abs=0)


def theirs(rope_type, r, theta, rope, seq_len=None, max_position_embeddings=4096):
    """transformers' frequencies and attention factor of a small config."""
    config = transformers.LlamaConfig(
        head_dim=r,
        hidden_size=r,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **rope},
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=seq_len)
    return inv_freq.double().tolist(), attention_factor


@drawn
@given(r=dims, theta=thetas, factor=factors)
def test_position_interpolation(r, theta, factor):
    inv_freq = PositionInterpolation(factor=factor).inv_freq(r, theta)
    naive = [theta ** (-2 * i / r) / factor for i in range(r // 2)]
    assert_close(inv_freq, naive, FLOAT64_ROUNDING)
    expected, attention_factor = theirs("linear", r, theta, {"factor": factor})
    assert_close(inv_freq, expected, FLOAT32_TABLE)
    assert attention_factor == PositionInterpolation(factor=factor).attention_factor == 1.0


@drawn
@given(r=dims.filter(lambda r: r > 2), theta=thetas, factor=factors)
def test_ntk_aware_is_a_raised_theta(r, theta, factor):
    scaling = NTKAware(factor=factor)
    raised = theta * factor ** (r / (r - 2))
    assert scaling.raised_theta(r, theta) == pytest.approx(raised, rel=FLOAT64_ROUNDING)
    naive = [raised ** (-2 * i / r) for i in range(r // 2)]
    assert_close(scaling.inv_freq(r, theta), naive, FLOAT64_ROUNDING)
    assert scaling.attention_factor == 1.0


@drawn
@given(
    r=dims.filter(lambda r: r > 2),
    theta=thetas,
    factor=factors,
    trained=trained_lengths,
    over=lengths_over_trained,
)
def test_dynamic_ntk(r, theta, factor, trained, over):
    length = max(1, int(over * trained))
    scaling = DynamicNTK(factor=factor, original_max_position_embeddings=trained)
    stretch = factor * length / trained - (factor - 1) if length > trained else 1.0
    raised = theta * stretch ** (r / (r - 2))
    inv_freq = scaling.inv_freq(r, theta, length)
    assert_close(inv_freq, [raised ** (-2 * i / r) for i in range(r // 2)], FLOAT64_ROUNDING)
    expected, _ = theirs("dynamic", r, theta, {"factor": factor}, length, trained)
    assert_close(inv_freq, expected, FLOAT32_TABLE)
    assert scaling.attention_factor == 1.0


def naive_yarn(r, theta, factor, trained, fast, slow, truncate):
    def index_of(turns):
        return r * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(fast), index_of(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    if low == high:
        high += 0.001
    frequencies = []
    for i in range(r // 2):
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        plain = theta ** (-2 * i / r)
        frequencies.append(plain * (1 - ramp) + plain / factor * ramp)
    return frequencies


def naive_yarn_attention_factor(factor, explicit, mscale, mscale_all_dim):
    def sharpen(m):
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    if explicit is not None:
        return explicit
    if mscale is not None:
        return sharpen(mscale) / sharpen(mscale_all_dim)
    return sharpen(1.0)


mscales = st.none() | st.tuples(st.floats(0.1, 2.0), st.floats(0.1, 2.0))


@drawn
@given(
    r=dims,
    theta=thetas,
    factor=factors,
    trained=trained_lengths,
    slow=st.floats(0.5, 4.0),
    fast_over_slow=st.floats(4.0, 64.0),
    truncate=st.booleans(),
    explicit=st.none() | st.floats(0.5, 2.0),
    mscale=mscales,
)
def test_yarn(r, theta, factor, trained, slow, fast_over_slow, truncate, explicit, mscale):
    fast = slow * fast_over_slow
    above, below = mscale or (None, None)
    options = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    shared = {"factor": factor, "original_max_position_embeddings": trained, **options}
    scaling = Yarn(**shared, attention_factor=explicit, mscale=above, mscale_all_dim=below)
    inv_freq = scaling.inv_freq(r, theta)
    naive = naive_yarn(r, theta, factor, trained, fast, slow, truncate)
    assert_close(inv_freq, naive, FLOAT64_ROUNDING)
    naive_factor = naive_yarn_attention_factor(factor, explicit, above, below)
    assert scaling.attention_factor == pytest.approx(naive_factor, rel=FLOAT64_ROUNDING)

    rope = {**shared, **scaling.parameters()}
    expected, attention_factor = theirs("yarn", r, theta, rope)
    assert_close(inv_freq, expected, FLOAT32_TABLE)
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=FLOAT64_ROUNDING)


@drawn
@given(r=dims, theta=thetas, factor=factors, trained=trained_lengths)
def test_ntk_by_parts_is_yarn_without_its_temperature(r, theta, factor, trained):
    scaling = NTKByParts(factor=factor, original_max_position_embeddings=trained)
    inv_freq = scaling.inv_freq(r, theta)
    naive = naive_yarn(r, theta, factor, trained, 32, 1, truncate=True)
    assert_close(inv_freq, naive, FLOAT64_ROUNDING)
    rope = {**scaling.parameters(), "attention_factor": 1.0}
    expected, attention_factor = theirs("yarn", r, theta, rope)
    assert_close(inv_freq, expected, FLOAT32_TABLE)
    assert scaling.attention_factor == attention_factor == 1.0


@drawn
@given(r=dims, theta=thetas, factor=factors, trained=trained_lengths)
def test_yarns_ramp_of_the_paper_is_linear_in_rotations(r, theta, factor, trained):
    scaling = Yarn(factor=factor, original_max_position_embeddings=trained, ramp="rotations")
    naive = []
    for i in range(r // 2):
        plain = theta ** (-2 * i / r)
        turns = trained * plain / (2 * math.pi)
        gamma = min(1.0, max(0.0, (turns - 1) / (32 - 1)))
        naive.append((1 - gamma) * plain / factor + gamma * plain)
    assert_close(scaling.inv_freq(r, theta), naive, FLOAT64_ROUNDING)


@drawn
@given(
    r=dims,
    theta=thetas,
    factor=factors,
    trained=trained_lengths,
    low=st.floats(0.5, 1.5),
    band=st.floats(2.0, 8.0),
)
def test_llama3(r, theta, factor, trained, low, band):
    high = low + band
    rope = {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }
    inv_freq = Llama3(**rope).inv_freq(r, theta)
    naive = []
    for i in range(r // 2):
        plain = theta ** (-2 * i / r)
        wavelength = 2 * math.pi / plain
        if wavelength < trained / high:
            naive.append(plain)
        elif wavelength > trained / low:
            naive.append(plain / factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            naive.append((1 - smooth) * plain / factor + smooth * plain)
    assert_close(inv_freq, naive, FLOAT64_ROUNDING)
    expected, attention_factor = theirs("llama3", r, theta, rope, None, 2 * trained)
    assert_close(inv_freq, expected, FLOAT32_TABLE)
    assert Llama3(**rope).attention_factor == attention_factor == 1.0


@drawn
@given(
    data=st.data(),
    pairs=st.integers(1, 32),
    theta=thetas,
    factor=factors,
    trained=trained_lengths,
    over=lengths_over_trained,
    explicit=st.none() | st.floats(0.5, 2.0),
)
def test_longrope(data, pairs, theta, factor, trained, over, explicit):
    r, length = 2 * pairs, max(1, int(over * trained))
    searched = st.lists(st.floats(0.9, 64.0), min_size=pairs, max_size=pairs)
    rope = {
        "short_factor": data.draw(searched),
        "long_factor": data.draw(searched),
        "factor": factor,
        "original_max_position_embeddings": trained,
    }
    if explicit is not None:
        rope["attention_factor"] = explicit
    scaling = LongRope(**rope)
    inv_freq = scaling.inv_freq(r, theta, length)
    chosen = rope["long_factor"] if length > trained else rope["short_factor"]
    naive = [theta ** (-2 * i / r) / chosen[i] for i in range(pairs)]
    assert_close(inv_freq, naive, FLOAT64_ROUNDING)
    naive_factor = math.sqrt(1 + math.log(factor) / math.log(trained))
    expected_factor = naive_factor if explicit is None else explicit
    assert scaling.attention_factor == pytest.approx(expected_factor, rel=FLOAT64_ROUNDING)

    expected, attention_factor = theirs("longrope", r, theta, rope, length)
    assert_close(inv_freq, expected, FLOAT32_TABLE)
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=FLOAT64_ROUNDING)


@drawn
@given(r=dims, theta=thetas, factor=factors, share=st.floats(0.2, 1.0))
def test_proportional(r, theta, factor, share):
    pairs = int(share * r // 2)
    if pairs == 0:
        return  # nothing turns: not a rotation
    scaling = PositionInterpolation(factor=factor)
    rope = Rope(
        head_dim=r,
        rotary_dim=2 * pairs,
        rope_theta=theta,
        frequencies="proportional",
        scaling=scaling,
    )
    naive = [theta ** (-2 * i / r) / factor if i < pairs else 0.0 for i in range(r // 2)]
    assert_close(rope.inv_freq(), naive, FLOAT64_ROUNDING)
    given_to_them = {"factor": factor, "partial_rotary_factor": share}
    expected, attention_factor = theirs("proportional", r, theta, given_to_them)
    assert_close(rope.inv_freq(), expected, FLOAT32_TABLE)
    assert rope.attention_factor == attention_factor == 1.0


@pytest.mark.parametrize(
    ("rope", "rotary_dim", "theta"),
    [
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 64, 10_000.0),  # DeepSeek-V3
        ({"factor": 32.0, "truncate": False}, 64, 150_000.0),  # gpt-oss
    ],
)
def test_published_yarn_recipes(rope, rotary_dim, theta):
    rope = {**rope, "original_max_position_embeddings": 4096}
    expected, attention_factor = theirs("yarn", rotary_dim, theta, rope)
    scaling = Yarn(**rope)
    assert_close(scaling.inv_freq(rotary_dim, theta), expected, FLOAT32_TABLE)
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=FLOAT64_ROUNDING)


def test_plain_frequencies_equal_transformers():
    config = transformers.LlamaConfig(head_dim=128, hidden_size=128, num_attention_heads=1)
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = rope_frequencies(128, config.rope_parameters["rope_theta"])
    assert module.inv_freq.dtype == torch.float32
    assert_close(module.inv_freq.double(), plain.tolist(), FLOAT32_TABLE)
