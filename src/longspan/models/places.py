"""Where the tokens of one forward are: worked out once, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.visibility import Visibility
from longspan.errors import ConfigError
from longspan.masks import Mask, attention_sinks, causal, sliding_window
from longspan.models.config import DecoderConfig
from longspan.models.memory import Memory, joined_documents, joined_positions
from longspan.rotary.rotate import RotationTable


@dataclass(frozen=True)
class Place:
    """Positions of the tokens read and of those remembered before them.

    Attributes:
        seen: by layer type, who sees whom.
        rotation: cos and sin of remembered and read tokens, where some layer rotates.
    """

    seen: dict[str, Visibility]
    rotation: RotationTable | None

    def table(self, tokens: int) -> RotationTable:
        """Returns the cos and sin of the last so many tokens."""
        if self.rotation is None:
            raise ConfigError("no layer of this decoder rotates.")
        cos, sin = self.rotation
        return RotationTable(cos[..., -tokens:, :], sin[..., -tokens:, :])


def place_tokens(
    config: DecoderConfig,
    shape: tuple[int, ...],
    positions: Tensor,
    documents: Tensor | None,
    memory: Memory | None,
    seq_len: int | None,
    dtype: torch.dtype,
) -> Place:
    """Returns the place of one forward's tokens; arguments as for `Decoder.forward`.

    `dtype` is that of the cosines and sines.
    """
    batch, queries = shape
    k_pos, k_doc = joined(memory, positions, documents)
    sizes = (batch, queries, k_pos.shape[-1])
    seen = {
        kind: Visibility.of(
            mask,
            sizes,
            q_pos=positions,
            k_pos=k_pos,
            q_doc=documents,
            k_doc=k_doc,
            device=positions.device,
        )
        for kind, mask in masks(config).items()
    }
    rope = config.rope
    if rope is not None and seq_len is None:
        seq_len = int(positions.max()) + 1
    return Place(seen, None if rope is None else rope.table(k_pos, seq_len, dtype=dtype))


def joined(
    memory: Memory | None, positions: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the positions and documents of remembered tokens and of those read behind them."""
    if memory is None:
        return positions, documents
    return (
        joined_positions(memory.positions, positions),
        joined_documents(memory.documents, documents),
    )


def masks(config: DecoderConfig) -> dict[str, Mask]:
    """Returns who sees whom, by the layer types a decoder has."""
    found: dict[str, Mask] = {}
    for kind in config.kinds:
        found[kind] = causal()
        if kind == "sliding_attention" and config.sliding_window is not None:
            near: Mask = sliding_window(config.sliding_window)
            if config.num_sink_tokens:
                near = near | attention_sinks(config.num_sink_tokens)
            found[kind] = causal() & near
    return found


def check_order(positions: Tensor, documents: Tensor | None) -> None:
    """Refuses positions that start again where no document does.

    Raises:
        ConfigError: naming the place.

    >>> check_order(torch.tensor([0, 1, 5, 6]), None)  # a jump ahead is fine (PoSE)
    >>> check_order(torch.tensor([0, 1, 0, 1]), torch.tensor([[0, 0, 1, 1]]))
    """
    back = positions.diff(dim=-1) <= 0
    if documents is not None:
        back = back & (documents.diff(dim=-1) == 0)
    if bool(back.any()):
        at = int(back.nonzero()[0, -1]) + 1
        raise ConfigError(
            f"positions go back at index {at} within one document, so tokens would see another "
            "document's as if near. Give documents (a number a document, [B, T]), or positions "
            "that grow."
        )
