"""One long text read by a stream, summed up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from longspan.tools.stream import CHUNK, Stream
from longspan.tools.stream_reach import reach
from longspan.tools.stream_results import Score, part, parts, protocol_of
from longspan.tools.stream_state import Meter
from longspan.tools.stream_text import text_row
from longspan.tools.texts import Text

FIRST_OCTAVE = 256

Seen = Callable[[Tensor], None]
"""Told the likelihoods so far."""
Announce = Callable[[str, int], Seen]
"""Told what is read next and how many tokens it scores; returns what is told how far it is."""


def score_text(
    stream: Stream,
    text: Text,
    *,
    tokens: int | None = None,
    repeat: bool = False,
    chunk_size: int = CHUNK,
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
        name: of the model in the protocol; its config's unless given.
        announce: told how far it is.
        state, save_every: see `Stream.score`. Measurements of memory lie in a file beside `state`.
    """
    row = text_row(stream.tokenizer, text, tokens, repeat)
    targets, streamed = row.shape[1] - 1, stream.streamed
    lengths = reach(stream.model.config, streamed.original_max_position_embeddings)
    meter = Meter(targets, None if state is None else state.with_suffix(".json"))
    show = announce("streaming", targets)

    def seen(nll: Tensor) -> None:
        meter(len(nll))
        show(nll)

    nll = stream.score(row, chunk_size, progress=seen, state=state, save_every=save_every).nll
    octaves = [FIRST_OCTAVE << power for power in range(targets.bit_length())]
    protocol = protocol_of(
        stream.model,
        stream.tokenizer,
        text,
        row,
        name=name,
        lengths=lengths,
        repeated=repeat,
        num_sink_tokens=stream.num_sink_tokens,
        sliding_window=stream.sliding_window,
        chunk_size=chunk_size,
        seq_len=streamed.seq_len,
    )
    score = Score(
        protocol=protocol,
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
