"""The contract every scaling method keeps."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch

from longspan.errors import ConfigError
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.scaling import (
    ALIASES,
    METHODS,
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
    scaling_for_method,
)

R, THETA, TRAINED = 128, 10_000.0, 4096
FLOAT64_ROUNDING = 1e-12

SHORT = [1.0 + i / 100 for i in range(R // 2)]
LONG = [1.0 + i / 2 for i in range(R // 2)]
# One example a method, every optional argument given, so that none can hide.
EXAMPLES: dict[type[RopeScaling], RopeScaling] = {
    NoScaling: NoScaling(),
    PositionInterpolation: PositionInterpolation(factor=8.0),
    NTKAware: NTKAware(factor=8.0),
    DynamicNTK: DynamicNTK(factor=2.0, original_max_position_embeddings=TRAINED),
    NTKByParts: NTKByParts(
        factor=8.0, original_max_position_embeddings=TRAINED, beta_fast=24, beta_slow=2
    ),
    Yarn: Yarn(
        factor=8.0,
        original_max_position_embeddings=TRAINED,
        beta_fast=24,
        beta_slow=2,
        mscale=0.8,
        mscale_all_dim=0.5,
        truncate=False,
    ),
    Llama3: Llama3(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=TRAINED,
    ),
    LongRope: LongRope(
        short_factor=SHORT,
        long_factor=LONG,
        factor=8.0,
        original_max_position_embeddings=TRAINED,
    ),
}
# Another value of every argument, each of which must change something.
CHANGES: dict[type[RopeScaling], dict[str, Any]] = {
    NoScaling: {},
    PositionInterpolation: {"factor": 8.5},
    NTKAware: {"factor": 8.5},
    DynamicNTK: {"factor": 2.5, "original_max_position_embeddings": 5000},
    NTKByParts: {
        "factor": 8.5,
        "original_max_position_embeddings": 5000,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    Yarn: {
        "factor": 8.5,
        "original_max_position_embeddings": 5000,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.0,
        "mscale": 0.9,
        "mscale_all_dim": 0.6,
        "truncate": True,
        "ramp": "rotations",
    },
    Llama3: {
        "factor": 8.5,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 5000,
    },
    LongRope: {
        "short_factor": LONG,
        "long_factor": SHORT,
        "original_max_position_embeddings": 5000,
        "factor": 8.5,
        "attention_factor": 1.0,
    },
}
SEARCHED = {LongRope}  # its factors are data, bound by no rule

every_scaling = pytest.mark.parametrize("scaling", EXAMPLES.values(), ids=lambda s: s.method)


def outputs(scaling: RopeScaling) -> list[Any]:
    tables = [scaling.rescale_factors(R, THETA, n).tolist() for n in (1, TRAINED + 1, 4 * TRAINED)]
    return [*tables, scaling.attention_factor]


def test_every_scaling_has_an_example_and_changes():
    assert set(EXAMPLES) == set(CHANGES) == set(SCALINGS)
    for cls in SCALINGS:
        assert type(EXAMPLES[cls]) is cls
        assert set(CHANGES[cls]) == set(inspect.signature(cls).parameters)


@every_scaling
def test_rescale_factors_have_one_float64_a_pair(scaling):
    for rotary_dim in (8, R):
        if isinstance(scaling, LongRope) and rotary_dim != R:
            continue  # its lists fit one rotary_dim
        factors = scaling.rescale_factors(rotary_dim, THETA, seq_len=2 * TRAINED)
        assert factors.shape == (rotary_dim // 2,)
        assert factors.dtype == torch.float64
        assert torch.isfinite(factors).all()


@every_scaling
def test_inv_freq_is_the_unscaled_one_divided(scaling):
    factors = scaling.rescale_factors(R, THETA, 2 * TRAINED)
    assert torch.equal(
        scaling.inv_freq(R, THETA, 2 * TRAINED), rope_frequencies(R, THETA) / factors
    )


@every_scaling
def test_formulas_only_slow_and_slow_slower_pairs_more(scaling):
    factors = scaling.rescale_factors(R, THETA, seq_len=4 * TRAINED)
    if type(scaling) in SEARCHED:
        assert factors.tolist() == LONG
        return
    assert (factors >= 1).all()
    assert (factors.diff() >= 0).all()
    # dynamic NTK with factor f stretches 4L by 4f − (f − 1).
    covered = 7.0 if isinstance(scaling, DynamicNTK) else scaling.factor
    assert factors[-1].item() == pytest.approx(covered, rel=FLOAT64_ROUNDING)


@every_scaling
def test_parameters_build_the_same_scaling(scaling):
    again = type(scaling)(**scaling.parameters())
    assert again == scaling
    assert outputs(again) == outputs(scaling)


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, name) for cls in SCALINGS for name in CHANGES[cls]]
)
def test_case_09_every_argument_changes_something(cls, name):
    given = EXAMPLES[cls].parameters()
    changed = cls(**{**given, name: CHANGES[cls][name]})
    assert changed != EXAMPLES[cls]
    assert outputs(changed) != outputs(EXAMPLES[cls])


@every_scaling
def test_rows_of_a_batch_of_lengths_equal_each_row_alone(scaling):
    lengths = [1, TRAINED, TRAINED + 1, 3 * TRAINED]
    together = scaling.inv_freq(R, THETA, torch.tensor(lengths))
    assert together.shape == ((4, R // 2) if scaling.depends_on_length else (R // 2,))
    for length, row in zip(lengths, together.expand(4, -1), strict=True):
        assert torch.equal(row, scaling.inv_freq(R, THETA, length))


@every_scaling
def test_only_tables_that_depend_on_the_length_ask_for_it(scaling):
    if not scaling.depends_on_length:
        assert torch.equal(scaling.inv_freq(R, THETA), scaling.inv_freq(R, THETA, 10 * TRAINED))
        return
    with pytest.raises(ConfigError, match="needs seq_len"):
        scaling.inv_freq(R, THETA)
    for wrong in (0, -1, 2.5, True, torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises(ConfigError, match="seq_len must be"):
            scaling.inv_freq(R, THETA, wrong)


@every_scaling
def test_a_scaling_is_a_frozen_hashable_value(scaling):
    twin = copy.deepcopy(scaling)
    assert twin == scaling
    assert hash(twin) == hash(scaling)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scaling.original_max_position_embeddings = 1
    assert repr(scaling).startswith(type(scaling).__name__ + "(")
    for field in dataclasses.fields(scaling):
        assert f"{field.name}={getattr(scaling, field.name)!r}" in repr(scaling)


@every_scaling
def test_a_scaling_does_not_follow_the_default_dtype(scaling):
    changed = {"factor": 3.3} if "factor" in scaling.parameters() else {}
    uneven = type(scaling)(**{**scaling.parameters(), **changed})  # 3.3 is no bfloat16 number
    expected = outputs(uneven)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert outputs(uneven) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@every_scaling
def test_case_10_a_factor_below_one_is_refused(scaling):
    if "factor" not in inspect.signature(type(scaling)).parameters:
        assert isinstance(scaling, NoScaling)
        return
    given = scaling.parameters()
    with pytest.raises(ConfigError, match=r"factor must be ≥ 1, got 0\.5\. RoPE scaling only"):
        type(scaling)(**{**given, "factor": 0.5})
    for wrong in (math.nan, math.inf, "4", True):
        with pytest.raises(ConfigError, match="factor must be a finite number"):
            type(scaling)(**{**given, "factor": wrong})


@pytest.mark.parametrize(
    "scaling",
    [s for s in EXAMPLES.values() if "original_max_position_embeddings" in s.parameters()],
    ids=lambda s: s.method,
)
def test_an_original_length_is_a_positive_whole_number(scaling):
    given = scaling.parameters()
    for wrong in (0, -1, 4096.0, "4096", True):
        with pytest.raises(
            ConfigError, match="original_max_position_embeddings must be a positive"
        ):
            type(scaling)(**{**given, "original_max_position_embeddings": wrong})


@every_scaling
def test_an_odd_rotary_dim_is_refused(scaling):
    with pytest.raises(ConfigError, match="rotary_dim"):
        scaling.rescale_factors(7, THETA, TRAINED)


@every_scaling
def test_a_method_is_found_by_its_name(scaling):
    assert METHODS[scaling.method] is type(scaling)
    assert scaling_for_method(scaling.method) is type(scaling)
    assert scaling.title


def test_aliases_and_unknown_methods():
    assert {alias: scaling_for_method(alias).method for alias in ALIASES} == ALIASES
    with pytest.raises(ConfigError, match=r"unknown method 'yarm'\. Did you mean 'yarn'\?"):
        scaling_for_method("yarm")


@pytest.mark.parametrize("cls", SCALINGS)
def test_for_factor_applies_the_published_defaults(cls):
    if cls is LongRope:
        with pytest.raises(ConfigError, match="search over one checkpoint"):
            cls.for_factor(4.0, TRAINED)
        return
    scaling = cls.for_factor(4.0, TRAINED)
    last = scaling.rescale_factors(R, THETA, 4 * TRAINED)[-1].item()
    assert last == pytest.approx(1.0 if cls is NoScaling else 4.0, rel=FLOAT64_ROUNDING)
