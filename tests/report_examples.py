"""Evaluations as `evaluate` would return them, for the tests of what is drawn from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longspan.tools.evaluation import (
    Bucket,
    Evaluation,
    MethodResult,
    PairedDifference,
    PasskeyTrial,
    Protocol,
)

# Plain and YaRN were measured: SmolLM2-135M, 12,288 tokens, per 2,048. The others are invented.
PLAIN = (3.35, 3.08, 3.11, 3.45, 3.45, 3.67)
YARN = (3.37, 3.10, 3.13, 3.48, 3.45, 3.16)
TWO = {"none": PLAIN, "yarn": YARN}
EIGHT = {
    **TWO,
    "linear": (3.95, 3.61, 3.60, 3.92, 3.90, 3.66),
    "ntk": (3.36, 3.10, 3.13, 3.47, 3.46, 3.22),
    "dynamic": (3.36, 3.09, 3.12, 3.47, 3.45, 3.19),
    "ntk-by-parts": (3.37, 3.10, 3.13, 3.48, 3.46, 3.18),
    "llama3": (3.37, 3.10, 3.14, 3.50, 3.47, 3.20),
    "longrope": (3.40, 3.13, 3.16, 3.52, 3.50, 3.30),
}
PROTOCOL = Protocol(
    model="HuggingFaceTB/SmolLM2-135M",
    texts=(("novel.txt", "ab12" * 16),),
    length=12_288,
    documents=1,
    bos=False,
    trained_length=8192,
    dtype="float32",
    phase="float64",
    bucket=2048,
    versions=(("longspan", "0.1.0"), ("torch", "2.13.0"), ("transformers", "5.24.0")),
)


def evaluation(
    rows: Mapping[str, Sequence[float]],
    *,
    half: float | None = None,
    passkey: Sequence[PasskeyTrial] = (),
    rope_parameters: Mapping[str, dict[str, Any]] | None = None,
    **protocol: Any,
) -> Evaluation:
    """Returns an evaluation of NLL by bucket, with bucket intervals of ± `half` nats if given.

    The paired difference against "none" is that of the last buckets, ± 0.09 nats.
    """
    made = replace(PROTOCOL, **protocol)
    given = rope_parameters or {}
    methods = tuple(
        result(method, nll, rows.get("none"), made, half, given.get(method))
        for method, nll in rows.items()
    )
    return Evaluation(protocol=made, methods=methods, passkey=tuple(passkey))


def result(
    method: str,
    nll: Sequence[float],
    plain: Sequence[float] | None,
    protocol: Protocol,
    half: float | None,
    rope_parameters: dict[str, Any] | None,
) -> MethodResult:
    """Returns one method's result."""
    size = protocol.bucket
    buckets = tuple(
        Bucket(
            start=i * size,
            stop=min((i + 1) * size, protocol.length),
            nll=value,
            low=None if half is None else value - half,
            high=None if half is None else value + half,
        )
        for i, value in enumerate(nll)
    )
    versus = None
    if plain is not None and method != "none":
        mean = plain[-1] - nll[-1]
        versus = PairedDifference(
            baseline="none",
            start=buckets[-1].start,
            stop=buckets[-1].stop,
            mean=mean,
            low=mean - 0.09,
            high=mean + 0.09,
            unit="256-token blocks" if protocol.documents == 1 else "documents",
        )
    kind = "default" if method == "none" else method
    block = {"rope_type": kind, "rope_theta": 100_000.0, "factor": 2.0}
    if method == "none":
        del block["factor"]
    overall = sum(nll) / len(nll)
    return MethodResult(
        method=method,
        rope_parameters=block if rope_parameters is None else rope_parameters,
        attention_factor=1.06931 if method == "yarn" else 1.0,
        nll=overall,
        perplexity=math.exp(overall),
        tokens_scored=protocol.documents * (protocol.length - 1),
        buckets=buckets,
        versus_none=versus,
        seconds=41.25,
    )


def trials(
    found: Mapping[str, Mapping[int, int]], *, of: int = 5, limit: int = 12_288
) -> list[PasskeyTrial]:
    """Returns `of` trials a method and length, the first so many of them found.

    Those longer than `limit` are invalid.
    """
    made = []
    for method, by_length in found.items():
        for length, count in by_length.items():
            for index in range(of):
                status = "found" if index < count else "missed"
                made.append(trial(method, length, index / max(1, of - 1), status, limit))
    return made


def trial(method: str, length: int, depth: float, status: Any, limit: int) -> PasskeyTrial:
    """Returns one trial; a found key is ranked first, a missed one fourth."""
    if length > limit:
        reason = f"a prompt of {length} tokens does not fit the limit of {limit}"
        status, rank = "invalid", None
    else:
        reason, rank = "", 1 if status == "found" else 4
    return PasskeyTrial(
        method=method,
        length=length,
        depth=depth,
        status=status,
        rank=rank,
        candidates=10,
        reason=reason,
    )
