"""A tile of queries meets some keys by PyTorch's fused attention of the CPU.

The kernel adds a tensor to the scores: there go the masks and biases of a tile, and of a far bias
one number a key. It knows no gradient of that tensor, no soft cap and no values of a bias.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.attention.kinds import Kind
from longspan.attention.meeting import Gradients, Meeting, finite
from longspan.attention.plan import Part
from longspan.attention.rules import Inputs, Rules, compute_dtype

PADDING = 8  # channels the kernel takes in one stride


def usable(inputs: Inputs, rules: Rules) -> bool:
    """Returns whether the kernel can do the forward pass of this call."""
    adds_values = rules.bias is not None and rules.bias.adds_values
    return inputs.q.device.type == "cpu" and rules.softcap is None and not adds_values


def forward(met: Meeting) -> tuple[Tensor, Tensor]:
    """Returns out [B, H, t, D] and lse [B, H, t] of a tile over these keys alone."""
    added = _added(met)
    q = met.q if met.rules.bias is None else met.rules.bias.content_query(met.q)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, met.k, met.v, 0.0, False, attn_mask=added.scores, scale=met.rules.scale)
    if added.row is not None:
        lse = lse + added.row
    if added.empty is not None:  # where the kernel's log-sum-exp is 0
        lse = lse.masked_fill(added.empty, -torch.inf)
    return out, lse


def differentiable(rules: Rules, part: Part, learned: tuple[Tensor, ...]) -> bool:
    """Returns whether the kernel can also do the backward pass of a part."""
    return rules.bias is None or part.splits or not (rules.bias.reads_query or learned)


def backward(met: Meeting, d_out: Tensor, out: Tensor, lse: Tensor, d_lse: Tensor) -> Gradients:
    """Returns what these keys contribute to every gradient.

    The kernel makes the weights again as exp(score − lse). Given out and lse over all keys, some
    of the keys give their part of the gradients exactly.

    Args:
        met: the tile and its keys; keys and values `widened` where d_lse is not 0 or the bias is
            learned.
        d_out, out: [B, H, t, D], the gradient and the result over all keys.
        lse, d_lse: [B, H, t], the same of the log-sum-exp.
    """
    with torch.set_grad_enabled(bool(met.learned)):
        row, scores, _ = _added(met)
    q, dim, lse = met.q, met.q.shape[-1], finite(lse)
    if row is not None:
        lse = lse - row.detach()
    if met.k.shape[-1] > dim:
        q, out, d_out = widened(q), widened(out), widened(d_out, d_lse)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    d_q, d_k, d_v = kernel(
        d_out, q, met.k, met.v, out, lse, 0.0, False, attn_mask=scores, scale=met.rules.scale
    )
    learned: list[Tensor | None] = [None] * len(met.learned)
    if row is not None and row.requires_grad:
        d_row = (d_q[..., dim] / met.rules.scale).to(row.dtype)
        d_row = d_row.sum_to_size(row.shape)
        learned = list(torch.autograd.grad(row, met.learned, d_row, allow_unused=True))
    return Gradients(d_q[..., :dim], d_k[..., :dim], d_v[..., :dim], learned)


def widened(x: Tensor, channel: float | Tensor = 0.0) -> Tensor:
    """Returns x with one more channel, and zeros up to `PADDING` more.

    Queries get a 0 there, keys and values a 1, out a 0 and d_out the gradient of the log-sum-exp.
    No score changes by it. The values' channel brings the log-sum-exp's gradient into the
    scores'; the keys' brings the sum of each row's score gradients, times the scale, out in d_q.
    """
    wide = F.pad(x, (0, PADDING))
    wide[..., x.shape[-1]] = channel
    return wide


class Added(NamedTuple):
    """What a mask and a bias come to for the kernel."""

    row: Tensor | None
    """[H, t] or [B, H, t], what log-sum-exps gain afterwards."""
    scores: Tensor | None
    """[1 or B, 1 or H, 1 or t, s], what the kernel adds to the scores."""
    empty: Tensor | None
    """[1 or B, 1, t], the rows that see nothing; None where there are none."""


def _added(met: Meeting) -> Added:
    bias, part, seen = met.rules.bias, met.part, met.rules.seen
    if bias is not None and part.splits:
        q = met.q.to(compute_dtype(met.q))
        row, key = bias.split(q, *met.positions, before=part.kind is Kind.BEFORE)
        return Added(row, None if key is None else _four(key.detach().unsqueeze(-2)), None)
    if bias is None and part.kind is Kind.WHOLE:
        return Added(None, None, None)
    like = None
    if bias is None or not bias.reads_query:
        like = seen.likeness(part.rows, part.runs, with_whole=bias is not None)
    known = met.rules.remembered
    if like is None or like not in known:
        known.clear()
        known[like] = _near(met)
    return known[like]


def _near(met: Meeting) -> Added:
    bias, visible, dtype = met.rules.bias, met.visible, compute_dtype(met.q)
    scores = None
    if bias is not None:
        scores = _four(bias.scores(met.q.to(dtype), *met.positions).detach())
        scores = scores * met.rules.scale if bias.inside_scale else scores
    if visible is None:
        return Added(None, scores, None)
    hidden = ~visible
    if scores is None:
        scores = torch.zeros(visible.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    else:
        scores = scores.masked_fill(hidden, -torch.inf)
    # A whole run leaves no row empty, and is not looked at.
    any_whole = any(run.whole for run in met.part.runs)
    return Added(None, scores, None if any_whole else hidden.all(-1))


def _four(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.unsqueeze(0)
