"""Passkey prompts of exact length, and retrieval by a reader whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import transformers

from longspan.adapters.head import SplitForward
from longspan.adapters.prompt import ReadPrompt
from longspan.errors import ConfigError, NumericalError, UnsupportedModelError
from longspan.metrics.passkey import (
    CANDIDATES,
    DEPTHS,
    HIDDEN,
    PasskeyPrompt,
    build_prompt,
    retrieve,
)
from tiny_models import VOCAB, ByteTokenizer, tiny_model, tokens

LENGTH = 700  # characters, so tokens of ByteTokenizer
CACHED = 1e-4  # logits: a cached forward sums in another order


class PairTokenizer(ByteTokenizer):
    """Joins digits in pairs, and a space with the letter behind it, as trained tokenizers may."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            pair = text[place : place + 2]
            if len(pair) == 2 and (pair.isdigit() or (pair[0] == " " and pair[1].isalpha())):
                ids.append(VOCAB + 1 + ord(pair[0]) * VOCAB + ord(pair[1]))
                place += 2
            else:
                ids.append(ord(text[place]))
                place += 1
        return ids

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(
            chr(t) if t <= VOCAB else chr((t - VOCAB - 1) // VOCAB) + chr((t - VOCAB - 1) % VOCAB)
            for t in token_ids
        )


class Answering:
    """Answers with fixed tokens, and finds tokens likely in proportion to `favour`."""

    def __init__(self, answer: Sequence[int], vocabulary: int = VOCAB, strength: float = 9.0):
        self.answer, self.vocabulary, self.strength = list(answer), vocabulary, strength

    def next_logits(self, continuation: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(len(continuation) + 1, self.vocabulary)
        for place in range(len(continuation) + 1):
            if place < len(self.answer):
                logits[place, self.answer[place]] = self.strength
        return logits


def built(tokenizer: ByteTokenizer | None = None, **changed: object) -> PasskeyPrompt:
    given = {"length": LENGTH, "depth": 0.5, "limit": LENGTH, **changed}
    prompt = build_prompt(tokenizer or ByteTokenizer(), **given)  # type: ignore[arg-type]
    assert isinstance(prompt, PasskeyPrompt), prompt
    return prompt


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), PairTokenizer()], ids=["bytes", "pairs"])
@pytest.mark.parametrize("length", [333, 500, 701])
@pytest.mark.parametrize("bos", [None, 1])
def test_prompt_and_answer_fill_the_length_exactly(
    tokenizer: ByteTokenizer, length: int, bos: int | None
) -> None:
    for depth in DEPTHS:
        prompt = built(tokenizer, length=length, limit=length, depth=depth, bos=bos)
        assert len(prompt.tokens) + prompt.room == length
        assert (prompt.tokens[0] == bos) == (bos is not None)
        text = tokenizer.decode(list(prompt.tokens[bos is not None :]))
        assert text.count(prompt.key) == 2
        assert HIDDEN.format(key=prompt.key) in text
        for key, answer in prompt.answers.items():
            whole = text + tokenizer.decode(list(answer))
            assert whole.endswith(f"The pass key is {key}")
            assert len(answer) < prompt.room


def test_depth_moves_the_key_from_start_to_end() -> None:
    assert len(DEPTHS) >= 10
    places = []
    for depth in DEPTHS:
        prompt = built(length=2000, limit=2000, depth=depth)
        places.append("".join(map(chr, prompt.tokens)).index(prompt.key) / 2000)
    assert places == sorted(places)
    assert places[0] < 0.15
    assert places[-1] > 0.9
    assert places[5] == pytest.approx(0.5, abs=0.06)


def test_keys_are_the_same_each_time_and_differ_by_trial() -> None:
    first, again = built(), built()
    assert first == again
    assert len(set(first.answers)) == CANDIDATES == 10
    assert all(len(key) == 5 and key.isdigit() for key in first.answers)
    assert built(depth=0.4).key != first.key
    assert built(length=701, limit=701).key != first.key
    assert built(seed=1).key != first.key


def test_case_27_a_prompt_of_120_tokens_at_limit_100_is_invalid() -> None:
    reason = build_prompt(ByteTokenizer(), length=120, depth=0.5, limit=100)
    assert reason == "a prompt of 120 tokens does not fit the limit of 100"


def test_a_prompt_too_short_for_the_question_is_invalid() -> None:
    reason = build_prompt(ByteTokenizer(), length=120, depth=0.5, limit=1000)
    told = "a prompt of 120 tokens has no room for the key and the question, which take "
    assert isinstance(reason, str)
    assert reason.startswith(told)
    least = int(reason.removeprefix(told))
    shorter, enough = (
        build_prompt(ByteTokenizer(), length=length, depth=0.5, limit=1000)
        for length in (least - 1, least)
    )
    assert isinstance(shorter, str)
    assert not isinstance(enough, str)


@pytest.mark.parametrize("depth", [-0.1, 1.1])
def test_a_depth_outside_the_prompt_is_refused(depth: float) -> None:
    with pytest.raises(ConfigError, match="depth must be from 0"):
        build_prompt(ByteTokenizer(), length=LENGTH, depth=depth, limit=LENGTH)


def test_the_key_is_found_when_its_digits_are_answered() -> None:
    prompt = built()
    answer = [*prompt.answers[prompt.key], ord(".")]
    assert retrieve(Answering(answer), ByteTokenizer(), prompt) == (True, 1)


def test_other_tokens_for_the_same_digits_are_found_too() -> None:
    tokenizer = PairTokenizer()
    prompt = built(tokenizer)
    digits = [ord(letter) for letter in f" {prompt.key[:4]}"]  # no pairs: 5 tokens, not 3
    pairs = tokenizer.encode(f" {prompt.key}")
    assert digits != pairs[:5]
    reading = Answering([*digits, ord(prompt.key[4])], vocabulary=VOCAB * (VOCAB + 2))
    prompt = PasskeyPrompt(**{**vars(prompt), "room": 7})
    assert retrieve(reading, tokenizer, prompt).found


@pytest.mark.parametrize("change", ["wrong digit", "sixth digit", "words", "too short"])
def test_another_answer_is_missed(change: str) -> None:
    prompt = built()
    key = prompt.key
    text = {
        "wrong digit": f" {key[:4]}{(int(key[4]) + 1) % 10}.",
        "sixth digit": f" {key}0.",
        "words": " the grass",
        "too short": f" {key[:4]}. ",
    }[change]
    assert not retrieve(Answering(ByteTokenizer().encode(text)), ByteTokenizer(), prompt).found


def test_a_found_key_takes_one_reading_a_candidate_and_one_for_what_follows() -> None:
    prompt = built()
    asked: list[tuple[int, ...]] = []

    class Counting(Answering):
        def next_logits(self, continuation: Sequence[int]) -> torch.Tensor:
            asked.append(tuple(continuation))
            return super().next_logits(continuation)

    answer = [*prompt.answers[prompt.key], ord(".")]
    assert retrieve(Counting(answer), ByteTokenizer(), prompt).found
    assert len(asked) == CANDIDATES + 1


def test_rank_counts_the_candidates_that_are_as_likely_or_more() -> None:
    prompt = built()
    other = next(key for key in prompt.answers if key != prompt.key)
    favoured = Answering(prompt.answers[other], strength=9.0)
    place = retrieve(favoured, ByteTokenizer(), prompt).rank
    assert place >= 2  # the favoured one is ahead
    indifferent = Answering([], strength=0.0)
    assert retrieve(indifferent, ByteTokenizer(), prompt).rank == CANDIDATES  # ties count against


def test_rank_is_by_the_likelihood_of_the_whole_answer() -> None:
    model, tokenizer = tiny_model(max_position_embeddings=1024), ByteTokenizer()
    prompt = built(length=400, limit=400)
    reading = ReadPrompt(SplitForward(model), torch.tensor([prompt.tokens]))
    likelihood = {}
    for key, answer in prompt.answers.items():
        whole = torch.tensor([[*prompt.tokens, *answer]])
        with torch.no_grad():
            logits = model(whole).logits[0].double().log_softmax(-1)
        first = len(prompt.tokens)
        likelihood[key] = sum(logits[first + i - 1, token].item() for i, token in enumerate(answer))
    ordered = sorted(likelihood, key=lambda key: -likelihood[key])
    assert retrieve(reading, tokenizer, prompt).rank == 1 + ordered.index(prompt.key)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_continuations_leave_the_prompt_as_it_was(family: str) -> None:
    changed = {"sliding_window": 16} if family == "mistral" else {}
    model, prompt = tiny_model(family, **changed), tokens(50)
    reading = ReadPrompt(SplitForward(model), prompt)
    for seed, count in ((3, 4), (4, 1), (3, 4)):
        continuation = tokens(count, seed=seed)
        logits = reading.next_logits(continuation[0].tolist())
        with torch.no_grad():
            fresh = model(torch.cat((prompt, continuation), dim=1)).logits[0, 49:]
        torch.testing.assert_close(logits, fresh, atol=CACHED, rtol=0)
    torch.testing.assert_close(reading.next_logits([]), fresh[:1], atol=CACHED, rtol=0)


def test_a_cache_that_changes_in_place_is_refused() -> None:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="leave it out for this model"):
        ReadPrompt(SplitForward(model), tokens(8))


def test_logits_that_are_not_finite_are_refused() -> None:
    prompt = built()
    with pytest.raises(NumericalError, match="not finite"):
        retrieve(Answering(prompt.answers[prompt.key], strength=math.nan), ByteTokenizer(), prompt)
