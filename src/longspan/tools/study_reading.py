"""How a study reads held-out documents: whole, in windows, in segments, with memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from longspan.errors import NumericalError
from longspan.metrics.intervals import mean_interval
from longspan.metrics.windows import strided_nll
from longspan.models import Decoder, Memory
from longspan.tools.evaluation import Bucket
from longspan.tools.study_results import Reading

STRIDE = 4  # windows overlap by all but a quarter
HEAD_TOKENS = 2048  # logits held at a time


@torch.no_grad()
def read(decoder: Decoder, documents: Tensor, reading: Reading, window: int) -> Tensor:
    """Returns the NLL of every token but the first of each document, [documents, N − 1] float32.

    Args:
        decoder: in eval mode.
        documents: [documents, N] int64.
        reading: see `Reading`.
        window: tokens of one forward; N − 1 for "whole".

    Raises:
        NumericalError: if a likelihood is not finite.
    """
    if reading == "window":
        nll = torch.stack([_in_windows(decoder, row[None], window) for row in documents])
    elif reading == "whole":
        nll = torch.cat([segment_nll(decoder, row[None], None)[0] for row in documents])
    else:
        nll = _in_segments(decoder, documents, window, recurrent=reading == "recurrent")
    if not nll.isfinite().all():
        raise NumericalError(
            f"{int((~nll.isfinite()).sum())} likelihoods of {nll.numel()} are not finite under "
            f"{decoder.config.position_encoding!r}. The weights are broken; train again."
        )
    return nll


def segment_nll(
    decoder: Decoder, tokens: Tensor, memory: Memory | None
) -> tuple[Tensor, Memory | None]:
    """Returns the NLL of all tokens but the first, [B, n − 1], and what is remembered of them.

    Args:
        decoder: in eval mode.
        tokens: [B, n] int64; the last is only a target.
        memory: of the tokens before.
    """
    out = decoder(tokens[:, :-1], memory=memory)
    targets = tokens[:, 1:].flatten()
    parts = [
        torch.nn.functional.cross_entropy(decoder.head(hidden).float(), target, reduction="none")
        for hidden, target in zip(
            out.hidden.flatten(0, 1).split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True
        )
    ]
    return torch.cat(parts).view(len(tokens), -1), out.memory


def _in_windows(decoder: Decoder, row: Tensor, window: int) -> Tensor:
    return strided_nll(
        lambda tokens: segment_nll(decoder, tokens, None)[0][0],
        row,
        window=window,
        stride=max(1, window // STRIDE),
        bos=False,
    )


def _in_segments(decoder: Decoder, documents: Tensor, window: int, recurrent: bool) -> Tensor:
    memory: Memory | None = None
    found = []
    for start in range(0, documents.shape[1] - 1, window):
        piece = documents[:, start : start + window + 1]
        nll, memory = segment_nll(decoder, piece, memory if recurrent else None)
        found.append(nll)
    return torch.cat(found, dim=1)


def doubling_buckets(by_seed: Sequence[Tensor], length: int) -> tuple[Bucket, ...]:
    """Returns the mean NLL by target position in buckets that double in width.

    Args:
        by_seed: [documents, N − 1] of every seed; entry i belongs to target position i + 1.
        length: the trained length: an edge, with two buckets or more below it.

    >>> [(b.start, b.stop) for b in doubling_buckets([torch.zeros(2, 63)], length=16)]
    [(1, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    """
    nll = torch.stack([one.double() for one in by_seed]).mean(dim=0)
    targets = nll.shape[1] + 1
    edges = sorted({1, targets, *(edge for edge in (length // 4, length // 2) if edge > 1)})
    edge = length
    while edge < targets - 1:
        edges.append(edge)
        edge *= 2
    edges.sort()
    found = []
    for start, stop in pairwise(edges):
        interval = mean_interval(nll[:, start - 1 : stop - 1].mean(dim=1))
        found.append(
            Bucket(start=start, stop=stop, nll=interval.mean, low=interval.low, high=interval.high)
        )
    return tuple(found)
