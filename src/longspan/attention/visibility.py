"""Who sees whom, by storage index: the mask at given positions, documents and absent slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.errors import ShapeError
from longspan.masks import Coverage, Mask, Span

FARTHEST = torch.iinfo(torch.int64).max


class Run(NamedTuple):
    """Neighbouring keys, by storage index."""

    start: int
    stop: int
    whole: bool = False
    """True where every query of the tile sees every key of the run."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """A mask laid over stored queries and keys; many calls may share one.

    Positions and documents are [1, …] where all rows of the batch share them, else [B, …].
    """

    mask: Mask | None
    q_pos: Tensor
    k_pos: Tensor
    q_doc: Tensor | None
    k_doc: Tensor | None
    first: tuple[int, int] | None
    """The first query's and key's position where both are consecutive and shared, else None."""
    found: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What one call worked out and the next one need not."""

    @staticmethod
    def of(
        mask: Mask | None,
        sizes: tuple[int, int, int],
        *,
        q_pos: Tensor | None = None,
        k_pos: Tensor | None = None,
        q_doc: Tensor | None = None,
        k_doc: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Visibility:
        """Returns the mask over the given positions, by default aligned bottom-right.

        Args:
            mask: who sees whom; None lets all see all.
            sizes: B, T and S.
            q_pos, k_pos, q_doc, k_doc: as `attend` takes them.
            device: of positions that are not given.

        Raises:
            ShapeError: for positions or documents of another shape or dtype, or documents of
                only one side.
        """
        batch, queries, keys = sizes
        if k_doc is None and queries == keys:
            k_doc = q_doc
        if (q_doc is None) != (k_doc is None):
            raise ShapeError("q_doc and k_doc go together: give both, or neither.")
        bottom_right = torch.arange(keys - queries, keys, device=device)
        in_storage = torch.arange(keys, device=device)
        q_rows = _rows("q_pos", bottom_right if q_pos is None else q_pos, batch, queries)
        k_rows = _rows("k_pos", in_storage if k_pos is None else k_pos, batch, keys)
        return Visibility(
            mask,
            q_rows,
            k_rows,
            None if q_doc is None else _rows("q_doc", q_doc, batch, queries),
            None if k_doc is None else _rows("k_doc", k_doc, batch, keys),
            _first(q_rows, k_rows),
        )

    @cached_property
    def hides(self) -> bool:
        """True where some pair may be hidden."""
        if self.q_doc is not None or bool((self.k_pos < 0).any()):
            return True
        if self.mask is None or self.first is None:
            return self.mask is not None
        spans = zip(self.first, self.shape, strict=True)
        q_span, k_span = ((first, first + count - 1) for first, count in spans)
        return self.mask.tile(q_span, k_span) != "all"

    @property
    def shape(self) -> tuple[int, int]:
        """T and S."""
        return self.q_pos.shape[-1], self.k_pos.shape[-1]

    def everything(self) -> Tensor:
        """Returns who sees whom, all T·S pairs: [1 or B, 1, T, S]. For the specification."""
        queries, keys = self.shape
        return self.tile(slice(0, queries), [Run(0, keys)])

    def tile(self, rows: slice, runs: Sequence[Run]) -> Tensor:
        """Returns who sees whom in a tile, bool [1 or B, 1, t, s]; whole runs are not looked at."""
        pieces = [self._piece(rows, run) for run in runs]
        batch = max(piece.shape[0] for piece in pieces)
        return torch.cat([piece.expand(batch, -1, -1) for piece in pieces], dim=-1).unsqueeze(1)

    def _piece(self, rows: slice, run: Run) -> Tensor:
        q_pos, k_pos = self.q_pos[:, rows], self.k_pos[:, run.start : run.stop]
        shape = (max(len(q_pos), len(k_pos)), q_pos.shape[1], k_pos.shape[1])
        if run.whole:
            return q_pos.new_ones((1, 1, 1), dtype=torch.bool).expand(shape)
        visible = (k_pos >= 0).unsqueeze(-2)
        if self.mask is not None:
            visible = visible & self.mask(q_pos, k_pos)
        if self.q_doc is not None and self.k_doc is not None:
            keys = self.k_doc[:, None, run.start : run.stop]
            visible = visible & (self.q_doc[:, rows, None] == keys)
        return visible.expand(max(shape[0], len(visible)), *shape[1:])

    def positions(self, rows: slice, runs: Sequence[Run]) -> tuple[Tensor, Tensor]:
        """Returns the positions of a tile's queries and keys, [t] and [s], or [B, …]."""
        q_pos = self.q_pos[:, rows]
        k_pos = torch.cat([self.k_pos[:, run.start : run.stop] for run in runs], dim=1)
        return _shared(q_pos), _shared(k_pos)

    def likeness(
        self, rows: slice, runs: Sequence[Run], with_whole: bool
    ) -> tuple[tuple[int, ...], ...] | None:
        """Returns what two tiles share that hide the same pairs; None where that is not known.

        Args:
            rows: the queries of a tile.
            runs: its keys.
            with_whole: the distances to keys that are wholly visible count too.
        """
        if self.first is None or self.q_doc is not None:
            return None
        q_first, k_first = self.first[0] + rows.start, self.first[1]
        hiding = [k_first + run.start for run in runs if not run.whole]
        relative_from = 0 if self.mask is None else self.mask.relative_from
        if relative_from is None or (hiding and min(hiding) < relative_from):
            return None
        size = (rows.stop - rows.start,)
        return size, *(
            (run.stop - run.start, int(run.whole))
            + ((k_first + run.start - q_first,) if with_whole or not run.whole else ())
            for run in runs
        )

    def grid(self, query_tile: int, key_block: int) -> Grid:
        """Returns the spans of all tiles of queries and blocks of keys."""
        q_doc = None if self.q_doc is None else _span(self.q_doc, query_tile)
        k_doc = None if self.k_doc is None else _span(self.k_doc, key_block)
        if self.first is not None and self.first[1] >= 0:
            q = _consecutive(self.first[0], self.q_pos, query_tile)
            k = _consecutive(self.first[1], self.k_pos, key_block)
            return Grid(self.mask, q, k, torch.ones_like(k.low, dtype=torch.bool), q_doc, k_doc)
        present = self.k_pos >= 0
        k = Span(
            _blocks(torch.where(present, self.k_pos, FARTHEST), key_block).amin(-1),
            _blocks(torch.where(present, self.k_pos, -1), key_block).amax(-1),
        )
        all_present = _blocks(present, key_block).all(-1)
        return Grid(self.mask, _span(self.q_pos, query_tile), k, all_present, q_doc, k_doc)


class Grid(NamedTuple):
    """The spans of n tiles of queries and m blocks of keys, [1 or B, n] and [1 or B, m]."""

    mask: Mask | None
    q: Span
    k: Span
    present: Tensor
    """True where no key of the block is absent."""
    q_doc: Span | None
    k_doc: Span | None

    def coverage(self, tiles: Tensor, blocks: Tensor) -> Coverage:
        """Returns what is known of some tiles of queries with some blocks of keys, broadcast.

        Args:
            tiles, blocks: their indices, of as many dimensions, broadcast together.
        """
        q, k = _of(self.q, tiles), _of(self.k, blocks)
        some, whole = k.high >= 0, self.present[:, blocks]
        if self.mask is not None:
            found = self.mask.coverage(q, k)
            some, whole = some & found.some, whole & found.all
        if self.q_doc is not None and self.k_doc is not None:
            q, k = _of(self.q_doc, tiles), _of(self.k_doc, blocks)
            some = some & (q.low <= k.high) & (k.low <= q.high)
            whole = whole & (q.low == k.high) & (k.low == q.high)
        shape = torch.broadcast_shapes(tiles.shape, blocks.shape)
        return Coverage(some.any(0).expand(shape), (whole & some).all(0).expand(shape))

    def apart(self, tiles: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how far blocks are before tiles and after them at least, in positions."""
        q, k = _of(self.q, tiles), _of(self.k, blocks)
        return (q.low - k.high).amin(0), (k.low - q.high).amin(0)


def _of(span: Span, at: Tensor) -> Span:
    return Span(span.low[:, at], span.high[:, at])


def _blocks(rows: Tensor, size: int) -> Tensor:
    """Returns [B, N] cut in blocks, [B, n, size]; the last is filled up with the last element."""
    missing = -rows.shape[1] % size
    if missing:
        rows = torch.cat((rows, rows[:, -1:].expand(-1, missing)), dim=1)
    return rows.unflatten(1, (-1, size))


def _span(rows: Tensor, size: int) -> Span:
    blocks = _blocks(rows, size)
    return Span(blocks.amin(-1), blocks.amax(-1))


def _consecutive(first: int, rows: Tensor, size: int) -> Span:
    """Returns the spans of positions that start at `first` and are consecutive."""
    length = rows.shape[1]
    low = torch.arange(first, first + length, size, device=rows.device).unsqueeze(0)
    return Span(low, (low + (size - 1)).clamp_max(first + length - 1))


def _rows(name: str, given: Tensor, batch: int, length: int) -> Tensor:
    if given.dtype != torch.int64:
        raise ShapeError(f"{name} must be int64, got {given.dtype}.")
    if tuple(given.shape) not in {(length,), (1, length), (batch, length)}:
        raise ShapeError(
            f"{name} must be [{length}] or [{batch}, {length}], a number a token, "
            f"got {tuple(given.shape)}."
        )
    return given if given.dim() == 2 else given.unsqueeze(0)


def _first(q_rows: Tensor, k_rows: Tensor) -> tuple[int, int] | None:
    for rows in (q_rows, k_rows):
        if len(rows) > 1 or not rows.shape[1] or not bool((rows.diff() == 1).all()):
            return None
    return int(q_rows[0, 0]), int(k_rows[0, 0])


def _shared(rows: Tensor) -> Tensor:
    return rows[0] if len(rows) == 1 else rows
