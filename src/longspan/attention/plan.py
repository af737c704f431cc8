"""Which keys each tile of queries meets, and how: the work left once hidden tiles are gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.visibility import Grid, Run, Visibility
from longspan.bias.base import Bias


class Kind(IntEnum):
    """How a tile of queries meets a run of keys."""

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


@dataclass(frozen=True)
class Sizes:
    """What is met at once; more is fewer calls, less is fewer hidden pairs computed."""

    queries: int = 192
    """Queries of a tile."""
    tiles: int = 4
    """Tiles that meet together the many keys they all see: kernels like many queries."""
    block: int = 32
    """Keys that are kept or skipped together."""
    dense: int = 1024
    """The most keys that meet a tile with a mask or a bias at once."""
    whole: int = 1024
    """Visible keys worth a call of their own, without a mask, where others need one."""


SIZES = Sizes()
GRID_CELLS = 1 << 18  # tiles × blocks looked at in one go: a few MB of bools


class Part(NamedTuple):
    """Queries and the keys they meet in one call."""

    rows: slice
    kind: Kind
    """PARTLY where any of its runs is; never HIDDEN."""
    runs: tuple[Run, ...]

    @property
    def splits(self) -> bool:
        """True where the bias is taken as row + key."""
        return self.kind in (Kind.BEFORE, Kind.AFTER)


class Group(NamedTuple):
    """Neighbouring tiles of queries and all they meet, each pair once."""

    rows: slice
    parts: tuple[Part, ...]


Stretch = tuple[Kind, int, int]
"""Neighbouring keys that are met in one way: kind, start and stop."""


def plan(seen: Visibility, bias: Bias | None, *, split: bool, sizes: Sizes) -> list[Group]:
    """Returns the groups of a call, in order of queries; one that sees nothing has no parts.

    Args:
        seen: who sees whom.
        bias: what is added to the scores, if anything.
        split: a bias may be taken as row + key, and parts without mask or bias may be of any size.
        sizes: of tiles and blocks.
    """
    queries, keys = seen.shape
    if not keys:
        return [Group(slice(0, queries), ())]
    grid = seen.grid(sizes.queries, sizes.block)
    all_rows = [*_cut(slice(0, queries), sizes.queries * sizes.tiles)]
    cells = sizes.tiles * -(-keys // sizes.block) * len(grid.k.low)
    at_once = max(1, GRID_CELLS // cells)
    groups: list[Group] = []
    for first in range(0, len(all_rows), at_once):
        tiles = slice(first * sizes.tiles, (first + at_once) * sizes.tiles)
        shared, own = _shared_and_own(_kinds(grid, tiles, bias, split), bias, split, sizes)
        together = _stretches(shared, sizes.block, keys)
        alone = _stretches(own.flatten(0, 1), sizes.block, keys)
        for at, rows in enumerate(all_rows[first : first + at_once]):
            parts = [*_parts(rows, together[at], bias, split, sizes)]
            for tile, some_rows in enumerate(_cut(rows, sizes.queries), at * sizes.tiles):
                parts += _parts(some_rows, alone[tile], bias, split, sizes)
            groups.append(Group(rows, tuple(parts)))
    return groups


def _kinds(grid: Grid, tiles: slice, bias: Bias | None, split: bool) -> Tensor:
    """Returns the Kind of each tile and block, [n, m] int8."""
    found = grid.coverage(tiles)
    kinds = torch.where(found.all, int(Kind.WHOLE), int(Kind.PARTLY))
    kinds = torch.where(found.some, kinds, int(Kind.HIDDEN)).to(torch.int8)
    if bias is None or bias.far is None or not split:
        return kinds
    q, k = grid.q, grid.k
    before = (q.low[:, tiles, None] - k.high[:, None] >= bias.far).all(0)
    after = (k.low[:, None] - q.high[:, tiles, None] >= bias.far).all(0)
    kinds[found.all & after] = int(Kind.AFTER)
    kinds[found.all & before] = int(Kind.BEFORE)
    return kinds


def _shared_and_own(
    kinds: Tensor, bias: Bias | None, split: bool, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Returns what the tiles of each group meet together, [g, m], and apart, [g, tiles, m]."""
    missing = -len(kinds) % sizes.tiles
    kinds = torch.cat((kinds, kinds[-1:].expand(missing, -1))).unflatten(0, (-1, sizes.tiles))
    least = Kind.WHOLE if bias is None else Kind.BEFORE  # kinds that need no tensor of all pairs
    same = (kinds == kinds[:, :1]).all(1) & (kinds[:, 0] >= least)
    many = same.sum(1, keepdim=True) * sizes.block >= sizes.whole
    same &= many & split
    return kinds[:, 0] * same, kinds * ~same.unsqueeze(1)


def _stretches(kinds: Tensor, block: int, keys: int) -> list[list[Stretch]]:
    """Returns for each row of kinds, [n, m], its stretches of one kind, hidden ones left out."""
    begins = torch.ones_like(kinds, dtype=torch.bool)
    begins[:, 1:] = kinds[:, 1:] != kinds[:, :-1]
    rows, starts = begins.nonzero().T.tolist()
    stretches: list[list[Stretch]] = [[] for _ in range(len(kinds))]
    for row, kind, start, end in zip(
        rows, kinds[begins].tolist(), starts, [*starts[1:], 0], strict=True
    ):
        if kind != Kind.HIDDEN:
            stop = end * block if end > start else keys  # the next row begins at block 0 again
            stretches[row].append((Kind(kind), start * block, min(stop, keys)))
    return stretches


def _parts(
    rows: slice, stretches: Sequence[Stretch], bias: Bias | None, split: bool, sizes: Sizes
) -> Iterator[Part]:
    """Yields the parts of a tile: far ones, an unmasked one if it is long, and the rest."""
    for kind in (Kind.BEFORE, Kind.AFTER):
        far = [Run(start, stop, True) for k, start, stop in stretches if k == kind]
        if far:
            yield Part(rows, kind, tuple(far))
    near = [Run(start, stop, k == Kind.WHOLE) for k, start, stop in stretches if k <= Kind.WHOLE]
    whole = [run for run in near if run.whole]
    if split and bias is None and whole:
        alone = len(whole) == len(near)
        if alone or sum(run.stop - run.start for run in whole) >= sizes.whole:
            yield Part(rows, Kind.WHOLE, tuple(whole))
            near = [run for run in near if not run.whole]
    for runs in _at_most(near, sizes.dense):
        kind = Kind.WHOLE if all(run.whole for run in runs) else Kind.PARTLY
        yield Part(rows, kind, tuple(runs))


def _at_most(runs: Sequence[Run], limit: int) -> Iterator[list[Run]]:
    """Yields the runs in lots of at most `limit` keys, longer runs cut."""
    lot: list[Run] = []
    room = limit
    for run in runs:
        start = run.start
        while start < run.stop:
            stop = min(run.stop, start + room)
            lot.append(Run(start, stop, run.whole))
            room -= stop - start
            start = stop
            if not room:
                yield lot
                lot, room = [], limit
    if lot:
        yield lot


def _cut(rows: slice, size: int) -> Iterator[slice]:
    """Yields the rows in slices of at most `size`."""
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))
