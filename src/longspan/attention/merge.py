"""Joins attention over disjoint sets of keys into attention over all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one softmax over two disjoint sets of keys, from the softmax over each.

    Differentiable, also in the log-sum-exps; a row empty on one side is the other's.

    Args:
        out, other_out: [B, H, T, D].
        lse, other_lse: [B, H, T], natural logarithms, −inf for an empty row.

    Returns:
        out [B, H, T, D] in the log-sum-exps' dtype, and its lse [B, H, T].

    Source: Dao et al. 2022 (arXiv:2205.14135) §3.1.

    >>> ones, lse = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1)
    >>> merge(ones, lse, 4 * ones, lse + torch.tensor(2.0).log())
    (tensor([[[[3.]]]]), tensor([[[1.0986]]]))
    """
    top = torch.maximum(lse, other_lse).detach()
    top = torch.where(top == -torch.inf, 0.0, top)
    weight, other_weight = (lse - top).exp(), (other_lse - top).exp()
    total = weight + other_weight
    empty = total == 0
    total = torch.where(empty, 1.0, total)  # before the division and the logarithm
    joined = (weight / total).unsqueeze(-1) * out + (other_weight / total).unsqueeze(-1) * other_out
    return joined, torch.where(empty, -torch.inf, total.log() + top)
