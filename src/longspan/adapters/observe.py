"""Attention weights shown to an observer, a chunk of queries at a time, as the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longspan.errors import UnsupportedModelError

NAME = "longspan_observed"
CHUNK_BYTES = 64 * 2**20

Observer = Callable[[int, int, Tensor, Tensor], None]
"""Gets (layer, first query, weights [B, H, C, S], visible [B or 1, 1, C, S]) for each chunk."""


@contextmanager
def observed_attention(model: Any, observer: Observer) -> Iterator[None]:
    """Runs the model's attention through a plain softmax whose weights `observer` sees.

    Weights exist for one chunk of queries at a time. The model's attention is restored on the way
    out; nothing stays registered.

    Args:
        model: a transformers model.
        observer: called for each layer and chunk, queries in order.

    Raises:
        UnsupportedModelError: if the model does not let its attention be chosen.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any):
        return observe(observer, module, query, key, value, mask, **given), None

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"{type(model).__name__} has its attention written into its layers, where it "
                "cannot be observed."
            )
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)


def observe(
    observer: Observer,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Returns attention's output, [B, T, H, D], and shows the weights on the way.

    Args:
        observer: see `Observer`.
        module: the attention layer; it tells its index.
        query: [B, H, T, D].
        key, value: [B, K, S, D].
        mask: [B, 1, T, S] bool, True where visible; None is causal.
        scaling: of the scores, 1/√D unless given.
        softcap: scores become softcap · tanh(score / softcap).
        s_aux: [H] learned sink logits, in the softmax's denominator only.
    """
    layer = getattr(module, "layer_idx", None)
    if layer is None or (mask is not None and mask.dtype != torch.bool):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not call attention as this release of longspan knows "
            "it, so its weights cannot be observed."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for first in range(0, query.shape[2], chunk_queries(query, key)):
        part = query[:, :, first : first + chunk_queries(query, key)]
        visible = visible_keys(mask, first, part.shape[2], query.shape[2], key)
        scores = grouped_product(part.float() * scale, key.float().transpose(-1, -2))
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        weights = softmax(scores.masked_fill(~visible, -torch.inf), s_aux)
        observer(int(layer), first, weights, visible)
        outputs.append(grouped_product(weights, value.float()).to(query.dtype))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def chunk_queries(query: Tensor, key: Tensor) -> int:
    """Returns how many queries' float32 weights fit in one chunk's memory, at least 1."""
    return max(1, CHUNK_BYTES // (4 * query.shape[0] * query.shape[1] * key.shape[2]))


def visible_keys(mask: Tensor | None, first: int, count: int, queries: int, key: Tensor) -> Tensor:
    """Returns what queries first … first + count − 1 see, [B or 1, 1, count, S] bool."""
    if mask is not None:
        return mask[:, :, first : first + count]
    keys = key.shape[2]
    q_pos = torch.arange(first, first + count, device=key.device) + keys - queries
    return (torch.arange(keys, device=key.device) <= q_pos[:, None])[None, None]


def grouped_product(heads: Tensor, shared: Tensor) -> Tensor:
    """Returns heads @ shared, [B, H, C, M], for H query heads sharing K key heads [B, K, …]."""
    batch, count, rows, inner = heads.shape
    groups = heads.reshape(batch, shared.shape[1], -1, rows, inner)
    return (groups @ shared.unsqueeze(2)).reshape(batch, count, rows, -1)


def softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Returns the weights over keys; learned sinks take their share and are left out."""
    if sink_logits is None:
        return scores.softmax(dim=-1)
    sinks = sink_logits.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
