"""A study's text: its tokens, the rows to train on in turn, and documents held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from longspan.errors import ConfigError, InputError
from longspan.tools.texts import Text

BYTES = 256
HELD_OUT = 0.1  # of every text, from its end
EMPTIED_EVERY = 100  # steps after which memory starts empty, so that a training can stop there


class Rows(NamedTuple):
    """What one training step reads."""

    inputs: Tensor
    """[B, L] int64."""
    targets: Tensor
    """[B, L]: the token behind each input."""
    first: bool
    """Whether nothing came before: memory starts empty."""


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and documents to measure on.

    Attributes:
        train: [N] int64.
        held_out: [documents, reach + 1] int64; a token more than is read, the last target.
    """

    train: Tensor
    held_out: Tensor

    def rows(self, step: int, *, batch_size: int, length: int, seed: int) -> Rows:
        """Returns what a step reads: a pure function of its arguments.

        The text is cut in `batch_size` lanes, read side by side: row b of a step goes on where row
        b of the step before ended, so that a model may remember. Each pass over the text begins a
        little further on.

        Raises:
            ConfigError: if the text is too short for one row a lane.
        """
        segments = (len(self.train) - 1 - length) // (batch_size * length)
        if segments < 1:
            raise ConfigError(
                f"{len(self.train):,} tokens of text are too few for {batch_size} rows of "
                f"{length}. Give a longer text, shorter rows or a smaller batch."
            )
        passed, segment = divmod(step, segments)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + passed)
        offset = int(torch.randint(length, (1,), generator=generator))
        starts = offset + (torch.arange(batch_size) * segments + segment) * length
        places = starts[:, None] + torch.arange(length)
        first = segment == 0 or step % EMPTIED_EVERY == 0
        return Rows(self.train[places], self.train[places + 1], first)


def cut(encoded: Sequence[Sequence[int]], *, reach: int, documents: int | None) -> Corpus:
    """Returns a corpus: documents from the last tenth of every text, the rest to train on.

    Args:
        encoded: token ids of each text.
        reach: tokens of a held-out document.
        documents: how many at most; as many as the last tenths hold unless given.

    Raises:
        InputError: if not one document fits.
    """
    train: list[int] = []
    held_out: list[list[int]] = []
    for tokens in encoded:
        until = len(tokens) - int(len(tokens) * HELD_OUT)
        train.extend(tokens[:until])
        held_out += [
            list(tokens[at : at + reach + 1]) for at in range(until, len(tokens) - reach, reach)
        ]
    if not held_out:
        raise InputError(
            f"not one document of {reach:,} tokens fits in the last tenth of the texts, which have "
            f"{', '.join(f'{len(tokens):,}' for tokens in encoded)} tokens. Give a longer text, or "
            "a smaller length or reach."
        )
    chosen = torch.tensor(held_out[:documents], dtype=torch.int64)
    return Corpus(torch.tensor(train, dtype=torch.int64), chosen)


def train_tokenizer(texts: Sequence[Text], vocabulary: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of exactly so many tokens, learned on the texts.

    Args:
        texts: what it will read; held-out parts too, as everywhere in the field.
        vocabulary: 256 gives plain bytes.

    Raises:
        ConfigError: for fewer than 256.
        InputError: if the texts are too short to learn so many.
    """
    if vocabulary < BYTES:
        raise ConfigError(f"vocabulary must be ≥ {BYTES}, the bytes, got {vocabulary}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.content for text in texts), trainer)
    found = tokenizer.get_vocab_size()
    if found != vocabulary:
        raise InputError(
            f"the texts give only {found} tokens, not {vocabulary}. Give more text, or a smaller "
            "vocabulary."
        )
    return tokenizer
