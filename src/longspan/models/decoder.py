"""A pre-norm decoder that takes any position encoding, and remembers segments if asked."""

from __future__ import annotations

import zlib
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.errors import ShapeError
from longspan.models.config import DecoderConfig
from longspan.models.encodings import encoding
from longspan.models.layers import Layer
from longspan.models.memory import Memory, check_memory, remember
from longspan.models.places import check_order, joined, place_tokens
from longspan.rotary.rotate import compute_dtype
from longspan.rotary.scaling import RopeScaling


class DecoderOutput(NamedTuple):
    """What a forward returns."""

    hidden: Tensor
    """[B, T, hidden], normalised: what the head reads."""
    memory: Memory | None
    """For the next segment; None where memory_length is 0."""


class Decoder(nn.Module):
    """Llama's shape (GQA, SwiGLU, RMSNorm) with positions known in any way.

    Weights common to two encodings start equal under one seed: each is drawn by its own name.

    Args:
        config: what it is made of.
        seed: of the initial weights.

    >>> config = DecoderConfig(vocab_size=16, hidden_size=8, intermediate_size=16,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    ...     max_position_embeddings=32, position_encoding="alibi")
    >>> Decoder(config).logits(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        input_encoding = config.input_encoding
        build = None if input_encoding is None else encoding(input_encoding).inputs
        self.positions = None if build is None else build(config)
        self.layers = nn.ModuleList()
        first = {}  # the first layer's bias of each encoding, for those that share
        for index, name in enumerate(config.encodings):
            bias_of = encoding(name).bias
            bias = None if bias_of is None else bias_of(config, first.get(name))
            first.setdefault(name, bias)
            self.layers.append(Layer(config, index, bias))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = (
            None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self._initialise(seed)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        memory: Memory | None = None,
        seq_len: int | None = None,
    ) -> DecoderOutput:
        """Returns the hidden states and what the next segment may remember.

        Args:
            input_ids: [B, T] int64.
            positions: [T] or [B, T] int64; by default they follow on the memory's. They may jump
                ahead (PoSE); where they go back, `documents` must say why.
            documents: [B, T] int64; tokens of different documents never see each other, nor does
                memory reach over them.
            memory: what an earlier forward returned.
            seq_len: the total length, for a rope whose table depends on it; the last position + 1
                unless given.

        Raises:
            ShapeError: for shapes that do not fit.
            ConfigError: for positions that go back within a document.
        """
        if input_ids.dim() != 2:
            raise ShapeError(f"input_ids must be [B, T], got {tuple(input_ids.shape)}.")
        if memory is not None:
            check_memory(memory, len(input_ids), len(self.layers), self.config.hidden_size)
        if positions is None:
            start = 0 if memory is None else memory.next_position
            positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        else:
            check_order(*joined(memory, positions, documents))
        x = self.embed_tokens(input_ids)
        place = place_tokens(
            self.config, input_ids.shape, positions, documents, memory, seq_len, compute_dtype(x)
        )
        if self.positions is not None:
            x = x + self.positions(positions, x.dtype)
        inputs = []
        for index, layer in enumerate(self.layers):
            inputs.append(x)
            x = layer(x, None if memory is None else memory.hidden[index], place)
        kept = remember(memory, tuple(inputs), positions, documents, self.config.memory_length)
        return DecoderOutput(self.norm(x), kept)

    def head(self, hidden: Tensor) -> Tensor:
        """Returns logits [B, T, vocabulary] of hidden states."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        return F.linear(hidden, self.embed_tokens.weight)

    def logits(self, input_ids: Tensor, **options: Tensor | None) -> Tensor:
        """Returns the logits of a forward, [B, T, vocabulary]; options as for `forward`."""
        return self.head(self(input_ids, **options).hidden)

    def with_scaling(self, scaling: RopeScaling | None) -> Decoder:
        """Returns a decoder over the same weights with another rope scaling."""
        return self._with(replace(self.config, scaling=scaling))

    def with_memory(self, memory_length: int) -> Decoder:
        """Returns a decoder over the same weights that remembers so many tokens."""
        return self._with(replace(self.config, memory_length=memory_length))

    def _with(self, config: DecoderConfig) -> Decoder:
        twin = copy(self)
        twin.config = config
        return twin

    def _initialise(self, seed: int) -> None:
        """Draws every weight by its own name, so that others do not shift it."""
        deep = (2 * self.config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(weight)
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= deep  # Radford et al. 2019 §2.3: what each layer adds to the residual stream
            nn.init.normal_(weight, std=std, generator=generator)
