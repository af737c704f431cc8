"""The contenders: who takes part, what each means, what each needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attention import attend
from longspan.attention.rules import Options
from longspan.bias import Alibi, T5Bias
from longspan.masks import causal, sliding_window
from rivals import (
    DIM,
    HEADS,
    MASK,
    WINDOW,
    Attention,
    alibi_function,
    causal_function,
    dense_alibi,
    dense_mask,
    flex_compiled,
    local_attention,
    plain,
    transformers_sdpa,
    window_function,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECKED = 16  # the last queries, held against the definition


@dataclass(frozen=True)
class Peer:
    """One contender."""

    name: str
    ready: Callable[[Tensor], Attention]
    """From q: builds what can be built beforehand, outside the time."""
    meaning: Options
    """What `attend` is asked for the same."""
    bytes_a_pair: int = 0
    """What it holds for each of N² pairs: masks of all heads, and copies the kernel makes."""
    bytes_a_query: int = 0
    """What it holds for each query, where that is much."""
    quadratic: bool = False
    """True where its time grows with N²."""
    trains_on_cpu: bool = True

    def needs(self, tokens: int) -> int:
        """Returns about how many bytes it holds beside its inputs and its output."""
        return self.bytes_a_pair * tokens**2 + self.bytes_a_query * tokens

    @torch.no_grad()
    def error(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> float:
        """Returns the largest |difference| from the float64 definition, over the last queries."""
        last = q[:, :, -CHECKED:].double()
        exact = attend(last, k.double(), v.double(), impl="reference", **self.meaning)
        return (attention(q, k, v)[:, :, -CHECKED:].double() - exact).abs().max().item()


def inputs(tokens: int, dtype: str, device: str = "cpu") -> list[Tensor]:
    """Returns q, k and v, [1, 8, N, 64]."""
    random = torch.Generator(device).manual_seed(0)
    shape = 1, HEADS, tokens, DIM
    found = (torch.randn(shape, generator=random, device=device) for _ in range(3))
    return [x.to(DTYPES[dtype]) for x in found]


def doublings(first: int, last: int) -> list[int]:
    """Returns first, 2·first, … up to `last`."""
    return [first << step for step in range((last // first).bit_length())]


def run(attention: Attention, qkv: list[Tensor], backward: bool) -> list[Tensor]:
    """Runs one contender once; returns out and, after a backward, the gradients of q, k and v."""
    if not backward:
        with torch.no_grad():
            return [attention(*qkv)]
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves)
    out.backward(qkv[0])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def ours(impl: str, **options: Any) -> Callable[[Tensor], Attention]:
    """Returns how to make attend ready: there is nothing to build."""
    return lambda _: lambda q, k, v: attend(q, k, v, impl=impl, **options)


WINDOW_ALONE, CAUSAL = Options(mask=sliding_window(WINDOW)), Options(mask=causal())
ALIBI = Options(mask=causal(), bias=Alibi(HEADS))
T5 = Options(mask=causal(), bias=T5Bias(HEADS))
SDPA_CAUSAL = Peer("sdpa causal", plain, CAUSAL, quadratic=True)
DENSE_MASK = Peer(
    "sdpa dense mask", dense_mask, Options(mask=MASK), bytes_a_pair=1 + 4, quadratic=True
)
FLEX = Peer(
    "flex compiled",
    flex_compiled(MASK, window_function),
    Options(mask=MASK),
    trains_on_cpu=False,
)
DENSE_ALIBI = Peer("sdpa dense ALiBi", dense_alibi, ALIBI, bytes_a_pair=4 * HEADS, quadratic=True)
FLEX_ALIBI = Peer(
    "flex ALiBi",
    flex_compiled(causal(), causal_function, alibi_function),
    ALIBI,
    quadratic=True,
    trains_on_cpu=False,
)
TRANSFORMERS = Peer(
    "transformers sdpa", transformers_sdpa, WINDOW_ALONE, bytes_a_pair=1 + 4, quadratic=True
)
LOCAL_ATTENTION = Peer(
    "local-attention",
    local_attention,
    Options(mask=sliding_window(WINDOW + 1)),
    bytes_a_query=3 * 4 * HEADS * 2 * WINDOW,  # three tensors of a query's scores, in float32
)

TILED = Peer("longspan tiled", ours("tiled", mask=MASK), Options(mask=MASK))
WINDOWED = (TILED, DENSE_MASK, TRANSFORMERS, FLEX, LOCAL_ATTENTION, SDPA_CAUSAL)
BIASED = (
    SDPA_CAUSAL,
    Peer("longspan ALiBi", ours("tiled", **ALIBI), ALIBI, quadratic=True),
    Peer("longspan T5", ours("tiled", **T5), T5, quadratic=True),
    DENSE_ALIBI,
    FLEX_ALIBI,
)
"""The first of each is what the others are compared with."""
