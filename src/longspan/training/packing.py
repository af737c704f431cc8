"""Documents packed into rows of equal length, kept apart by positions that start again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import ConfigError, InputError

IGNORED = -100
"""The target of a position that is not scored."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of several documents each.

    Attributes:
        input_ids: [R, L] int64.
        documents: [R, L] int64, counted from 0 within a row.
        positions: [R, L] int64; they start again with every document, unless the rows let
            documents see each other.
        document_mask: whether documents must not see each other.
    """

    input_ids: Tensor
    documents: Tensor
    positions: Tensor
    document_mask: bool

    def __len__(self) -> int:
        return len(self.input_ids)

    def at(self, places: Tensor) -> PackedRows:
        """Returns the rows at these places."""
        chosen = (self.input_ids[places], self.documents[places], self.positions[places])
        return PackedRows(*chosen, self.document_mask)

    def targets(self) -> Tensor:
        """Returns the next token of every position but the last, [R, L − 1].

        The first token of a masked document is not predicted: nothing that is seen comes before it.
        """
        following = self.input_ids[:, 1:].clone()
        if self.document_mask:
            following[self.documents.diff(dim=1) != 0] = IGNORED
        return following


def pack(
    documents: Sequence[Sequence[int]],
    length: int,
    *,
    document_mask: bool = True,
    restart_positions: bool | None = None,
) -> PackedRows:
    """Packs documents, in order, into rows of `length` tokens.

    A document that does not fit in its row goes on in the next as one of its own. What is left over
    at the end, less than a row, is dropped. A model of transformers tells the documents by
    positions that start again, if it is given no attention mask.

    Args:
        documents: token ids of each.
        length: L, tokens a row.
        document_mask: whether documents must not see each other.
        restart_positions: whether positions start again; as `document_mask` unless given.

    Raises:
        ConfigError: if positions start again without a document mask, so that a token would see
            another document at a distance that is not there; or do not with one.
        InputError: if a document is empty, or all of them do not fill a row.

    >>> rows = pack([[5, 6, 7], [8, 9, 10, 11]], length=3)
    >>> rows.input_ids.tolist(), rows.documents.tolist(), rows.positions.tolist()
    ([[5, 6, 7], [8, 9, 10]], [[0, 0, 0], [0, 0, 0]], [[0, 1, 2], [0, 1, 2]])
    >>> pack([[5, 6], [8, 9]], length=3).positions.tolist()
    [[0, 1, 0]]
    """
    restart = document_mask if restart_positions is None else restart_positions
    check_restart(document_mask=document_mask, restart_positions=restart)
    if length < 2:
        raise ConfigError(f"length must be ≥ 2 tokens a row, got {length}.")
    if not documents or not all(documents):
        raise InputError("a document to pack is empty. Leave it out.")
    tokens = torch.cat([torch.as_tensor(one, dtype=torch.int64) for one in documents])
    sizes = torch.tensor([len(one) for one in documents])
    numbers = torch.arange(len(sizes)).repeat_interleave(sizes)
    rows = len(tokens) // length
    if rows == 0:
        raise InputError(
            f"the documents have {len(tokens):,} tokens together, less than one row of "
            f"{length:,}. Give more text, or shorter rows."
        )
    input_ids = tokens[: rows * length].view(rows, length)
    numbered = numbers[: rows * length].view(rows, length)
    numbered = numbered - numbered[:, :1]
    return PackedRows(input_ids, numbered, _positions(numbered, restart), document_mask)


def check_restart(*, document_mask: bool, restart_positions: bool) -> None:
    """Refuses positions that do not tell who sees whom; see `pack`."""
    if restart_positions and not document_mask:
        raise ConfigError(
            "positions that start again need document_mask=True: without it a token would see the "
            "document before it at a distance that is not there. Let positions run on instead."
        )
    if document_mask and not restart_positions:
        raise ConfigError(
            "document_mask=True needs positions that start again: they are how transformers tells "
            "packed documents apart. Leave restart_positions out."
        )


def _positions(numbered: Tensor, restart: bool) -> Tensor:
    places = torch.arange(numbered.shape[1], dtype=torch.int64).expand_as(numbered)
    if not restart:
        return places.clone()
    starts = torch.ones_like(numbered, dtype=torch.bool)
    starts[:, 1:] = numbered.diff(dim=1) != 0
    return places - torch.where(starts, places, 0).cummax(dim=1).values
