"""How fast each pair of channels turns, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longspan.errors import ConfigError


def rope_frequencies(rotary_dim: int, rope_theta: float) -> Tensor:
    """Returns the unscaled inverse frequencies θ_i = rope_theta^(−2i / rotary_dim).

    Args:
        rotary_dim: channels that turn, even and positive.
        rope_theta: the frequency base, above 1.

    Returns:
        [rotary_dim / 2] float64, radians per token; the first is always 1.

    Raises:
        ConfigError: if `rotary_dim` is not even and positive, or `rope_theta` not above 1.

    Source: Su et al. 2021 (arXiv:2104.09864) §3.2.2, 0-based as in every implementation.

    >>> rope_frequencies(4, 10_000.0)
    tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    check_rotary_dim(rotary_dim)
    check_rope_theta(rope_theta)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return float(rope_theta) ** -exponents


def wavelengths(inv_freq: Tensor) -> Tensor:
    """Returns the tokens of each pair's full turn, 2π / inv_freq; infinite for a pair at rest.

    >>> round(wavelengths(rope_frequencies(4, 10_000.0))[1].item(), 2)
    628.32
    """
    return 2 * math.pi / inv_freq


def rotations(inv_freq: Tensor, length: int) -> Tensor:
    """Returns the full turns each pair makes over `length` tokens, L·θ_i / 2π.

    >>> round(rotations(rope_frequencies(4, 10_000.0), 4096)[1].item(), 3)
    6.519
    """
    return length * inv_freq / (2 * math.pi)


def check_rotary_dim(rotary_dim: int) -> None:
    """Refuses a rotary dimension that cannot be split in pairs."""
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, int):
        raise ConfigError(
            f"rotary_dim must be an even whole number of channels, got {rotary_dim!r}."
        )
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"rotary_dim must be even and at least 2, got {rotary_dim}. "
            "RoPE turns channels in pairs; check head_dim and partial_rotary_factor."
        )


def check_rope_theta(rope_theta: float) -> None:
    """Refuses a frequency base that is not a finite number above 1."""
    number = isinstance(rope_theta, (int, float)) and not isinstance(rope_theta, bool)
    if not number or not 1 < rope_theta < math.inf:
        raise ConfigError(
            f"rope_theta must be a finite number above 1, got {rope_theta!r}. "
            "Published values run from 10000 to 10000000."
        )
