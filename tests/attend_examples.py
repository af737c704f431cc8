"""What attend is tried on: encodings, who sees whom, and an example of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.attention import IMPLS, flex, plan
from longspan.attention.visibility import Visibility
from longspan.bias import Alibi, Bias, ShawRelative, T5Bias, TransformerXLBias
from longspan.masks import Mask, attention_sinks, causal, prefix, sliding_window
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rotate import rotate

B, H, K, N, D = 2, 4, 2, 37, 8
# So that N tokens are many tiles.
TINY = plan.Sizes(queries=5, tiles=2, block=4, fine=2, dense=11, whole=7)
NO_GRADIENT = ("flex",)  # on a CPU


def make_tiles_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts N tokens in many tiles, and runs flex's own arithmetic without its compiler."""
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(plan, "SIZES", TINY)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "compiled", lambda *kind: torch_flex.flex_attention)


@dataclass(frozen=True)
class Encoding:
    """A way a position enters: a rotation of q and k, or a bias."""

    name: str
    bias: Callable[[], Bias | None] = lambda: None
    rotates: bool = False


@dataclass(frozen=True)
class Look:
    """Who sees whom: a mask, and what else `attend` is told of N tokens, by position."""

    name: str
    mask: Mask | None
    placed: dict[str, Tensor] = field(default_factory=dict)

    def options(self, queries: slice, keys: slice) -> dict[str, Any]:
        """Returns attend's options for some queries and keys."""
        cut = {"q": queries, "k": keys}
        placed = {name: given[..., cut[name[0]]] for name, given in self.placed.items()}
        return {"mask": self.mask, **placed}


positions = torch.arange(N)
padded = positions.expand(B, N).clone()
padded[1, :12] = -1  # longer than the window, so that rows see nothing
shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(3))
documents = torch.tensor([0] * 9 + [4] * 17 + [7] * (N - 26))

ENCODINGS = (
    Encoding("none"),
    Encoding("rope", rotates=True),
    Encoding("alibi", lambda: Alibi(H)),
    Encoding("alibi-both", lambda: Alibi(H, bidirectional=True)),
    Encoding("t5", lambda: T5Bias(H, num_buckets=8, max_distance=16)),
    Encoding("t5-both", lambda: T5Bias(H, num_buckets=8, max_distance=16, bidirectional=True)),
    Encoding("shaw", lambda: ShawRelative(H, D, max_distance=5)),
    Encoding("transformer-xl", lambda: TransformerXLBias(H, D)),
)
LOOKS = (
    Look("all", None),
    Look("causal", causal()),
    Look("window", sliding_window(7)),
    Look("window-and-sinks", causal() & (sliding_window(5) | attention_sinks(3))),
    Look("window-both", sliding_window(6, ahead=4)),
    Look("prefix", causal() | prefix(9)),
    Look("all-but-near", ~sliding_window(6, ahead=4)),
    Look("padding", sliding_window(7), {"q_pos": positions, "k_pos": padded}),
    Look("documents", causal(), {"q_doc": documents, "k_doc": documents}),
    Look("scattered", sliding_window(7), {"q_pos": shuffled * 2, "k_pos": shuffled * 2}),
)
each_look = pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.name)
each_impl = pytest.mark.parametrize("impl", IMPLS)
each_differentiable = pytest.mark.parametrize("impl", [i for i in IMPLS if i not in NO_GRADIENT])


def contradicts(encoding: Encoding, look: Look) -> bool:
    """Whether the encoding has no meaning under this mask, so that everyone refuses it."""
    bias = encoding.bias()
    return bias is not None and bias.needs_causal and (look.mask is None or not look.mask.causal)


def example(encoding: Encoding, dtype: torch.dtype = torch.float64):
    """Returns q, k, v and the bias, large enough that a wrong one shows."""
    random = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k, v = normal(B, H, N, D), normal(B, K, N, D), normal(B, K, N, D)
    if encoding.rotates:
        inv_freq = rope_frequencies(D, 10_000.0)
        q, k = rotate(q, positions, inv_freq), rotate(k, positions, inv_freq)
    bias = encoding.bias()
    if bias is not None:
        bias = bias.double()
        for parameter in bias.parameters():
            parameter.data = normal(*parameter.shape)
    return q.to(dtype), k.to(dtype), v.to(dtype), bias


def seen_by(mask: Mask | None, length: int, **placed: Tensor) -> Visibility:
    return Visibility.of(mask, (B, length, length), **placed)
