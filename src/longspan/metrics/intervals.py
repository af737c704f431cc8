"""Means with 95 % intervals, and the paired difference of two methods on the same tokens."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from longspan.errors import ShapeError

CONFIDENCE = 0.95
BLOCK_TOKENS = 256
LAST_TOKENS = 2048


class Interval(NamedTuple):
    """A mean and the ends of its 95 % interval, None where one sample allows none."""

    mean: float
    low: float | None
    high: float | None


class Difference(NamedTuple):
    """A mean paired difference with its 95 % interval.

    `unit` says what was sampled; `first` is the first entry of the likelihoods compared.
    """

    mean: float
    low: float
    high: float
    unit: str
    first: int


def mean_interval(samples: Tensor) -> Interval:
    """Returns the mean of independent samples [n] and Student's 95 % interval of it.

    >>> interval = mean_interval(Tensor([1.0, 3.0]))
    >>> interval.mean, round(interval.high, 3)
    (2.0, 14.706)
    """
    if samples.dim() != 1 or len(samples) < 1:
        raise ShapeError(f"samples must be [n] with n ≥ 1, got {tuple(samples.shape)}.")
    mean = samples.double().mean().item()
    if len(samples) == 1:
        return Interval(mean, None, None)
    reach = half_width(samples)
    return Interval(mean, mean - reach, mean + reach)


def half_width(samples: Tensor) -> float:
    """Returns half of Student's 95 % interval of the mean of samples [n], n ≥ 2."""
    error = samples.double().std(unbiased=True).item() / math.sqrt(len(samples))
    return student_quantile(len(samples) - 1) * error


def paired_difference(baseline: Tensor, method: Tensor) -> Difference:
    """Returns the mean of (baseline − method) over the last 2,048 tokens, and its 95 % interval.

    Documents are the samples where there are two or more. A single document is cut in blocks of
    256 tokens, taken as independent: within one text they are nearly so, and the unit says it.

    Args:
        baseline, method: [documents, tokens] NLL of the same tokens; positive means the method
            is better.

    Raises:
        ShapeError: if the shapes differ or there are fewer than two tokens.

    >>> worse, better = Tensor([[2.0, 2.0, 3.0]]), Tensor([[1.0, 1.0, 2.0]])
    >>> paired_difference(worse, better)
    Difference(mean=1.0, low=1.0, high=1.0, unit='1-token blocks', first=0)
    """
    if baseline.shape != method.shape or baseline.dim() != 2 or baseline.shape[1] < 2:
        raise ShapeError(
            "baseline and method must both be [documents, tokens ≥ 2], got "
            f"{tuple(baseline.shape)} and {tuple(method.shape)}."
        )
    documents, tokens = baseline.shape
    block = block_tokens(tokens)
    last = min(LAST_TOKENS, tokens) // block * block
    difference = (baseline.double() - method.double())[:, -last:]
    if documents > 1:
        samples, unit = difference.mean(dim=1), "documents"
    else:
        samples, unit = difference.view(-1, block).mean(dim=1), f"{block}-token blocks"
    mean, reach = samples.mean().item(), half_width(samples)
    return Difference(mean, mean - reach, mean + reach, unit, tokens - last)


def block_tokens(tokens: int) -> int:
    """Returns 256, or for texts too short for eight such blocks an eighth of them, at least 1.

    >>> block_tokens(12_287), block_tokens(95)
    (256, 11)
    """
    return BLOCK_TOKENS if tokens >= LAST_TOKENS else max(1, tokens // 8)


@lru_cache(maxsize=256)
def student_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Returns t with P(|T| ≤ t) = confidence for Student's T of `degrees` of freedom.

    >>> round(student_quantile(1), 4), round(student_quantile(10), 4)
    (12.7062, 2.2281)
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise ShapeError(
            f"degrees must be ≥ 1 and confidence within (0, 1), got {degrees} and {confidence}."
        )
    low, high = 0.0, math.pi / 2  # of the angle atan(t / √degrees), where the CDF is a finite sum
    for _ in range(100):
        middle = (low + high) / 2
        if two_sided_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def two_sided_probability(angle: float, degrees: int) -> float:
    """Returns P(|T| ≤ tan(angle)·√degrees).

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range((degrees - odd) // 2):
        total += term
        term *= cosine * cosine * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
