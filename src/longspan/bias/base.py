"""The contract of a bias: a dense form, and whatever lets attention avoid it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from longspan.errors import ConfigError

ScoreFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From a head, q_pos and k_pos, element by element, to the term in float32."""


class Split(NamedTuple):
    """A bias over keys that all lie on one side of all queries: row + key, nothing of size T·S."""

    row: Tensor
    """[H, T] or [B, H, T]: moves a row's log-sum-exp, never its weights."""
    key: Tensor | None
    """[H, S] or [B, H, S], constant; None where it is 0."""


class Bias(nn.Module, ABC):
    """Something added to the score of each pair: a function of (q_pos, k_pos), perhaps of q.

    `scores` is the specification; a tile of it is all that is ever built. A bias that becomes
    row + key at a distance says so by `far` and `split`.
    """

    inside_scale: ClassVar[bool] = False
    """True where the paper puts the term under the same 1/√d as q·k (Shaw, Transformer-XL)."""
    reads_query: ClassVar[bool] = False
    """True where the term depends on q, not on positions alone."""
    adds_values: bool = False
    """True where `values` adds to the output (Shaw)."""
    needs_causal: bool = False
    """True where keys after the query get a score without meaning: a mask must hide them."""
    far: int | None = None
    """From this distance on, in tokens, `split` holds; None where it never does."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        self.num_heads = num_heads

    @abstractmethod
    def scores(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns the term of every pair of a tile, [H, T, S] or [B, H, T, S], in q's dtype.

        Args:
            q: [B, H, T, D]; for a bias that does not read it, only its dtype and device count.
            q_pos: [T] or [B, T] int64.
            k_pos: [S] or [B, S] int64.
        """

    def content_query(self, q: Tensor) -> Tensor:
        """Returns what meets the keys in place of q, [B, H, T, D]."""
        return q

    def values(self, p: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns what the output gains, [B, H, T, D], linear in the weights p [B, H, T, S].

        Only for a bias with `adds_values`.
        """
        raise ConfigError(f"{type(self).__name__} adds nothing to the values.")

    def split(self, q: Tensor, q_pos: Tensor, k_pos: Tensor, before: bool) -> Split:
        """Returns `scores` as row + key where every key is at least `far` tokens away.

        Only for a bias whose `far` is not None.

        Args:
            q, q_pos, k_pos: as for `scores`.
            before: all keys are before all queries; otherwise after.
        """
        raise ConfigError(f"{type(self).__name__} does not split into row + key.")

    def score_function(self, device: torch.device) -> ScoreFunction:
        """Returns `scores` as a function of one head, query and key, for kernels that take one.

        Only for a bias that does not read q.
        """
        raise ConfigError(f"{type(self).__name__} is not a function of positions alone.")


def distances(q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Returns query − key, [T, S] or [B, T, S] int64.

    >>> distances(torch.tensor([3]), torch.tensor([1, 3, 4]))
    tensor([[ 2,  0, -1]])
    """
    return q_pos.unsqueeze(-1) - k_pos.unsqueeze(-2)


def columns(by_column: Tensor, index: Tensor) -> Tensor:
    """Returns for each pair the column of its row that `index` names.

    Args:
        by_column: [B, H, T, C].
        index: [T, S] or [B, T, S] int64, below C.

    Returns:
        [B, H, T, S].
    """
    index = index.unsqueeze(-3)  # [1, T, S] or [B, 1, T, S]
    return by_column.gather(-1, index.expand(*by_column.shape[:3], index.shape[-1]))


def initial(*shape: int) -> nn.Parameter:
    """Returns a learned table of small normal numbers."""
    return nn.Parameter(torch.empty(*shape).normal_(std=0.02))


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuses anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number ≥ {least}, got {value!r}.")
