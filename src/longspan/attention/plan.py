"""Which keys each tile of queries meets, and how: the work left once hidden tiles are gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.kinds import Kind, Kinds, Stretch
from longspan.attention.visibility import Run, Visibility
from longspan.bias.base import Bias


@dataclass(frozen=True)
class Sizes:
    """What is met at once; more is fewer calls, less is fewer hidden pairs computed."""

    queries: int = 192
    """Queries of a tile."""
    tiles: int = 4
    """Tiles that meet together the many keys they all see: kernels like many queries."""
    block: int = 64
    """Keys that are kept or skipped together, on the first look."""
    fine: int = 4
    """Keys that are kept or skipped together in blocks of which some pairs are hidden."""
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
    look = Kinds(seen, bias if split else None, sizes.queries, sizes.block, sizes.fine)
    all_rows = [*_cut(slice(0, queries), sizes.queries * sizes.tiles)]
    at_once = max(1, GRID_CELLS // (sizes.tiles * look.blocks * look.batch))
    groups: list[Group] = []
    for first in range(0, len(all_rows), at_once):
        some = all_rows[first : first + at_once]
        tiles = torch.arange(len(some) * sizes.tiles, device=seen.q_pos.device)
        tiles = (tiles + first * sizes.tiles).clamp_max(look.tiles - 1)
        shared, own = _shared_and_own(look.of(tiles), bias, split, sizes)
        together = look.stretches(shared, tiles[:: sizes.tiles])
        alone = look.stretches(own, tiles)
        for at, rows in enumerate(some):
            parts = [*_parts(rows, together[at], bias, split, sizes)]
            for tile, few_rows in enumerate(_cut(rows, sizes.queries), at * sizes.tiles):
                parts += _parts(few_rows, alone[tile], bias, split, sizes)
            groups.append(Group(rows, tuple(parts)))
    return groups


def _shared_and_own(
    kinds: Tensor, bias: Bias | None, split: bool, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Returns what the tiles of each group meet together, [g, m], and apart, [g·tiles, m]."""
    kinds = kinds.unflatten(0, (-1, sizes.tiles))
    least = Kind.WHOLE if bias is None else Kind.BEFORE  # kinds that need no tensor of all pairs
    same = (kinds == kinds[:, :1]).all(1) & (kinds[:, 0] >= least)
    many = same.sum(1, keepdim=True) * sizes.block >= sizes.whole
    same &= many & split
    return kinds[:, 0] * same, (kinds * ~same.unsqueeze(1)).flatten(0, 1)


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
