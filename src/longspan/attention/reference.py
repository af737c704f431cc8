"""The specification: every pair's score at once, in float32 or better. Memory T·S; for tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.attention.rules import Inputs, Rules, compute_dtype
from longspan.attention.visibility import Run


def refusal(inputs: Inputs, rules: Rules) -> str | None:
    """Returns why this implementation cannot do what is asked: it always can."""
    return None


def run(inputs: Inputs, rules: Rules) -> tuple[Tensor, Tensor | None]:
    """Returns out [B, H, T, Dv] and lse [B, H, T], by the definition."""
    dtype, groups = compute_dtype(inputs.q), inputs.q.shape[1] // inputs.k.shape[1]
    q = inputs.q.to(dtype)
    k, v = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (inputs.k, inputs.v))
    queries, keys = rules.seen.shape
    q_pos, k_pos = rules.seen.positions(slice(0, queries), [Run(0, keys)])

    content = q if rules.bias is None else rules.bias.content_query(q)
    scores = finish_scores(content @ k.transpose(-1, -2), q, q_pos, k_pos, rules)
    visible = rules.seen.everything()
    scores = scores.masked_fill(~visible, -torch.inf)
    if inputs.sink_logits is not None:  # one more key that everyone sees and that has no value
        sink = inputs.sink_logits.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    # A row that sees nothing must not reach the softmax: its gradient would be NaN.
    empty = (scores == -torch.inf).all(-1)
    lse = scores.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()[..., :keys]
    weights = F.dropout(weights, rules.dropout)
    out = weights @ v
    if rules.bias is not None and rules.bias.adds_values:
        out = out + rules.bias.values(weights, q_pos, k_pos)
    return out.to(inputs.q.dtype), lse.masked_fill(empty, -torch.inf)


def finish_scores(
    products: Tensor, q: Tensor, q_pos: Tensor, k_pos: Tensor, rules: Rules
) -> Tensor:
    """Returns the scores the softmax meets, from the products of content queries and keys.

    Terms inside 1/√d are scaled with the products; the soft cap comes next; other terms are added
    last, as flash-attn does.

    Args:
        products: [B, H, T, S].
        q: [B, H, T, D], for biases that read it.
        q_pos, k_pos: [T] or [B, T], [S] or [B, S].
        rules: what attend was asked.
    """
    if rules.bias is None:
        return cap(products * rules.scale, rules.softcap)
    bias = rules.bias.scores(q, q_pos, k_pos)
    if rules.bias.inside_scale:
        return cap((products + bias) * rules.scale, rules.softcap)
    return cap(products * rules.scale, rules.softcap) + bias


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Returns softcap·tanh(scores / softcap), which keeps scores within ±softcap.

    Source: Gemma 2 (arXiv:2408.00118) §2.

    >>> cap(torch.tensor([1000.0]), 50.0)
    tensor([50.])
    """
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
