"""One tile of queries and the keys it meets in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.kinds import Kind
from longspan.attention.plan import Part
from longspan.attention.rules import Rules
from longspan.attention.visibility import Run


class Gradients(NamedTuple):
    """What one meeting contributes."""

    q: Tensor
    """[B, H, t, D]"""
    k: Tensor
    """[B, K, s, D]"""
    v: Tensor
    """[B, K, s, D]"""
    learned: Sequence[Tensor | None]
    """Of each learned parameter of the bias; None where these keys have no part in it."""


@dataclass(eq=False)
class Meeting:
    """A tile's queries, the keys and values of one part, and the rules of the call."""

    rules: Rules
    learned: tuple[Tensor, ...]
    part: Part
    q: Tensor
    """[B, H, t, D]"""
    k: Tensor
    """[B, K, s, D]"""
    v: Tensor
    """[B, K, s, D]"""

    @cached_property
    def positions(self) -> tuple[Tensor, Tensor]:
        """The queries' and keys', [t] and [s], or [B, …]."""
        return self.rules.seen.positions(self.part.rows, self.part.runs)

    @cached_property
    def visible(self) -> Tensor | None:
        """Who sees whom, [1 or B, 1, t, s]; None where all do."""
        if self.part.kind is not Kind.PARTLY:
            return None
        return self.rules.seen.tile(self.part.rows, self.part.runs)


def finite(lse: Tensor) -> Tensor:
    """Returns lse with 0 for rows that see nothing, whose scores are all −inf: exp gives 0."""
    return torch.where(lse == -torch.inf, 0.0, lse)


def take(x: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """Returns these keys of x, [B, K, s, D]; a view where they are neighbours."""
    if len(runs) == 1:
        return x[:, :, runs[0].start : runs[0].stop]
    return torch.cat([x[:, :, run.start : run.stop] for run in runs], dim=2)


def give(x: Tensor, runs: tuple[Run, ...], gained: Tensor) -> None:
    """Adds to these keys of x what each has gained, in place: the reverse of `take`."""
    done = 0
    for run in runs:
        count = run.stop - run.start
        x[:, :, run.start : run.stop] += gained[:, :, done : done + count]
        done += count
