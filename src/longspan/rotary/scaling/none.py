"""No scaling: every pair keeps its trained speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspan.rotary.frequencies import check_rotary_dim
from longspan.rotary.scaling.base import RopeScaling, SeqLen


@dataclass(frozen=True)
class NoScaling(RopeScaling):
    """Plain RoPE: λ_i = 1.

    It does not extrapolate: positions past the trained length turn slow pairs to angles never seen.

    Source: Su et al. 2021 (arXiv:2104.09864).

    >>> NoScaling().rescale_factors(4, 10_000.0)
    tensor([1., 1.], dtype=torch.float64)
    """

    method: ClassVar[str] = "none"
    rope_type: ClassVar[str | None] = "default"
    title: ClassVar[str] = "plain RoPE"
    factor: ClassVar[float] = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def for_factor(cls, factor: float, original_max_position_embeddings: int) -> NoScaling:
        """Returns plain RoPE, whatever is asked of it."""
        return cls()

    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns ones, [P] float64."""
        check_rotary_dim(rotary_dim)
        return torch.ones(rotary_dim // 2, dtype=torch.float64)
