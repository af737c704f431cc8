"""One new token in every row: no tile, no copy of the window, the same shapes at every step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.attention import attend
from longspan.caches.buffers import Buffers
from longspan.caches.encoding import LayerEncoding, Scoring
from longspan.caches.step import Step


def attend_one(
    step: Step,
    kept: Buffers,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: LayerEncoding,
    scoring: Scoring,
) -> Tensor:
    """Returns the attention of one token a row over what is kept and itself; stores it first.

    Window keys stay as they were turned; only the few sinks are turned again, to their distance,
    unless the step has done so for all layers.

    Args:
        step: of the new tokens.
        kept: the layer's buffers.
        q: [B, H, 1, D], not turned.
        k, v: [B, K, 1, D] and [B, K, 1, Dv], not turned.
        encoding: the layer's rotation or bias.
        scoring: scale, learned sinks and soft cap.
    """
    if encoding.turns:
        heads = q.shape[1]
        both = encoding.turn(torch.cat((q, k), dim=1), step.at, known=(step.tables, "at"))
        q, now = both[:, :heads], both[:, heads:]
        kept.write(step.where, None, k, now, v)
        _turn_sinks(step, kept, encoding)
    else:
        kept.write(step.where, None, k, k, v)
    keys, values = kept.first(step.count)
    if encoding.by_length:
        length = step.within[:, -1] + 1
        q = encoding.turn(q, step.within, length, known=(step.tables, "within"))
        keys = encoding.turn(keys, step.places.clamp_min(0), length, known=(step.tables, "places"))
    if encoding.bias is None and scoring.plain:
        # Query heads that share a key head come as its queries: no key is repeated.
        out = F.scaled_dot_product_attention(
            q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]),
            keys,
            values,
            attn_mask=step.filled,
            scale=scoring.scale,
        )
        return out.reshape(*q.shape[:3], -1)
    return attend(
        q,
        keys,
        values,
        mask=step.from_one,
        bias=encoding.bias,
        scale=scoring.scale,
        sink_logits=scoring.sink_logits,
        softcap=scoring.softcap,
    )


def _turn_sinks(step: Step, kept: Buffers, encoding: LayerEncoding) -> None:
    sinks = step.slots.num_sink_tokens
    if sinks and kept.turned is not None and not step.sinks_moved:
        raw = kept.raw[:, :, :sinks]
        moved = encoding.turn(raw, step.sinks_at, known=(step.tables, "sinks"))
        kept.turned[:, :, :sinks] = moved
