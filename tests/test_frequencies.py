"""Frequencies: the paper's formula, published wavelengths, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.rotary.frequencies import rope_frequencies, rotations, wavelengths

FLOAT64_ROUNDING = 1e-12

even_dims = st.integers(1, 128).map(lambda pairs: 2 * pairs)
thetas = st.floats(2.0, 1e8)


@settings(max_examples=200, deadline=None)
@given(rotary_dim=even_dims, rope_theta=thetas)
def test_frequencies_are_the_papers_formula(rotary_dim, rope_theta):
    naive = [1 / rope_theta ** (2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    frequencies = rope_frequencies(rotary_dim, rope_theta)
    assert frequencies.dtype == torch.float64
    assert frequencies.tolist() == pytest.approx(naive, rel=FLOAT64_ROUNDING)


@settings(max_examples=50, deadline=None)
@given(rotary_dim=even_dims, rope_theta=thetas, length=st.integers(1, 2**20))
def test_a_wavelength_is_one_full_turn(rotary_dim, rope_theta, length):
    frequencies = rope_frequencies(rotary_dim, rope_theta)
    turns = wavelengths(frequencies) * frequencies / (2 * math.pi)
    assert turns.tolist() == pytest.approx([1.0] * (rotary_dim // 2), rel=FLOAT64_ROUNDING)
    expected = [length / wavelength for wavelength in wavelengths(frequencies).tolist()]
    assert rotations(frequencies, length).tolist() == pytest.approx(expected, rel=FLOAT64_ROUNDING)


def test_golden_wavelengths_of_llama():
    first, last = wavelengths(rope_frequencies(128, 10_000.0))[[0, -1]].tolist()
    assert first == pytest.approx(6.2832, abs=1e-4)
    assert last == pytest.approx(54410.1, abs=0.1)


def test_a_resting_pair_has_an_endless_wavelength_and_no_rotations():
    rest = torch.zeros(1, dtype=torch.float64)
    assert wavelengths(rest).item() == math.inf
    assert rotations(rest, 4096).item() == 0


def test_frequencies_do_not_follow_the_default_dtype():
    expected = rope_frequencies(64, 500_000.0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(rope_frequencies(64, 500_000.0), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("rotary_dim", [0, -2, 3, 127])
def test_a_rotary_dim_that_makes_no_pairs_is_refused(rotary_dim):
    with pytest.raises(ConfigError, match=rf"even and at least 2, got {rotary_dim}"):
        rope_frequencies(rotary_dim, 10_000.0)


@pytest.mark.parametrize("rotary_dim", [64.0, "64", True, None])
def test_a_rotary_dim_that_is_no_whole_number_is_refused(rotary_dim):
    with pytest.raises(ConfigError, match="even whole number of channels"):
        rope_frequencies(rotary_dim, 10_000.0)


@pytest.mark.parametrize("rope_theta", [1.0, 0, -5.0, math.inf, math.nan, "10000", True, None])
def test_a_theta_not_above_one_is_refused(rope_theta):
    with pytest.raises(ConfigError, match="rope_theta must be a finite number above 1"):
        rope_frequencies(64, rope_theta)
