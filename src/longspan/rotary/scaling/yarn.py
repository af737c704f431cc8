"""YaRN: fast pairs are kept, slow ones interpolated, and attention is sharpened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from longspan.errors import ConfigError
from longspan.rotary.frequencies import check_rope_theta, check_rotary_dim
from longspan.rotary.scaling.base import (
    RopeScaling,
    SeqLen,
    check_factor,
    check_length,
    check_number,
)

RampAxis = Literal["index", "rotations"]


@dataclass(frozen=True, kw_only=True, init=False)
class Yarn(RopeScaling):
    """1/λ_i = (1 − ramp_i) + ramp_i / factor, and cos and sin times 0.1·ln(factor) + 1.

    Pairs that turn more than `beta_fast` times within the trained length are kept, those that
    turn less than `beta_slow` times are interpolated, and a ramp joins them. The paper's ramp is
    linear in rotations, its code's (and everyone's) in the pair's index: the default.

    An explicit `attention_factor` replaces the formula, also when it is 1.0. `mscale` with
    `mscale_all_dim` gives their ratio (DeepSeek), both needed.

    Source: Peng et al. 2023 (arXiv:2309.00071) §3.2 and §3.4, and its code for the ramp.

    >>> yarn = Yarn(factor=4.0, original_max_position_embeddings=4096)
    >>> round(yarn.attention_factor, 5)
    1.13863
    >>> yarn.rescale_factors(128, 10_000.0)[[0, 20, 46]]
    tensor([1., 1., 4.], dtype=torch.float64)
    """

    method: ClassVar[str] = "yarn"
    rope_type: ClassVar[str | None] = "yarn"
    title: ClassVar[str] = "YaRN"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    explicit_attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool
    ramp: RampAxis

    # Written out, since `attention_factor` is given as a number or None but read as a number.
    def __init__(
        self,
        *,
        factor: float,
        original_max_position_embeddings: int,
        beta_fast: float = 32,
        beta_slow: float = 1,
        attention_factor: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
        ramp: RampAxis = "index",
    ) -> None:
        check_factor(factor)
        check_length("original_max_position_embeddings", original_max_position_embeddings)
        check_betas(beta_fast, beta_slow)
        check_attention_factor(attention_factor)
        check_mscale(mscale, mscale_all_dim)
        if not isinstance(truncate, bool):
            raise ConfigError(f"truncate must be true or false, got {truncate!r}.")
        if ramp not in ("index", "rotations"):
            raise ConfigError(f"ramp must be 'index' or 'rotations', got {ramp!r}.")
        given = dict(
            factor=factor,
            original_max_position_embeddings=original_max_position_embeddings,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            explicit_attention_factor=attention_factor,
            mscale=mscale,
            mscale_all_dim=mscale_all_dim,
            truncate=truncate,
            ramp=ramp,
        )
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin: the explicit one, or the formula's."""
        if self.explicit_attention_factor is not None:
            return float(self.explicit_attention_factor)
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor)

    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns 1 for fast pairs rising to `factor` for slow ones, [P] float64."""
        ramp = self._ramp(rotary_dim, rope_theta)
        return 1 / ((1 - ramp) + ramp / self.factor)

    def _ramp(self, rotary_dim: int, rope_theta: float) -> Tensor:
        if self.ramp == "rotations":
            return self._ramp_by_rotations(rotary_dim, rope_theta)
        low, high = self.ramp_range(rotary_dim, rope_theta)
        if low == high:
            high += 0.001  # a step, as in the original code
        index = torch.arange(rotary_dim // 2, dtype=torch.float64)
        return ((index - low) / (high - low)).clamp(0, 1)

    def _ramp_by_rotations(self, rotary_dim: int, rope_theta: float) -> Tensor:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        turns = self.original_max_position_embeddings * rope_theta**-exponents / (2 * math.pi)
        return ((self.beta_fast - turns) / (self.beta_fast - self.beta_slow)).clamp(0, 1)

    def ramp_range(self, rotary_dim: int, rope_theta: float) -> tuple[float, float]:
        """Returns the pair indices where the ramp starts and ends, rounded if `truncate`.

        >>> scaling = Yarn(factor=8.0, original_max_position_embeddings=4096, truncate=False)
        >>> [round(edge, 4) for edge in scaling.ramp_range(128, 10_000.0)]
        [20.9445, 45.0269]
        """
        check_rotary_dim(rotary_dim)
        check_rope_theta(rope_theta)
        low = self._index_of(self.beta_fast, rotary_dim, rope_theta)
        high = self._index_of(self.beta_slow, rotary_dim, rope_theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if high < low:
            raise ConfigError(
                f"YaRN's ramp would run from pair {low:g} down to {high:g} for rope_theta "
                f"{rope_theta:g} and {self.original_max_position_embeddings} trained tokens. "
                "Use method 'linear'."
            )
        return low, high

    def _index_of(self, turns: float, rotary_dim: int, rope_theta: float) -> float:
        """Returns the (fractional) index of the pair that turns `turns` times while trained."""
        wavelength = self.original_max_position_embeddings / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope_theta))


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Returns 0.1 · mscale · ln(factor) + 1, and 1 where nothing is stretched.

    >>> round(yarn_mscale(40.0, 0.707) ** 2, 5)
    1.58963
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def check_betas(beta_fast: float, beta_slow: float) -> None:
    """Refuses ramp ends that are not positive or in the wrong order."""
    check_number("beta_slow", beta_slow, above=0)
    check_number("beta_fast", beta_fast, above=0)
    if beta_fast <= beta_slow:
        raise ConfigError(
            f"beta_fast must be above beta_slow, got {beta_fast} and {beta_slow}. "
            "They count rotations within the trained length; published values are 32 and 1."
        )


def check_attention_factor(attention_factor: float | None) -> None:
    """Refuses an explicit attention factor that is not positive."""
    if attention_factor is not None:
        check_number("attention_factor", attention_factor, above=0)


def check_mscale(mscale: float | None, mscale_all_dim: float | None) -> None:
    """Refuses negative values, and one of the pair alone, which would be ignored."""
    for name, value in (("mscale", mscale), ("mscale_all_dim", mscale_all_dim)):
        if value is not None:
            check_number(name, value)
            if value < 0:
                raise ConfigError(f"{name} must be ≥ 0, got {value}.")
    if bool(mscale) != bool(mscale_all_dim):
        raise ConfigError(
            f"mscale and mscale_all_dim act only together, got {mscale} and {mscale_all_dim}. "
            "Give both, or set attention_factor."
        )
