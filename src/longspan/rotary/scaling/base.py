"""The contract of a scaling method: a vector of rescale factors, nothing else."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from longspan.errors import ConfigError
from longspan.rotary.frequencies import rope_frequencies

SeqLen = int | Tensor | None

LONGEST = 2**53  # lengths are divided in float64, which is exact up to here


class RopeScaling(ABC):
    """Divides each unscaled frequency by a rescale factor λ: θ'_i = θ_i / λ_i.

    A method is one file: a frozen dataclass whose fields are config.json's words, and
    `rescale_factors`. Naming it in `SCALINGS` enrols it everywhere else.
    """

    method: ClassVar[str]
    """The name on the command line and in results."""
    rope_type: ClassVar[str | None]
    """The name in config.json; None where transformers has no such type."""
    title: ClassVar[str]
    """The name in prose, with its source."""
    depends_on_length: ClassVar[bool] = False
    """True where the table is a function of the row's own length."""
    factor: float

    @abstractmethod
    def rescale_factors(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns λ, [P] float64, or [B, P] where the table depends on a `seq_len` of [B].

        Raises:
            ConfigError: where the table depends on the length and `seq_len` is None.
        """

    def inv_freq(self, rotary_dim: int, rope_theta: float, seq_len: SeqLen = None) -> Tensor:
        """Returns θ / λ, [P] or [B, P] float64, radians per token."""
        base = rope_frequencies(rotary_dim, rope_theta)
        return base / self.rescale_factors(rotary_dim, rope_theta, seq_len)

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin, so the logits by its square; 1 unless a method says otherwise."""
        return 1.0

    @classmethod
    def for_factor(cls, factor: float, original_max_position_embeddings: int) -> RopeScaling:
        """Returns the method with its published defaults, stretching the trained length."""
        arguments: dict[str, Any] = {"factor": factor}
        if "original_max_position_embeddings" in inspect.signature(cls).parameters:
            arguments["original_max_position_embeddings"] = original_max_position_embeddings
        return cls(**arguments)

    def parameters(self) -> dict[str, Any]:
        """Returns the constructor's arguments as they were given, those left at None omitted."""
        names = inspect.signature(type(self)).parameters
        given = {name: getattr(self, self._stored_as(name)) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    @staticmethod
    def _stored_as(name: str) -> str:
        # attention_factor is the resolved number; what the caller gave is kept beside it.
        return "explicit_attention_factor" if name == "attention_factor" else name


def check_factor(factor: float) -> None:
    """Refuses a factor below 1: scaling only lengthens."""
    check_number("factor", factor)
    if factor < 1:
        raise ConfigError(
            f"factor must be ≥ 1, got {factor}. "
            "RoPE scaling only lengthens; to shorten, lower the serving limit."
        )


def check_number(name: str, value: Any, above: float | None = None) -> None:
    """Refuses anything but a finite number, and one not above `above`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{name} must be a finite number, got {value!r}.")
    if above is not None and value <= above:
        raise ConfigError(f"{name} must be above {above:g}, got {value!r}.")


def check_length(name: str, value: Any) -> None:
    """Refuses anything but a positive whole number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number of tokens, got {value!r}.")
    if value > LONGEST:
        raise ConfigError(f"{name} must be at most 2^53 tokens, got {value}.")


def lengths(seq_len: SeqLen, method: str) -> Tensor:
    """Returns `seq_len` as a float64 tensor, [] or [B]; None is refused.

    Raises:
        ConfigError: if `seq_len` is None or not positive.
    """
    if seq_len is None:
        raise ConfigError(
            f"{method} needs seq_len: its table is a function of the sequence's length. "
            "Pass the total length the sequence will reach."
        )
    tensor = torch.as_tensor(seq_len)
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool or tensor.dim() > 1:
        raise ConfigError(f"seq_len must be an int or an int64 tensor [B], got {seq_len!r}.")
    if (tensor < 1).any():
        raise ConfigError(f"seq_len must be at least 1 token, got {seq_len!r}.")
    return tensor.to("cpu", torch.float64)  # tables are made on the host
