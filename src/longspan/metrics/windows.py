"""Long texts in windows: every token is scored once, with as much context as fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.errors import ConfigError, NumericalError


class Window(NamedTuple):
    """Tokens [start, stop) are read, targets [first_scored, stop) are scored."""

    start: int
    stop: int
    first_scored: int


def strided_windows(tokens: int, window: int, stride: int) -> tuple[Window, ...]:
    """Returns the windows that score each of `tokens` once, except the first.

    The first window is scored whole, of each later one only the last `stride` tokens (fewer at
    the end).

    Args:
        tokens: of the text, at least 2.
        window: tokens read at once, at least 2.
        stride: tokens from one window's start to the next, 1 … window − 1.

    Raises:
        ConfigError: for values outside these bounds.

    Source: Press et al. 2021 (arXiv:2012.15409) §2.

    >>> [(w.start, w.stop) for w in strided_windows(2000, window=1024, stride=512)]
    [(0, 1024), (512, 1536), (1024, 2000)]
    >>> sum(w.stop - w.first_scored for w in strided_windows(2000, window=1024, stride=512))
    1999
    """
    check_windows(tokens, window, stride)
    windows = [Window(0, min(window, tokens), 1)]
    while windows[-1].stop < tokens:
        last = windows[-1]
        start = last.start + stride
        windows.append(Window(start, min(start + window, tokens), last.stop))
    return tuple(windows)


def check_windows(tokens: int, window: int, stride: int) -> None:
    """Refuses windows that would score nothing, or skip tokens."""
    if tokens < 2:
        raise ConfigError(f"a text needs 2 tokens or more to score one, got {tokens}.")
    if window < 2:
        raise ConfigError(f"window must be at least 2 tokens, got {window}.")
    if not 1 <= stride < window:
        raise ConfigError(
            f"stride must be from 1 to window − 1 = {window - 1}, got {stride}. A smaller one "
            "gives every token more context and takes longer."
        )


def strided_nll(
    score: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    *,
    window: int,
    stride: int,
    bos: bool,
) -> Tensor:
    """Returns the NLL of every token but the first, read in windows.

    Args:
        score: from [1, n] tokens to the [n − 1] NLL of all but the first.
        input_ids: [1, N]; its first token is BOS if `bos`.
        window: tokens of a forward, BOS included.
        stride: tokens from one window's start to the next.
        bos: whether the first token is BOS: then it starts every window, and is never scored.

    Returns:
        [N − 1], nats, in the dtype of `score`; what `token_nll` gives with the whole context.
    """
    lead = 1 if bos else 0
    # BOS takes a place of every window, so the windows run over the text behind it. Its first
    # token then has something before it, and is scored.
    windows = strided_windows(input_ids.shape[1] - lead, window - lead, stride)
    found = []
    for part in windows:
        text = input_ids[:, lead + part.start : lead + part.stop]
        read = torch.cat((input_ids[:, :lead], text), dim=1)
        new = part.stop - part.first_scored
        if bos and part.start == 0:
            new += 1
        found.append(score(read)[-new:])
    return torch.cat(found)


def perplexity(total_nll: float, tokens: int) -> float:
    """Returns exp(total_nll / tokens), over all tokens scored: never a mean of means.

    Raises:
        ConfigError: if no token was scored.
        NumericalError: if it is beyond the largest float.

    >>> round(perplexity(2 * math.log(8.0), 2), 6)
    8.0
    """
    if tokens < 1:
        raise ConfigError("perplexity needs at least one scored token, got none.")
    try:
        return math.exp(total_nll / tokens)
    except OverflowError:
        raise NumericalError(
            f"the mean NLL is {total_nll / tokens:.4g} nats, whose perplexity is beyond the "
            "largest number. The weights or their dtype are broken; try float32."
        ) from None
