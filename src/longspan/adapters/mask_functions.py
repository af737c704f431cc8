"""Reads the masks that transformers hands out as functions of indices back into longspan's.

transformers composes a mask from a few functions of its own. Each is known here by name, so that
its structure is used; any other function is asked about pairs, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.errors import UnsupportedModelError
from longspan.masks import Mask, causal, sliding_window

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]
"""From indices of batch row, head, query and key, broadcast together, to who sees whom."""
NO_LIMIT = 1 << 62  # keys ahead that a one-sided window leaves to the mask it is joined to


class Seen(NamedTuple):
    """What a mask function comes to: all of it together."""

    mask: Mask | None = None
    documents: tuple[Tensor, ...] = ()
    """Each [B, N], a number for every index; tokens of different numbers never see each other."""


@dataclass(frozen=True, eq=False)
class AskedMask(Mask):
    """A mask known only by asking, over indices; hidden tiles of it cannot be skipped."""

    function: MaskFunction
    batch: int

    def sees(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns who sees whom, [B, T, S]; an absent key, at −1, is asked about as 0."""
        rows = torch.arange(self.batch, device=q_pos.device)[:, None, None]
        try:
            seen = self.function(rows, torch.zeros_like(rows), q_pos, k_pos.clamp_min(0))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"the mask function {_name(self.function)} cannot be asked about many pairs at "
                f"once: {error}. Load the model with attn_implementation='sdpa' or 'eager'."
            ) from error
        return seen.expand(torch.broadcast_shapes(seen.shape, q_pos.shape, k_pos.shape))

    def __repr__(self) -> str:
        return f"asked({_name(self.function)})"


def read_mask_function(function: MaskFunction, batch: int, reach: int) -> Seen:
    """Returns a mask function of transformers as a mask and documents.

    Args:
        function: what `AttentionMaskInterface` functions get as `mask_function`.
        batch: rows it may be asked about.
        reach: tokens from the first key to the last query; a window that long hides nothing.
    """
    name, held = _name(function), _held(function)
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return Seen(AskedMask(function, batch))
    if name == "causal_mask_function":
        return Seen(causal())
    if name == "bidirectional_mask_function":
        return Seen()
    if name == "sliding_window_overlay":
        return Seen(sliding_window(held["sliding_window"], ahead=NO_LIMIT))
    if name == "sliding_window_bidirectional_overlay":
        window = held["sliding_window"]  # here it does not count the query itself
        return Seen(sliding_window(window + 1, ahead=window))
    if name == "packed_sequence_mask_function":
        return Seen(documents=(held["packed_sequence_mask"],))
    if name == "and_masks":
        return _all_of(held["mask_functions"], batch, reach)
    return Seen(AskedMask(function, batch))


def _all_of(functions: Sequence[MaskFunction], batch: int, reach: int) -> Seen:
    """Returns what all of several functions leave visible."""
    named = {_name(function): function for function in functions}
    if named.keys() == {"sliding_window_overlay", "causal_mask_function"}:
        window = _held(named["sliding_window_overlay"])["sliding_window"]
        if window < 1:  # some configs say 0 where no layer slides; the mask is made, never used
            return Seen(causal() & ~causal())
        return Seen(sliding_window(window) if window < reach else causal())
    packed = "packed_sequence_mask_function" in named
    mask: Mask | None = None
    documents: tuple[Tensor, ...] = ()
    for function in functions:
        seen = _in_documents(function, batch, reach) if packed else None
        seen = seen or read_mask_function(function, batch, reach)
        documents += seen.documents
        if seen.mask is not None:
            mask = seen.mask if mask is None else mask & seen.mask
    return Seen(mask, documents)


def _in_documents(function: MaskFunction, batch: int, reach: int) -> Seen | None:
    """Returns what stands behind a change from indices to positions in documents, if all the same.

    Within a document positions are consecutive, as indices are, so a mask that goes by distance
    alone says the same of both.
    """
    if _name(function) != "remap_positions_for_packed_sequence":
        return None
    seen = read_mask_function(_held(function)["mask_function"], batch, reach)
    return seen if seen.mask is None or seen.mask.relative_from == 0 else None


def _name(function: Any) -> str:
    """Returns the outermost name a function was defined under."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return name.partition(".<locals>")[0]


def _held(function: Any) -> dict[str, Any]:
    """Returns the variables a function took from where it was made."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
