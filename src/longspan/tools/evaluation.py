"""What `evaluate` returns: results that carry the protocol they were measured under."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from longspan.errors import ConfigError
from longspan.tools.records import record_from_json, record_to_json

FORM = "longspan evaluation 1"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a measurement was made; only results of equal protocols may be compared.

    Attributes:
        model: name or path as the user gave it.
        texts: (name, sha256) of each source text.
        length: tokens a document, BOS included where there is one.
        documents: how many documents.
        bos: whether BOS starts every document; it is never scored.
        trained_length: tokens the checkpoint was trained to read.
        dtype: of weights and activations, such as "float32".
        phase: how angles were computed, "float64" or "hf_float32".
        bucket: tokens a position bucket.
        semantics: of length-dependent tables: "whole", the table of the document's (or window's)
            full length.
        window: tokens of a forward, or None for one forward a document.
        stride: tokens from one window's start to the next; None without windows.
        versions: of longspan, torch and transformers.
    """

    model: str
    texts: tuple[tuple[str, str], ...]
    length: int
    documents: int
    bos: bool
    trained_length: int
    dtype: str
    phase: str
    bucket: int
    semantics: str = "whole"
    window: int | None = None
    stride: int | None = None
    versions: tuple[tuple[str, str], ...] = ()

    def require_equal(self, other: Protocol) -> None:
        """Refuses to compare results that were measured differently.

        Raises:
            ConfigError: naming the first field that differs, with both values.
        """
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if mine != theirs:
                raise ConfigError(
                    f"these results cannot be compared: {item.name} differs ({mine!r} and "
                    f"{theirs!r}). Measure both under one protocol."
                )


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Mean NLL (nats per token) of target positions [start, stop), over documents.

    `low` and `high` bound the mean's 95 % interval; None where there are too few samples for one.
    """

    start: int
    stop: int
    nll: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean of (baseline − method) NLL over positions [start, stop), same tokens, with its 95 %.

    `unit` says what was resampled: "documents" (two or more), or "256-token blocks" of one.
    """

    baseline: str
    start: int
    stop: int
    mean: float
    low: float
    high: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One method's measurement.

    Attributes:
        method: "none" is the checkpoint as it stands.
        rope_parameters: the block of config.json it ran under.
        factor: of the method, also where config.json has no key for it (NTK-aware); None for
            plain RoPE.
        attention_factor: the multiplier of cos and sin.
        nll: mean over all scored tokens, nats per token.
        perplexity: exp(nll).
        tokens_scored: over all documents.
        buckets: NLL by target position.
        versus_none: the paired difference against "none" on the last positions, if both ran.
        seconds: of all its forwards.
    """

    method: str
    rope_parameters: dict[str, Any]
    factor: float | None = None
    attention_factor: float
    nll: float
    perplexity: float
    tokens_scored: int
    buckets: tuple[Bucket, ...]
    versus_none: PairedDifference | None
    seconds: float


PasskeyStatus = Literal["found", "missed", "invalid"]


@dataclass(frozen=True, kw_only=True)
class PasskeyTrial:
    """One hidden key: `depth` in [0, 1] of a prompt that is `length` tokens with its answer.

    `rank` is the true key's place among the candidates by log-likelihood (1 is best), None when
    the trial is invalid: a prompt that does not fit is invalid, not wrong.
    """

    method: str
    length: int
    depth: float
    status: PasskeyStatus
    rank: int | None
    candidates: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything one run of `evaluate` measured."""

    protocol: Protocol
    methods: tuple[MethodResult, ...]
    passkey: tuple[PasskeyTrial, ...] = field(default=())

    def method(self, name: str) -> MethodResult:
        """Returns one method's result by name."""
        for result in self.methods:
            if result.method == name:
                return result
        raise ConfigError(
            f"no result for method {name!r}; measured: {[m.method for m in self.methods]}."
        )


def to_json(evaluation: Evaluation) -> str:
    """Returns the evaluation as JSON.

    Raises:
        NumericalError: if a number is NaN or infinite.
    """
    return record_to_json(evaluation, FORM)


def from_json(text: str) -> Evaluation:
    """Returns the evaluation that `to_json` wrote.

    Raises:
        InputError: if the text is not one.
    """
    return record_from_json(Evaluation, text, FORM)


def retrieval_rate(trials: Iterable[PasskeyTrial]) -> float | None:
    """Returns the share of keys found, of the valid trials only; None if there are none.

    >>> from dataclasses import replace
    >>> trial = PasskeyTrial(method="none", length=9, depth=0.0, status="found", rank=1,
    ...                      candidates=10)
    >>> retrieval_rate([trial, replace(trial, status="missed"), replace(trial, status="invalid")])
    0.5
    """
    found = [trial.status == "found" for trial in trials if trial.status != "invalid"]
    return sum(found) / len(found) if found else None
