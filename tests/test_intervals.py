"""Means, Student's intervals and paired differences against numbers from tables."""

from __future__ import annotations

import math

import pytest
import torch

from longspan.errors import ShapeError
from longspan.metrics.intervals import (
    mean_interval,
    paired_difference,
    student_quantile,
)

# Two-sided 95 % points of Student's t, as printed in statistical tables.
PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "printed"), PRINTED.items())
def test_student_quantiles_are_those_of_the_tables(degrees: int, printed: float) -> None:
    assert student_quantile(degrees) == pytest.approx(printed, abs=6e-4)


def test_student_quantile_of_many_degrees_is_the_normal_one() -> None:
    assert student_quantile(10_000) == pytest.approx(1.959964, abs=3e-4)


def test_student_quantile_of_another_confidence() -> None:
    assert student_quantile(10, confidence=0.99) == pytest.approx(3.169, abs=6e-4)


def test_interval_of_five_documents() -> None:
    samples = torch.tensor([2.0, 4.0, 4.0, 4.0, 6.0])  # standard deviation √2
    interval = mean_interval(samples)
    reach = 2.776 * math.sqrt(2) / math.sqrt(5)
    assert interval.mean == pytest.approx(4.0)
    assert interval.low == pytest.approx(4 - reach, abs=1e-3)
    assert interval.high == pytest.approx(4 + reach, abs=1e-3)


def test_one_document_has_no_interval() -> None:
    assert mean_interval(torch.tensor([3.0])) == (3.0, None, None)


def test_paired_difference_over_documents_uses_their_means_of_the_last_2048() -> None:
    generator = torch.Generator().manual_seed(0)
    method = torch.rand(3, 3000, generator=generator)
    baseline = method + torch.tensor([[0.1], [0.2], [0.3]])
    baseline[:, :952] += 100  # before the last 2,048 tokens, so not counted
    difference = paired_difference(baseline, method)
    reach = 4.303 * 0.1 / math.sqrt(3)
    assert difference.unit == "documents"
    assert difference.first == 952
    assert difference.mean == pytest.approx(0.2, abs=1e-6)
    assert difference.low == pytest.approx(0.2 - reach, abs=1e-4)
    assert difference.high == pytest.approx(0.2 + reach, abs=1e-4)


def test_paired_difference_of_one_document_samples_its_blocks() -> None:
    method = torch.zeros(1, 4000)
    baseline = torch.zeros(1, 4000)
    means = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])  # deviation √6
    baseline[0, -2048:] = means.repeat_interleave(256)
    difference = paired_difference(baseline, method)
    reach = 2.365 * math.sqrt(6) / math.sqrt(8)
    assert difference.unit == "256-token blocks"
    assert difference.mean == pytest.approx(4.5)
    assert difference.high == pytest.approx(4.5 + reach, abs=1e-3)
    assert difference.low == pytest.approx(4.5 - reach, abs=1e-3)


def test_pairing_removes_what_both_methods_share() -> None:
    shared = torch.rand(1, 2048, generator=torch.Generator().manual_seed(0)) * 10
    difference = paired_difference(shared + 0.01, shared)
    assert difference.low == pytest.approx(0.01, abs=1e-4)
    assert difference.high == pytest.approx(0.01, abs=1e-4)


def test_a_worse_method_has_a_negative_difference() -> None:
    worse = torch.ones(2, 10)
    assert paired_difference(torch.zeros(2, 10), worse).mean == -1.0


@pytest.mark.parametrize("tokens", [2, 15, 95, 512, 2047, 2048])
def test_short_texts_are_cut_in_smaller_blocks(tokens: int) -> None:
    difference = paired_difference(torch.rand(1, tokens), torch.rand(1, tokens))
    block = int(difference.unit.split("-")[0])
    assert (tokens - difference.first) % block == 0
    assert (tokens - difference.first) // block >= min(tokens, 8)


def test_unlike_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(1, 5\) and \(1, 6\)"):
        paired_difference(torch.zeros(1, 5), torch.zeros(1, 6))
    with pytest.raises(ShapeError, match="n ≥ 1"):
        mean_interval(torch.zeros(0))
    with pytest.raises(ShapeError, match="degrees must be ≥ 1"):
        student_quantile(0)
