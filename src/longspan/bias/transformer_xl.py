"""Transformer-XL: the query meets a projected sinusoid of the distance, with two learned biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longspan.bias.base import Bias, check_count, columns, distances, initial
from longspan.errors import ConfigError


class TransformerXLBias(Bias):
    """Scores (q + u)·k + (q + v)·W_kR R_{q − k}, all inside 1/√d.

    Args:
        num_heads: query heads.
        head_dim: channels of a head.
        hidden_size: channels of the sinusoid R, even; num_heads·head_dim by default.
        u, v: [H, D] each, one pair for all layers: give a first layer's to the others.

    Source: Dai et al. 2019 (arXiv:1901.02860) §3.3.

    >>> TransformerXLBias(num_heads=2, head_dim=4).u.shape
    torch.Size([2, 4])
    """

    inside_scale = True
    reads_query = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int | None = None,
        u: nn.Parameter | None = None,
        v: nn.Parameter | None = None,
    ) -> None:
        super().__init__(num_heads)
        check_count("head_dim", head_dim)
        self.hidden_size = num_heads * head_dim if hidden_size is None else hidden_size
        check_count("hidden_size", self.hidden_size)
        if self.hidden_size % 2:
            raise ConfigError(
                f"hidden_size must be even, a sine and a cosine each, got {self.hidden_size}."
            )
        self.head_dim = head_dim
        self.u = initial(num_heads, head_dim) if u is None else u
        self.v = initial(num_heads, head_dim) if v is None else v
        self.key_relative = nn.Linear(self.hidden_size, num_heads * head_dim, bias=False)

    def content_query(self, q: Tensor) -> Tensor:
        """Returns q + u."""
        return q + self.u.to(q.dtype)[:, None]

    def scores(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns (q + v)·W_kR R_{q − k}, [B, H, T, S]; see `Bias.scores`."""
        met, index = distinct(distances(q_pos, k_pos))
        sinusoids = sinusoid(met, self.hidden_size).to(q.dtype)
        projected = sinusoids @ self.key_relative.weight.to(q.dtype).T  # [R, H·D]
        keys = projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(0, 1)
        by_distance = (q + self.v.to(q.dtype)[:, None]) @ keys.transpose(-1, -2)  # [B, H, T, R]
        return columns(by_distance, index)

    def extra_repr(self) -> str:
        """Shows the sinusoid's width."""
        return f"num_heads={self.num_heads}, hidden_size={self.hidden_size}"


def distinct(away: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distances that occur in a tile and, for each pair, the index of its own.

    This is the relative shift: each row meets a vector a distance once, then pairs look it up.
    Neighbouring positions share nearly all distances, [T + S − 1] of them.

    Args:
        away: [T, S] or [B, T, S] int64, from `distances`.

    Returns:
        [R] and an index of the shape of `away`.

    >>> distinct(torch.tensor([[2, 1, 0], [3, 2, 1]]))[0]
    tensor([0, 1, 2, 3])
    """
    nearest, farthest = int(away.min()), int(away.max())
    if farthest - nearest < 2 * sum(away.shape[-2:]):
        return torch.arange(nearest, farthest + 1, device=away.device), away - nearest
    met, index = away.unique(return_inverse=True)
    return met, index


def sinusoid(positions: Tensor, hidden_size: int) -> Tensor:
    """Returns sines then cosines of position / 10000^(2i / hidden_size), [R, hidden_size] float64.

    Source: Dai et al. 2019 (arXiv:1901.02860), code; Vaswani et al. 2017 §3.5 interleaves them.

    >>> sinusoid(torch.tensor([1]), 2)
    tensor([[0.8415, 0.5403]], dtype=torch.float64)
    """
    exponents = torch.arange(0, hidden_size, 2, dtype=torch.float64) / hidden_size
    frequencies = (10_000.0**-exponents).to(positions.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
