"""One layer's keys and values in fixed buffers, written in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Buffers:
    """What one layer remembers, slot by slot."""

    raw: Tensor
    """[B, K, C, D] keys as they came, never turned."""
    turned: Tensor | None
    """[B, K, C, D] keys as queries meet them; None where they are turned afresh or never."""
    values: Tensor
    """[B, K, C, Dv]"""

    @staticmethod
    def like(k: Tensor, v: Tensor, capacity: int, turns: bool) -> Buffers:
        """Returns empty buffers for keys and values like these.

        Args:
            k, v: [B, K, T, D] and [B, K, T, Dv].
            capacity: slots, C.
            turns: keys are also kept turned.
        """

        def empty(x: Tensor) -> Tensor:
            return x.new_zeros((*x.shape[:2], capacity, x.shape[3]))

        return Buffers(empty(k), empty(k) if turns else None, empty(v))

    @property
    def keys(self) -> Tensor:
        """What is met by queries: turned keys where there are some."""
        return self.raw if self.turned is None else self.turned

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the first slots."""
        if count == self.capacity:
            return self.keys, self.values
        return self.keys[:, :, :count], self.values[:, :, :count]

    @property
    def capacity(self) -> int:
        """C, slots."""
        return self.raw.shape[2]

    def grow(self, capacity: int) -> None:
        """Makes room for more slots; the stored rows stay where they are."""
        for name in ("raw", "turned", "values"):
            old: Tensor | None = getattr(self, name)
            if old is not None:
                new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
                new[:, :, : old.shape[2]] = old
                setattr(self, name, new)

    def write(self, slots: Tensor, kept: Tensor | None, k: Tensor, turned: Tensor, v: Tensor):
        """Stores new rows.

        Args:
            slots: [R, T] int64.
            kept: [R, T] bool, which tokens are stored; None for all.
            k, turned: [B, K, T, D], raw and turned.
            v: [B, K, T, Dv].
        """
        pairs = [(self.raw, k), (self.values, v)]
        if self.turned is not None:
            pairs.append((self.turned, turned))
        if len(slots) == 1:
            where = slots[0] if kept is None else slots[0][kept[0]]
            for buffer, rows in pairs:
                buffer.index_copy_(2, where, rows if kept is None else rows[:, :, kept[0]])
            return
        kept = torch.ones_like(slots, dtype=torch.bool) if kept is None else kept
        row, token = kept.nonzero(as_tuple=True)
        where = slots[row, token]
        for buffer, rows in pairs:
            buffer[row, :, where] = rows[row, :, token]
