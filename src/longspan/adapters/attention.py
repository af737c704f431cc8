"""Lends `attend` to any transformers model, by the name `attn_implementation="longspan"`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.adapters.mask_functions import AskedMask, MaskFunction, read_mask_function
from longspan.adapters.passed_mask import PassedMask
from longspan.attention import Visibility, attend
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.masks import causal

NAME = "longspan"


def lend() -> None:
    """Registers the attention and mask functions; see `longspan.adapters.register`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, seen_keys)


class SeenKeys(PassedMask):
    """Who sees whom in one forward, kept as positions and shared by all layers of a kind."""

    def __init__(self, seen: Visibility, batch: int, *, unmarked: bool = False) -> None:
        super().__init__((batch, *seen.shape))
        self.seen = seen
        self.unmarked = unmarked
        """True where nothing was said of padding or documents, and no key came before."""

    def under(self, position_ids: Tensor | None) -> Visibility:
        """Returns who sees whom once packed documents are told by positions that start again.

        Some models (gpt-oss) do not tell the mask interface their positions, only their layers,
        and transformers itself looks for documents only where there is no cache.

        Args:
            position_ids: [1 or B, T], the same for all layers of a forward.
        """
        if self.unmarked and position_ids is not None and position_ids.dim() == 2:
            starts_again = F.pad(position_ids.diff(dim=-1) < 1, (1, 0))
            if bool(starts_again.any()):
                document = starts_again.cumsum(-1)
                self.seen = replace(self.seen, q_doc=document, k_doc=document, found={})
            self.unmarked = False
        return self.seen


@torch.compiler.disable
def seen_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    device: Any = None,
    **_: Any,
) -> SeenKeys:
    """Returns who sees whom, as transformers' mask interface asks for it.

    Positions are indices into the text, padding counted, as in transformers' own masks.

    Args:
        batch_size, q_length, kv_length: B, T and S.
        q_offset, kv_offset: the index of the first query and of the first stored key.
        mask_function: over indices.
        attention_mask: [B, tokens so far] bool, False at padding; keys past its end are absent.
        device: where the queries are.
    """
    q_first, k_first = int(q_offset), int(kv_offset)
    reach = q_first + q_length - k_first
    mask, documents = read_mask_function(mask_function, batch_size, reach)
    q_pos = torch.arange(q_first, q_first + q_length, device=device)
    k_pos = torch.arange(k_first, k_first + kv_length, device=device)
    placed: dict[str, Any] = {}
    if documents:
        document = _numbered(documents)
        placed = {"q_doc": document[:, q_pos], "k_doc": document[:, k_pos]}
    k_pos = _present(k_pos, attention_mask)
    seen = Visibility.of(
        mask, (batch_size, q_length, kv_length), q_pos=q_pos, k_pos=k_pos, **placed
    )
    unmarked = attention_mask is None and not documents and q_length == kv_length == reach
    return SeenKeys(seen, batch_size, unmarked=unmarked)


@torch.compiler.disable
def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SeenKeys | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns attention's output [B, T, H, Dv], as transformers' attention interface asks for it.

    Args:
        module: the attention layer.
        query: [B, H, T, D].
        key, value: [B, K, S, D] and [B, K, S, Dv].
        attention_mask: what `seen_keys` made, a caller's own [B, 1 or H, T, S], or None.
        scaling: of the scores, 1/√D unless given.
        dropout: of the weights.
        softcap: bounds the scores.
        s_aux: [H] learned sinks.
        position_bias: [1 or B, H, T, S], made by the model; then all pairs are in memory.
        position_ids: [1 or B, T], where the model lets its layers know.
        is_causal: where there is no mask; the module's own word unless given.
        output_attentions: refused.

    Raises:
        ConfigError: for options that would change the result and cannot be followed.
    """
    if output_attentions:
        raise ConfigError(
            "attn_implementation='longspan' never holds the attention weights, so "
            "output_attentions=True cannot be followed. Use 'eager', or longspan.sinks."
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if isinstance(attention_mask, SeenKeys):
        seen = attention_mask.under(position_ids)
    else:
        seen = _seen_by(attention_mask, query, key, bool(is_causal))
    if position_bias is not None:
        if softcap is not None or s_aux is not None:
            raise ConfigError("position_bias together with softcap or learned sinks is not done.")
        out = _with_dense_bias(query, key, value, seen, position_bias, scaling, dropout)
    else:
        out = attend(
            query,
            key,
            value,
            mask=seen,
            scale=scaling,
            sink_logits=s_aux,
            softcap=softcap,
            dropout=dropout,
        )
    return out.transpose(1, 2).contiguous(), None


def _seen_by(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> Visibility:
    """Returns who sees whom from a caller's own mask, or from none."""
    sizes = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:  # one query alone comes last, several come first: as transformers' sdpa
        hides = causal() if is_causal and sizes[1] > 1 else None
        first = torch.arange(sizes[1], device=query.device)
        return Visibility.of(hides, sizes, q_pos=first if hides else None, device=query.device)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise UnsupportedModelError(
            f"the layer hands over a mask of {type(mask).__name__}, which longspan does not know. "
            "Call longspan.adapters.register(), or load the model with 'sdpa'."
        )
    visible = _as_visible(mask).expand(sizes[0], -1, -1, -1)
    given = AskedMask(lambda b, h, q, k: visible[b, h, q, k], sizes[0])
    q_pos = torch.arange(sizes[1], device=query.device)
    return Visibility.of(given, sizes, q_pos=q_pos, device=query.device)


def _as_visible(mask: Tensor) -> Tensor:
    """Returns a caller's own mask of all pairs as bools; refuses one that adds numbers."""
    if mask.shape[1] != 1:
        raise ConfigError(
            f"a mask of all pairs must be [B, 1, T, S], the same for every head, got "
            f"{tuple(mask.shape)}. Load the model with attn_implementation='sdpa'."
        )
    if mask.dtype == torch.bool:
        return mask
    visible, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    if not bool((visible | hidden).all()):
        raise ConfigError(
            "the 4-D attention_mask adds numbers other than 0 and −inf to the scores. longspan "
            "takes who sees whom as bool; give a bias to `attend`, or load the model with 'sdpa'."
        )
    return visible


def _with_dense_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Visibility,
    bias: Tensor,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Returns attention under a bias of all pairs, which the model has built already (T5)."""
    if seen.hides:
        bias = bias.masked_fill(~seen.everything(), torch.finfo(bias.dtype).min)
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )


def _present(k_pos: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Returns positions with −1 at padding, [S] where there is none, else [B, S]."""
    if attention_mask is None:
        return k_pos
    within = k_pos < attention_mask.shape[1]
    kept = attention_mask[:, k_pos[within]].bool()
    kept = F.pad(kept, (0, len(k_pos) - kept.shape[1]))
    if bool(kept.all()):
        return k_pos
    return torch.where(kept, k_pos, -1)


def _numbered(documents: tuple[Tensor, ...]) -> Tensor:
    """Returns one number for each combination of documents, [B, N]."""
    together = torch.stack([document.long() for document in documents])
    return together.flatten(1).unique(dim=1, return_inverse=True)[1].view_as(together[0])
