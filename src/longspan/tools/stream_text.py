"""From a text to tokens, and back as they come: whole characters, an end at a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.errors import InputError
from longspan.rotary.scaling.base import check_length
from longspan.tools.rows import bos_token, token_ids
from longspan.tools.texts import Text

UNFINISHED = "\ufffd"  # what a decoder shows for bytes whose rest is still to come
KEPT = 8  # tokens before a piece that it is decoded with, so that spaces come out right
LONGEST = 8  # tokens of one character; what is longer is no character, and is not waited for


def text_row(tokenizer: Any, text: Text, tokens: int | None, repeat: bool) -> Tensor:
    """Returns the tokens of a text, [1, N] int64, behind BOS where the tokenizer adds one.

    Args:
        tokenizer: the model's.
        text: from its start.
        tokens: N; the whole text unless given.
        repeat: read it again from its start where it is shorter.

    Raises:
        InputError: if it is too short and not repeated.
    """
    bos = bos_token(tokenizer)
    row = torch.tensor([*([] if bos is None else [bos]), *token_ids(tokenizer, text.content)])
    if len(row) < 2:
        raise InputError(
            f"the text {text.name} has {len(row)} of the 2 tokens that a likelihood needs. Give a "
            "longer one."
        )
    if tokens is None:
        return row.unsqueeze(0)
    check_length("tokens", tokens)
    if tokens > len(row) and not repeat:
        raise InputError(
            f"the text {text.name} has {len(row):,} tokens, and {tokens:,} are asked for. Give a "
            "longer one, or repeat (--repeat) to read it again and again."
        )
    again = row if bos is None else row[1:]
    while len(row) < tokens:
        row = torch.cat((row, again.repeat((tokens - len(row)) // len(again) + 1)))
    return row[:tokens].unsqueeze(0)


class Pieces:
    """Decodes tokens one by one; a character of several tokens comes once it is whole.

    Args:
        tokenizer: with `decode`.
        before: tokens of the text so far. Behind them SentencePiece shows a word's leading
            space, and in front of a text it does not.
    """

    def __init__(self, tokenizer: Any, before: Iterable[int] = ()) -> None:
        self.tokenizer, self.before = tokenizer, before

    def of(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yields text as soon as it is certain, and the rest at the end."""
        recent = list(self.before)[-KEPT:]
        shown = self._whole(recent)  # of the recent tokens, those whose text is out
        for token in tokens:
            recent.append(token)
            piece = self._new(recent, shown)
            if piece.endswith(UNFINISHED) and len(recent) - shown < LONGEST:
                continue
            if piece:
                yield piece
            recent = recent[-KEPT:]
            shown = len(recent)
        rest = self._new(recent, shown)
        if rest:
            yield rest

    def _whole(self, recent: Sequence[int]) -> int:
        """Returns how many tokens end with a whole character; all, where none before them does."""
        for shown in range(len(recent), max(-1, len(recent) - LONGEST), -1):
            if not self._decode(recent[:shown]).endswith(UNFINISHED):
                return shown
        return len(recent)

    def _new(self, recent: Sequence[int], shown: int) -> str:
        before = self._decode(recent[:shown])
        return self._decode(recent)[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def until_stop(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """Yields text up to the first stop string; what may be the beginning of one waits.

    >>> list(until_stop(["Good ", "day. U", "ser: more"], ["User:"]))
    ['Good ', 'day. ']
    """
    stops = [string for string in stop if string]
    held = ""
    for piece in pieces:
        held += piece
        found = [at for at in (held.find(string) for string in stops) if at >= 0]
        if found:
            if min(found):
                yield held[: min(found)]
            return
        safe = len(held) - max((_overlap(held, string) for string in stops), default=0)
        if safe:
            yield held[:safe]
            held = held[safe:]
    if held:
        yield held


def _overlap(text: str, string: str) -> int:
    """Returns how much of the end of `text` is the beginning of `string`."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)
