"""The published numbers of each scaling method, and what each refuses."""

from __future__ import annotations

import math

import pytest
import torch

from longspan.errors import ConfigError
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.scaling import DynamicNTK, Llama3, LongRope, NTKAware, NTKByParts, Yarn
from longspan.rotary.scaling.yarn import yarn_mscale

R, THETA, TRAINED = 128, 10_000.0, 4096
SHORT = [1.0 + i / 100 for i in range(R // 2)]
LONG = [1.0 + i / 2 for i in range(R // 2)]
FLOAT64_ROUNDING = 1e-12


@pytest.mark.parametrize(
    ("rotary_dim", "factor", "golden"),
    [(128, 2, 20221.2617), (128, 4, 40889.9424), (128, 8, 82684.6226), (64, 4, 41829.3659)],
)
def test_golden_ntk_thetas(rotary_dim, factor, golden):
    scaling = NTKAware(factor=factor)
    assert scaling.raised_theta(rotary_dim, THETA) == pytest.approx(golden, abs=5e-5)
    raised = rope_frequencies(rotary_dim, golden)
    assert scaling.inv_freq(rotary_dim, THETA).tolist() == pytest.approx(raised.tolist(), rel=1e-8)
    factors = scaling.rescale_factors(rotary_dim, THETA)
    assert factors[0] == 1
    assert factors[-1].item() == pytest.approx(factor, rel=FLOAT64_ROUNDING)


@pytest.mark.parametrize(
    "scaling", [NTKAware(factor=8.0), DynamicNTK(original_max_position_embeddings=TRAINED)]
)
def test_ntk_is_undefined_for_a_single_pair(scaling):
    with pytest.raises(ConfigError, match="undefined for rotary_dim 2"):
        scaling.rescale_factors(2, THETA, TRAINED)


@pytest.mark.parametrize(
    ("length", "golden"),
    [(4096, 10000), (4097, 10004.960), (6144, 20221.262), (8192, 30527.737), (16384, 72195.86)],
)
def test_golden_dynamic_thetas(length, golden):
    scaling = DynamicNTK(factor=2, original_max_position_embeddings=TRAINED)
    last = scaling.inv_freq(R, THETA, length)[-1].item()
    theta = last ** (-R / (R - 2))  # the base whose last frequency this is
    assert theta == pytest.approx(golden, rel=1e-7)


def test_dynamic_with_factor_one_stretches_by_the_length_alone():
    scaling = DynamicNTK(original_max_position_embeddings=TRAINED)
    assert [scaling.stretch(n).item() for n in (1, 4096, 6144, 16384)] == [1, 1, 1.5, 4]


def test_case_12_dynamic_is_plain_rope_bit_for_bit_up_to_the_trained_length():
    scaling = DynamicNTK(factor=4, original_max_position_embeddings=TRAINED)
    plain = rope_frequencies(R, THETA)
    for length in (1, 2, 4095, 4096):
        assert torch.equal(scaling.inv_freq(R, THETA, length), plain)
    assert not torch.equal(scaling.inv_freq(R, THETA, 4097), plain)


@pytest.mark.parametrize(
    ("rotary_dim", "rope_theta", "length", "low", "high"),
    [
        (128, 1e4, 4096, 20.9445, 45.0269),
        (128, 5e5, 8192, 18.0811, 34.9841),
        (128, 1e6, 32768, 23.5959, 39.6509),
        (128, 1e4, 8192, 25.7610, 49.8434),
        (64, 1e4, 4096, 10.4722, 22.5134),
        (64, 150_000, 4096, 8.0928, 17.3980),
        (64, 1e5, 8192, 10.3044, 19.9373),
    ],
)
def test_golden_yarn_ramp_ends(rotary_dim, rope_theta, length, low, high):
    exact = Yarn(factor=8, original_max_position_embeddings=length, truncate=False)
    assert exact.ramp_range(rotary_dim, rope_theta) == pytest.approx((low, high), abs=5e-5)
    rounded = Yarn(factor=8, original_max_position_embeddings=length)
    assert rounded.ramp_range(rotary_dim, rope_theta) == (math.floor(low), math.ceil(high))
    factors = rounded.rescale_factors(rotary_dim, rope_theta)
    assert (factors[: math.floor(low) + 1] == 1).all()
    assert (factors[math.floor(low) + 1 : math.ceil(high)] > 1).all()
    assert factors[math.ceil(high) :].tolist() == pytest.approx(
        [8.0] * (rotary_dim // 2 - math.ceil(high)), rel=FLOAT64_ROUNDING
    )


@pytest.mark.parametrize(
    ("factor", "golden"),
    [(2, 1.06931), (4, 1.13863), (8, 1.20794), (16, 1.27726), (32, 1.34657), (40, 1.36889)],
)
def test_golden_yarn_attention_factors(factor, golden):
    scaling = Yarn(factor=factor, original_max_position_embeddings=TRAINED)
    assert scaling.attention_factor == pytest.approx(golden, abs=5e-6)
    parts = NTKByParts(factor=factor, original_max_position_embeddings=TRAINED)
    assert parts.attention_factor == 1.0


def test_an_explicit_attention_factor_replaces_the_formula_even_when_it_is_one():
    def yarn(**given):
        return Yarn(factor=40, original_max_position_embeddings=TRAINED, **given)

    assert yarn(attention_factor=1.0).attention_factor == 1.0
    assert yarn(attention_factor=0.7, mscale=1.0, mscale_all_dim=0.5).attention_factor == 0.7
    equal = yarn(mscale=1.0, mscale_all_dim=1.0)
    assert equal.attention_factor == 1.0


@pytest.mark.parametrize(("mscale_all_dim", "golden"), [(1.0, 1.87385), (0.707, 1.58963)])
def test_golden_mla_softmax_multipliers(mscale_all_dim, golden):
    assert yarn_mscale(40, mscale_all_dim) ** 2 == pytest.approx(golden, abs=5e-6)
    ratio = Yarn(
        factor=40,
        original_max_position_embeddings=TRAINED,
        mscale=1.0,
        mscale_all_dim=mscale_all_dim,
    )
    above, below = 0.1 * math.log(40) + 1, 0.1 * mscale_all_dim * math.log(40) + 1
    assert ratio.attention_factor == pytest.approx(above / below, rel=FLOAT64_ROUNDING)


def test_golden_llama3_bands():
    scaling = Llama3(
        factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192
    )
    kept = 1 / scaling.rescale_factors(128, 500_000.0)
    assert kept[:29].tolist() == [1.0] * 29
    golden = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    assert kept[29:35].tolist() == pytest.approx(golden, abs=5e-7)
    assert kept[35:].tolist() == [0.125] * 29


def test_llama3_with_equal_factors_is_a_step_and_crossed_ones_are_refused():
    scaling = Llama3(
        factor=16, low_freq_factor=1, high_freq_factor=1, original_max_position_embeddings=8192
    )
    factors = scaling.rescale_factors(128, 500_000.0)
    fast = 2 * math.pi / rope_frequencies(128, 500_000.0) < 8192
    assert factors.tolist() == [1.0 if kept else 16.0 for kept in fast.tolist()]
    with pytest.raises(ConfigError, match="high_freq_factor must be ≥ low_freq_factor"):
        Llama3(
            factor=8, low_freq_factor=4, high_freq_factor=1, original_max_position_embeddings=8192
        )


def longrope(**changed):
    given = dict(
        short_factor=SHORT, long_factor=LONG, factor=8.0, original_max_position_embeddings=TRAINED
    )
    return LongRope(**{**given, **changed})


def test_longrope_turns_long_after_the_trained_length():
    scaling = longrope()
    assert scaling.rescale_factors(R, THETA, 4096).tolist() == SHORT
    assert scaling.rescale_factors(R, THETA, 4097).tolist() == LONG


@pytest.mark.parametrize(("factor", "golden"), [(1, 1.0), (8, 1.1180), (16, 1.1547), (32, 1.1902)])
def test_golden_longrope_attention_factors(factor, golden):
    scaling = longrope(factor=factor)
    assert scaling.attention_factor == pytest.approx(golden, abs=5e-5)


def test_longrope_takes_published_factors_below_one_and_refuses_what_cannot_be():
    longrope(short_factor=[0.998] * 64)
    for wrong in ([], "1.0", [0.0] * 64, [-1.0] * 64, [math.nan] * 64, ["1"] * 64, None):
        with pytest.raises(ConfigError, match="short_factor must be"):
            longrope(short_factor=wrong)
    with pytest.raises(ConfigError, match="long_factor must hold one number a pair, 32"):
        longrope(short_factor=[1.0] * 32).rescale_factors(64, THETA, 1)
    with pytest.raises(ConfigError, match=r"needs factor .* or attention_factor"):
        longrope(factor=None)


@pytest.mark.parametrize("cls", [Yarn, NTKByParts])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"beta_fast": 1, "beta_slow": 1}, "beta_fast must be above beta_slow, got 1 and 1"),
        ({"beta_fast": 1, "beta_slow": 32}, "beta_fast must be above beta_slow"),
        ({"beta_slow": 0}, "beta_slow must be above 0"),
        ({"beta_fast": math.inf}, "beta_fast must be a finite number"),
    ],
)
def test_betas_that_make_no_ramp_are_refused(cls, changed, message):
    with pytest.raises(ConfigError, match=message):
        cls(factor=4, original_max_position_embeddings=TRAINED, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention_factor": 0.0}, "attention_factor must be above 0"),
        ({"attention_factor": "1"}, "attention_factor must be a finite number"),
        ({"mscale": -1, "mscale_all_dim": 1}, "mscale must be ≥ 0"),
        ({"mscale": 0.7}, "act only together"),
        ({"mscale_all_dim": 0.7}, "act only together"),
        ({"truncate": "false"}, "truncate must be true or false"),
        ({"ramp": "turns"}, "ramp must be 'index' or 'rotations'"),
    ],
)
def test_yarn_refuses_options_that_would_be_ignored_or_misread(changed, message):
    with pytest.raises(ConfigError, match=message):
        Yarn(factor=4, original_max_position_embeddings=TRAINED, **changed)


def test_yarn_refuses_a_ramp_that_would_run_backwards():
    yarn = Yarn(factor=4.0, original_max_position_embeddings=4096)
    with pytest.raises(ConfigError, match="down to"):
        yarn.rescale_factors(64, 3.0)
    assert yarn.rescale_factors(64, 10_000.0)[-1] == 4.0
