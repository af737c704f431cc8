"""Llama-3 scaling: kept, blended and divided bands of wavelengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longspan.errors import ConfigError
from longspan.rotary.frequencies import rope_frequencies, wavelengths
from longspan.rotary.scaling.base import (
    RopeScaling,
    SeqLen,
    check_factor,
    check_length,
    check_number,
)


@dataclass(frozen=True, kw_only=True)
class Llama3(RopeScaling):
    """λ is 1 for wavelengths below L / high_freq_factor, `factor` above L / low_freq_factor.

    Between them the frequency is blended, θ' = (1 − k)·θ / factor + k·θ with
    k = (L / wavelength − low) / (high − low). Equal factors make a hard step (Llama-4-Scout).
    `factor` is not a length ratio: Llama 3.1 serves 131072 tokens with factor 8 from 8192.

    Source: Meta's llama-models reference code (Llama 3.1), `apply_scaling`.

    >>> llama = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    ...                original_max_position_embeddings=8192)
    >>> llama.rescale_factors(128, 500_000.0)[[28, 35]]
    tensor([1., 8.], dtype=torch.float64)
    """

    method: ClassVar[str] = "llama3"
    rope_type: ClassVar[str | None] = "llama3"
    title: ClassVar[str] = "Llama-3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_factor(self.factor)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)
        check_number("low_freq_factor", self.low_freq_factor, above=0)
        check_number("high_freq_factor", self.high_freq_factor, above=0)
        if self.high_freq_factor < self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor must be ≥ low_freq_factor, got {self.high_freq_factor} and "
                f"{self.low_freq_factor}. Llama 3.1 uses 4 and 1."
            )

    @classmethod
    def for_factor(cls, factor: float, original_max_position_embeddings: int) -> Llama3:
        """Returns Llama 3.1's bands (1 and 4) with this factor."""
        return cls(
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=original_max_position_embeddings,
        )

    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns 1, a blend, or `factor` by wavelength, [P] float64."""
        wavelength = wavelengths(rope_frequencies(rotary_dim, rope_theta))
        turns = self.original_max_position_embeddings / wavelength
        if self.low_freq_factor == self.high_freq_factor:
            # A hard step; at the very edge, where the blend is 0 / 0, the frequency is kept.
            keep = (turns >= self.high_freq_factor).double()
        else:
            band = self.high_freq_factor - self.low_freq_factor
            keep = ((turns - self.low_freq_factor) / band).clamp(0, 1)
        return 1 / ((1 - keep) / self.factor + keep)
