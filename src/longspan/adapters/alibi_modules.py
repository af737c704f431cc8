"""Attention modules of MPT and BLOOM, over the weights of those they stand in for.

Each hands queries, keys and values to one attention function: `attend`, or a stream's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.bias import Alibi

AttentionFunction = Callable[..., tuple[Tensor, None]]
"""As transformers calls one: module, query, key, value, attention_mask, scaling=, dropout=."""


class AlibiAttention(nn.Module, ABC):
    """Stands in for a layer's own attention, over the same weights.

    Args:
        own: the module it stands in for.
        alibi: the model's bias.
        attention: what meets queries, keys and values.
    """

    own_class: ClassVar[str]
    """The module of transformers whose place it takes."""
    followed: ClassVar[Mapping[str, Any]] = {}
    """The one value that transformers follows of each of these keys of attn_config."""

    def __init__(self, own: nn.Module, alibi: Alibi, attention: AttentionFunction) -> None:
        super().__init__()
        for name, child in own.named_children():
            setattr(self, name, child)
        self.own: Any
        object.__setattr__(self, "own", own)  # for its numbers; as a child it would save twice
        self.layer_idx = self.own.layer_idx
        self.alibi, self.attention = alibi, attention
        self.train(own.training)

    @staticmethod
    @abstractmethod
    def bias_of_two(base: Any, num_heads: int) -> Tensor:
        """Returns what the model adds to the scores of two keys, [H, 1, 2]."""

    def read(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        attention_mask: Any,
        cache: Any,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        """Returns what all heads read, [B, T, H·D].

        Args:
            heads: q, k and v of the new tokens, [B, H, T, D] each.
            attention_mask: what the mask function of `attention` made.
            cache: any of transformers', or None.
            scaling: of the scores.
            dropout: of the weights, in training.
        """
        q, k, v = heads
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        dropout = dropout if self.training else 0.0
        out, _ = self.attention(self, q, k, v, attention_mask, scaling=scaling, dropout=dropout)
        return out.flatten(2)


class MptAlibiAttention(AlibiAttention):
    """MPT's attention: q, k and v one after the other in Wqkv, clipped where the config says so."""

    own_class = "MptAttention"
    followed: ClassVar[Mapping[str, Any]] = {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_type": "multihead_attention",
        "prefix_lm": False,
        "qk_ln": False,
    }
    Wqkv: nn.Module
    out_proj: nn.Module

    @staticmethod
    def bias_of_two(base: Any, num_heads: int) -> Tensor:
        """Returns what the model adds to the scores of two keys, [H, 1, 2]."""
        return base.build_mpt_alibi_tensor(num_heads, 2)

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor | None = None,
        cache: Any = None,
        attention_mask: Any = None,
    ) -> tuple[Tensor, None]:
        """Returns what the layer adds, [B, T, H·D], as MPT's block asks for it."""
        fused, clip = self.Wqkv(hidden_states), self.own.clip_qkv
        if clip:
            fused = fused.clamp(min=-clip, max=clip)
        q, k, v = fused.unflatten(-1, (3, self.alibi.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scaling, dropout = self.own.softmax_scale, self.own.attn_dropout_p
        return self.out_proj(self.read((q, k, v), attention_mask, cache, scaling, dropout)), None


class BloomAlibiAttention(AlibiAttention):
    """BLOOM's attention: each head's q, k and v side by side, the residual added within."""

    own_class = "BloomAttention"
    query_key_value: nn.Module
    dense: nn.Linear

    @staticmethod
    def bias_of_two(base: Any, num_heads: int) -> Tensor:
        """Returns what the model adds to the scores of two keys, [H, 1, 2]."""
        present = torch.ones(1, 2, dtype=torch.int64)
        return base.build_alibi_tensor(present, num_heads, torch.float32)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor | None = None,
        attention_mask: Any = None,
        layer_past: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Returns the residual and what the layer adds to it, as BLOOM's block asks for it."""
        fused = self.query_key_value(hidden_states)
        q, k, v = fused.unflatten(-1, (self.alibi.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        scaling, dropout = self.own.inv_norm_factor, self.own.attention_dropout.p
        out = self._joined(self.read((q, k, v), attention_mask, layer_past, scaling, dropout))
        return residual + F.dropout(out, self.own.hidden_dropout, self.training), None

    def _joined(self, read: Tensor) -> Tensor:
        """Returns the heads joined; `slow_but_exact` adds up the ranks' shares, without a bias."""
        ranks = self.own.pretraining_tp
        if ranks == 1 or not self.own.slow_but_exact:
            return self.dense(read)
        shares = zip(read.chunk(ranks, -1), self.dense.weight.chunk(ranks, -1), strict=True)
        return torch.stack([F.linear(share, weight) for share, weight in shares]).sum(0)


STAND_INS: Mapping[str, type[AlibiAttention]] = {
    "mpt": MptAlibiAttention,
    "bloom": BloomAlibiAttention,
}
