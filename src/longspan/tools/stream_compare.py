"""Streams compared: other methods, and other numbers of sinks, on the same tokens.

Source: Xiao et al. 2023 (arXiv:2309.17453) figure 3 (methods) and table 2 (numbers of sinks).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.adapters.head import SplitForward
from longspan.adapters.rope import rope_from_config
from longspan.adapters.rotation import exact_rotation
from longspan.errors import ConfigError, did_you_mean
from longspan.metrics.likelihood import check_finite, nll_dtype
from longspan.rotary.scaling.base import check_length
from longspan.tools.stream import CHUNK, Stream
from longspan.tools.stream_reach import check_fits, reach, slides_alone
from longspan.tools.stream_results import (
    Comparison,
    MethodScore,
    Protocol,
    mean,
    part,
    parts,
    protocol_of,
)
from longspan.tools.stream_score import Announce
from longspan.tools.stream_text import text_row
from longspan.tools.subjects import without_rope
from longspan.tools.summary import default_bucket
from longspan.tools.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.adapters.streamed import StreamedModel

METHODS = ("streaming", "window", "recompute", "dense")
FRESH_TOKENS = 8192  # read at once where contexts are read afresh
STEPS, FRESH_STEPS = 16, 3  # timed, of a token each


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    text: Text,
    *,
    methods: Sequence[str] = METHODS,
    sinks: Sequence[int] = (),
    num_sink_tokens: int = 4,
    sliding_window: int = 1020,
    tokens: int | None = None,
    repeat: bool = False,
    chunk_size: int = CHUNK,
    recompute_tokens: int = 64,
    dense_tokens: int = 16 * 1024,
    original_max_position_embeddings: int | None = None,
    name: str | None = None,
    announce: Announce = lambda what, tokens: lambda nll: None,
) -> Comparison:
    """Returns how methods, and numbers of sinks, read the same text with caches of one size.

    Args:
        model: a live causal model, in eval mode; it is not changed.
        tokenizer: the model's.
        text: from its start.
        methods: of METHODS; none where only `sinks` are compared.
        sinks: numbers of sinks; with each, the window is what is left of the cache.
        num_sink_tokens, sliding_window: of the stream; together, what each method may keep.
        tokens, repeat: see `text_row`.
        chunk_size: tokens read at once.
        recompute_tokens: how many tokens `recompute` scores; it takes the time of a whole cache
            for each.
        dense_tokens: how many tokens `dense` reads at most.
        original_max_position_embeddings: the trained length, where the config leaves it open.
        name: of the model in the protocol; its config's unless given.
        announce: told how far it is.

    Raises:
        ConfigError: for a text that fits into the cache, an unknown method, or sizes out of range.
    """
    kept = num_sink_tokens + sliding_window
    given = original_max_position_embeddings
    check_fits(
        model.config, num_sink_tokens, sliding_window, original_max_position_embeddings=given
    )
    if slides_alone(model.config, given):
        raise ConfigError(
            "every layer of this model keeps to a sliding window of its own, whatever a stream "
            "keeps, so all methods would be one. There is nothing to compare."
        )
    lengths = reach(model.config, given)
    row = text_row(tokenizer, text, tokens, repeat)
    check_comparable(methods, sinks, kept, row.shape[1], recompute_tokens, dense_tokens)
    protocol = protocol_of(
        model,
        tokenizer,
        text,
        row,
        name=name,
        lengths=lengths,
        repeated=repeat,
        num_sink_tokens=num_sink_tokens,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
    )
    places = torch.linspace(kept + 1, row.shape[1] - 1, recompute_tokens, dtype=torch.float64)
    reading = Reading(
        model=model,
        row=row,
        protocol=protocol,
        announce=announce,
        kept=kept,
        original=given,
        places=places.round().long().unique() if "recompute" in methods else None,
        dense_stop=min(dense_tokens, row.shape[1]) if "dense" in methods else None,
    )
    return Comparison(
        protocol=protocol,
        recompute_tokens=recompute_tokens,
        dense_tokens=dense_tokens,
        methods=tuple(reading.method(method) for method in methods),
        sinks=tuple(reading.streaming("streaming", count, kept - count) for count in sinks),
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A text that several methods read.

    Attributes:
        kept: tokens in each cache, and in each context that is read afresh.
        original: the trained length, where the config leaves it open.
        places: positions that `recompute` scores, if it does.
        dense_stop: tokens that `dense` reads, if it does.
        known: the likelihoods by sinks and window, so that nothing is read twice.
    """

    model: PreTrainedModel
    row: Tensor
    protocol: Protocol
    announce: Announce
    kept: int
    original: int | None
    places: Tensor | None
    dense_stop: int | None
    known: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def method(self, method: str) -> MethodScore:
        """Returns one method's score."""
        if method == "recompute":
            return self.recompute()
        if method == "dense":
            return self.streaming(method, 0, self.dense_stop or 1, self.dense_stop)
        if method == "window":
            return self.streaming(method, 0, self.kept)
        return self.streaming(
            method, self.protocol.num_sink_tokens, self.protocol.sliding_window, timed=True
        )

    def streaming(
        self, method: str, sinks: int, window: int, stop: int | None = None, timed: bool = False
    ) -> MethodScore:
        """Returns the score of a stream of these sizes over the first `stop` tokens, or all."""
        from longspan.adapters.streamed import StreamedModel  # it imports transformers

        streamed = StreamedModel(self.model, sinks, window, None, self.original)
        row = self.row[:, :stop]
        if (sinks, window) not in self.known:
            what = f"{method}, keeping {sinks} + {window}"
            seen, size = self.announce(what, row.shape[1] - 1), self.protocol.chunk_size
            self.known[sinks, window] = Stream(streamed, None).score(row, size, progress=seen).nll
        nll, end = self.known[sinks, window], row.shape[1]
        block, reads_all = default_bucket(self.row.shape[1]), end == self.row.shape[1]
        spread = None if self.places is None or not reads_all else nll[self.places - 1]
        first, last = self.kept + 1, self.dense_stop
        return MethodScore(
            method=method,
            num_sink_tokens=sinks,
            sliding_window=window,
            whole=part(nll, 1, end),
            blocks=parts(nll, [1, *range(block, end, block), end]),
            past=part(nll, first, end) if reads_all else None,
            spread=None if spread is None else mean(spread, first, end),
            dense=None if last is None else part(nll, 1, last),
            tokens_per_second=self.stepping(streamed) if timed else None,
        )

    def recompute(self) -> MethodScore:
        """Returns the score of contexts read afresh, many at once."""
        assert self.places is not None
        split, row = SplitForward(self.model), self.row[0]
        seen = self.announce("recompute", len(self.places))
        contexts = row[self.places[:, None] + torch.arange(-self.kept, 0)]
        if self.protocol.bos:
            contexts[:, 0] = row[0]
        nll = torch.empty(len(self.places), dtype=nll_dtype(self.model.dtype))
        seen(nll[:0])
        with self.rotation():
            for some in torch.arange(len(nll)).split(max(1, FRESH_TOKENS // self.kept)):
                logits = split.logits(split.hidden(contexts[some])[:, -1:])[:, 0].to(nll).cpu()
                nll[some] = F.cross_entropy(logits, row[self.places[some]], reduction="none")
                seen(nll[: int(some[-1]) + 1])
        check_finite(nll, self.protocol.dtype)
        found = mean(nll, self.kept + 1, self.row.shape[1])

        def step(_: int) -> None:
            split.logits(split.hidden(contexts[-1:])[:, -1:])

        return MethodScore(
            method="recompute",
            num_sink_tokens=0,
            sliding_window=self.kept,
            whole=found,
            spread=found,
            tokens_per_second=steps_per_second(step, FRESH_STEPS),
        )

    def rotation(self) -> AbstractContextManager[None]:
        """Lends the model the streams' own rotation, under the table of a whole context."""
        if without_rope(self.model):
            return nullcontext()
        ropes = rope_from_config(self.model.config, original_max_position_embeddings=self.original)
        return exact_rotation(self.model, ropes, self.kept)

    def stepping(self, streamed: StreamedModel) -> float:
        """Returns the tokens a second of a stream that reads one after another."""
        split, cache = SplitForward(streamed.model), streamed.new_cache()
        for chunk in self.row[:, : self.kept].split(self.protocol.chunk_size, dim=1):
            split.hidden(chunk, cache)

        def step(index: int) -> None:
            token = self.row[:, index % self.row.shape[1]].unsqueeze(1)
            split.logits(split.hidden(token, cache))

        return steps_per_second(step, STEPS)


def check_comparable(
    methods: Sequence[str],
    sinks: Sequence[int],
    kept: int,
    tokens: int,
    recompute_tokens: int,
    dense_tokens: int,
) -> None:
    """Refuses a comparison that would show nothing.

    Raises:
        ConfigError: naming what to change.
    """
    check_length("recompute_tokens", recompute_tokens)
    for method in methods:
        if method not in METHODS:
            known = f"Known: {', '.join(METHODS)}."
            raise ConfigError(f"no method {method!r}.{did_you_mean(method, METHODS)} {known}")
    if tokens < kept + 2:
        raise ConfigError(
            f"the text has {tokens} tokens, and a cache of {kept} drops none of them before the "
            f"last: all methods would be one. Read {kept + 2} tokens or more, or keep fewer."
        )
    if "dense" in methods and dense_tokens < kept + 2:
        raise ConfigError(f"dense_tokens must be above {kept + 1}, got {dense_tokens}.")
    if too_many := [count for count in sinks if not 0 <= count < kept]:
        raise ConfigError(f"a cache of {kept} tokens has 0 to {kept - 1} sinks, got {too_many[0]}.")


def steps_per_second(step: Callable[[int], None], count: int) -> float:
    """Returns one over the median time of a step, after one that is not timed."""
    seconds = []
    for index in range(count + 1):
        begun = time.perf_counter()
        step(index)
        seconds.append(time.perf_counter() - begun)
    return 1 / median(seconds[1:])
