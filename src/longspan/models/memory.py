"""What a segment leaves for the next: the last hidden states of every layer (Transformer-XL)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import ShapeError


@dataclass(frozen=True)
class Memory:
    """Hidden states of earlier tokens, detached; an argument and a return value, never changed.

    Source: Dai et al. 2019 (arXiv:1901.02860) §3.2.

    Attributes:
        hidden: the input of each layer, [B, M, hidden] each.
        positions: [M] or [B, M] int64.
        documents: [B, M] int64, or None where all tokens are of one document.
    """

    hidden: tuple[Tensor, ...]
    positions: Tensor
    documents: Tensor | None

    @property
    def length(self) -> int:
        """Tokens remembered."""
        return self.positions.shape[-1]

    @property
    def next_position(self) -> int:
        """The position that follows, where no others are given."""
        return int(self.positions.max()) + 1 if self.length else 0


def check_memory(memory: object, batch: int, layers: int, hidden_size: int) -> None:
    """Refuses what another decoder, or another batch, left.

    Raises:
        ShapeError: naming both.
    """
    if not isinstance(memory, Memory):
        raise ShapeError(
            f"memory must be what an earlier forward returned, got {type(memory).__name__}."
        )
    held = len(memory.hidden), *memory.hidden[0].shape[::2]
    if held != (layers, batch, hidden_size):
        raise ShapeError(
            f"memory holds {held[0]} layers of [{held[1]}, M, {held[2]}], and this forward has "
            f"{layers} of [{batch}, T, {hidden_size}]. Begin a text without memory."
        )


def remember(
    memory: Memory | None,
    hidden: tuple[Tensor, ...],
    positions: Tensor,
    documents: Tensor | None,
    memory_length: int,
) -> Memory | None:
    """Returns the last `memory_length` of what was remembered and what was just read.

    Args:
        memory: from the segments before, or None.
        hidden: the input of each layer, [B, T, hidden] each.
        positions: [T] or [B, T], of the tokens just read.
        documents: [B, T] or None.
        memory_length: tokens to keep; 0 keeps nothing.

    Returns:
        None where nothing is kept.
    """
    if memory_length == 0:
        return None
    if memory is not None:
        hidden = tuple(torch.cat(pair, dim=1) for pair in zip(memory.hidden, hidden, strict=True))
        positions = joined_positions(memory.positions, positions)
        documents = joined_documents(memory.documents, documents)
    start = max(0, positions.shape[-1] - memory_length)
    return Memory(
        tuple(states[:, start:].detach() for states in hidden),
        positions[..., start:],
        None if documents is None else documents[:, start:],
    )


def joined_documents(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """Returns the documents of remembered and new tokens, [B, M + T]; None if neither has any.

    Raises:
        ShapeError: if only one of them has.
    """
    if (before is None) != (now is None):
        raise ShapeError(
            "documents are given for only one of memory and input. Give them for every segment, "
            "or for none."
        )
    return None if before is None or now is None else torch.cat((before, now), dim=1)


def joined_positions(before: Tensor, now: Tensor) -> Tensor:
    """Returns the positions of remembered and new tokens, [M + T], or [B, M + T] if either is."""
    shape = torch.broadcast_shapes(before.shape[:-1], now.shape[:-1])
    return torch.cat((before.expand(*shape, -1), now.expand(*shape, -1)), dim=-1)
