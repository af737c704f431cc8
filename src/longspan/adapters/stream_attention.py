"""The attention of a streamed model, and what its layers are handed in place of a mask.

Queries and keys come unturned; they are turned by the cache's own positions. Padding needs no
position_ids: a row counts the tokens it has seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.adapters.families import TableForm
from longspan.adapters.mask_functions import NO_LIMIT, MaskFunction, read_mask_function
from longspan.adapters.passed_mask import PassedMask
from longspan.adapters.rotation import lay_out
from longspan.adapters.stream_cache import Pending, StreamCache, hand_over
from longspan.caches import KeyValueCache, LayerEncoding, Scoring, Step
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.masks import causal, sliding_window
from longspan.rotary.rope import Rope
from longspan.rotary.rotate import RotationTable

if TYPE_CHECKING:
    from longspan.adapters.streamed import StreamedModel


@dataclass(frozen=True, eq=False)
class Seat:
    """A layer's place: how it knows positions, and in which cache it remembers."""

    streamed: StreamedModel
    layer: int
    kind: str
    encoding: LayerEncoding


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

    def check(self, position_ids: Tensor | None) -> None:
        """Refuses a mask that no layer can follow, and documents told by positions alone.

        Raises:
            UnsupportedModelError: saying what the mask is.
        """
        if self.refused:
            raise UnsupportedModelError(self.refused)
        one = self.sizes[1] == 1
        if one or self.present is not None or self.steps or position_ids is None:
            return
        if position_ids.dim() == 2 and bool((position_ids.diff(dim=-1) < 1).any()):
            raise UnsupportedModelError(
                "position_ids start again within a row, so it holds several documents. A stream "
                "reads one text a row; pass an attention_mask if it is padding."
            )

    def step_of(self, kept: KeyValueCache, key: Tensor) -> Step:
        """Returns the step these tokens are to a cache; the first layer to ask begins it.

        Args:
            kept: the cache.
            key: [B, K, T, D], the layer's.

        Raises:
            ShapeError: for another number of rows than it holds; nothing is counted then.
        """
        if id(kept) not in self.steps:
            kept.check_rows(key.shape[0])
            step = kept.begin(self.sizes[1], self.present, key.device)
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
        self.pairs = {kind: rope.inv_freq().shape[-1] for kind, rope in ropes.items()}
        self.form: TableForm = form

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns ones and zeros in the family's form, [B, T, …], in x's dtype."""
        pairs = self.pairs.get(layer_type or "", next(iter(self.pairs.values())))
        ones = x.new_ones((*position_ids.shape, pairs))
        return lay_out(RotationTable(ones, torch.zeros_like(ones)), self.form)


@torch.compiler.disable
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


@torch.compiler.disable
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
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns attention's output [B, T, H, Dv] over what the stream remembers, and remembers more.

    Args:
        module: the attention layer, which has a `Seat`.
        query: [B, H, T, D], not turned.
        key, value: [B, K, T, D] and [B, K, T, Dv], not turned.
        attention_mask: what `new_tokens` made.
        scaling, dropout, softcap, s_aux, position_ids: as every attention function of
            transformers gets them.
    """
    pending, seat = hand_over(None), getattr(module, "seat", None)
    if seat is None or not isinstance(attention_mask, NewTokens):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not belong to a streamed model, or was handed a mask of "
            f"{type(attention_mask).__name__}. Call the model that longspan.stream(…).model is, "
            "with a 2-D attention_mask or none."
        )
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise ConfigError(
            "a stream remembers without gradients and drops nothing. Call model.eval() and run it "
            "under torch.no_grad()."
        )
    attention_mask.check(position_ids)
    kept = _cache_of(seat, pending, key, attention_mask).caches[seat.kind]
    step = attention_mask.step_of(kept, key)
    scoring = Scoring(scaling, s_aux, softcap)
    out = kept.attend(step, seat.layer, query, key, value, seat.encoding, scoring)
    return out.transpose(1, 2).contiguous(), None


def _cache_of(seat: Seat, pending: Pending | None, key: Tensor, tokens: NewTokens) -> StreamCache:
    """Returns the cache this forward was given, or one that lives as long as the forward."""
    if pending is not None:
        if pending.layer != seat.layer or pending.keys is not key:
            raise UnsupportedModelError(
                "the model changes its keys between its cache and its attention, which a stream "
                "cannot follow."
            )
        if pending.cache.streamed is not seat.streamed:
            raise ConfigError(
                "this cache belongs to another stream. Pass cache=stream.new_cache() of the stream "
                "whose model is called."
            )
        return pending.cache
    if key.shape[2] != tokens.sizes[1]:
        raise ConfigError(
            "a streamed model remembers in its own cache. Pass cache=stream.new_cache() to "
            "generate or forward, in place of transformers' own."
        )
    if tokens.alone is None:
        tokens.alone = seat.streamed.new_cache()
    return tokens.alone
