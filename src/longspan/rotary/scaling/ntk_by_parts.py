"""NTK-by-parts: YaRN's ramp without its temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longspan.rotary.scaling.base import RopeScaling, SeqLen
from longspan.rotary.scaling.yarn import Yarn


@dataclass(frozen=True, kw_only=True)
class NTKByParts(RopeScaling):
    """λ_i from 1 (fast pairs) to `factor` (slow pairs) on YaRN's ramp; attention unchanged.

    Source: bloc97 2023, "NTK-by-parts"; Peng et al. 2023 (arXiv:2309.00071) §3.2.

    >>> parts = NTKByParts(factor=4.0, original_max_position_embeddings=4096)
    >>> parts.attention_factor
    1.0
    >>> parts.rescale_factors(128, 10_000.0)[[0, 20, 46]]
    tensor([1., 1., 4.], dtype=torch.float64)
    """

    method: ClassVar[str] = "ntk-by-parts"
    rope_type: ClassVar[str | None] = None
    title: ClassVar[str] = "NTK-by-parts"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1

    def __post_init__(self) -> None:
        self.as_yarn()

    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns 1 for fast pairs rising to `factor` for slow ones, [P] float64."""
        return self.as_yarn().rescale_factors(rotary_dim, rope_theta)

    def as_yarn(self) -> Yarn:
        """Returns the YaRN with attention factor 1.0 that it is."""
        return Yarn(**self.parameters(), attention_factor=1.0)
