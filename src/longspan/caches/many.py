"""Many new tokens at once: the window and the sinks are met apart, and merged by log-sum-exp.

It gives what the tokens one at a time would: every query has its own distance to the sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from longspan.attention import attend, merge
from longspan.caches.buffers import Buffers
from longspan.caches.encoding import LayerEncoding, Scoring
from longspan.caches.step import Step


def attend_many(
    step: Step,
    kept: Buffers,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: LayerEncoding,
    scoring: Scoring,
) -> Tensor:
    """Returns the attention of new tokens over what is kept and themselves; then stores them.

    Args:
        step: of the new tokens.
        kept: the layer's buffers.
        q: [B, H, T, D], not turned.
        k, v: [B, K, T, D] and [B, K, T, Dv], not turned.
        encoding: the layer's rotation or bias.
        scoring: scale, learned sinks and soft cap.
    """
    if not encoding.by_length:
        return _run(step, kept, q, k, v, encoding, scoring, None)
    outs = [
        _run(part, kept, q[:, :, cut], k[:, :, cut], v[:, :, cut], encoding, scoring, length)
        for part, cut, length in _runs(step, encoding)
    ]
    return torch.cat(outs, dim=2)


def _run(
    step: Step,
    kept: Buffers,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: LayerEncoding,
    scoring: Scoring,
    length: Tensor | None,
) -> Tensor:
    """Does what `attend_many` does for tokens that share one table, that of `length` [R]."""
    tables = step.tables
    now = encoding.turn(k, step.at, length, known=(tables, "at"))
    old = _old(step, kept, encoding, length)
    out, lse = attend(
        encoding.turn(q, step.at, length, known=(tables, "at")),
        torch.cat((old.keys, now), dim=2),
        torch.cat((old.values, v), dim=2),
        mask=step.from_window,
        bias=encoding.bias,
        scale=scoring.scale,
        sink_logits=scoring.sink_logits,
        softcap=scoring.softcap,
        return_lse=True,
    )
    kept.write(step.where, step.kept, k, now, v)
    sinks = step.slots.num_sink_tokens
    if not sinks:
        return out
    within = step.within.clamp_min(0)
    slot = torch.arange(sinks, device=q.device).unsqueeze(0)
    first = kept.raw[:, :, :sinks]
    met = attend(
        encoding.turn(q, within, length, known=(tables, "within")),
        encoding.turn(first, slot, length, known=(tables, "first")),
        kept.values[:, :, :sinks],
        mask=step.from_sinks,
        bias=encoding.bias,
        scale=scoring.scale,
        softcap=scoring.softcap,
        return_lse=True,
    )
    return merge(out, lse, *met)[0].to(q.dtype)


def _old(step: Step, kept: Buffers, encoding: LayerEncoding, length: Tensor | None) -> Buffers:
    """Returns what was kept before the step, the sinks left out, as its queries meet it."""
    order, positions = step.old
    start = step.slots.num_sink_tokens
    keys, values = (
        x[:, :, start : start + positions.shape[1]] if order is None else x.index_select(2, order)
        for x in (kept.keys, kept.values)
    )
    if encoding.by_length:
        at = positions.clamp_min(0) - step.base
        keys = encoding.turn(keys, at, length, known=(step.tables, "old"))
    return Buffers(keys, None, values)


def _runs(step: Step, encoding: LayerEncoding) -> Iterator[tuple[Step, slice, Tensor]]:
    """Yields the tokens of a step in runs that share one table, with that table's length [R]."""
    lengths = step.within.clamp_min(0) + 1
    tables = encoding.tables_of(lengths)
    changes = (tables.diff(dim=1) != 0).any(-1).any(0).nonzero().flatten() + 1
    edges = [0, *changes.tolist(), step.tokens]
    for start, stop in pairwise(edges):
        yield step.part(start, stop), slice(start, stop), lengths[:, stop - 1]
