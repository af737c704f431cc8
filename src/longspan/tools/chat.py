"""A chat over a stream: every turn adds its own tokens alone, so that nothing is read twice.

And how an answer comes: piece by piece, until something ends it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from longspan.errors import ConfigError, UnsupportedModelError
from longspan.tools.rows import token_ids
from longspan.tools.sampling import Sampling
from longspan.tools.stream import Stream
from longspan.tools.stream_text import until_stop

# Stand in for what was said before; a template only looks at who spoke.
QUESTION, OTHER, ANSWER = "Once, a question.", "Another question.", "«the answer before»"


class ChatTemplate:
    """How a model writes a chat down.

    Args:
        tokenizer: with a chat template.
        system: the text of the system prompt; the template's own, if it has one, unless given.

    Raises:
        ConfigError: without a chat template, or for one that takes no system prompt.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the model's tokenizer has no chat template, so turns cannot be written down. "
                "Give --prompt TEXT to continue a text, or a model trained to chat."
            )
        self.tokenizer = tokenizer
        self.start = [] if system is None else [{"role": "system", "content": system}]
        self._written([*self.start, user(QUESTION)])

    def first_turn(self, text: str) -> list[int]:
        """Returns the tokens of a chat up to where its first answer begins."""
        return self._tokens(self._written([*self.start, user(text)]))

    def next_turn(self, text: str) -> list[int]:
        """Returns the tokens from behind an answer to where the next one begins.

        They are the template's difference over a short history that stands for any.

        Raises:
            UnsupportedModelError: where the template writes old answers down in another way.
        """
        before = [*self.start, user(QUESTION), {"role": "assistant", "content": ANSWER}]
        written = self._written([*before, user(text)])
        if written.count(ANSWER) != 1:
            raise UnsupportedModelError(
                "the chat template does not write answers down as they were given, so a stream "
                "cannot go on from one. Give --prompt TEXT to continue a text."
            )
        return self._tokens(written.split(ANSWER)[1])

    def opening(self) -> int:
        """Returns how many tokens stand before the first turn: the system prompt's."""
        written = self._written([*self.start, user(QUESTION)])
        try:
            alone = self._written(self.start, answer=False)
        except ConfigError:
            alone = ""
        if not alone or not written.startswith(alone):  # then up to where questions differ
            other = self._written([*self.start, user(OTHER)])
            same = takewhile(lambda pair: pair[0] == pair[1], zip(written, other, strict=False))
            alone = "".join(letter for letter, _ in same)
        return len(self._tokens(alone))

    def _written(self, messages: list[dict[str, str]], answer: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer
            )
        except (TemplateError, ValueError, IndexError) as error:
            remedy = " Leave --system out." if self.start else ""
            raise ConfigError(f"the model's chat template refuses: {error}.{remedy}") from error

    def _tokens(self, written: str) -> list[int]:
        return token_ids(self.tokenizer, written)


class Chat:
    """A conversation that a stream remembers.

    Args:
        stream: it may have been loaded; then the conversation goes on.
        template: how turns are written down.
    """

    def __init__(self, stream: Stream, template: ChatTemplate) -> None:
        self.stream, self.template = stream, template

    def turn(self, text: str) -> list[int]:
        """Returns the tokens that a user's turn adds, up to where the answer begins.

        An answer that was cut short is ended first; one that ended itself is not ended twice.
        """
        if not self.stream.tokens_seen:
            return self.template.first_turn(text)
        added, last = self.template.next_turn(text), self.stream.last_token
        # some templates write a space before the end
        if last in self.stream.ends and last in added[:2]:
            return added[added.index(last) + 1 :]
        return added


def user(text: str) -> dict[str, str]:
    """Returns a user's message."""
    return {"role": "user", "content": text}


@dataclass
class Writing:
    """How an answer is written down, and how the last one ended."""

    stream: Stream
    sampling: Sampling
    limit: int
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    ended: str = ""
    tokens: int = 0
    seconds: float = 0.0

    def pieces(self, prompt: str | Sequence[int]) -> Iterator[str]:
        """Yields the answer as it comes; Ctrl-C ends it between two tokens, with all remembered."""
        ids = self.stream.generate_ids(
            prompt,
            max_new_tokens=self.limit or None,
            ignore_eos=self.ignore_eos,
            sampling=self.sampling,
        )
        # a seed given once is not the beginning of every answer
        self.sampling = replace(self.sampling, seed=None)
        self.tokens, self.ended, begun = 0, "stop", time.perf_counter()
        with interruptible() as asked:
            yield from until_stop(self.stream.pieces(self._counted(ids, asked)), self.stop)
        self.seconds = time.perf_counter() - begun

    def _counted(self, ids: Iterator[int], asked: list[int]) -> Iterator[int]:
        for token in ids:
            self.tokens += 1
            yield token
            if asked:
                self.ended = "interrupted"
                return
        self.ended = "limit" if self.tokens == self.limit else "eos"


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Yields a list that Ctrl-C is noted in; a second one interrupts at once.

    A forward that is broken off would leave some layers a token ahead of others.
    """
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
