"""What reading a text as a stream comes to: means by position, and how they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

from longspan.adapters.lengths import Lengths
from longspan.metrics.windows import perplexity
from longspan.tools.evaluate import versions
from longspan.tools.records import record_from_json, record_to_json
from longspan.tools.rows import bos_token
from longspan.tools.texts import Text


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a stream was measured.

    Attributes:
        model: name or path as the user gave it.
        text: (name, sha256) of the text.
        tokens: read, BOS counted; the first one is not scored.
        repeated: whether the text may have been read again from its start where it ended.
        bos: whether BOS starts the text, and every context that is read afresh.
        trained_length: tokens the checkpoint was trained to read; None for ALiBi.
        num_sink_tokens, sliding_window: of the stream.
        chunk_size: tokens read at once.
        seq_len: the declared length, where a table depends on one.
        dtype: of weights and activations, such as "float32".
        versions: of longspan, torch and transformers.
    """

    model: str
    text: tuple[str, str]
    tokens: int
    repeated: bool
    bos: bool
    trained_length: int | None
    num_sink_tokens: int
    sliding_window: int
    chunk_size: int
    dtype: str
    versions: tuple[tuple[str, str], ...]
    seq_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Mean NLL (nats per token) and perplexity of tokens between positions [start, stop)."""

    start: int
    stop: int
    tokens: int
    nll: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """One text read by a stream.

    Attributes:
        whole: all scored tokens.
        tenths: of the text.
        octaves: its first 256 tokens, and every doubling of them.
        resumed_at: tokens that an interrupted run had scored before.
        tokens_per_second: of this run; None where nothing was left to read.
        memory: (tokens scored, bytes resident in memory) as the text went by; empty where the
            system does not tell.
        resident_at_tenth, resident_at_end: bytes, once a tenth is read and at the end.
    """

    protocol: Protocol
    whole: Part
    tenths: tuple[Part, ...]
    octaves: tuple[Part, ...]
    resumed_at: int
    tokens_per_second: float | None
    memory: tuple[tuple[int, int], ...]
    resident_at_tenth: int | None
    resident_at_end: int | None


@dataclass(frozen=True, kw_only=True)
class MethodScore:
    """One way to read a text that is longer than the cache.

    Attributes:
        method: `streaming` keeps sinks and a window; `window` as many last tokens alone; `dense`
            keeps all; `recompute` reads as many last tokens afresh for every token it scores.
        num_sink_tokens, sliding_window: tokens kept; those of a context for `recompute`.
        whole: all tokens it scored.
        blocks: by position; none for `recompute`.
        past: those behind which the stream has dropped something.
        spread: those that `recompute` scored, spread evenly over the others' `past`.
        dense: those that `dense` scored. Like `past` and `spread`, None where it did not read them.
        tokens_per_second: of one token after another with a full cache, where measured.
    """

    method: str
    num_sink_tokens: int
    sliding_window: int
    whole: Part
    blocks: tuple[Part, ...] = ()
    past: Part | None = None
    spread: Part | None = None
    dense: Part | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods, and `streaming` with other numbers of sinks, on the same tokens.

    Attributes:
        recompute_tokens, dense_tokens: how many tokens these two methods may score and read.
    """

    protocol: Protocol
    recompute_tokens: int
    dense_tokens: int
    methods: tuple[MethodScore, ...]
    sinks: tuple[MethodScore, ...]


FORMS = {Score: "longspan stream score 1", Comparison: "longspan stream comparison 1"}
Result = TypeVar("Result", Score, Comparison)


def protocol_of(
    model: Any,
    tokenizer: Any,
    text: Text,
    row: Tensor,
    *,
    name: str | None,
    lengths: Lengths | None,
    repeated: bool,
    num_sink_tokens: int,
    sliding_window: int,
    chunk_size: int,
    seq_len: int | None = None,
) -> Protocol:
    """Returns the protocol of a text's tokens, [1, N], read by a stream; see `Protocol`."""
    return Protocol(
        model=name or model.config._name_or_path or type(model).__name__,
        text=(text.name, text.sha256),
        tokens=row.shape[1],
        repeated=repeated,
        bos=bos_token(tokenizer) is not None,
        trained_length=None if lengths is None else lengths.trained,
        num_sink_tokens=num_sink_tokens,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        seq_len=seq_len,
        dtype=str(model.dtype).removeprefix("torch."),
        versions=versions(),
    )


def part(nll: Tensor, start: int, stop: int) -> Part:
    """Returns the mean over positions [start, stop); entry i of `nll` belongs to i + 1."""
    return mean(nll[start - 1 : stop - 1], start, stop)


def parts(nll: Tensor, edges: Sequence[int]) -> tuple[Part, ...]:
    """Returns the means between one edge and the next, without empty ones."""
    return tuple(part(nll, start, stop) for start, stop in pairwise(edges) if stop > start)


def mean(nll: Tensor, start: int, stop: int) -> Part:
    """Returns the mean of likelihoods that lie between two positions."""
    total, tokens = float(nll.double().sum()), len(nll)
    return Part(
        start=start,
        stop=stop,
        tokens=tokens,
        nll=total / tokens,
        perplexity=perplexity(total, tokens),
    )


def to_json(result: Score | Comparison) -> str:
    """Returns a score or a comparison as JSON."""
    return record_to_json(result, FORMS[type(result)])


def from_json(kind: type[Result], text: str) -> Result:
    """Returns the score or comparison that `to_json` wrote."""
    return record_from_json(kind, text, FORMS[kind])
