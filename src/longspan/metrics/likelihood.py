"""Negative log-likelihood of every token from one forward, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.adapters.head import split_forward
from longspan.errors import NumericalError, ShapeError

CHUNK_TOKENS = 1024
EXACT = ("float32", "float64")


def token_nll(model: Any, input_ids: Tensor, *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Returns −ln p(token i + 1 | tokens 0 … i) for every i, from one forward.

    Args:
        model: a transformers causal language model in eval mode, or a `SplitForward` of it.
        input_ids: [1, N] int64, N ≥ 2.
        chunk_tokens: logits held at a time.

    Returns:
        [N − 1] float32, or the model's float64, on the CPU, nats; entry i belongs to target
        position i + 1.

    Raises:
        ShapeError: if `input_ids` is not one row of two or more tokens of the vocabulary.
        NumericalError: if a logit is NaN or infinite, with its position.
        UnsupportedModelError: if the head cannot be run apart from the body.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
        raise ShapeError(
            f"input_ids must be one row [1, N] of N ≥ 2 tokens, got {tuple(input_ids.shape)}."
        )
    split = split_forward(model)
    hidden = split.hidden(input_ids)[:, :-1]
    targets = input_ids[0, 1:].to(hidden.device)
    nll = chunked_nll(split.logits, hidden, targets, chunk_tokens).cpu()
    check_finite(nll, str(split.model.dtype).removeprefix("torch."))
    return nll


def chunked_nll(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, chunk_tokens: int
) -> Tensor:
    """Returns the targets' negative log-likelihood, holding one chunk's logits at a time.

    Args:
        head: from hidden states [1, C, hidden] to logits [1, C, V].
        hidden: [1, T, hidden].
        targets: [T] int64.
        chunk_tokens: C, the most logits held.

    Returns:
        [T] float32, or float64 where `hidden` is, nats.
    """
    if chunk_tokens < 1:
        raise ShapeError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")
    nll = torch.empty(targets.shape, dtype=nll_dtype(hidden.dtype), device=hidden.device)
    for start in range(0, targets.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        logits = head(hidden[:, part])[0].to(nll.dtype)  # [C, V]
        of_target = logits.gather(-1, targets[part, None]).squeeze(-1)
        nll[part] = logits.logsumexp(dim=-1) - of_target
        del logits  # before the next chunk's exist
    return nll


def nll_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns what a likelihood is reckoned in for a model's dtype: float32, or its float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_finite(nll: Tensor, dtype: str) -> None:
    """Refuses likelihoods that are not numbers, naming the first position.

    Raises:
        NumericalError: if one is NaN or infinite.
    """
    broken = (~nll.isfinite()).nonzero()
    if len(broken):
        position = int(broken[0])
        raise NumericalError(
            f"the logits at position {position} are not finite ({nll[position].item()} nats for "
            f"its next token; {len(broken)} of {len(nll)} positions). Weights run in {dtype}: "
            + ("check the checkpoint for damage." if dtype in EXACT else "try float32.")
        )
