"""Tensors of all ranks side by side, with gradients that find their way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def from_all(own: Tensor, group: Any) -> list[Tensor]:
    """Returns a tensor of every rank, in order."""
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return parts


def gathered(key: Tensor, value: Tensor, group: Any = None) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of all ranks in order of rank, [B, K, N, D] and [B, K, N, Dv].

    In the backward pass each rank gets the sum of the gradients that all have for its own.

    Args:
        key, value: this rank's, [B, K, T, D] and [B, K, T, Dv], with N = size · T.
        group: of torch.distributed; all processes unless given.
    """
    both: Any = _Gathered.apply(group, torch.cat((key, value), dim=-1))
    return both.split((key.shape[-1], value.shape[-1]), dim=-1)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, own: Tensor) -> Tensor:
        ctx.group = group
        return torch.cat(from_all(own, group), dim=2)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator)
        ctx: Any, *grads: Any
    ) -> tuple[None, Tensor]:
        (grad,) = grads
        parts = [part.contiguous() for part in grad.chunk(dist.get_world_size(ctx.group), dim=2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return None, own
