"""Which position buckets lie within the trained length, and which past it."""

from __future__ import annotations

from longspan.errors import ConfigError
from longspan.tools.evaluation import Bucket, Evaluation, MethodResult


def within_trained(result: MethodResult, trained_length: int) -> tuple[Bucket, ...]:
    """Returns the buckets that end at or before the trained length."""
    return tuple(bucket for bucket in result.buckets if bucket.stop <= trained_length)


def past_trained(result: MethodResult, trained_length: int) -> tuple[Bucket, ...]:
    """Returns the buckets that start at or after the trained length; a straddling one is neither.

    >>> buckets = [Bucket(start=s, stop=s + 4, nll=1.0, low=None, high=None) for s in (0, 4, 8)]
    >>> result = MethodResult(method="none", rope_parameters={}, attention_factor=1.0, nll=1.0,
    ...     perplexity=2.7, tokens_scored=11, buckets=tuple(buckets), versus_none=None, seconds=0.1)
    >>> [bucket.start for bucket in past_trained(result, 6)]
    [8]
    """
    return tuple(bucket for bucket in result.buckets if bucket.start >= trained_length)


def check_measured(evaluation: Evaluation) -> None:
    """Refuses an evaluation without a method, or a method without a bucket.

    Raises:
        ConfigError: naming what is missing.
    """
    if not evaluation.methods:
        raise ConfigError(
            "this evaluation holds no method, so there is nothing to show. "
            "Run evaluate with at least one method, such as 'none'."
        )
    for result in evaluation.methods:
        if not result.buckets:
            raise ConfigError(
                f"the result of method {result.method!r} holds no position buckets, so it cannot "
                "be shown by position. Run evaluate again."
            )
