"""Dynamic NTK: the base is raised only as far as the sequence has grown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longspan.rotary.scaling.base import (
    RopeScaling,
    SeqLen,
    check_factor,
    check_length,
    lengths,
)
from longspan.rotary.scaling.ntk import ntk_rescale_factors


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(RopeScaling):
    """NTK-aware with the stretch s(l) = factor · l / L − (factor − 1) for l > L, else 1.

    factor 1 is the paper's s = max(1, l / L). A larger one, as transformers writes it, stretches
    more than the length asks for: with factor 4 and l = 4L it is 13.

    A pure function of the row's own length `seq_len`; up to L it is bit for bit plain RoPE.

    Source: Peng et al. 2023 (arXiv:2309.00071) §3.3; transformers' `dynamic` for the factor.

    >>> dynamic = DynamicNTK(factor=2.0, original_max_position_embeddings=4096)
    >>> dynamic.rescale_factors(6, 10_000.0, seq_len=6144)[-1].item()
    2.0
    """

    method: ClassVar[str] = "dynamic"
    rope_type: ClassVar[str | None] = "dynamic"
    title: ClassVar[str] = "Dynamic NTK"
    depends_on_length: ClassVar[bool] = True
    factor: float = 1.0
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_factor(self.factor)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)

    @classmethod
    def for_factor(cls, factor: float, original_max_position_embeddings: int) -> DynamicNTK:
        """Returns the paper's form, which follows the length by itself whatever `factor` is."""
        return cls(original_max_position_embeddings=original_max_position_embeddings)

    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns the NTK factors of the stretch at `seq_len`, [P] or [B, P] float64."""
        return ntk_rescale_factors(self.stretch(seq_len), rotary_dim)

    def stretch(self, seq_len: SeqLen) -> Tensor:
        """Returns s(seq_len), float64 [] or [B], at least 1."""
        grown = lengths(seq_len, "dynamic NTK") / self.original_max_position_embeddings
        return (self.factor * grown - (self.factor - 1)).clamp_min(1.0).where(grown > 1, 1.0)
