"""The rotation of one layer's q and k on a GPU, beside copying them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rotate import RotationTable, apply_rotation, rotation_table
from longspan.rotary.turn import Impl
from peers import DTYPES
from timing import Call

HEADS, KV_HEADS, DIM, THETA = 32, 8, 128, 10_000
IMPLS: tuple[Impl, ...] = ("eager", "compiled")


class Rotations:
    """q [1, 32, N, 128], k [1, 8, N, 128] and a ready table."""

    def __init__(self, tokens: int, dtype: str, device: str) -> None:
        random = torch.Generator(device).manual_seed(0)
        shapes = ((1, heads, tokens, DIM) for heads in (HEADS, KV_HEADS))
        drawn = (torch.randn(shape, generator=random, device=device) for shape in shapes)
        self.q, self.k = (x.to(DTYPES[dtype]) for x in drawn)
        self.positions = torch.arange(tokens, device=device)
        self.table = self.table_of(torch.float32)

    def table_of(self, dtype: torch.dtype) -> RotationTable:
        """Returns cos and sin of every position."""
        inv_freq = rope_frequencies(DIM, THETA).to(self.positions.device)
        return rotation_table(self.positions, inv_freq, dtype=dtype)

    def calls(self) -> dict[str, Call]:
        """Returns the copy, then both implementations."""
        turns: dict[str, Call] = {f"longspan {by}": partial(self.turn, by) for by in IMPLS}
        return {"clone": self.clone, **turns}

    def clone(self) -> tuple[Tensor, Tensor]:
        """Copies q and k: the least that a rotation must do."""
        return self.q.clone(), self.k.clone()

    def turn(self, impl: Impl) -> tuple[Tensor, ...]:
        """Rotates q and k."""
        return tuple(apply_rotation(x, self.table, "half", impl) for x in (self.q, self.k))

    def error(self, impl: Impl) -> float:
        """Returns the largest |difference| from the float64 rotation of q, relative."""
        exact = apply_rotation(self.q.double(), self.table_of(torch.float64), "half", "eager")
        return ((self.turn(impl)[0].double() - exact).abs().max() / exact.abs().max()).item()
