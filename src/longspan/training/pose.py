"""PoSE: positions that skip, so that short rows train distances they do not have."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from longspan.errors import ConfigError


def skipping_positions(length: int, to: int, generator: Generator) -> Tensor:
    """Returns positions of one row, [length] int64, that skip once: positional skip-wise training.

    The row is cut in two chunks at a random place. The first starts at 0; the second one's
    positions jump by a random u from 0 to `to` − `length`, so all lie below `to`. Every token still
    sees every token before it: only the distances are those of a longer text.

    Args:
        length: L, tokens of the row, at least 2.
        to: N, positions to reach, more than `length`.
        generator: what place and jump are drawn from.

    Raises:
        ConfigError: if there is nothing to cut or to skip.

    Source: Zhu et al. 2023 (arXiv:2309.10400) §3.2, with two chunks.

    >>> skipping_positions(4, 100, Generator().manual_seed(0))
    tensor([ 0,  1,  2, 85])
    """
    if length < 2 or to <= length:
        raise ConfigError(
            f"skipped positions need rows of 2 tokens or more and a longer target, got rows of "
            f"{length} and a target of {to}. Rows as long as the target need no skip."
        )
    cut = int(torch.randint(1, length, (), generator=generator))
    skip = int(torch.randint(0, to - length + 1, (), generator=generator))
    positions = torch.arange(length, dtype=torch.int64)
    positions[cut:] += skip
    return positions
