"""The tokens of one forward: where they stand in their texts, and in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longspan.attention import Visibility
from longspan.caches.slots import Slots
from longspan.masks import Mask, causal, sliding_window


@dataclass(eq=False)
class Step:
    """New tokens, and all that follows from their positions alone: the same for every layer.

    R is 1 where all rows of the batch are equally long, else B.
    """

    slots: Slots
    positions: Tensor
    """[R, T] int64, each in its own row's text; −1 for an absent token (padding)."""
    before: Tensor
    """[R] int64: tokens each row had seen."""
    base: int
    """Where positions of turned keys are counted from."""
    count: int
    """Slots in use once the step is stored, C; all of them where the cache is bounded."""
    padded: bool = False
    """True where some token is absent."""
    full: bool = False
    """True where every slot is known to hold a token."""
    sinks_moved: bool = False
    """True where the sinks of all layers stand already where a single token needs them."""
    tables: dict[Any, Any] = field(default_factory=dict)
    """Rotation tables that one layer made and the next one need not."""

    @property
    def tokens(self) -> int:
        """T, absent ones counted."""
        return self.positions.shape[1]

    @property
    def single(self) -> bool:
        """True for one token in every row: a decoder's step."""
        return self.tokens == 1 and not self.padded

    @cached_property
    def last(self) -> Tensor:
        """[R] the newest position of each row, −1 where it has seen nothing."""
        return self.before + (self.positions >= 0).sum(-1) - 1

    @cached_property
    def at(self) -> Tensor:
        """[R, T] where tokens are turned to; anything for absent ones."""
        return (
            self.positions.clamp_min(self.base) - self.base
            if self.padded
            else (self.positions - self.base)
        )

    @cached_property
    def within(self) -> Tensor:
        """[R, T] positions as counted within the cache."""
        return self.slots.saturated(self.positions)

    @cached_property
    def where(self) -> Tensor:
        """[R, T] the slots of the new tokens."""
        return self.slots.of(self.positions)

    @cached_property
    def kept(self) -> Tensor | None:
        """[R, T] bool, which of the new tokens are stored; None where all are."""
        window = self.slots.sliding_window
        if not self.padded and (window is None or self.tokens <= window):
            return None
        return self.slots.kept(self.positions, self.last)

    @cached_property
    def sinks_at(self) -> Tensor:
        """[R, S] where a single token needs the sinks turned to: at their distance in the cache."""
        sinks = torch.arange(self.slots.num_sink_tokens, device=self.positions.device)
        return self.positions - self.within + sinks - self.base

    @cached_property
    def places(self) -> Tensor:
        """[R, C] the position of every slot as a single token counts it, −1 for an empty one."""
        stored = self.slots.positions(self.last, self.count)
        slot = torch.arange(self.count, device=stored.device)
        moves = (stored >= 0) & (slot >= self.slots.num_sink_tokens)
        return torch.where(moves, stored - (self.positions - self.within), stored)

    @cached_property
    def filled(self) -> Tensor | None:
        """[R, 1, 1, C] which slots hold a token; None where all do."""
        if self.full:
            return None
        slot = torch.arange(self.count, device=self.positions.device)
        return (slot <= self.last.unsqueeze(-1))[:, None, None]

    @cached_property
    def from_one(self) -> Visibility:
        """What a single token sees of the slots."""
        return _laid(causal(), self.within, self.places)

    @cached_property
    def old(self) -> tuple[Tensor | None, Tensor]:
        """The slots after the sinks' in order of position, [W], and their positions [R, W].

        The order is None, that of storage, where rows differ in length or nothing is dropped.
        """
        sinks, window = self.slots.num_sink_tokens, self.slots.sliding_window
        before, device = self.before - 1, self.positions.device
        if window is None:
            return None, self.slots.positions(before, self.count - self.tokens)
        stored = self.slots.positions(before, sinks + window)[:, sinks:]
        if len(stored) > 1:
            return None, stored
        oldest = (self.before - sinks).clamp_min(0) % window
        order = (oldest + torch.arange(window, device=device)) % window
        return order + sinks, stored[:, order]

    @cached_property
    def from_window(self) -> Visibility:
        """What the new tokens see of the window before them and of themselves."""
        sinks, window = self.slots.num_sink_tokens, self.slots.sliding_window
        new = torch.where(self.positions < sinks, -1, self.positions)
        mask = causal() if window is None else sliding_window(window)
        return _laid(mask, self.positions, torch.cat((self.old[1], new), dim=1))

    @cached_property
    def from_sinks(self) -> Visibility:
        """What the new tokens see of the sinks, themselves among them, counted in the cache."""
        stored = self.slots.positions(self.last, self.slots.num_sink_tokens)
        return _laid(causal(), self.within, stored)

    def part(self, start: int, stop: int) -> Step:
        """Returns the step of some of its tokens, once those before them are seen."""
        seen = (self.positions[:, :start] >= 0).sum(-1)
        return Step(
            self.slots,
            self.positions[:, start:stop],
            self.before + seen,
            self.base,
            self.count - (self.tokens - stop) if self.slots.capacity is None else self.count,
            padded=self.padded,
        )


def positions_after(before: Tensor, tokens: int, present: Tensor | None) -> Tensor:
    """Returns the positions of new tokens, [R, T], −1 for absent ones.

    Args:
        before: [R] int64, tokens each row has seen.
        tokens: T.
        present: [B, T] bool, False at padding; None where all are there.

    >>> positions_after(torch.tensor([5]), 2, None)
    tensor([[5, 6]])
    >>> positions_after(torch.tensor([5, 0]), 2, torch.tensor([[True, True], [False, True]]))
    tensor([[ 5,  6],
            [-1,  0]])
    """
    if present is None:
        return before.unsqueeze(-1) + torch.arange(tokens, device=before.device)
    at = before.unsqueeze(-1) + present.cumsum(-1) - 1
    return torch.where(present, at, -1)


def _laid(mask: Mask, q_pos: Tensor, k_pos: Tensor) -> Visibility:
    sizes = max(len(q_pos), len(k_pos)), q_pos.shape[1], k_pos.shape[1]
    return Visibility.of(mask, sizes, q_pos=q_pos, k_pos=k_pos)
