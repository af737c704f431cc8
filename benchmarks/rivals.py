"""What people use for the same attention: SDPA, transformers, FlexAttention, local-attention.

Each function builds from a q what can be built beforehand, outside the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.attention import flex
from longspan.attention.rules import Options, check
from longspan.bias import Alibi
from longspan.masks import Mask, attention_sinks, causal, sliding_window

HEADS, DIM, WINDOW, SINKS = 8, 64, 512, 4
MASK = causal() & (sliding_window(WINDOW) | attention_sinks(SINKS))
ROWS = 256  # of a tensor of all pairs, built at once

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(_: Tensor) -> Attention:
    """Returns SDPA over all keys before the query."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def all_pairs(q: Tensor, tile: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns a tensor of all pairs; building it by rows needs no more memory than itself."""
    at = torch.arange(q.shape[2], device=q.device)
    first = tile(at[:1], at)
    whole = first.new_empty((*first.shape[:-2], len(at), len(at)))
    for start in range(0, len(at), ROWS):
        rows = slice(start, start + ROWS)
        whole[..., rows, :] = tile(at[rows], at)
    return whole


def dense_mask(q: Tensor) -> Attention:
    """Returns SDPA under a window mask of all pairs."""
    mask = all_pairs(q, MASK)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def dense_alibi(q: Tensor) -> Attention:
    """Returns SDPA under an ALiBi bias of all pairs and heads."""
    alibi, sees, like = Alibi(HEADS), causal(), q.new_zeros(1)
    bias = all_pairs(
        q, lambda rows, at: alibi.scores(like, rows, at).masked_fill(~sees(rows, at), -torch.inf)
    )
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def transformers_sdpa(q: Tensor) -> Attention:
    """Returns transformers' own path: its window mask is built once a forward, for all layers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    sees, tokens, layer = sliding_window_causal_mask_function(WINDOW), q.shape[2], nn.Module()
    mask = sdpa_mask(1, tokens, tokens, mask_function=sees, local_size=WINDOW, device=q.device)
    # It gives [B, T, H, D].
    return lambda q, k, v: sdpa_attention_forward(layer, q, k, v, mask)[0].transpose(1, 2)


def local_attention(_: Tensor) -> Attention:
    """Returns lucidrains' local-attention: 513 keys a query, and no sinks."""
    from local_attention import LocalAttention

    return LocalAttention(
        window_size=WINDOW, causal=True, exact_windowsize=True, autopad=True, dim=None
    )


def window_function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Returns who sees whom, as one writes it for FlexAttention."""
    return (q >= k) & ((q - k < WINDOW) | (k < SINKS))


def causal_function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Returns who sees whom, as one writes it for FlexAttention."""
    return q >= k


def alibi_function(device: torch.device) -> Callable[..., Tensor]:
    """Returns ALiBi as one writes it for FlexAttention."""
    slopes = Alibi(HEADS).slopes.to(device, torch.float32)
    return lambda score, b, h, q, k: score - slopes[h] * (q - k)


def flex_compiled(
    mask: Mask,
    sees: Callable[..., Tensor],
    score: Callable[[torch.device], Callable[..., Tensor]] | None = None,
) -> Callable[[Tensor], Attention]:
    """Returns how to make compiled FlexAttention ready.

    Its own create_block_mask takes 7.7 GB at 32k tokens on a CPU, so there the block mask is
    longspan's, with the same blocks.

    Args:
        mask: who sees whom,
        sees: and the same as a function for FlexAttention.
        score: from a device, how a score is changed.
    """

    def ready(q: Tensor) -> Attention:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        tokens, on_cpu = q.shape[2], q.device.type == "cpu"
        if on_cpu:
            blocks = flex.block_mask(check(q, q, q, False, Options(mask=mask))[1].seen)
            blocks.mask_mod = sees
        else:
            build = torch.compile(create_block_mask)
            blocks = build(sees, None, None, tokens, tokens, device=q.device)
        score_mod = None if score is None else score(q.device)
        kernel = torch.compile(flex_attention, fullgraph=True, dynamic=False if on_cpu else None)
        return lambda q, k, v: kernel(q, k, v, score_mod=score_mod, block_mask=blocks)

    return ready
