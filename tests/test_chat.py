"""A chat's turns against the whole conversation as the template writes it, and how answers end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import transformers

from longspan.errors import ConfigError, UnsupportedModelError
from longspan.tools.chat import Chat, ChatTemplate, Writing, interruptible
from longspan.tools.sampling import Sampling
from longspan.tools.stream import Stream, stream
from test_load import byte_tokenizer, tiny_llama

S, W = 4, 40
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# a default system prompt, as SmolLM2's
WITH_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML
)
# the end behind a space, the system prompt inside the first turn, as Llama 2's
BRACKETS = (
    "{% if messages[0].role == 'system' %}{% set said = '<<' ~ messages[0].content ~ '>>' %}"
    "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}<|im_start|>[{% if loop.first %}{{ said }}"
    "{% endif %}{{ m.content }}]{% else %} {{ m.content }} <|im_end|>{% endif %}{% endfor %}"
)
# thoughts are left out of all answers but the last, as Qwen3's
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "default": WITH_DEFAULT, "brackets": BRACKETS, "thinking": THINKING}


def chat_tokenizer(template: str | None = CHATML) -> transformers.PreTrainedTokenizerFast:
    """Bytes, and the two marks of a turn."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


def talking(template: str | None = CHATML, **changed: Any) -> Stream:
    return stream(tiny_llama(**changed), chat_tokenizer(template), S, W)


def conversation(tokenizer: Any, system: str | None, *said: str) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant") * len(said)
    messages += [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# --- turns


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_add_up_to_the_conversation_as_the_template_writes_it(
    name: str, system: str | None
) -> None:
    found = talking(TEMPLATES[name])
    tokenizer = found.tokenizer
    talk = Chat(found, ChatTemplate(tokenizer, system))
    questions, answers, read = ["Who?", "Where, <b>?", "Why not?"], ["Me.", "Here.", "So."], []
    for question, answer in zip(questions, answers, strict=True):
        turn = talk.turn(question)
        # the answer ends itself, with the space that the template writes before its end
        spaced = f" {answer} <|im_end|>" if name == "brackets" else f"{answer}<|im_end|>"
        for part in (turn, ids(tokenizer, spaced)):
            found.read(part)
            read += part
    turn = talk.turn("And?")
    said = [text for pair in zip(questions, answers, strict=True) for text in pair]
    assert tokenizer.decode(read + turn) == conversation(tokenizer, system, *said, "And?")
    assert read + turn == ids(tokenizer, conversation(tokenizer, system, *said, "And?"))
    assert len(turn) < 60  # it does not grow with what was said


def test_an_answer_that_was_cut_short_is_ended() -> None:
    found = talking()
    talk, end = Chat(found, ChatTemplate(found.tokenizer)), found.tokenizer.eos_token_id
    found.read(talk.turn("Who?"))
    found.read("I am")
    cut = talk.turn("Go on.")
    assert cut[0] == end
    found.read([end])
    assert talk.turn("Go on.") == cut[1:]


def test_a_question_with_the_stand_in_answer_in_it_is_refused_not_cut() -> None:
    template = ChatTemplate(chat_tokenizer())
    with pytest.raises(UnsupportedModelError, match="does not write answers down"):
        template.next_turn("«the answer before»")
    lost = CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")
    with pytest.raises(UnsupportedModelError, match="does not write answers down"):
        ChatTemplate(chat_tokenizer(lost)).next_turn("Who?")


def test_templates_that_cannot_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*--prompt"):
        ChatTemplate(chat_tokenizer(None))
    with pytest.raises(ConfigError, match=r"refuses: no system role\. Leave --system out"):
        ChatTemplate(chat_tokenizer(NO_SYSTEM + CHATML), "Be brief.")
    ChatTemplate(chat_tokenizer(NO_SYSTEM + CHATML))


# --- the opening


def test_the_opening_is_the_system_prompt() -> None:
    tokenizer, said = chat_tokenizer(), "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert ChatTemplate(tokenizer, "Be brief.").opening() == len(ids(tokenizer, said))
    assert ChatTemplate(tokenizer).opening() == len(ids(tokenizer, "<|im_start|>user\n"))


def test_a_system_prompt_of_the_templates_own_counts() -> None:
    tokenizer = chat_tokenizer(WITH_DEFAULT)
    # it cannot be written alone, so the mark of the first turn is counted in
    said = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert ChatTemplate(tokenizer).opening() == len(ids(tokenizer, said))


def test_a_system_prompt_inside_the_first_turn_counts() -> None:
    tokenizer = chat_tokenizer(BRACKETS)
    said = "<|im_start|>[<<Be brief.>>"
    assert ChatTemplate(tokenizer, "Be brief.").opening() == len(ids(tokenizer, said))


# --- answers


def answer(found: Stream, limit: int, prompt: str = "Hello", **own: Any) -> tuple[str, Writing]:
    writing = Writing(found, own.pop("sampling", Sampling()), limit, **own)
    return "".join(writing.pieces(prompt)), writing


def test_an_answer_tells_how_it_ended() -> None:
    whole, writing = answer(talking(), 30)
    assert (writing.ended, writing.tokens) == ("limit", 30)
    assert writing.seconds > 0
    stop = whole[10:13]
    text, writing = answer(talking(), 30, stop=[stop])
    assert (text, writing.ended) == (whole[: whole.index(stop)], "stop")
    written = list(talking().generate_ids("Hello", max_new_tokens=30))
    end = next(token for at, token in enumerate(written) if at > 3 and token not in written[:at])
    found = talking(eos_token_id=end)
    _, writing = answer(found, 30)
    assert (writing.ended, writing.tokens) == ("eos", written.index(end))
    text, writing = answer(talking(eos_token_id=end), 30, ignore_eos=True)
    assert (text, writing.ended) == (whole, "limit")


def test_a_seed_is_the_beginning_of_the_first_answer_alone() -> None:
    draws = Sampling(temperature=2.0, seed=3)
    found = talking()
    writing = Writing(found, draws, 12)
    texts = ["".join(writing.pieces("")) if at else "".join(writing.pieces("Hi")) for at in (0, 1)]
    again = talking()
    whole = list(again.generate_ids("Hi", max_new_tokens=24, sampling=draws))
    assert "".join(texts) == again.tokenizer.decode(whole)
    assert writing.sampling == Sampling(temperature=2.0)


def test_an_interrupt_ends_an_answer_between_two_tokens() -> None:
    before = signal.getsignal(signal.SIGINT)
    found, pieces = talking(), []
    writing = Writing(found, Sampling(), 0)
    for piece in writing.pieces("Hello"):
        pieces.append(piece)
        if len(pieces) == 5:
            os.kill(os.getpid(), signal.SIGINT)
    assert writing.ended == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before
    # and nothing is lost: it goes on as if it had not been
    rest = "".join(found.generate(max_new_tokens=10))
    whole = "".join(talking().generate("Hello", max_new_tokens=writing.tokens + 10))
    assert "".join(pieces) + rest == whole


def test_a_second_interrupt_does_not_wait() -> None:
    with interruptible() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
