"""Rows to train on, each a pure function of the seed and its number, and documents held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from longspan.adapters.head import PROOF_TOKENS, SplitForward
from longspan.errors import ConfigError, InputError
from longspan.tools.finetune_settings import Resolved
from longspan.tools.rows import bos_token, token_ids
from longspan.tools.texts import Text, documents
from longspan.training.packing import IGNORED, PackedRows, pack
from longspan.training.pose import skipping_positions


@dataclass(frozen=True)
class Batch:
    """What one forward reads.

    Attributes:
        input_ids: [B, L] int64.
        targets: [B, L − 1] int64, `IGNORED` where nothing is scored.
        position_ids: [B, L] int64.
        attention_mask: [B, L] of ones, or None for packed rows, whose positions start again.
    """

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        input_ids, targets = self.input_ids.to(device), self.targets.to(device)
        return Batch(input_ids, targets, self.position_ids.to(device), mask)

    @property
    def scored(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())


@dataclass(frozen=True, kw_only=True)
class Rows:
    """All rows of a training, in the order a seed gives them.

    Row number n of the whole training is the same whatever the processes and batches: so two
    processes that read one row each do what one does that reads two.

    Attributes:
        packed: the rows themselves; unpacked ones hold one document each.
        to: positions to reach by skipping, or None.
        seed: of the order and the skips.
    """

    packed: PackedRows
    to: int | None
    seed: int

    def batch(self, first: int, count: int) -> Batch:
        """Returns rows number `first` to `first` + `count`, counted over the whole training."""
        numbers = range(first, first + count)
        rows = self.packed.at(torch.tensor([self.place(number) for number in numbers]))
        positions = rows.positions
        if self.to is not None:
            positions = torch.stack([self.skipping(number, self.to) for number in numbers])
        one_document_each = not bool(rows.documents.any())
        mask = torch.ones_like(rows.input_ids) if one_document_each else None
        return Batch(rows.input_ids, rows.targets(), positions, mask)

    def skipping(self, number: int, to: int) -> Tensor:
        """Returns the skipping positions of row number `number`, [L]."""
        length = self.packed.input_ids.shape[1]
        return skipping_positions(length, to, generator_of(self.seed, "skip", number))

    def place(self, number: int) -> int:
        """Returns which row comes as number `number`; every row comes once before one returns."""
        epoch, place = divmod(number, len(self.packed))
        order = torch.randperm(len(self.packed), generator=generator_of(self.seed, "order", epoch))
        return int(order[place])


def generator_of(seed: int, purpose: str, number: int) -> Generator:
    """Returns a generator that depends on these three alone."""
    return Generator().manual_seed(seed_of(seed, purpose, number))


def seed_of(seed: int, purpose: str, number: int) -> int:
    """Returns a seed that depends on these three alone."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def hold_out(
    encoded: Sequence[Sequence[int]], length: int, count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Cuts documents off the end of the texts, the last text first.

    Args:
        encoded: token ids of each text.
        length: of each document, in tokens.
        count: how many.

    Returns:
        What is left of each text, and the documents in the order of the texts.

    Raises:
        InputError: if the texts are too short.

    >>> hold_out([range(3), range(10, 17)], length=3, count=2)
    ([[0, 1, 2], [10]], [[11, 12, 13], [14, 15, 16]])
    """
    left = [list(tokens) for tokens in encoded]
    held: list[list[int]] = []
    for tokens in reversed(left):
        while len(held) < count and len(tokens) >= length:
            held.append(tokens[-length:])
            del tokens[-length:]
    if len(held) < count:
        raise InputError(
            f"{count} documents of {length:,} tokens are to be held out; the texts have "
            f"{', '.join(f'{len(tokens):,}' for tokens in encoded)} tokens. Give a longer text, "
            "or measure fewer or shorter documents."
        )
    return [tokens for tokens in left if tokens], held[::-1]


def training_rows(
    encoded: Sequence[Sequence[int]], length: int, bos: int | None, *, packing: bool
) -> PackedRows:
    """Returns the rows to train on.

    Without packing a row is one stretch of one text, and what is left over at a text's end is
    dropped; with it every text is a document, and rows hold several.

    Raises:
        InputError: if the texts do not fill a row.
    """
    lead = [] if bos is None else [bos]
    if packing:
        return pack([[*lead, *tokens] for tokens in encoded], length)
    cut = documents(encoded, length - len(lead), None)
    return pack([[*lead, *row] for row in cut], length)


@dataclass(frozen=True)
class ReadTexts:
    """Rows to train on, documents held out ([D, N] int64, or None), and the token before each."""

    rows: PackedRows
    held_out: Tensor | None
    bos: int | None


def read_apart(
    tokenizer: Any,
    texts: Sequence[Text],
    settings: Resolved,
    split: SplitForward,
    trained_length: int,
) -> ReadTexts:
    """Returns texts as rows to train on and documents held out, of tokens the model knows.

    Raises:
        ConfigError: if packed texts are so short that no row leaves the trained length.
        InputError: if the texts are too short, or hold a token the model does not know.
        UnsupportedModelError: if the model's head cannot be run apart from its body.
    """
    bos = bos_token(tokenizer)
    lead = [] if bos is None else [bos]
    encoded: Sequence[Sequence[int]] = [token_ids(tokenizer, text.content) for text in texts]
    held_out = None
    if settings.evaluation_length is not None:
        own = settings.evaluation_length - len(lead)
        encoded, held = hold_out(encoded, own, settings.evaluation_documents)
        held_out = torch.tensor([[*lead, *one] for one in held])
    rows = training_rows(encoded, settings.length, bos, packing=settings.packing)
    if settings.packing:
        _check_reach(rows, trained_length)
    highest = max(int(ids.max()) for ids in (rows.input_ids, held_out) if ids is not None)
    if highest >= split.vocab_size:
        raise InputError(
            f"the tokenizer gives token {highest}, but the model's vocabulary has "
            f"{split.vocab_size}. Use the tokenizer that belongs to the model."
        )
    split.hidden(rows.input_ids[:1, :PROOF_TOKENS])  # proves that the head runs apart
    return ReadTexts(rows, held_out, bos)


def _check_reach(rows: PackedRows, trained_length: int) -> None:
    """Refuses packed rows in which no document is longer than what the model was trained on."""
    longest = int(rows.positions.max()) + 1
    if longest <= trained_length:
        raise ConfigError(
            f"packed texts of at most {longest} tokens never reach the positions from "
            f"{trained_length} on that are to be learnt. Give longer texts, or pose=True (--pose) "
            "in place of packing to skip positions."
        )
