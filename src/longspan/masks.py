"""Way three a position enters attention: who sees whom, a predicate of (q_pos, k_pos).

A mask is one comparison, told twice: of positions one by one (`sees`), and of whole tiles of them
(`coverage`), so that attention skips what nobody sees without ever building a mask of all pairs.
Masks combine with `&`, `|` and `~`:

>>> causal() & (sliding_window(512) | attention_sinks(4))
causal() & (sliding_window(512) | attention_sinks(4))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longspan.errors import ConfigError


class Span(NamedTuple):
    """The positions of a tile lie from `low` to `high`, both included."""

    low: Tensor
    high: Tensor


class Coverage(NamedTuple):
    """What a mask says of whole tiles, a bool for each.

    Neither is wrong, both may be shy: a tile that nobody sees may be called `some`, and one that
    is wholly visible may not be called `all`; it then costs time, never correctness.
    """

    some: Tensor
    """False where no pair of the tile is visible."""
    all: Tensor
    """True where every pair of the tile is."""


class Mask(ABC):
    """A predicate of positions; never of storage index, never a tensor of all pairs.

    A new mask is a subclass with `sees`; with `coverage` it also skips tiles.
    """

    @property
    def causal(self) -> bool:
        """True where no query can see a key after it."""
        return False

    @property
    def relative_from(self) -> int | None:
        """From this key position on, q − k alone decides; None where that is not known."""
        return None

    @abstractmethod
    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns whether the query at `q_pos` sees the key at `k_pos`, element by element."""

    def coverage(self, q: Span, k: Span) -> Coverage:
        """Returns what is known of tiles of positions; the default knows nothing."""
        shape = torch.broadcast_shapes(q.low.shape, k.low.shape)
        unknown = torch.ones(shape, dtype=torch.bool, device=k.low.device)
        return Coverage(some=unknown, all=~unknown)

    def __call__(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns who sees whom, bool [T, S] or [B, T, S].

        Args:
            q_pos: [T] or [B, T] int64.
            k_pos: [S] or [B, S] int64.

        >>> causal()(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).int()
        tensor([[1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
        """
        q_pos, k_pos = q_pos.unsqueeze(-1), k_pos.unsqueeze(-2)
        seen = self.sees(q_pos, k_pos)
        return seen.expand(torch.broadcast_shapes(seen.shape, q_pos.shape, k_pos.shape))

    def tile(
        self, q_span: tuple[int, int], k_span: tuple[int, int]
    ) -> Literal["all", "none", "some"]:
        """Returns whether all, none or some pairs of a tile are visible.

        Args:
            q_span: the first and last query position.
            k_span: the first and last key position.

        >>> causal().tile((8, 11), (0, 7)), causal().tile((8, 11), (12, 15))
        ('all', 'none')
        """
        q, k = (Span(*(torch.tensor(end) for end in span)) for span in (q_span, k_span))
        found = self.coverage(q, k)
        return "all" if found.all else "some" if found.some else "none"

    def __and__(self, other: Mask) -> Mask:
        return _And(self, _checked(other))

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, _checked(other))

    def __invert__(self) -> Mask:
        return _Not(self)

    def __bool__(self) -> bool:
        raise ConfigError(
            f"{self!r} is neither true nor false by itself. Combine masks with &, | and ~, "
            "not with `and`, `or` and `not`."
        )


def causal() -> Mask:
    """Returns the mask of keys not after the query: k ≤ q.

    >>> causal()(torch.arange(2), torch.arange(3)).sum(-1)
    tensor([1, 2])
    """
    return _Causal()


def sliding_window(window: int, ahead: int = 0) -> Mask:
    """Returns the mask of the query itself and the window − 1 keys before it: 0 ≤ q − k < window.

    It is causal by itself, as `sliding_window` of config.json is. flash-attn's left bound is
    window − 1.

    Args:
        window: keys visible *including self*, at least 1.
        ahead: also that many keys after the query, for encoders: −ahead ≤ q − k < window.

    Source: Beltagy et al. 2020 (arXiv:2004.05150) §3.1; Jiang et al. 2023 (arXiv:2310.06825) §2.

    >>> sliding_window(4)(torch.arange(8), torch.arange(8)).sum(-1)
    tensor([1, 2, 3, 4, 4, 4, 4, 4])
    """
    _check_count("sliding_window", window, least=1)
    _check_count("ahead", ahead, least=0)
    return _SlidingWindow(window, ahead)


def attention_sinks(num_sink_tokens: int) -> Mask:
    """Returns the mask of the first tokens, k < num_sink_tokens; join it to a window with `|`.

    Source: Xiao et al. 2023 (arXiv:2309.17453) §3.2.

    >>> mask = causal() & (sliding_window(2) | attention_sinks(1))
    >>> mask(torch.tensor([5]), torch.arange(7)).int()
    tensor([[1, 0, 0, 0, 1, 1, 0]], dtype=torch.int32)
    """
    _check_count("num_sink_tokens", num_sink_tokens, least=0)
    return _FirstTokens(num_sink_tokens, "attention_sinks")


def prefix(length: int) -> Mask:
    """Returns the mask of the first keys, k < length; joined to causal() by `|`, a prefix LM.

    Source: Raffel et al. 2020 (arXiv:1910.10683) §3.2.1.

    >>> (causal() | prefix(2))(torch.arange(3), torch.arange(3)).sum(-1)
    tensor([2, 2, 3])
    """
    _check_count("prefix length", length, least=0)
    return _FirstTokens(length, "prefix")


@dataclass(frozen=True)
class _Causal(Mask):
    @property
    def causal(self) -> bool:
        return True

    @property
    def relative_from(self) -> int:
        return 0

    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return q_pos >= k_pos

    def coverage(self, q: Span, k: Span) -> Coverage:
        return Coverage(some=q.high >= k.low, all=q.low >= k.high)

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True)
class _SlidingWindow(Mask):
    window: int
    ahead: int

    @property
    def causal(self) -> bool:
        return self.ahead == 0

    @property
    def relative_from(self) -> int:
        return 0

    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        back = q_pos - k_pos
        return (back >= -self.ahead) & (back < self.window)

    def coverage(self, q: Span, k: Span) -> Coverage:
        least, most = q.low - k.high, q.high - k.low
        return Coverage(
            some=(most >= -self.ahead) & (least < self.window),
            all=(least >= -self.ahead) & (most < self.window),
        )

    def __repr__(self) -> str:
        ahead = f", ahead={self.ahead}" if self.ahead else ""
        return f"sliding_window({self.window}{ahead})"


@dataclass(frozen=True)
class _FirstTokens(Mask):
    count: int
    name: str

    @property
    def relative_from(self) -> int:
        return self.count

    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos < self.count

    def coverage(self, q: Span, k: Span) -> Coverage:
        return Coverage(some=k.low < self.count, all=k.high < self.count)

    def __repr__(self) -> str:
        return f"{self.name}({self.count})"


@dataclass(frozen=True)
class _And(Mask):
    left: Mask
    right: Mask

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal

    @property
    def relative_from(self) -> int | None:
        return _later(self.left, self.right)

    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.left.sees(q_pos, k_pos) & self.right.sees(q_pos, k_pos)

    def coverage(self, q: Span, k: Span) -> Coverage:
        left, right = self.left.coverage(q, k), self.right.coverage(q, k)
        return Coverage(left.some & right.some, left.all & right.all)

    def __repr__(self) -> str:
        return f"{_grouped(self.left)} & {_grouped(self.right)}"


@dataclass(frozen=True)
class _Or(Mask):
    left: Mask
    right: Mask

    @property
    def causal(self) -> bool:
        return self.left.causal and self.right.causal

    @property
    def relative_from(self) -> int | None:
        return _later(self.left, self.right)

    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.left.sees(q_pos, k_pos) | self.right.sees(q_pos, k_pos)

    def coverage(self, q: Span, k: Span) -> Coverage:
        left, right = self.left.coverage(q, k), self.right.coverage(q, k)
        return Coverage(left.some | right.some, left.all | right.all)

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


@dataclass(frozen=True)
class _Not(Mask):
    inner: Mask

    @property
    def relative_from(self) -> int | None:
        return self.inner.relative_from

    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return ~self.inner.sees(q_pos, k_pos)

    def coverage(self, q: Span, k: Span) -> Coverage:
        inner = self.inner.coverage(q, k)
        return Coverage(some=~inner.all, all=~inner.some)

    def __repr__(self) -> str:
        return f"~({self.inner!r})"


def _later(left: Mask, right: Mask) -> int | None:
    ends = left.relative_from, right.relative_from
    return None if ends[0] is None or ends[1] is None else max(ends[0], ends[1])


def _grouped(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, _Or) else repr(mask)


def _checked(other: object) -> Mask:
    if not isinstance(other, Mask):
        raise ConfigError(
            f"a mask combines with masks, got {type(other).__name__}. Masks are made by causal(), "
            "sliding_window(W), attention_sinks(S) and prefix(P)."
        )
    return other


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of tokens ≥ {least}, got {value!r}.")
