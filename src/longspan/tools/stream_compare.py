"""Streams measured: one long score, and the comparison of the paper, on the same tokens.

Source: Xiao et al. 2023 (arXiv:2309.17453) §4.1 and table 2 (sinks).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.adapters.head import SplitForward
from longspan.adapters.streamed import StreamedModel
from longspan.errors import ConfigError, did_you_mean
from longspan.metrics.windows import perplexity
from longspan.rotary.scaling.base import check_length
from longspan.tools.evaluate import versions
from longspan.tools.records import record_from_json, record_to_json
from longspan.tools.rows import bos_token
from longspan.tools.stream import CHUNK, Stream, check_fits, reach
from longspan.tools.stream_state import Meter
from longspan.tools.stream_text import text_row
from longspan.tools.summary import default_bucket
from longspan.tools.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORE_FORM = "longspan stream score 1"
COMPARISON_FORM = "longspan stream comparison 1"
METHODS = ("streaming", "window", "recompute", "dense")
FRESH_TOKENS = 8192  # read at once where contexts are read afresh
STEPS, FRESH_STEPS = 16, 3  # timed, of a token each
FIRST_OCTAVE = 256

Seen = Callable[[Tensor], None]
"""Told the likelihoods so far."""
Announce = Callable[[str, int], Seen]
"""Told what is measured next and over how many tokens; returns what is told how far it is."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a stream was measured.

    Attributes:
        model: name or path as the user gave it.
        text: (name, sha256) of the text.
        tokens: read, BOS counted; the first is not scored.
        repeated: whether the text was read again from its start where it ended.
        bos: whether BOS starts the text (and every context that is read afresh).
        trained_length: tokens the checkpoint was trained to read; None for ALiBi.
        num_sink_tokens, sliding_window: of the stream.
        chunk_size: tokens read at once.
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

    @property
    def kept(self) -> int:
        """Tokens in the cache, sinks and window."""
        return self.num_sink_tokens + self.sliding_window


@dataclass(frozen=True, kw_only=True)
class Part:
    """Mean NLL (nats per token) and perplexity of target positions [start, stop)."""

    start: int
    stop: int
    nll: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """One text read by a stream.

    Attributes:
        whole: all scored tokens.
        tenths: of the text.
        octaves: its first 256 tokens, and every doubling of them.
        resumed_at: tokens that an earlier run had scored.
        tokens_per_second: of this run; None where nothing was left to read.
        memory: (tokens read, bytes resident in memory) as the text went by; of the run that read
            them. Empty where the system does not tell.
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
    """One way to read a long text with a cache of the same size.

    Attributes:
        method: `streaming` keeps sinks and a window; `window` the last tokens alone; `dense` all;
            `recompute` reads as many last tokens afresh for every token, by the model itself.
        num_sink_tokens, sliding_window: what is kept, in tokens.
        whole: all tokens it scored.
        blocks: by position; none for recompute.
        past: those behind which the stream has dropped something; None for dense where it ends
            before the others.
        spread: those that recompute scored, spread evenly over `past`.
        within_dense: those that dense scored, where it ends before the others.
        tokens_per_second: of one token after another, once the cache is full.
    """

    method: str
    num_sink_tokens: int
    sliding_window: int
    tokens_scored: int
    whole: Part
    blocks: tuple[Part, ...] = ()
    past: Part | None = None
    spread: Part | None = None
    within_dense: Part | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods, and numbers of sinks, on the same tokens and with caches of one size.

    Attributes:
        recompute_tokens, dense_tokens: how many tokens those two read; None where they did not.
        sinks: `streaming` with other numbers of sinks.
    """

    protocol: Protocol
    recompute_tokens: int | None
    dense_tokens: int | None
    methods: tuple[MethodScore, ...]
    sinks: tuple[MethodScore, ...]


def score_text(
    stream: Stream,
    text: Text,
    *,
    tokens: int | None = None,
    repeat: bool = False,
    chunk_size: int = CHUNK,
    original_max_position_embeddings: int | None = None,
    name: str | None = None,
    announce: Announce = lambda what, tokens: lambda nll: None,
    state: Path | None = None,
    save_every: int = 0,
) -> tuple[Score, Tensor]:
    """Returns how a stream reads a text, and the NLL of every token but the first, [N − 1].

    Args:
        stream: its own text stays as it is.
        text: from its start.
        tokens, repeat: see `text_row`.
        chunk_size: tokens read at once.
        original_max_position_embeddings: the trained length, where the config leaves it open.
        name: of the model in the protocol; its config's unless given.
        announce: told how far it is.
        state, save_every: see `Stream.score`; a file beside `state` keeps measurements of memory.
    """
    row = text_row(stream.tokenizer, text, tokens, repeat)
    targets = row.shape[1] - 1
    meter = Meter(targets, None if state is None else state.with_suffix(".json"))
    show = announce("streaming", targets)

    def seen(nll: Tensor) -> None:
        meter(len(nll))
        show(nll)

    nll = stream.score(row, chunk_size, progress=seen, state=state, save_every=save_every).nll
    octaves = [FIRST_OCTAVE << power for power in range(targets.bit_length())]
    score = Score(
        protocol=Protocol(
            model=name or stream.model.config._name_or_path or type(stream.model).__name__,
            text=(text.name, text.sha256),
            tokens=targets + 1,
            repeated=repeat,
            bos=bos_token(stream.tokenizer) is not None,
            trained_length=trained(stream.model, original_max_position_embeddings),
            num_sink_tokens=stream.num_sink_tokens,
            sliding_window=stream.sliding_window,
            chunk_size=chunk_size,
            dtype=str(stream.model.dtype).removeprefix("torch."),
            versions=versions(),
        ),
        whole=part(nll, 1, targets + 1),
        tenths=parts(nll, [1 + targets * tenth // 10 for tenth in range(11)]),
        octaves=parts(nll, [1, *(edge for edge in octaves if edge <= targets), targets + 1]),
        resumed_at=meter.resumed_at,
        tokens_per_second=meter.tokens_per_second,
        memory=tuple(meter.samples),
        resident_at_tenth=next((size for at, size in meter.samples if 10 * at >= targets), None),
        resident_at_end=meter.samples[-1][1] if meter.samples else None,
    )
    return score, nll


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A text under way through several methods; what was read once is not read again."""

    model: PreTrainedModel
    row: Tensor
    chunk_size: int
    announce: Announce
    known: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def streamed(self, what: str, sinks: int, window: int, tokens: int | None = None) -> Tensor:
        """Returns the NLL of the first `tokens` as a stream reads them."""
        row = self.row[:, :tokens]
        key = sinks, window, row.shape[1]
        if key not in self.known:
            stream = Stream(StreamedModel(self.model, sinks, window), None)
            seen = self.announce(what, row.shape[1] - 1)
            self.known[key] = stream.score(row, self.chunk_size, progress=seen).nll
        return self.known[key]

    def afresh(self, places: Tensor, kept: int, bos: bool) -> Tensor:
        """Returns the NLL of the tokens at `places`, each after its last `kept` read afresh.

        BOS starts every context where there is one, and takes one of its places.
        """
        split, row, seen = SplitForward(self.model), self.row[0], self.announce("recompute", len(places))
        contexts = row[places[:, None] + torch.arange(-kept, 0)]
        if bos:
            contexts[:, 0] = row[0]
        nll = torch.empty(len(places))
        for some in torch.arange(len(places)).split(max(1, FRESH_TOKENS // kept)):
            logits = split.logits(split.hidden(contexts[some])[:, -1:])[:, 0].float().cpu()
            nll[some] = torch.nn.functional.cross_entropy(logits, row[places[some]], reduction="none")
            seen(nll[: some[-1] + 1])
        return nll
