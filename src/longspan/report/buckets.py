"""Which position buckets lie within the trained length, and which past it."""

from __future__ import annotations

from longspan.errors import ConfigError
from longspan.tools.evaluation import Bucket, Evaluation, MethodResult, Protocol


def within_trained(result: MethodResult, protocol: Protocol) -> tuple[Bucket, ...]:
    """Returns the buckets that end at or before the trained length.

    None where documents were read in windows: a target's place in its document is then not the
    place it was read at.
    """
    if protocol.window is not None:
        return ()
    return tuple(bucket for bucket in result.buckets if bucket.stop <= protocol.trained_length)


def past_trained(result: MethodResult, protocol: Protocol) -> tuple[Bucket, ...]:
    """Returns the buckets that start at or after the trained length; a straddling one is neither.

    None where documents were read in windows.
    """
    if protocol.window is not None:
        return ()
    return tuple(bucket for bucket in result.buckets if bucket.start >= protocol.trained_length)


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
