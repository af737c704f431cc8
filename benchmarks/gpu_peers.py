"""The contenders on a GPU: longspan's implementations, FlexAttention, flash-attn, SDPA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.attention.rules import Options
from longspan.bias import T5Bias, alibi_slopes
from longspan.masks import causal, sliding_window
from peers import ALIBI, CAUSAL, DENSE_ALIBI, DENSE_MASK, FLEX, FLEX_ALIBI, SDPA_CAUSAL, Peer, ours
from rivals import HEADS, MASK, WINDOW, Attention, causal_function, flex_compiled

SOFTCAP = 2.0  # low, so that it shows with normal q and k


def flash(**options: Any) -> Callable[[Tensor], Attention]:
    """Returns how to make flash-attn ready; it takes [B, T, H, D], and no float32."""

    def ready(q: Tensor) -> Attention:
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turned = (x.transpose(1, 2) for x in (q, k, v))
            return flash_attn_func(*turned, causal=True, **options).transpose(1, 2)

        return attention

    return ready


def softcap_function(_: torch.device) -> Callable[..., Tensor]:
    """Returns the soft cap as one writes it for FlexAttention."""
    return lambda score, b, h, q, k: SOFTCAP * torch.tanh(score / SOFTCAP)


def tables(device: str) -> dict[str, tuple[Peer, ...]]:
    """Returns the contenders of each setting; the first is what the others are compared with."""
    slopes = alibi_slopes(HEADS).to(device, torch.float32)
    window, alone = Options(mask=MASK), Options(mask=sliding_window(WINDOW))
    capped = Options(mask=causal(), softcap=SOFTCAP)
    t5 = Options(mask=causal(), bias=T5Bias(HEADS).to(device))
    return {
        "window": (
            *longspan(window, "auto", "flex", "tiled"),
            FLEX,
            Peer("flash-attn window", flash(window_size=(WINDOW - 1, 0)), alone),
            DENSE_MASK,
            SDPA_CAUSAL,
        ),
        "ALiBi": (
            SDPA_CAUSAL,
            *longspan(ALIBI, "auto", "tiled"),
            FLEX_ALIBI,
            Peer("flash-attn ALiBi", flash(alibi_slopes=slopes), ALIBI),
            DENSE_ALIBI,
        ),
        "T5": (SDPA_CAUSAL, *longspan(t5, "auto", "tiled")),
        "soft cap": (
            *longspan(capped, "auto", "tiled"),
            Peer("flex", flex_compiled(causal(), causal_function, softcap_function), capped),
            Peer("flash-attn", flash(softcap=SOFTCAP), capped),
            Peer("sdpa causal, no cap", SDPA_CAUSAL.ready, CAUSAL),
        ),
    }


def longspan(options: Options, *impls: str) -> tuple[Peer, ...]:
    """Returns attend by each of these implementations."""
    return tuple(Peer(f"longspan {impl}", ours(impl, **options), options) for impl in impls)
