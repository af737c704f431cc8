"""LongRoPE: searched factors, one list for short texts and one for long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspan.errors import ConfigError
from longspan.rotary.frequencies import check_rotary_dim
from longspan.rotary.scaling.base import (
    RopeScaling,
    SeqLen,
    check_factor,
    check_length,
    check_number,
    lengths,
)
from longspan.rotary.scaling.yarn import check_attention_factor


@dataclass(frozen=True, kw_only=True, init=False)
class LongRope(RopeScaling):
    """λ_i = long_factor_i where the row is longer than the trained length, else short_factor_i.

    The factors are data from a search (published ones start at 0.998), so no bound holds for them.
    The choice depends on the row's declared length and must never change under a live cache.

    `factor` (target / original length) only sets the attention factor √(1 + ln factor / ln L).

    Source: Ding et al. 2024 (arXiv:2402.13753); Phi-3's code for the attention factor.

    >>> rope = LongRope(short_factor=[1.0, 1.0], long_factor=[1.5, 8.0], factor=8.0,
    ...                 original_max_position_embeddings=4096)
    >>> rope.rescale_factors(4, 10_000.0, seq_len=4096)
    tensor([1., 1.], dtype=torch.float64)
    >>> rope.rescale_factors(4, 10_000.0, seq_len=4097)
    tensor([1.5000, 8.0000], dtype=torch.float64)
    >>> round(rope.attention_factor, 4)
    1.118
    """

    method: ClassVar[str] = "longrope"
    rope_type: ClassVar[str | None] = "longrope"
    title: ClassVar[str] = "LongRoPE"
    depends_on_length: ClassVar[bool] = True
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float | None  # pyright: ignore[reportIncompatibleVariableOverride]
    explicit_attention_factor: float | None

    # Written out, since `attention_factor` is given as a number or None but read as a number.
    def __init__(
        self,
        *,
        short_factor: Sequence[float],
        long_factor: Sequence[float],
        original_max_position_embeddings: int,
        factor: float | None = None,
        attention_factor: float | None = None,
    ) -> None:
        check_length("original_max_position_embeddings", original_max_position_embeddings)
        check_attention_factor(attention_factor)
        if factor is not None:
            check_factor(factor)
        if factor is None and attention_factor is None:
            raise ConfigError(
                "LongRoPE needs factor (target / original length) or attention_factor; got neither."
            )
        given = dict(
            short_factor=searched_factors("short_factor", short_factor),
            long_factor=searched_factors("long_factor", long_factor),
            original_max_position_embeddings=original_max_position_embeddings,
            factor=factor,
            explicit_attention_factor=attention_factor,
        )
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @classmethod
    def for_factor(cls, factor: float, original_max_position_embeddings: int) -> LongRope:
        """Refuses: LongRoPE's factors are the result of a search, not of a formula."""
        raise ConfigError(
            "longrope cannot be applied by factor alone: its short_factor and long_factor come "
            "from a search over one checkpoint. Use 'yarn', or a checkpoint that carries them."
        )

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin: the explicit one, or √(1 + ln factor / ln L)."""
        if self.explicit_attention_factor is not None:
            return float(self.explicit_attention_factor)
        if self.factor is None or self.factor <= 1:
            return 1.0
        return math.sqrt(
            1 + math.log(self.factor) / math.log(self.original_max_position_embeddings)
        )

    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns the short or the long factors by `seq_len`, [P] or [B, P] float64."""
        self._check_pairs(rotary_dim)
        is_long = lengths(seq_len, "LongRoPE") > self.original_max_position_embeddings
        short = torch.tensor(self.short_factor, dtype=torch.float64)
        long = torch.tensor(self.long_factor, dtype=torch.float64)
        return torch.where(is_long.unsqueeze(-1), long, short)

    def _check_pairs(self, rotary_dim: int) -> None:
        check_rotary_dim(rotary_dim)
        for name, factors in (
            ("short_factor", self.short_factor),
            ("long_factor", self.long_factor),
        ):
            if len(factors) != rotary_dim // 2:
                raise ConfigError(
                    f"{name} must hold one number a pair, {rotary_dim // 2} for rotary_dim "
                    f"{rotary_dim}, got {len(factors)}."
                )


def searched_factors(name: str, factors: Sequence[float]) -> tuple[float, ...]:
    """Returns the factors as a tuple; refuses an empty list or a number that is not positive."""
    if isinstance(factors, str) or not isinstance(factors, Sequence) or not factors:
        raise ConfigError(f"{name} must be a list of positive numbers, got {factors!r}.")
    for value in factors:
        check_number(f"every number of {name}", value, above=0)
    return tuple(float(value) for value in factors)
