"""Position Interpolation: positions are squeezed by the factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspan.rotary.frequencies import check_rotary_dim
from longspan.rotary.scaling.base import RopeScaling, SeqLen, check_factor


@dataclass(frozen=True, kw_only=True)
class PositionInterpolation(RopeScaling):
    """λ_i = factor: position m behaves like m / factor.

    Nothing leaves the trained range, but neighbours move closer together in every pair, so the
    local resolution is lost until a short fine-tuning (200 to 1000 steps) restores it.

    Source: Chen et al. 2023 (arXiv:2306.15595) eq. 3; also known as linear scaling.

    >>> PositionInterpolation(factor=4.0).rescale_factors(4, 10_000.0)
    tensor([4., 4.], dtype=torch.float64)
    """

    method: ClassVar[str] = "linear"
    rope_type: ClassVar[str | None] = "linear"
    title: ClassVar[str] = "Position Interpolation"
    factor: float

    def __post_init__(self) -> None:
        check_factor(self.factor)

    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns `factor` for every pair, [P] float64."""
        check_rotary_dim(rotary_dim)
        return torch.full((rotary_dim // 2,), float(self.factor), dtype=torch.float64)
