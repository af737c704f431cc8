"""A stream against the plain model, a text written by hand, and its own past."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fresh import printed
from longspan.adapters.stream_cache import StreamCache
from longspan.errors import ConfigError, InputError, NumericalError, ShapeError
from longspan.metrics.likelihood import token_nll
from longspan.tools.sampling import Sampling
from longspan.tools.stream import Stream, stream
from longspan.tools.stream_reach import check_fits, reach
from longspan.tools.stream_state import Meter, read_state, write_state
from longspan.tools.stream_text import KEPT, LONGEST, UNFINISHED, Pieces, text_row, until_stop
from longspan.tools.texts import Text
from test_load import byte_tokenizer
from tiny_families import tiny
from tiny_models import TRAINED, VOCAB, ByteTokenizer, tiny_model, tokens

S, W, N = 3, 21, 100
DOUBLE = 1e-9
DYNAMIC = dict(rope_type="dynamic", factor=2.0)
OWN_TABLE = 5e-5  # the plain model's angles are float32
SEEN = 1e-2


def streaming(model: Any = None, sinks: int = S, window: int = W, **own: Any) -> Stream:
    return stream(model or tiny_model().double(), ByteTokenizer(), sinks, window, **own)


def tokens_of(found: Stream, count: int, **options: Any) -> list[int]:
    return list(found.generate_ids(max_new_tokens=count, **options))


# --- score


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_any_chunk_size_gives_the_numbers_of_one_token_at_a_time(family: str) -> None:
    found, row = streaming(tiny_model(family).double()), tokens(N)
    one = found.score(row, chunk_size=1).nll
    assert one.dtype == torch.float64
    for chunk_size in (7, 64, N):
        nll = found.score(row, chunk_size=chunk_size).nll
        torch.testing.assert_close(nll, one, atol=DOUBLE, rtol=0)


def test_streams_in_two_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, found = tiny_model(), [tokens(30), tokens(30, seed=2)], {}
    wanted = [streaming(model).score(row, chunk_size=1).nll for row in rows]
    both, update = threading.Barrier(2, timeout=60), StreamCache.update

    def together(self: StreamCache, *args: Any, **kwargs: Any) -> Any:
        noted = update(self, *args, **kwargs)
        both.wait()  # neither attends before both have noted their keys
        return noted

    monkeypatch.setattr(StreamCache, "update", together)

    def read(at: int) -> None:
        found[at] = streaming(model).score(rows[at], chunk_size=1).nll

    threads = [threading.Thread(target=read, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in range(2):
        assert torch.equal(found[at], wanted[at])


def test_a_score_is_the_plain_models_until_something_is_dropped() -> None:
    model, row = tiny_model().double(), tokens(N)
    plain, nll = token_nll(model, row), streaming(model).score(row, chunk_size=7).nll
    kept = S + W
    torch.testing.assert_close(nll[:kept], plain[:kept], atol=OWN_TABLE, rtol=0)
    assert (nll[kept:] - plain[kept:]).abs().max() > SEEN
    whole = streaming(model, 4, TRAINED - 4).score(row[:, :TRAINED]).nll
    torch.testing.assert_close(whole, plain[: TRAINED - 1], atol=OWN_TABLE, rtol=0)


def test_sinks_and_window_change_the_score() -> None:
    model, row = tiny_model(), tokens(N)
    base = streaming(model).score(row)
    assert base.perplexity == pytest.approx(base.nll.mean().exp().item(), rel=1e-5)
    for sinks, window in ((0, S + W), (S, W + 1), (S + 1, W)):
        assert (streaming(model, sinks, window).score(row).nll - base.nll).abs().max() > SEEN


def test_a_score_leaves_the_streams_own_text_alone() -> None:
    found, other = streaming(), streaming()
    for one in (found, other):
        one.read([1, 2, 3])
        tokens_of(one, 5)
    found.score(tokens(N))
    assert found.tokens_seen == other.tokens_seen == 8
    assert tokens_of(found, 30) == tokens_of(other, 30)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 8), (1, 2, 8)])
def test_what_is_not_one_row_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="one row of at least 2 tokens"):
        streaming().score(torch.ones(shape, dtype=torch.int64))


def test_a_broken_logit_is_told_with_its_place_in_the_text() -> None:
    model, row = tiny_model(), tokens(60) % 100
    row[0, 32] = 101  # the first of a chunk: what is masked in one is 0 times NaN
    model.get_input_embeddings().weight.data[101] = float("nan")
    with pytest.raises(NumericalError, match="position 32 are not finite"):
        streaming(model).score(row, chunk_size=16)


# --- an interrupted score


class Stop(Exception):
    pass


def interrupted(found: Stream, row: Tensor, state: Path, at: int, **options: Any) -> None:
    def stop(nll: Tensor) -> None:
        if len(nll) >= at:
            raise Stop

    with pytest.raises(Stop):
        found.score(row, 5, progress=stop, state=state, save_every=20, **options)


def test_an_interrupted_score_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    state, row, told = tmp_path / "state.safetensors", tokens(N), []
    whole = streaming(tiny_model()).score(row, 5).nll
    interrupted(streaming(tiny_model()), row, state, at=55)
    found = streaming(tiny_model()).score(
        row, 5, progress=lambda nll: told.append(len(nll)), state=state, save_every=20
    )
    assert told == [40, *range(45, N, 5), N - 1]
    assert torch.equal(found.nll, whole)
    again = streaming(tiny_model()).score(row, 5, progress=told.append, state=state)
    assert len(told[-1]) == N - 1  # the whole score lies in the state until it is removed
    assert torch.equal(again.nll, whole)


def test_without_save_every_nothing_is_written(tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    streaming().score(tokens(N), 5, state=state)
    assert not state.exists()


def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    state, row = tmp_path / "state.safetensors", tokens(N)
    interrupted(streaming(tiny_model()), row, state, at=55)
    other = tiny_model()
    other.lm_head.weight.data[0, 0] += 1
    for found, text, chunk_size, told in (
        (streaming(tiny_model()), tokens(N, seed=2), 5, "saved with text"),
        (streaming(tiny_model()), row[:, :-1], 5, r"with tokens 100, .* 99\. Give .*--tokens 100"),
        (streaming(tiny_model(), window=W + 1), row, 5, "sliding_window 21, and this .* 22"),
        (streaming(tiny_model(), sinks=S + 1), row, 5, "num_sink_tokens 3, and this .* 4"),
        (streaming(tiny_model()), row, 6, "chunk_size 5, and this .* 6"),
        (streaming(other), row, 5, "saved with weights"),
        (streaming(tiny_model().double()), row, 5, "dtype 'float32'"),
        (streaming(tiny_model("qwen2")), row, 5, "model_type 'llama'"),
    ):
        with pytest.raises(ConfigError, match=told):
            found.score(text, chunk_size, state=state)
    with pytest.raises(ConfigError, match="holds 'a score', and this stream has 'a stream'"):
        streaming(tiny_model()).load(state)


# --- generate


def test_greedy_text_is_what_the_plain_model_would_write() -> None:
    model, prompt = tiny_model().double(), [5, 9, 2, 40]
    by_hand = list(prompt)
    for _ in range(S + W - len(prompt)):
        with torch.no_grad():
            by_hand.append(int(model(torch.tensor([by_hand])).logits[0, -1].argmax()))
    written = tokens_of(streaming(model), S + W - len(prompt), prompt=prompt)
    assert prompt + written == by_hand
    assert len(set(written)) > 3


def test_past_the_window_greedy_text_is_what_reading_it_anew_would_give() -> None:
    found, prompt = streaming(), [5, 9, 2, 40]
    by_hand = list(prompt)
    for _ in range(2 * W):
        with torch.no_grad():
            logits = found.model(torch.tensor([by_hand]), cache=found.new_cache()).logits
        by_hand.append(int(logits[0, -1].argmax()))
    assert len(by_hand) > S + W
    for chunk_size in (1, 3, 256):
        written = tokens_of(streaming(), 2 * W, prompt=prompt, chunk_size=chunk_size)
        assert prompt + written == by_hand


def test_it_goes_on_from_where_it_is() -> None:
    whole, parts = streaming(), streaming()
    wanted = tokens_of(whole, 40, prompt=[1, 2, 3])
    parts.read([1])
    parts.read([2, 3])
    got = [token for count in (1, 9, 30) for token in tokens_of(parts, count)]
    assert got == wanted
    assert parts.tokens_seen == 43
    assert parts.last_token == wanted[-1]


def test_text_gets_bos_at_its_start_alone() -> None:
    found = stream(tiny_model(), ByteTokenizer(bos_token_id=1), S, W)
    found.read("ab")
    found.read("c")
    assert found._pending == [1, 97, 98, 99]


def test_a_stop_string_ends_the_text_and_is_not_written() -> None:
    text = "".join(streaming().generate("Hello", max_new_tokens=60))
    assert len(text) == 60
    stop = text[20:24]
    cut = text.index(stop)
    assert "".join(streaming().generate("Hello", max_new_tokens=60, stop=[stop])) == text[:cut]
    never = "".join(streaming().generate("Hello", max_new_tokens=60, stop=["no such words"]))
    assert never == text


@pytest.mark.parametrize(
    ("pieces", "stop", "written"),
    [
        (["a", "E", "N", "D", "b"], ["END"], ["a"]),
        (["aEN", "Eb"], ["END"], ["a", "ENEb"]),
        (["aEND", "b"], ["x", "END", "aEN"], []),
        (["a", "EN"], ["END"], ["a", "EN"]),
        (["END"], [], ["END"]),
        (["a", "END"], [""], ["a", "END"]),
        (["aaab"], ["aab"], ["a"]),
    ],
)
def test_stop_strings_across_pieces(pieces: list[str], stop: list[str], written: list[str]) -> None:
    assert list(until_stop(pieces, stop)) == written


def test_the_models_end_ends_it_unless_ignored() -> None:
    model = tiny_model().double()
    text = tokens_of(streaming(model), 30, prompt=[7, 8])
    end = next(token for at, token in enumerate(text) if at > 3 and token not in text[:at])
    model.generation_config.eos_token_id = [end, VOCAB - 1]
    found = streaming(model)
    assert found.ends == {end, VOCAB - 1}
    assert tokens_of(found, 30, prompt=[7, 8]) == text[: text.index(end)]
    assert found.last_token == end  # it belongs to the text
    assert tokens_of(streaming(model), 30, prompt=[7, 8], ignore_eos=True) == text


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to go on from"):
        streaming().generate_ids()
    with pytest.raises(ConfigError, match="max_new_tokens"):
        streaming().generate_ids([1], max_new_tokens=0)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        stream(tiny_model(), None, S, W).generate([1])
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        stream(tiny_model(), None, S, W).generate_ids("text")
    model = tiny_model()
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(NumericalError, match="1 of 128 logits are NaN"):
        tokens_of(streaming(model), 1, prompt=[1])


# --- pieces


def test_a_character_of_several_tokens_comes_whole() -> None:
    text, tokenizer = "aé €uro, 😀! 12 日本", byte_tokenizer()
    ids = tokenizer(text).input_ids
    pieces = list(Pieces(tokenizer).of(ids))
    assert "".join(pieces) == text
    assert "😀" in pieces
    assert len(ids) > len(pieces) > 10
    assert not any(UNFINISHED in piece for piece in pieces)


def test_spaces_between_pieces_come_out_as_in_the_whole() -> None:
    class Words:  # like SentencePiece: a space before each word, but the text's first
        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join("abcdef"[token] for token in ids)

    assert list(Pieces(Words()).of([0, 1, 2])) == ["a", " b", " c"]
    assert "".join(Pieces(Words()).of([1, 2] * 3 * KEPT)) == " ".join("bc" * 3 * KEPT)
    assert list(Pieces(Words(), [3] * 2 * KEPT).of([1, 2])) == [" b", " c"]


def test_bytes_that_are_no_character_are_not_waited_for_without_end() -> None:
    tokenizer, longest = byte_tokenizer(), 0
    broken = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("é"))[:1]

    class Watched:
        def decode(self, ids: list[int], **options: Any) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizer.decode(ids, **options)

    pieces = list(Pieces(Watched()).of(broken * 100))
    assert len(pieces) > 10
    assert longest <= KEPT + LONGEST
    assert list(Pieces(tokenizer).of(broken)) == [UNFINISHED]  # at the end it is all there is
    longest = 0
    assert list(Pieces(Watched()).of([tokenizer.eos_token_id] * 100)) == []
    assert longest <= KEPT + 1


# --- save and load


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("before", [2, 60])
def test_a_loaded_stream_goes_on_bit_for_bit(family: str, before: int, tmp_path: Path) -> None:
    draws, path = Sampling(temperature=1.5, seed=5), tmp_path / "state"
    found = streaming(tiny_model(family))
    first = tokens_of(found, before, prompt=[1, 2, 3], sampling=draws)
    found.save(path)
    on = Sampling(temperature=1.5)
    after = tokens_of(found, 40, sampling=on)
    loaded = streaming(tiny_model(family))
    loaded.load(path)
    assert (loaded.tokens_seen, loaded.last_token) == (3 + before, first[-1])
    assert tokens_of(loaded, 40, sampling=on) == after
    loaded.load(path)  # in place of what it has read since
    assert tokens_of(loaded, 40, sampling=on) == after
    loaded.load(path)
    assert tokens_of(loaded, 40, sampling=Sampling(temperature=1.5, seed=6)) != after


def test_a_text_in_two_parts_is_one_under_a_repetition_penalty(tmp_path: Path) -> None:
    penalised, path = Sampling(repetition_penalty=5.0), tmp_path / "state"
    whole = tokens_of(streaming(tiny_model()), 60, prompt=[1, 2], sampling=penalised)
    found = streaming(tiny_model())
    first = tokens_of(found, 30, prompt=[1, 2], sampling=penalised)
    found.save(path)
    assert first + tokens_of(found, 30, sampling=penalised) == whole
    loaded = streaming(tiny_model())
    loaded.load(path)
    assert first + tokens_of(loaded, 30, sampling=penalised) == whole


def test_the_parts_of_a_text_join_as_they_do_in_the_whole(tmp_path: Path) -> None:
    class Words(
        ByteTokenizer
    ):  # like SentencePiece: a space before each word, but the text's first
        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join(map(str, ids))

    def parts(*counts: int) -> list[str]:
        found = stream(tiny_model(), Words(), S, W)
        prompts = [[1, 2], *([()] * len(counts))]
        return [
            "".join(found.generate(p, max_new_tokens=n))
            for p, n in zip(prompts, counts, strict=False)
        ]

    assert "".join(parts(20, 15)) == parts(35)[0]
    assert parts(1)[0].startswith(" ")


def test_a_character_that_two_parts_share_comes_with_the_second() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("a 😀!").input_ids
    for cut in range(1, len(ids)):
        first = list(Pieces(tokenizer).of(ids[:cut]))
        second = "".join(Pieces(tokenizer, ids[:cut]).of(ids[cut:]))
        assert "".join(first).rstrip(UNFINISHED) + second == "a 😀!"


def test_an_answers_end_is_not_avoided_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model, penalised = tiny_model(), Sampling(repetition_penalty=1.3)
    text = tokens_of(streaming(model), 30, prompt=[7, 8], sampling=penalised)
    end = next(at for at, token in enumerate(text) if at > 3 and token not in text[:at])
    model.generation_config.eos_token_id = text[end]
    found, told, scores = streaming(model), [], Sampling.scores

    def noted(self: Sampling, logits: Tensor, written: Any) -> Tensor:
        told.append(list(written))
        return scores(self, logits, written)

    monkeypatch.setattr(Sampling, "scores", noted)
    assert tokens_of(found, 30, prompt=[7, 8], sampling=penalised) == text[:end]
    assert found.last_token == text[end]
    tokens_of(found, 1, prompt=[1], sampling=penalised)
    assert told[-1] == text[:end]


def test_a_stream_that_has_read_nothing_is_saved_too(tmp_path: Path) -> None:
    streaming().save(tmp_path / "state")
    found = streaming()
    found.load(tmp_path / "state")
    assert found.tokens_seen == 0
    assert tokens_of(found, 5, prompt=[1]) == tokens_of(streaming(), 5, prompt=[1])


def test_the_state_of_another_stream_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    found = streaming(tiny_model())
    tokens_of(found, 5, prompt=[1])
    found.save(path)
    with pytest.raises(ConfigError, match="sliding_window 21, and this stream has 20"):
        streaming(tiny_model(), window=W - 1).load(path)
    with pytest.raises(ConfigError, match="holds 'a stream', and this stream has 'a score'"):
        streaming(tiny_model()).score(tokens(N), state=path)
    with pytest.raises(InputError, match="cannot be read"):
        streaming(tiny_model()).load(tmp_path / "not there")
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole[:20], b"", b"\xff" * 200):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be read as a stream's state"):
            streaming(tiny_model()).load(path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "weights")
    with pytest.raises(InputError, match="is not a stream's state"):
        streaming().load(tmp_path / "weights")
    write_state(tmp_path / "state", {"a": 1}, {"x": torch.ones(2)})
    assert read_state(tmp_path / "state", {"a": 1})["x"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="saved with a 1, and this stream has 2"):
        read_state(tmp_path / "state", {"a": 2})


# --- sampling

PROCESSORS = {
    "repetition_penalty": (1.7, transformers.RepetitionPenaltyLogitsProcessor),
    "temperature": (0.6, transformers.TemperatureLogitsWarper),
    "top_k": (9, transformers.TopKLogitsWarper),
    "top_p": (0.7, transformers.TopPLogitsWarper),
    "min_p": (0.2, transformers.MinPLogitsWarper),
}
WRITTEN = [3, 17, 3, 60]


def drawn_logits(seed: int) -> Tensor:
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "names", [*([name] for name in PROCESSORS), list(PROCESSORS)], ids="-".join
)
def test_scores_are_those_of_transformers_processors(names: list[str]) -> None:
    options = {name: PROCESSORS[name][0] for name in names}
    narrow = {"top_k", "top_p", "min_p"} & set(names)
    if narrow:
        options.setdefault("temperature", 1.0)
    for seed in range(5):
        logits = drawn_logits(seed)
        wanted = logits.unsqueeze(0)
        for name in names:
            value, processor = PROCESSORS[name]
            wanted = processor(value)(torch.tensor([WRITTEN]), wanted)
        got = Sampling(**options).scores(logits, WRITTEN)
        torch.testing.assert_close(got, wanted[0], atol=1e-6, rtol=0)
        assert not torch.equal(got, logits)
        kept = got.isfinite()
        assert bool(kept.all()) != bool(narrow)
        assert kept[logits.argmax()] or "repetition_penalty" in names


def test_a_nucleus_keeps_the_likeliest_even_alone() -> None:
    for options in (dict(top_p=1e-6), dict(top_k=1), dict(min_p=1.0)):
        got = Sampling(temperature=1.0, **options).scores(drawn_logits(0), ())
        assert got.isfinite().nonzero().flatten().tolist() == [int(drawn_logits(0).argmax())]
    assert Sampling(temperature=1.0, top_k=999).scores(drawn_logits(0), ()).isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        dict(seed=2),
        dict(temperature=0.3),
        dict(top_k=2),
        dict(top_p=0.2),
        dict(min_p=0.5),
        dict(repetition_penalty=5.0),
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_option_changes_the_draw(options: dict[str, Any]) -> None:
    base = dict(temperature=1.0, seed=1)

    def text(**own: Any) -> list[int]:
        return tokens_of(streaming(tiny_model()), 25, prompt=[1, 2], sampling=Sampling(**own))

    first = text(**base)
    assert first == text(**base)
    assert first != text(**{**base, **options})
    assert first != text() != text(repetition_penalty=5.0)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.2, 0.3]).log()
    choose = Sampling(temperature=1.0, seed=0).chooser(None, deque())
    counts = torch.bincount(torch.tensor([choose(logits) for _ in range(4000)]), minlength=3)
    torch.testing.assert_close(counts / 4000, logits.exp(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(temperature=0), "temperature must be above 0, got 0.*likeliest"),
        (dict(temperature=float("nan")), "temperature must be above 0, got nan"),
        (dict(temperature=1.0, top_k=0), "top_k must be above 0, got 0"),
        (dict(temperature=1.0, top_p=1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (dict(temperature=1.0, min_p=-0.1), "min_p must be above 0"),
        (dict(repetition_penalty=-1.0), "repetition_penalty must be above 0"),
        (dict(top_k=3, min_p=0.1), "top_k, min_p: of a draw, and without a temp"),
        (dict(seed=1), "seed: of a draw, and without a temperature nothing is drawn"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Sampling(**options)


# --- lengths


def test_more_than_the_model_reads_is_refused() -> None:
    streaming(tiny_model(), 4, TRAINED - 4)
    told = r"4 \+ 61 = 65, and the model reads 64 tokens.*lower sliding_window to 60"
    with pytest.raises(ConfigError, match=told):
        streaming(tiny_model(), 4, TRAINED - 3)
    yarn = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=TRAINED)
    further = tiny_model(rope=yarn, max_position_embeddings=2 * TRAINED)
    assert reach(further.config).trained == TRAINED
    streaming(further, 4, 2 * TRAINED - 4)
    with pytest.raises(ConfigError, match="reads 128 tokens"):
        streaming(further, 4, 2 * TRAINED - 3)


def test_without_a_window_the_trained_length_is_kept_to() -> None:
    assert stream(tiny_model()).sliding_window == TRAINED - 4
    assert stream(tiny_model(), None, 8).sliding_window == TRAINED - 8
    long = tiny_model(max_position_embeddings=4096)
    for model in (long, tiny_model(rope=DYNAMIC)):
        assert stream(model).sliding_window == 1020
    with pytest.raises(ConfigError, match=r"64 tokens are never to be dropped.*reads 64"):
        stream(tiny_model(), None, TRAINED)


def test_a_generate_that_was_overtaken_does_not_go_on() -> None:
    found = streaming(tiny_model())
    first = found.generate_ids([1], max_new_tokens=9)
    next(first)
    tokens_of(found, 2)
    with pytest.raises(ConfigError, match="another generate has gone on"):
        next(first)


def test_what_is_not_a_row_of_the_vocabulary_is_no_score() -> None:
    with pytest.raises(ShapeError, match="score takes token ids"):
        streaming().score("Call me")
    with pytest.raises(ShapeError, match=f"token {VOCAB} is outside"):
        streaming().score([1, VOCAB])


def test_dynamic_ntk_has_no_end_and_layers_that_slide_no_other_window() -> None:
    row, plain = tokens(N), tiny_model()
    dynamic = tiny_model(rope=DYNAMIC)
    nll = streaming(dynamic, 4, 3 * TRAINED).score(row).nll
    assert (nll - token_nll(plain, row)).abs()[TRAINED:].max() > SEEN
    declared = streaming(dynamic, 4, 80, seq_len=N).score(row).nll
    assert (declared - streaming(dynamic, 4, 80).score(row).nll).abs().max() > SEEN
    mistral = tiny("mistral", sliding_window=11)
    found = streaming(mistral, 4, 1020)
    assert (found.num_sink_tokens, found.sliding_window) == (0, 11)  # which is what it keeps


def test_a_declared_length_must_matter_and_hold_the_cache() -> None:
    with pytest.raises(ConfigError, match="seq_len 200 would change nothing"):
        streaming(tiny_model(), seq_len=200)
    with pytest.raises(ConfigError, match=r"seq_len 23 is declared.*holds 24 tokens.*Declare 24"):
        streaming(tiny_model(rope=DYNAMIC), seq_len=23)
    with pytest.raises(ConfigError, match="would change nothing"):
        check_fits(transformers.BloomConfig(), S, W, seq_len=200)


def test_the_trained_length_that_is_given_sets_the_table() -> None:
    row, further = tokens(N), 4 * TRAINED
    open_, closed = (
        tiny_model(rope=DYNAMIC | own, max_position_embeddings=further)
        for own in ({}, dict(original_max_position_embeddings=TRAINED))
    )
    sizes = dict(sinks=4, window=N)
    wanted = streaming(closed, **sizes).score(row).nll
    given = dict(original_max_position_embeddings=TRAINED)
    assert torch.equal(streaming(open_, **sizes, **given).score(row).nll, wanted)
    other = dict(original_max_position_embeddings=TRAINED // 2)
    assert (streaming(open_, **sizes, **other).score(row).nll - wanted).abs().max() > SEEN


def test_a_length_that_the_config_leaves_open_can_be_given() -> None:
    model = tiny_model(rope=dict(rope_type="linear", factor=2.0))
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        streaming(model)
    found = streaming(model, 4, 2 * TRAINED - 4, original_max_position_embeddings=TRAINED)
    assert found.sliding_window == 2 * TRAINED - 4


def test_alibi_has_no_length() -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    assert reach(config) is None
    assert reach(tiny("gemma3_text").config).usable == 64


# --- text and measurements


def test_a_text_is_repeated_behind_one_bos() -> None:
    text = Text("t", "abc", "0")
    assert text_row(ByteTokenizer(), text, None, False).tolist() == [[97, 98, 99]]
    assert text_row(ByteTokenizer(), text, 2, False).tolist() == [[97, 98]]
    assert text_row(ByteTokenizer(), text, 7, True).tolist() == [[97, 98, 99, 97, 98, 99, 97]]
    bos = ByteTokenizer(bos_token_id=1)
    assert text_row(bos, text, 8, True).tolist() == [[1, 97, 98, 99, 97, 98, 99, 97]]
    with pytest.raises(InputError, match=r"t has 3 tokens, and 4 are asked for.*--repeat"):
        text_row(ByteTokenizer(), text, 4, False)
    with pytest.raises(ConfigError, match="tokens"):
        text_row(ByteTokenizer(), text, 0, True)


def test_a_meter_measures_at_tenths_and_in_every_doubling(tmp_path: Path) -> None:
    meter = Meter(1000, tmp_path / "meter.json")
    for done in range(0, 1001, 10):
        meter(done)
    places = [at for at, _ in meter.samples]
    assert {100 * tenth for tenth in range(1, 11)} <= set(places)
    assert all(b / a <= 2**0.25 + 10 / a for a, b in pairwise(places))
    assert len(places) < 40
    assert meter.resumed_at == 0
    assert meter.tokens_per_second > 0
    again = Meter(1000, tmp_path / "meter.json")
    again(500)
    assert again.samples == [sample for sample in meter.samples if sample[0] <= 500]
    assert (again.resumed_at, again.tokens_per_second) == (500, None)
    anew = Meter(1000, tmp_path / "meter.json")
    anew(0)
    assert anew.samples == []


def test_resident_memory_grows_with_what_is_held() -> None:
    found = printed("""
from longspan.tools.stream_state import resident_bytes
before = resident_bytes()
held = b"x" * 40_000_000
print(resident_bytes() - before)
""")
    assert 30e6 < int(found) < 200e6


def test_a_state_belongs_to_every_layers_rope(tmp_path):
    def scaled(factor: float):
        block = {"rope_type": "linear", "factor": factor}
        model = tiny_model("gemma3", block)
        return stream(model, None, 4, 12, original_max_position_embeddings=TRAINED)

    saved = scaled(2.0)
    saved.read([1, 2, 3])
    saved.save(tmp_path / "state.safetensors")
    scaled(2.0).load(tmp_path / "state.safetensors")
    with pytest.raises(ConfigError, match="positions"):
        scaled(4.0).load(tmp_path / "state.safetensors")


def test_no_copy_of_a_kept_state_outlives_its_file(tmp_path, monkeypatch):
    one, alive, seen = stream(tiny_model(), ByteTokenizer(), 2, 6), [], []
    make = type(one.new_cache()).state

    def state(self):
        found = make(self)
        alive.extend(weakref.ref(tensor) for tensor in found.values())
        return found

    def told(nll):
        seen.append((len(alive), sum(ref() is not None for ref in alive)))

    monkeypatch.setattr(type(one.new_cache()), "state", state)
    path = tmp_path / "state.safetensors"
    one.score(tokens(40), chunk_size=8, progress=told, state=path, save_every=8)
    assert seen[-1][0] > 0
    assert all(living == 0 for _, living in seen)


def test_freed_memory_goes_back():
    assert float(printed(FREES)) < 0.25


FREES = """
import torch
from longspan.tools.stream_state import give_back_memory, resident_bytes

torch.zeros(31 << 18)  # freed: from now on glibc keeps blocks up to 31 MB for itself
before = resident_bytes()
blocks = [torch.ones(1 << 18) for _ in range(140)]
del blocks[::2]  # what is left lies between the holes
give_back_memory()
print((resident_bytes() - before) / (140 << 20) - 0.5)
"""
