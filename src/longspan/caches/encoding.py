"""How one layer's queries and keys know where they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longspan.bias.base import Bias
from longspan.errors import ConfigError
from longspan.rotary.rope import Rope
from longspan.rotary.rotate import compute_dtype, rotation_table
from longspan.rotary.scaling.base import SeqLen
from longspan.rotary.turn import turn, turn_by, turn_whole

FEW = 16  # tokens whose turning costs more in calls than in arithmetic


@dataclass(frozen=True, eq=False)
class Scoring:
    """What else makes a layer's scores; see `attend`."""

    scale: float | None = None
    sink_logits: Tensor | None = None
    softcap: float | None = None

    @property
    def plain(self) -> bool:
        """True where scores are scaled products and nothing else."""
        return self.sink_logits is None and self.softcap is None


@dataclass(frozen=True, eq=False)
class LayerEncoding:
    """A layer's rotation or bias; neither for a layer without positions (NoPE).

    Attributes:
        rope: the rotation.
        seq_len: the declared total length, where the rope's table depends on one (*request*). Left
            at None, the query at p and every key it sees use the table of p + 1 tokens (*step*).
        bias: what is added to the scores.
    """

    rope: Rope | None = None
    seq_len: int | None = None
    bias: Bias | None = None

    def __post_init__(self) -> None:
        if self.rope is not None and self.rope.layout is None:
            raise ConfigError("this rope has no layout, so nothing can be rotated by it.")
        if self.bias is not None and (self.bias.adds_values or self.bias.reads_query):
            raise ConfigError(
                f"{type(self.bias).__name__} needs the query or adds values, which a cache of "
                "distances does not do. Alibi and T5Bias can be streamed."
            )

    def tables_of(self, lengths: Tensor) -> Tensor:
        """Returns the frequencies that a text of each length has, [R, T, P] for lengths [R, T]."""
        if self.rope is None:
            raise ConfigError("this layer does not rotate, so it has no frequencies.")
        return self.rope.inv_freq(lengths.flatten()).unflatten(0, tuple(lengths.shape))

    @cached_property
    def turns(self) -> bool:
        """True where keys can be stored turned: one table serves all queries."""
        return self.rope is not None and not self.by_length

    @cached_property
    def by_length(self) -> bool:
        """True where each query's own length sets its table."""
        return self.rope is not None and self.rope.method.depends_on_length and self.seq_len is None

    @cached_property
    def inv_freq(self) -> Tensor:
        """[P] the frequencies that serve all queries."""
        if self.rope is None or self.by_length:
            raise ConfigError("no one table of frequencies serves all queries of this layer.")
        return self.rope.inv_freq(self.seq_len)

    def turn(
        self,
        x: Tensor,
        positions: Tensor,
        seq_len: SeqLen = None,
        known: tuple[dict[Any, Any], str] | None = None,
    ) -> Tensor:
        """Returns x turned by its positions, x itself where nothing turns.

        Args:
            x: [B, H, T, D], or several such stacked, [L, B, H, T, D].
            positions: [R, T] int64.
            seq_len: the length whose table is used, where the declared one is not.
            known: tables made before, and the name of this one.
        """
        rope = self.rope
        if rope is None or rope.layout is None:
            return x
        tables, name = ({}, "") if known is None else known
        key = name, id(rope), self.seq_len, x.dtype
        if key not in tables:
            inv_freq = self.inv_freq if seq_len is None else rope.inv_freq(seq_len)
            factor, dtype = rope.attention_factor, compute_dtype(x)
            table = rotation_table(positions, inv_freq.to(positions.device), factor, dtype=dtype)
            tables[key] = table.cos.unsqueeze(-3), table.sin.unsqueeze(-3)
        cos, sin = tables[key]
        if x.shape[-2] > FEW:
            return turn_by(x, cos, sin, rope.layout, "auto")
        if rope.layout != "half" or 2 * cos.shape[-1] != x.shape[-1]:
            return turn(x, cos, sin, rope.layout)
        wide = *key, "wide"
        if wide not in tables:
            tables[wide] = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return turn_whole(x, *tables[wide])
