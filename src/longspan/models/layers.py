"""The decoder's layers: attention with any encoding, a gated MLP, norms before both."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.attention import attend
from longspan.bias.base import Bias
from longspan.models.config import DecoderConfig
from longspan.models.encodings import encoding
from longspan.models.places import Place
from longspan.rotary.rotate import apply_rotation


class Attention(nn.Module):
    """Grouped-query attention of one layer.

    Args:
        config: the decoder's.
        index: of this layer.
        bias: added to the scores; it may be shared between layers.
    """

    def __init__(self, config: DecoderConfig, index: int, bias: Bias | None) -> None:
        super().__init__()
        self.head_dim, self.kind = config.head_dim, config.kinds[index]
        width, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.rotates = encoding(config.encodings[index]).rotates
        self.scale = None if encoding(config.encodings[index]).scaled else 1.0
        self.bias = bias
        sinks = torch.empty(config.num_attention_heads) if config.learned_sinks else None
        self.sink_logits = None if sinks is None else nn.Parameter(sinks)

    def forward(self, x: Tensor, remembered: Tensor | None, place: Place) -> Tensor:
        """Returns the layer's attention, [B, T, hidden].

        Args:
            x: [B, T, hidden], normalised.
            remembered: [B, M, hidden] before it, normalised alike.
            place: where they are.
        """
        source = x if remembered is None else torch.cat((remembered, x), dim=1)
        q, k, v = (
            self._heads(project(states))
            for project, states in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source))
        )
        if self.rotates:
            q = apply_rotation(q, place.table(q.shape[2]), "half")
            k = apply_rotation(k, place.table(k.shape[2]), "half")
        out = attend(
            q,
            k,
            v,
            mask=place.seen[self.kind],
            bias=self.bias,
            scale=self.scale,
            sink_logits=self.sink_logits,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)). Source: Shazeer 2020 (arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [B, T, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer, named as Llama names its parts."""

    def __init__(self, config: DecoderConfig, index: int, bias: Bias | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, index, bias)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, remembered: Tensor | None, place: Place) -> Tensor:
        """Returns the next layer's input, [B, T, hidden].

        Args:
            x: this layer's input.
            remembered: this layer's input of earlier tokens, [B, M, hidden], or None.
            place: where they are.
        """
        before = None if remembered is None else self.input_layernorm(remembered)
        x = x + self.self_attn(self.input_layernorm(x), before, place)
        return x + self.mlp(self.post_attention_layernorm(x))
