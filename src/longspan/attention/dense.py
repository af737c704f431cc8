"""A tile of queries meets some keys by plain products: any device, any bias, any soft cap."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attention.meeting import Gradients, Meeting, finite
from longspan.attention.reference import finish_scores
from longspan.attention.rules import compute_dtype


def forward(met: Meeting) -> tuple[Tensor, Tensor]:
    """Returns out [B, H, t, D] and lse [B, H, t] of a tile over these keys alone."""
    q, k, v = (x.to(compute_dtype(x)) for x in (met.q, met.k, met.v))
    scores = _hide(_scores(met, q, k), met)
    lse = scores.logsumexp(-1)
    weights = (scores - finite(lse).unsqueeze(-1)).exp()
    out = (_stacked(weights, v) @ v).view(*weights.shape[:3], -1)
    bias = met.rules.bias
    if bias is not None and bias.adds_values:
        out = out + bias.values(weights, *met.positions)
    return out, lse


def backward(met: Meeting, d_out: Tensor, out: Tensor, lse: Tensor, d_lse: Tensor) -> Gradients:
    """Returns what these keys contribute to every gradient.

    Args:
        met: the tile and its keys.
        d_out, out: [B, H, t, D], the gradient and the result over all keys.
        lse, d_lse: [B, H, t], the same of the log-sum-exp.
    """
    dtype = compute_dtype(met.q)
    q, k, v, d_out, out = (x.detach().to(dtype) for x in (met.q, met.k, met.v, d_out, out))
    with torch.enable_grad():
        q, k = q.requires_grad_(), k.requires_grad_()
        scores = _scores(met, q, k)
    weights = (_hide(scores.detach(), met) - finite(lse).unsqueeze(-1)).exp()
    d_weights, of_values = _weight_gradients(met, weights, v, d_out)
    even = (d_out * out).sum(-1) - d_lse  # the weight gradient that leaves its score alone
    d_scores = weights * (d_weights - even.unsqueeze(-1))
    d_q, d_k, *learned = torch.autograd.grad(
        scores, [q, k, *met.learned], d_scores, allow_unused=True
    )
    d_v = _stacked(weights, v).transpose(-1, -2) @ _stacked(d_out, v)
    return Gradients(d_q, d_k, d_v, [_sum(*pair) for pair in zip(learned, of_values, strict=True)])


def _scores(met: Meeting, q: Tensor, k: Tensor) -> Tensor:
    bias = met.rules.bias
    content = q if bias is None else bias.content_query(q)
    return finish_scores(_products(content, k), q, *met.positions, met.rules)


def _hide(scores: Tensor, met: Meeting) -> Tensor:
    return scores if met.visible is None else scores.masked_fill(~met.visible, -torch.inf)


def _weight_gradients(
    met: Meeting, weights: Tensor, v: Tensor, d_out: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the gradient of the weights, and of the parameters that made values of them."""
    d_weights, bias = _products(d_out, v), met.rules.bias
    if bias is None or not bias.adds_values:
        return d_weights, [None] * len(met.learned)
    with torch.enable_grad():
        leaf = weights.detach().requires_grad_()
        gained = bias.values(leaf, *met.positions)
    d_leaf, *learned = torch.autograd.grad(gained, [leaf, *met.learned], d_out, allow_unused=True)
    return d_weights + d_leaf, list(learned)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Returns q·k, [B, H, t, s]."""
    return (_stacked(q, k) @ k.transpose(-1, -2)).view(*q.shape[:3], k.shape[2])


def _stacked(x: Tensor, k: Tensor) -> Tensor:
    """Returns [B, H, t, …] as [B, K, (H/K)·t, …]: a key head's queries under one another."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])
