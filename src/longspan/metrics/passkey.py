"""Passkey retrieval: five digits hidden in filler, asked for at the end."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longspan.errors import ConfigError, NumericalError

INTRODUCTION = (
    "There is a pass key hidden in a long text that does not matter. Find it and remember it.\n"
)
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
HIDDEN = "The pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "What is the pass key? The pass key is"
CANDIDATES = 10
DEPTHS = tuple(tenth / 10 for tenth in range(11))


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of token ids."""
        ...


class Reading(Protocol):
    """A model that has read a prompt; `adapters.prompt.ReadPrompt` is one."""

    def next_logits(self, continuation: Sequence[int]) -> Tensor:
        """Returns [len(continuation) + 1, V] logits: after the prompt, and each token."""
        ...


@dataclass(frozen=True, kw_only=True)
class PasskeyPrompt:
    """A prompt, its key, and the keys it is ranked against.

    Attributes:
        tokens: the prompt's, BOS included where there is one.
        key: five digits.
        answers: the tokens of each candidate as an answer, by candidate; `key` is one of them.
        room: tokens a greedy answer may take; prompt and room together are the trial's length.
    """

    tokens: tuple[int, ...]
    key: str
    answers: dict[str, tuple[int, ...]]
    room: int


class Retrieval(NamedTuple):
    """Whether the key was answered, digit for digit, and its place among the candidates."""

    found: bool
    rank: int


def retrieve(reading: Reading, tokenizer: Tokenizer, prompt: PasskeyPrompt) -> Retrieval:
    """Returns whether the hidden key is found, and its rank among other keys.

    Exact match asks for the digits alone, decoded greedily. The rank, by log-likelihood of the
    whole answer, also tells something of a base model that does not answer questions.

    Args:
        reading: a model that has read the prompt.
        tokenizer: the model's.
        prompt: see `build_prompt`.

    Raises:
        NumericalError: if logits are not finite.
    """
    reading = Remembered(reading)
    place = rank(reading, prompt)
    return Retrieval(greedy_digits(reading, tokenizer, prompt) == prompt.key, place)


class Remembered:
    """A reading that is asked for each continuation only once: the answers share their starts."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.known: dict[tuple[int, ...], Tensor] = {}

    def next_logits(self, continuation: Sequence[int]) -> Tensor:
        """Returns [len(continuation) + 1, V] logits: after the prompt, and each token."""
        starts = [tuple(continuation[:stop]) for stop in range(len(continuation) + 1)]
        if any(start not in self.known for start in starts):
            logits = self.reading.next_logits(continuation)
            self.known.update(zip(starts, logits, strict=True))
        return torch.stack([self.known[start] for start in starts])


def build_prompt(
    tokenizer: Tokenizer,
    *,
    length: int,
    depth: float,
    limit: int,
    bos: int | None = None,
    seed: int = 0,
) -> PasskeyPrompt | str:
    """Returns a prompt that with its answer is exactly `length` tokens, or why there is none.

    A trial that does not fit is invalid, not wrong. The filler around the key is cut at sentence
    ends; what is left over starts it.

    Args:
        tokenizer: the model's.
        length: tokens of prompt and answer together.
        depth: 0 hides the key at the start of the filler, 1 at its end.
        limit: the most tokens the model may be given.
        bos: the token every prompt starts with, if there is one.
        seed: of the keys; equal for every method, so that all are asked the same.
    """
    if length > limit:
        return f"a prompt of {length} tokens does not fit the limit of {limit}"
    if not 0 <= depth <= 1:
        raise ConfigError(f"depth must be from 0 (start) to 1 (end), got {depth}.")
    keys = candidate_keys(length, depth, seed)
    question, answers = question_and_answers(tokenizer, keys)
    room = max(map(len, answers.values())) + 1  # one more shows that no sixth digit follows

    introduction = encode(tokenizer, INTRODUCTION)
    hidden = encode(tokenizer, HIDDEN.format(key=keys[0]))
    start = ([] if bos is None else [bos]) + introduction
    free = length - room - len(start) - len(hidden) - len(question)
    if free < 0:
        return (
            f"a prompt of {length} tokens has no room for the key and the question, which take "
            f"{length - free}"
        )

    sentence = encode(tokenizer, FILLER)
    after = round((1 - depth) * free / len(sentence)) * len(sentence)
    after = min(after, free // len(sentence) * len(sentence))
    tokens = start + repeated(sentence, free - after) + hidden + repeated(sentence, after)
    return PasskeyPrompt(tokens=(*tokens, *question), key=keys[0], answers=answers, room=room)


def candidate_keys(length: int, depth: float, seed: int) -> list[str]:
    """Returns distinct keys of five digits; the first is the one to hide."""
    numbers = random.Random(f"{seed} {length} {depth:.6f}").sample(
        range(10_000, 100_000), CANDIDATES
    )
    return [str(number) for number in numbers]


def question_and_answers(
    tokenizer: Tokenizer, keys: list[str]
) -> tuple[list[int], dict[str, tuple[int, ...]]]:
    """Returns the question's tokens and each key's as they follow it.

    Question and answer are tokenized together, since a tokenizer may join them differently, and
    parted where all answers still agree with the bare question.
    """
    bare = encode(tokenizer, QUESTION)
    full = {key: encode(tokenizer, f"{QUESTION} {key}.") for key in keys}
    full = {key: until_digits_end(tokenizer, tokens, key) for key, tokens in full.items()}
    shared = len(bare)
    for tokens in full.values():
        agreeing = (place for place in range(shared) if tokens[place : place + 1] != [bare[place]])
        shared = next(agreeing, shared)
    return bare[:shared], {key: tuple(tokens[shared:]) for key, tokens in full.items()}


def until_digits_end(tokenizer: Tokenizer, tokens: list[int], key: str) -> list[int]:
    """Returns the shortest start of `tokens` whose text holds the key."""
    stop = next(
        (stop for stop in range(1, len(tokens)) if key in tokenizer.decode(tokens[:stop])),
        len(tokens),
    )
    return tokens[:stop]


def repeated(sentence: list[int], count: int) -> list[int]:
    """Returns the last `count` tokens of the sentence repeated, so that it ends with its end."""
    return (sentence * (count // len(sentence) + 1))[-count:] if count else []


def greedy_digits(reading: Reading, tokenizer: Tokenizer, prompt: PasskeyPrompt) -> str:
    """Returns the digits the model answers with, as far as they can still be the key."""
    tokens: list[int] = []
    digits = ""
    for _ in range(prompt.room):
        tokens.append(int(reading.next_logits(tokens)[-1].argmax()))
        text = tokenizer.decode(tokens).lstrip()
        digits = text[: len(text) - len(text.lstrip("0123456789"))]
        if len(text) > len(digits) or not prompt.key.startswith(digits):
            break
    return digits


def rank(reading: Reading, prompt: PasskeyPrompt) -> int:
    """Returns the key's place among the candidates, 1 for the most likely; ties count against."""
    likelihood = {key: log_likelihood(reading, answer) for key, answer in prompt.answers.items()}
    mine = likelihood.pop(prompt.key)
    return 1 + sum(other >= mine for other in likelihood.values())


def log_likelihood(reading: Reading, answer: Sequence[int]) -> float:
    """Returns ln p(answer | prompt), summed over its tokens.

    Raises:
        NumericalError: if it is not a finite number.
    """
    logits = reading.next_logits(answer[:-1]).double()
    tokens = torch.tensor(answer, device=logits.device).unsqueeze(-1)
    total = logits.log_softmax(dim=-1).gather(-1, tokens).sum().item()
    if not math.isfinite(total):
        raise NumericalError(
            f"the logits after a passkey prompt are not finite ({total}). Load the model in "
            "float32, or check the checkpoint for damage."
        )
    return total


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text, without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))
