"""Where a token is stored: the first S in slots of their own, the last W in a ring after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import ConfigError


@dataclass(frozen=True)
class Slots:
    """The layout of a cache of S sink tokens and the last W others.

    Attributes:
        num_sink_tokens: S, first tokens that are never dropped.
        sliding_window: W, the last tokens kept, the newest included; None keeps all.
    """

    num_sink_tokens: int
    sliding_window: int | None

    def __post_init__(self) -> None:
        _check("num_sink_tokens", self.num_sink_tokens, 0)
        if self.sliding_window is not None:
            _check("sliding_window", self.sliding_window, 1)

    @property
    def capacity(self) -> int | None:
        """Slots at most, S + W; None where nothing is dropped."""
        window = self.sliding_window
        return None if window is None else self.num_sink_tokens + window

    def of(self, positions: Tensor) -> Tensor:
        """Returns the slot of each position, of the same shape.

        >>> Slots(2, 3).of(torch.arange(9))
        tensor([0, 1, 2, 3, 4, 2, 3, 4, 2])
        """
        sinks, window = self.num_sink_tokens, self.sliding_window
        if window is None:
            return positions
        return torch.where(positions < sinks, positions, sinks + (positions - sinks) % window)

    def positions(self, last: Tensor, count: int) -> Tensor:
        """Returns the position stored in each of the first slots, −1 for an empty one.

        Args:
            last: [R] int64, the newest position of each row.
            count: slots.

        Returns:
            [R, count] int64.

        >>> Slots(2, 3).positions(torch.tensor([0, 7]), 5)
        tensor([[ 0, -1, -1, -1, -1],
                [ 0,  1,  5,  6,  7]])
        """
        slot = torch.arange(count, device=last.device)
        newest = last.unsqueeze(-1)
        if self.sliding_window is None:
            return torch.where(slot <= newest, slot, -1)
        stored = newest - (newest - slot) % self.sliding_window
        stored = torch.where(slot < self.num_sink_tokens, slot, stored)
        return torch.where((stored <= newest) & (stored >= slot), stored, -1)

    def kept(self, positions: Tensor, last: Tensor) -> Tensor:
        """Returns which positions are still stored once `last` is, bool of their shape [R, T]."""
        there = positions >= 0
        if self.sliding_window is None:
            return there
        recent = positions > (last - self.sliding_window).unsqueeze(-1)
        return there & (recent | (positions < self.num_sink_tokens))

    def saturated(self, positions: Tensor) -> Tensor:
        """Returns each position as counted within the cache: it stops at S + W − 1.

        That is where the distance to a sink stops growing.

        Source: Xiao et al. 2023 (arXiv:2309.17453) §3.2.

        >>> Slots(4, 8).saturated(torch.tensor([3, 11, 12, 99]))
        tensor([ 3, 11, 11, 11])
        """
        return positions if self.capacity is None else positions.clamp_max(self.capacity - 1)


def _check(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of tokens ≥ {least}, got {value!r}.")
