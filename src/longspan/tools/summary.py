"""Likelihoods by document and position, summed up to what a result holds."""

from __future__ import annotations

from torch import Tensor

from longspan.errors import ConfigError
from longspan.metrics.intervals import mean_interval, paired_difference
from longspan.tools.evaluation import Bucket, PairedDifference

FEWEST_BUCKETS = 12


def default_bucket(length: int) -> int:
    """Returns the largest power of two that gives 12 buckets or more, at least 1 token.

    >>> default_bucket(12_288), default_bucket(16_384)
    (1024, 1024)
    """
    return 1 << max(0, (length // FEWEST_BUCKETS).bit_length() - 1)


def position_buckets(nll: Tensor, bucket: int) -> tuple[Bucket, ...]:
    """Returns the mean NLL of each bucket of target positions, with intervals over documents.

    Args:
        nll: [documents, N − 1]; entry i belongs to target position i + 1.
        bucket: positions a bucket; the first lacks position 0, which nothing predicts.
    """
    if bucket < 1:
        raise ConfigError(f"bucket must be at least 1 token, got {bucket}.")
    length = nll.shape[1] + 1
    found = []
    for start in range(0, length, bucket):
        stop = min(start + bucket, length)
        part = nll[:, max(start, 1) - 1 : stop - 1]
        if part.shape[1]:  # a first bucket of one token holds only position 0
            interval = mean_interval(part.double().mean(dim=1))
            found.append(
                Bucket(
                    start=start,
                    stop=stop,
                    nll=interval.mean,
                    low=interval.low,
                    high=interval.high,
                )
            )
    return tuple(found)


def versus(baseline: str, of_baseline: Tensor, of_method: Tensor) -> PairedDifference:
    """Returns the paired difference over the last positions, both [documents, N − 1]."""
    difference = paired_difference(of_baseline, of_method)
    return PairedDifference(
        baseline=baseline,
        start=difference.first + 1,
        stop=of_baseline.shape[1] + 1,
        mean=difference.mean,
        low=difference.low,
        high=difference.high,
        unit=difference.unit,
    )
