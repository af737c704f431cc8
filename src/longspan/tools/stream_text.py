"""From tokens to text as they come: whole characters, and an end at a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder shows for bytes whose rest is still to come
KEPT = 8  # tokens before a piece that it is decoded with, so that spaces come out right


class Pieces:
    """Decodes tokens one by one; a character of several tokens comes once it is whole.

    Args:
        tokenizer: with `decode`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def of(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yields text as soon as it is certain, and the rest at the end."""
        recent: list[int] = []
        shown = 0  # of the recent tokens, those whose text is out
        for token in tokens:
            recent.append(token)
            piece = self._new(recent, shown)
            if piece and not piece.endswith(UNFINISHED):
                yield piece
                recent = recent[-KEPT:]
                shown = len(recent)
        rest = self._new(recent, shown)
        if rest:
            yield rest

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
