"""How each tile of queries meets each stretch of keys, from spans of positions alone."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.visibility import Grid, Visibility
from longspan.bias.base import Bias


class Kind(IntEnum):
    """How a tile of queries meets a stretch of keys."""

    HIDDEN = 0
    """Not at all."""
    PARTLY = 1
    """Some pairs are hidden: a mask is needed."""
    WHOLE = 2
    """All pairs are visible."""
    BEFORE = 3
    """All are visible, and so far before the queries that the bias is row + key."""
    AFTER = 4
    """The same, after the queries."""


class Stretch(NamedTuple):
    """Neighbouring keys that a tile meets in one way."""

    kind: Kind
    start: int
    stop: int


class Kinds:
    """Looks at blocks of keys first, then at the few keys of blocks that are partly hidden.

    Args:
        seen: who sees whom.
        bias: one that may be taken as row + key where it is far enough away.
        queries: of a tile.
        block: keys of a block, a multiple of `fine`.
        fine: keys of the second look.
    """

    def __init__(
        self, seen: Visibility, bias: Bias | None, queries: int, block: int, fine: int
    ) -> None:
        self.rough, self.fine = seen.grid(queries, block), seen.grid(queries, fine)
        self.block, self.step = block, fine
        self.far = None if bias is None else bias.far
        self.keys = seen.shape[1]
        self.batch, self.blocks = self.rough.k.low.shape
        self.tiles = self.rough.q.low.shape[1]

    def of(self, tiles: Tensor) -> Tensor:
        """Returns the kind of some tiles, [n], with every block: [n, blocks] int8."""
        blocks = torch.arange(self.blocks, device=tiles.device).unsqueeze(0)
        return self._look(self.rough, tiles.unsqueeze(-1), blocks)

    def stretches(self, kinds: Tensor, tiles: Tensor) -> list[list[Stretch]]:
        """Returns the stretches of each tile that are not hidden, in order of keys.

        Args:
            kinds: [n, blocks], of these tiles, or less where blocks were taken out.
            tiles: [n].
        """
        found: list[list[Stretch]] = [[] for _ in range(len(kinds))]
        second_look = self._partly(kinds, tiles)
        for row, kind, start, end in _runs(kinds):
            if kind != Kind.PARTLY:
                _append(found[row], kind, start * self.block, min(end * self.block, self.keys))
                continue
            for _ in range(start, end):
                for stretch in next(second_look):
                    _append(found[row], *stretch)
        return found

    def _partly(self, kinds: Tensor, tiles: Tensor) -> Iterator[list[Stretch]]:
        """Yields the stretches of each partly hidden block, tile after tile."""
        rows, blocks = (kinds == Kind.PARTLY).nonzero().T
        steps = self.block // self.step
        inside = blocks.unsqueeze(-1) * steps + torch.arange(steps, device=kinds.device)
        inside = inside.clamp_max(self.fine.k.low.shape[1] - 1)
        looked = self._look(self.fine, tiles[rows].unsqueeze(-1), inside)
        found: list[list[Stretch]] = [[] for _ in range(len(looked))]
        firsts = (blocks * self.block).tolist()
        for cell, kind, start, end in _runs(looked):
            first, stop = firsts[cell] + start * self.step, firsts[cell] + end * self.step
            if first < self.keys:
                found[cell].append(Stretch(kind, first, min(stop, self.keys)))
        yield from found

    def _look(self, grid: Grid, tiles: Tensor, blocks: Tensor) -> Tensor:
        found = grid.coverage(tiles, blocks)
        kinds = torch.where(found.all, int(Kind.WHOLE), int(Kind.PARTLY))
        kinds = torch.where(found.some, kinds, int(Kind.HIDDEN)).to(torch.int8)
        if self.far is not None:
            before, after = grid.apart(tiles, blocks)
            kinds[found.all & (after >= self.far)] = int(Kind.AFTER)
            kinds[found.all & (before >= self.far)] = int(Kind.BEFORE)
        return kinds


def _runs(kinds: Tensor) -> Iterator[tuple[int, Kind, int, int]]:
    """Yields row, kind, first and end column of each run of one kind, hidden ones left out."""
    begins = torch.ones_like(kinds, dtype=torch.bool)
    begins[:, 1:] = kinds[:, 1:] != kinds[:, :-1]
    rows, starts = begins.nonzero().T.tolist()
    values = kinds[begins].tolist()
    for row, value, start, end in zip(rows, values, starts, [*starts[1:], 0], strict=True):
        if value != Kind.HIDDEN:  # the next row begins at column 0 again
            yield row, Kind(value), start, end if end > start else kinds.shape[1]


def _append(stretches: list[Stretch], kind: Kind, start: int, stop: int) -> None:
    """Adds a stretch, joined to the last one where it goes on."""
    if stretches and stretches[-1].kind == kind and stretches[-1].stop == start:
        start = stretches.pop().start
    stretches.append(Stretch(kind, start, stop))
