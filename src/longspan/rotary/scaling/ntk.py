"""NTK-aware scaling: the base is raised, so slow pairs stretch and fast ones stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspan.errors import ConfigError
from longspan.rotary.frequencies import check_rope_theta, check_rotary_dim
from longspan.rotary.scaling.base import RopeScaling, SeqLen, check_factor


@dataclass(frozen=True, kw_only=True)
class NTKAware(RopeScaling):
    """λ_i = factor^(2i / (r − 2)), the same as rope_theta · factor^(r / (r − 2)).

    The first pair keeps its speed and the last is slowed by exactly `factor`.

    Source: bloc97 2023, "NTK-Aware Scaled RoPE"; Peng et al. 2023 (arXiv:2309.00071) §3.1.

    >>> NTKAware(factor=4.0).rescale_factors(6, 10_000.0)
    tensor([1., 2., 4.], dtype=torch.float64)
    >>> round(NTKAware(factor=2.0).raised_theta(128, 10_000.0), 4)
    20221.2617
    """

    method: ClassVar[str] = "ntk"
    rope_type: ClassVar[str | None] = None
    title: ClassVar[str] = "NTK-aware"
    factor: float

    def __post_init__(self) -> None:
        check_factor(self.factor)

    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns 1 for the first pair rising to `factor` for the last, [P] float64."""
        return ntk_rescale_factors(torch.tensor(self.factor, dtype=torch.float64), rotary_dim)

    def raised_theta(self, rotary_dim: int, rope_theta: float) -> float:
        """Returns the base that gives the same frequencies without a scaling."""
        check_rope_theta(rope_theta)
        check_ntk_dim(rotary_dim)
        return float(rope_theta * self.factor ** (rotary_dim / (rotary_dim - 2)))


def ntk_rescale_factors(stretch: Tensor, rotary_dim: int) -> Tensor:
    """Returns stretch^(2i / (r − 2)), [P] or [B, P], for a float64 stretch of [] or [B]."""
    check_ntk_dim(rotary_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / (rotary_dim - 2)
    return stretch.unsqueeze(-1) ** exponents


def check_ntk_dim(rotary_dim: int) -> None:
    """Refuses a single pair: NTK keeps the first and stretches the last, and they are the same."""
    check_rotary_dim(rotary_dim)
    if rotary_dim == 2:
        raise ConfigError(
            "NTK-aware scaling is undefined for rotary_dim 2: its only pair would have to be "
            "both kept and stretched. Use method 'linear'."
        )
