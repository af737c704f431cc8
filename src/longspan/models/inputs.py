"""Positions added to the embeddings: sinusoids, or a learned vector each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longspan.bias.base import check_count, initial
from longspan.bias.transformer_xl import sinusoid
from longspan.errors import ConfigError


class SinusoidalPositions(nn.Module):
    """Sines then cosines of the position, divided by √hidden_size.

    Vaswani et al. multiply the embeddings by √hidden_size instead. Layers that normalise their
    input cannot tell the two apart, and this leaves the embeddings alike under every encoding.

    Args:
        hidden_size: channels, even.

    Source: Vaswani et al. 2017 (arXiv:1706.03762) §3.4 and 3.5.

    >>> SinusoidalPositions(4)(torch.tensor([0]))
    tensor([[0.0000, 0.0000, 0.5000, 0.5000]])
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        check_count("hidden_size", hidden_size)
        if hidden_size % 2:
            raise ConfigError(f"hidden_size must be even for sinusoids, got {hidden_size}.")
        self.hidden_size = hidden_size

    def forward(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns [T, hidden_size] or [B, T, hidden_size] for int64 positions [T] or [B, T]."""
        return (sinusoid(positions, self.hidden_size) * self.hidden_size**-0.5).to(dtype)


class LearnedPositions(nn.Module):
    """A learned vector for each of the trained positions; there are no others.

    Args:
        max_position_embeddings: positions that have a vector.
        hidden_size: channels.

    Source: Gehring et al. 2017 (arXiv:1705.03122) §3.1.
    """

    def __init__(self, max_position_embeddings: int, hidden_size: int) -> None:
        super().__init__()
        check_count("max_position_embeddings", max_position_embeddings)
        self.table = initial(max_position_embeddings, hidden_size)

    def forward(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns [T, hidden_size] or [B, T, hidden_size] for int64 positions [T] or [B, T].

        Raises:
            ConfigError: for a position that was never trained.
        """
        last = len(self.table) - 1
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) <= last:
            raise ConfigError(
                f"learned positions end at {last}, got {int(positions.min())} to "
                f"{int(positions.max())}. They cannot reach further; train another encoding."
            )
        return self.table[positions].to(dtype)
