"""A model that remembers in longspan's caches: its twin over the same weights, turned by them.

The rotary modules hand queries and keys through unturned, and the attention function turns them by
the cache's own positions. Padding needs no position_ids: a row counts the tokens it has seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.adapters.alibi_attention import STAND_INS, alibi_of, stand_in
from longspan.adapters.config_fields import as_mapping
from longspan.adapters.extended import twin
from longspan.adapters.families import TableForm, layer_count, layer_types, text_part
from longspan.adapters.mask_functions import NO_LIMIT, MaskFunction, read_mask_function
from longspan.adapters.passed_mask import PassedMask
from longspan.adapters.rope import rope_from_config
from longspan.adapters.rotation import (
    lay_out,
    require_family,
    rope_of_type,
    rotary_modules,
    table_form,
)
from longspan.adapters.stream_cache import SINKS, SLIDING, StreamCache
from longspan.caches import Encoding, KeyValueCache, Scoring, SinkCache, Step, WindowCache
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.masks import causal, sliding_window
from longspan.rotary.rope import Rope
from longspan.rotary.rotate import RotationTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "longspan_stream"


@dataclass(frozen=True, eq=False)
class Seat:
    """A layer's place: how it knows positions, and in which cache it remembers."""

    streamed: StreamedModel
    layer: int
    kind: str
    encoding: Encoding


class StreamedModel:
    """A twin of a model, in which every layer remembers sinks and a window.

    Layers with a sliding window of their own keep it, without sinks and at true distances.

    Args:
        model: a transformers causal language model; it stays as it is.
        num_sink_tokens: first tokens that are never dropped.
        sliding_window: last tokens kept, the newest included.
        seq_len: the length whose table is used throughout, where a rope depends on it (dynamic
            NTK, LongRoPE); left at None, each token uses the table of its own place in the cache.

    Raises:
        UnsupportedModelError: for a family that longspan does not know, saying what is missing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_sink_tokens: int,
        sliding_window: int,
        seq_len: int | None = None,
    ) -> None:
        SinkCache(num_sink_tokens, sliding_window)  # refuses wrong sizes before anything is made
        self.num_sink_tokens = num_sink_tokens
        self.sliding_window = sliding_window
        self.current: StreamCache | None = None
        encodings, self.kinds, self.native_window = _plan(model, seq_len)
        self.encodings = dict(enumerate(encodings))
        self.model = _seated(self, model)

    def new_cache(self) -> StreamCache:
        """Returns an empty cache, for this model alone."""
        caches: dict[str, KeyValueCache] = {}
        if SINKS in self.kinds:
            caches[SINKS] = SinkCache(self.num_sink_tokens, self.sliding_window)
        if SLIDING in self.kinds:
            caches[SLIDING] = WindowCache(self.native_window or 1)
        return StreamCache(self, caches, self.kinds)

    def facts(self) -> dict[str, Any]:
        """Returns what must agree for remembered keys to be of use: the model and the sizes."""
        config = self.model.config.get_text_config()
        shapes = [tuple(parameter.shape) for parameter in self.model.parameters()]
        return {
            "model_type": config.model_type,
            "parameters": sum(math.prod(shape) for shape in shapes),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "rope": repr([encoding.rope for encoding in self.encodings.values()][:1]),
            "num_sink_tokens": self.num_sink_tokens,
            "sliding_window": self.sliding_window,
        }


class NewTokens(PassedMask):
    """The tokens of one forward, shared by all layers of a kind.

    Args:
        batch, tokens: B and T.
        present: [B, T] bool, False at padding; None where all are there.
        refused: why no layer can follow this mask, if none can.
    """

    def __init__(
        self, batch: int, tokens: int, present: Tensor | None, refused: str | None
    ) -> None:
        super().__init__((batch, tokens, tokens))
        self.present, self.refused = present, refused
        self.steps: dict[int, tuple[KeyValueCache, Step]] = {}
        self.alone: StreamCache | None = None
        """Where this forward remembers when it was given no cache."""

    def to(self, device: Any) -> NewTokens:
        """Returns itself; MPT asks any mask to become bools."""
        return self

    def step_of(self, kept: KeyValueCache, device: torch.device) -> Step:
        """Returns the step these tokens are to a cache; the first layer to ask begins it."""
        if id(kept) not in self.steps:
            step = kept.begin(self.sizes[1], self.present, device)
            self.steps[id(kept)] = kept, step
        return self.steps[id(kept)][1]


class Unturned(nn.Module):
    """Stands in for a rotary module: cos 1 and sin 0, so that nothing turns.

    Args:
        ropes: by layer type, for their sizes.
        form: how the family lays cos and sin out.
    """

    def __init__(self, ropes: Mapping[str, Rope], form: TableForm) -> None:
        super().__init__()
        self.ropes = ropes
        self.form: TableForm = form

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns ones and zeros in the family's form, [B, T, …], in x's dtype."""
        pairs = rope_of_type(self.ropes, layer_type).inv_freq().shape[-1]
        ones = x.new_ones((*position_ids.shape, pairs))
        return lay_out(RotationTable(ones, torch.zeros_like(ones)), self.form)


def new_tokens(
    batch_size: int,
    q_length: int,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_: Any,
) -> NewTokens:
    """Returns what the layers need of a forward's mask, as transformers' mask interface asks.

    Args:
        batch_size, q_length: B and T.
        mask_function: over indices; anything but causal, or the model's own window, is refused by
            the layers that are handed it.
        attention_mask: [B, tokens so far] bool, False at padding.
        local_size: the model's own window, where the mask is for its sliding layers.
    """
    seen = read_mask_function(mask_function, batch_size, NO_LIMIT)
    ordinary = [causal()] + ([sliding_window(local_size)] if local_size else [])
    refused = None
    if seen.documents or seen.mask not in ordinary:
        packed = ", over packed documents" if seen.documents else ""
        refused = f"a stream reads one causal text a row, and this mask is {seen.mask!r}{packed}."
    present = None if attention_mask is None else attention_mask[:, -q_length:]
    return NewTokens(batch_size, q_length, present, refused)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns attention's output [B, T, H, Dv] over what the stream remembers, and remembers more.

    Args:
        module: the attention layer, which has a `Seat`.
        query: [B, H, T, D], not turned.
        key, value: [B, K, T, D] and [B, K, T, Dv], not turned.
        attention_mask: what `new_tokens` made.
        scaling, dropout, softcap, s_aux: as for every attention function of transformers.
    """
    seat: Seat | None = getattr(module, "seat", None)
    if seat is None or not isinstance(attention_mask, NewTokens):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not belong to a streamed model, or was handed a mask of "
            f"{type(attention_mask).__name__}. Call the model that longspan.stream(…).model is, "
            "with a 2-D attention_mask or none."
        )
    if attention_mask.refused:
        raise UnsupportedModelError(attention_mask.refused)
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise ConfigError(
            "a stream remembers without gradients and drops nothing. Call model.eval() and run it "
            "under torch.no_grad()."
        )
    kept = _cache_of(seat, key, attention_mask).caches[seat.kind]
    step = attention_mask.step_of(kept, query.device)
    scoring = Scoring(scaling, s_aux, softcap)
    out = kept.attend(step, seat.layer, query, key, value, seat.encoding, scoring)
    return out.transpose(1, 2).contiguous(), None


def _cache_of(seat: Seat, key: Tensor, tokens: NewTokens) -> StreamCache:
    """Returns the cache this forward was given, or one that lives as long as the forward."""
    current = seat.streamed.current
    if current is not None and current.given is not None:
        (layer, given), current.given = current.given, None
        if layer == seat.layer and given is key:
            return current
        raise UnsupportedModelError(
            "the model changes its keys between its cache and its attention, which a stream "
            "cannot follow."
        )
    if key.shape[2] != tokens.sizes[1]:
        raise ConfigError(
            "a streamed model remembers in its own cache. Pass cache=stream.new_cache() to "
            "generate or forward, in place of transformers' own."
        )
    if tokens.alone is None:
        tokens.alone = seat.streamed.new_cache()
    return tokens.alone


def _plan(
    model: PreTrainedModel, seq_len: int | None
) -> tuple[list[Encoding], tuple[str, ...], int | None]:
    """Returns each layer's encoding and cache, and the model's own sliding window."""
    if model.config.model_type in STAND_INS:
        alibi, layers = Encoding(bias=alibi_of(model)), layer_count(as_mapping(model.config))
        return [alibi] * layers, (SINKS,) * layers, None
    family = require_family(model)
    table_form(model)
    if family.mla:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} has latent attention (MLA): only a part of "
            "each key turns, outside of the attention function. It cannot be streamed yet."
        )
    config = text_part(as_mapping(model.config))
    ropes, types = rope_from_config(model.config), layer_types(config, family)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"layers of type {', '.join(sorted(unknown))} cannot be streamed; full_attention and "
            "sliding_attention can."
        )
    encodings = []
    for layer in range(len(types)):
        rope = ropes.for_layer(layer)
        by_length = rope is not None and rope.method.depends_on_length
        encodings.append(Encoding(rope, seq_len if by_length else None))
    kinds = tuple(SLIDING if kind == "sliding_attention" else SINKS for kind in types)
    return encodings, kinds, config.get("sliding_window")


def _seated(streamed: StreamedModel, model: PreTrainedModel) -> PreTrainedModel:
    """Returns the twin, its layers seated and calling this module's attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, new_tokens)
    found = twin(model)
    if model.config.model_type in STAND_INS:
        stand_in(found, attention, NAME)
    else:
        _hand_through(found)
    for module in found.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            kind, encoding = streamed.kinds[layer], streamed.encodings[layer]
            object.__setattr__(module, "seat", Seat(streamed, layer, kind, encoding))
    if found.generation_config is not None:  # MPT's says False: each step would be fed all again
        found.generation_config.use_cache = True
    return found.eval()


def _hand_through(model: PreTrainedModel) -> None:
    """Lets a model's rotary modules turn nothing, and its layers call this module's attention."""
    ropes, form = rope_from_config(model.config), table_form(model)
    for parent, name, _ in rotary_modules(model):
        parent._modules[name] = Unturned(ropes, form)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} has its attention written into its layers, where a stream "
            "cannot reach it."
        )
