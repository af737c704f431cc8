"""`longspan stream`: what it writes and keeps, how it fails, and that it survives being killed."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MistralConfig, MistralForCausalLM

from longspan.adapters.head import SplitForward
from longspan.cli import streaming, writing
from longspan.cli.main import main
from longspan.cli.stream import command
from longspan.tools.stream import CHUNK, stream
from longspan.tools.stream_results import Comparison, Score, from_json
from longspan.tools.stream_text import text_row
from longspan.tools.texts import read_texts
from test_chat import chat_tokenizer, tiny_llama

SMALL = ("--num-sink-tokens", "3", "--sliding-window", "21")
TRAINED = 64
SLIDING = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9}
DYNAMIC = {
    "rope_type": "dynamic",
    "factor": 2.0,
    "original_max_position_embeddings": TRAINED,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    # its own end is <|im_end|>; nothing else ends it
    tiny_llama(eos_token_id=260, bos_token_id=None).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(chr(97 + at * at % 26) for at in range(400)))
    return str(path)


Ran = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs the command; `piped` is its standard input."""

    def runs(*args: str, piped: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        code = 0
        try:
            main(["stream", *args])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    return runs


def written(tiny: str, count: int, prompt: str = "Hello", **options: Any) -> str:
    model, tokenizer = streaming.load_model(tiny)
    found = stream(model, tokenizer, 3, 21)
    return "".join(found.generate(prompt, max_new_tokens=count, **options))


def test_the_command_line_reads_as_much_at_once_as_the_library() -> None:
    chosen = {each.name: each.default for each in command.params}
    assert chosen["chunk_size"] == CHUNK


# --- a text that goes on


def test_a_prompt_is_continued(run, tiny):
    code, out, _ = run(tiny, *SMALL, "--prompt", "Hello", "--max-new-tokens", "40")
    assert code == 0
    assert out == written(tiny, 40) + "\n"


def test_piped_text_is_continued_without_its_last_line_end(run, tiny):
    for piped in (b"Hello", b"Hello\n", b"Hello\r\n"):
        _, out, _ = run(tiny, *SMALL, "--max-new-tokens", "10", piped=piped)
        assert out == written(tiny, 10) + "\n"
    _, out, _ = run(tiny, *SMALL, "--max-new-tokens", "10", piped=b"Hello\n\n")
    assert out == written(tiny, 10, "Hello\n") + "\n"


def test_pieces_come_as_they_are_written(tiny, monkeypatch, run):
    shown: list[str] = []
    monkeypatch.setattr(writing, "show", shown.append)
    run(tiny, *SMALL, "--prompt", "Hello", "--max-new-tokens", "12")
    assert len(shown) > 3
    assert "".join(shown) == written(tiny, 12) + "\n"


def test_options_of_a_text_change_it(run, tiny):
    base = (tiny, *SMALL, "--prompt", "Hello", "--max-new-tokens", "40")
    _, plain, _ = run(*base)
    drawn = run(*base, "--temperature", "1.5", "--seed", "1")[1]
    assert drawn == run(*base, "--temperature", "1.5", "--seed", "1")[1] != plain
    for options in (
        ("--temperature", "1.5", "--seed", "2"),
        ("--temperature", "1.5", "--seed", "1", "--top-k", "2"),
        ("--temperature", "1.5", "--seed", "1", "--top-p", "0.1"),
        ("--temperature", "1.5", "--seed", "1", "--min-p", "0.9"),
        ("--temperature", "1.5", "--seed", "1", "--repetition-penalty", "9"),
    ):
        assert run(*base, *options)[1] not in (plain, drawn)
    stop = plain[10:13]
    assert run(*base, "--stop", "never", "--stop", stop)[1] == plain.split(stop)[0] + "\n"
    # the prompt is pinned: five first tokens instead of three
    assert run(*base, "--pin-prompt")[1] != plain


def test_as_json_it_tells_how_it_ended(run, tiny):
    options = ("--prompt", "Hello", "--max-new-tokens", "12", "--temperature", "1", "--seed", "4")
    code, out, _ = run(tiny, *SMALL, *options, "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["tokens"], told["ended"], told["prompt"]) == (12, "limit", "Hello")
    assert told["text"] + "\n" == run(tiny, *SMALL, *options)[1]
    assert told["sampling"]["temperature"] == 1
    assert (told["num_sink_tokens"], told["sliding_window"]) == (3, 21)
    assert told["tokens_per_second"] > 0
    pinned = (tiny, *SMALL, "--prompt", "Hello", "--json", "--pin-prompt")
    told = json.loads(run(*pinned)[1])
    assert (told["ended"], told["num_sink_tokens"]) == ("eos", 5)
    told = json.loads(run(*pinned, "--ignore-eos")[1])
    assert (told["tokens"], told["ended"]) == (256, "limit")


def test_a_saved_text_goes_on_as_if_it_had_not_ended(run, tiny, tmp_path):
    state = str(tmp_path / "kept")
    draws = ("--temperature", "1.5")
    first = (tiny, *SMALL, *draws, "--seed", "3", "--prompt", "Hello")
    _, whole, _ = run(*first, "--max-new-tokens", "60")
    _, start, _ = run(*first, "--max-new-tokens", "30", "--save", state)
    rest = (tiny, *SMALL, *draws, "--load", state, "--max-new-tokens", "30")
    _, end, _ = run(*rest)
    assert start[:-1] + end == whole
    assert run(*rest, "--prompt", "!")[1] != end
    code, _, err = run(*first, "--save", state)
    assert (code, "--force" in err) == (1, True)
    assert run(*first, "--max-new-tokens", "1", "--save", state, "--force")[0] == 0
    assert run(*rest)[1] != end
    code, _, err = run(tiny, "--load", state, "--sliding-window", "21")
    assert code == 1
    assert "saved with num_sink_tokens 3, and this stream has 4. Give" in err
    assert "--num-sink-tokens 3" in err


def test_a_declared_length_changes_what_dynamic_ntk_reads(run, tmp_path, text):
    dynamic = tiny_llama(eos_token_id=260, bos_token_id=None)
    dynamic.config.rope_parameters = {**dynamic.config.rope_parameters, **DYNAMIC}
    dynamic.save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    words = (str(tmp_path / "model"), "--sliding-window", "80", "--score", text, "--tokens", "120")
    found = []
    for declared in ((), ("--seq-len", "120"), ("--seq-len", "1k")):
        code, out, err = run(*words, *declared, "--json")
        assert code == 0, err
        found.append(from_json(Score, out))
    assert [one.protocol.seq_len for one in found] == [None, 120, 1024]
    assert len({one.whole.nll for one in found}) == 3


# --- a chat


@pytest.fixture
def terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Runs the command on a terminal where these lines are typed; an exception is raised there."""

    def runs(lines: list[Any], *args: str) -> Ran:
        typed: Iterator[Any] = iter(lines)

        def ask(prompt: str) -> str:
            assert prompt == "> "
            line = next(typed, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", ask)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        code = 0
        try:
            main(["stream", *args])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    return runs


LIMIT = ("--max-new-tokens", "8")


def talked(tiny: str, questions: list[str], system: str | None = None, sinks: int = 3) -> list[str]:
    """The answers of a model that is given the whole conversation's tokens, turn by turn."""
    model, tokenizer = streaming.load_model(tiny)
    found, answers, start = stream(model, tokenizer, sinks, 21), [], ""
    if system is not None:
        start = f"<|im_start|>system\n{system}<|im_end|>\n"
    for question in questions:
        turn = f"{start}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        found.read(tokenizer(turn, add_special_tokens=False)["input_ids"])
        answers.append("".join(found.generate(max_new_tokens=8)))
        start = "<|im_end|>\n"  # each answer is cut short
    return answers


def test_a_chat_asks_and_answers_until_quit(terminal, tiny):
    code, out, err = terminal(["Who?", "", "  ", "Why?", "/quit", "more"], tiny, *SMALL, *LIMIT)
    assert code == 0
    assert out == "".join(f"{answer}\n" for answer in talked(tiny, ["Who?", "Why?"]))
    assert "3 + 21 tokens" in err
    assert "/quit or Ctrl-D" in err


def test_the_end_of_input_ends_a_chat_and_ctrl_c_at_the_prompt_does_not(terminal, tiny):
    code, out, err = terminal([KeyboardInterrupt(), "Who?"], tiny, *SMALL, *LIMIT)
    assert code == 0
    assert out == talked(tiny, ["Who?"])[0] + "\n\n"
    assert err.count("/quit or Ctrl-D") == 2


def test_a_pinned_system_prompt_is_all_sinks(terminal, tiny):
    system = "Be brief."
    pinned = len("system\nBe brief.\n") + 2  # bytes and the two marks
    words = (tiny, *SMALL, *LIMIT, "--system", system)
    _, out, _ = terminal(["Who?"], *words)
    assert out == talked(tiny, ["Who?"], system)[0] + "\n\n"
    _, out, err = terminal(["Who?", "Why?"], *words, "--pin-prompt")
    assert f"{pinned} + 21 tokens" in err
    answers = talked(tiny, ["Who?", "Why?"], system, sinks=pinned)
    assert out == "".join(f"{answer}\n" for answer in [*answers, ""])


def test_where_every_layer_slides_nothing_is_pinned(run, tmp_path):
    config = MistralConfig(**tiny_llama().config.to_dict() | SLIDING)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    words = (str(tmp_path), *SMALL, "--prompt", "Hello", "--max-new-tokens", "3")
    code, out, err = run(*words, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["num_sink_tokens"], told["sliding_window"]) == (0, 9)
    code, _, err = run(*words, "--pin-prompt")
    assert (code, "own window of 9 tokens" in err) == (1, True)


def test_a_saved_chat_goes_on(terminal, tiny, tmp_path):
    state = str(tmp_path / "chat")
    terminal(["Who?"], tiny, *SMALL, *LIMIT, "--save", state)
    _, out, _ = terminal(["Why?"], tiny, *SMALL, *LIMIT, "--load", state)
    assert out == talked(tiny, ["Who?", "Why?"])[1] + "\n\n"


# --- a score


def test_a_score_leaves_a_folder(run, tiny, text, tmp_path):
    out_folder = tmp_path / "out"
    words = (tiny, *SMALL, "--score", text, "--chunk-size", "16", "-o", str(out_folder))
    code, out, err = run(*words)
    assert code == 0
    assert "400 tokens of" in out
    assert len(err.splitlines()) >= 9
    names = ["nll.safetensors", "score.json", "score.png"]
    assert sorted(path.name for path in out_folder.iterdir()) == names
    found = from_json(Score, (out_folder / "score.json").read_text())
    nll = load_file(out_folder / "nll.safetensors")["nll"]
    model, tokenizer = streaming.load_model(tiny)
    row = text_row(tokenizer, read_texts([text])[0], None, False)
    assert torch.equal(nll, stream(model, tokenizer, 3, 21).score(row, 16).nll)
    assert found.whole.nll == pytest.approx(nll.mean().item(), abs=1e-6)
    assert len(found.tenths) == 10
    assert found.protocol.text[1] == read_texts([text])[0].sha256
    code, _, err = run(*words)
    assert (code, "--force" in err) == (1, True)
    assert run(*words, "--force")[0] == 0


def test_a_score_as_json(run, tiny, text):
    code, out, err = run(
        tiny, *SMALL, "--score", text, "--tokens", "1k", "--repeat", "--chunk-size", "64", "--json"
    )
    assert code == 0
    found = from_json(Score, out)
    assert (found.protocol.tokens, found.protocol.repeated) == (1024, True)
    assert found.protocol.chunk_size == 64
    assert found.protocol.model == tiny
    assert "perplexity" in err


KILLED = """
import os, signal, sys
from longspan.adapters.head import SplitForward
from longspan.cli.main import main
from longspan.cli.stream import command

reads, hidden = 0, SplitForward.hidden

def counted(self, input_ids, cache=None):
    global reads
    reads += 1
    if reads == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return hidden(self, input_ids, cache)

SplitForward.hidden = counted
main(sys.argv[1:])
"""


def test_a_killed_score_resumes_to_the_same_numbers(run, tiny, text, tmp_path):
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    words = (tiny, *SMALL, "--score", text, "--chunk-size", "8", "--save-every", "50")
    command = [sys.executable, "-c", KILLED, "stream", *words, "-o", str(folder)]
    killed = subprocess.run(command, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.name for path in folder.iterdir()) == ["state.json", "state.safetensors"]
    code, _, err = run(*words, "-o", str(folder))
    assert code == 1
    assert "unfinished score. Pass --resume" in err
    code, out, _ = run(*words, "-o", str(folder), "--resume")
    assert code == 0
    assert "since 224, where it was resumed" in out
    assert run(*words, "-o", str(whole), "--resume")[0] == 0  # nothing to go on from: it begins
    found, wanted = (
        from_json(Score, (place / "score.json").read_text()) for place in (folder, whole)
    )
    assert (found.resumed_at, wanted.resumed_at) == (224, 0)
    for name in ("protocol", "whole", "tenths", "octaves"):
        assert getattr(found, name) == getattr(wanted, name)
    nll, again = (load_file(place / "nll.safetensors")["nll"] for place in (folder, whole))
    assert torch.equal(nll, again)
    assert not (folder / "state.safetensors").exists()


def test_an_interrupted_score_says_what_is_kept(run, tiny, text, tmp_path, monkeypatch):
    reads, hidden = [], SplitForward.hidden

    def interrupted(self, input_ids, cache=None):
        reads.append(1)
        if len(reads) == 30:
            raise KeyboardInterrupt  # a signal may be ignored where tests run in the background
        return hidden(self, input_ids, cache)

    monkeypatch.setattr(SplitForward, "hidden", interrupted)
    words = (tiny, *SMALL, "--score", text, "--chunk-size", "8", "--save-every", "50")
    code, out, err = run(*words, "-o", str(tmp_path / "out"))
    assert (code, out) == (1, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("Error: interrupted.")
    assert "--resume goes on from where it was last saved" in last
    assert (tmp_path / "out" / "state.safetensors").exists()
    code, _, err = run(*words, "-o", str(tmp_path / "out"), "--resume", "--tokens", "300")
    assert code == 1
    assert "saved with tokens 400, and this stream has 300. Give tokens 400 (--tokens" in err
    assert run(*words, "-o", str(tmp_path / "out"), "--force")[0] == 0
    told = from_json(Score, (tmp_path / "out" / "score.json").read_text())
    assert told.resumed_at == 0


def test_an_endless_text_ends_at_ctrl_c_with_all_kept(run, tiny, tmp_path, monkeypatch):
    shown, state = [], tmp_path / "kept"

    def show(piece: str) -> None:
        shown.append(piece)
        if len(shown) == 100:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(writing, "show", show)
    endless = ("--max-new-tokens", "0", "--ignore-eos")
    code, _, err = run(tiny, *SMALL, "--prompt", "Hello", *endless, "--save", str(state))
    assert (code, err) == (0, "")
    assert shown[-1] == "\n"
    assert len(shown) < 105
    first = "".join(shown[:-1])
    shown.clear()
    run(tiny, *SMALL, *endless, "--load", str(state))
    assert written(tiny, 400, ignore_eos=True).startswith(first + "".join(shown[:20]))


# --- a comparison


def test_a_comparison_leaves_a_folder(run, tiny, text, tmp_path):
    folder = tmp_path / "out"
    words = (tiny, *SMALL, "--score", text, "--tokens", "120", "--chunk-size", "32")
    options = ("--recompute-tokens", "8", "--dense-tokens", "60", "--sinks", "0,1,3")
    code, out, _ = run(
        *words, *options, "--compare", "streaming,window,recompute,dense", "-o", str(folder)
    )
    assert code == 0
    found = from_json(Comparison, (folder / "comparison.json").read_text())
    assert [score.method for score in found.methods] == [
        "streaming",
        "window",
        "recompute",
        "dense",
    ]
    assert [score.num_sink_tokens for score in found.sinks] == [0, 1, 3]
    assert found.methods[2].whole.tokens == 8
    assert found.methods[3].whole.tokens == 59
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "sinks in a cache of 24 tokens" in out
    assert "recompute" in out
    code, _, err = run(*words, "--sinks", "0", "-o", str(folder))
    assert (code, "--force" in err) == (1, True)


def test_a_comparison_as_json(run, tiny, text):
    words = (tiny, *SMALL, "--score", text, "--tokens", "60", "--json")
    code, out, _ = run(*words, "--sinks", "0,2")
    assert code == 0
    found = from_json(Comparison, out)
    assert found.methods == ()
    assert len(found.sinks) == 2


# --- refusals


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((), 2, "nothing to go on from: give --prompt TEXT, or pipe it in"),
        (("--prompt", "x", "--resume"), 2, "--resume does nothing with --prompt or piped text"),
        (("--prompt", "x", "--score", "TEXT"), 2, "--prompt is to be continued and --score read"),
        (("--score", "TEXT", "--temperature", "1"), 2, "--temperature does nothing with --score"),
        (("--score", "TEXT", "--dense-tokens", "9"), 2, "--compare or --sinks"),
        (("--score", "TEXT", "--sinks", "0", "--seq-len", "9"), 2, "--seq-len does nothing with"),
        (("--prompt", "x", "--compare", "window"), 2, "need --score TEXT, what to read"),
        (("--prompt", "x" * 70, "--pin-prompt"), 1, "tokens are never to be dropped"),
        (("--prompt", "x", "--system", "y"), 2, "--system does nothing .* use it in a chat"),
        (("--prompt", "x", "--load", "TEXT", "--pin-prompt"), 2, "its text has begun"),
        (("--prompt", "x", "--force"), 2, "--force needs"),
        (("--score", "TEXT", "--resume"), 2, "--resume needs -o"),
        (("--score", "TEXT", "--save-every", "9"), 2, "--save-every needs -o"),
        (("--score", "TEXT", "--repeat"), 2, "--repeat needs --tokens"),
        (("--score", "TEXT", "--compare", "windwo"), 2, "Did you mean 'window'"),
        (("--score", "TEXT", "--compare", ","), 2, "name at least one"),
        (("--score", "TEXT", "--sinks", "0,x"), 2, "not a list of whole numbers"),
        (("--prompt", "x", "--max-new-tokens", "-1"), 2, "max-new-tokens"),
        (("--load", "no such file", "--prompt", "x"), 2, "does not exist"),
        (("--prompt", "x", "--temperature", "0"), 1, "temperature must be above 0, got 0"),
        (("--prompt", "x", "--top-k", "3"), 1, "top_k: of a draw"),
        (("--prompt", "x", "--seed", "3"), 1, "seed: of a draw, and without a temperature"),
        (("--prompt", "x", "--seq-len", "9k", *SMALL), 1, "seq_len 9216 would change nothing"),
        (
            ("--score", "TEXT", "--compare", "window", "--dense-tokens", "9"),
            2,
            "--dense-tokens needs dense among the methods of --compare",
        ),
        (
            ("--score", "TEXT", "--sinks", "0,1", "--recompute-tokens", "9"),
            2,
            "--recompute-tokens needs recompute among",
        ),
        (("--prompt", "x", "--sliding-window", "61"), 1, "the model reads 64 tokens"),
        (("--score", "TEXT", "--sliding-window", "61"), 1, "the model reads 64 tokens"),
        (("--score", "TEXT", "--sinks", "1", "--sliding-window", "61"), 1, "reads 64 tokens"),
        (("--prompt", "x", "--num-sink-tokens", "-1"), 2, "num-sink-tokens"),
        (("--score", "no-such.txt", *SMALL), 1, "no text file 'no-such.txt'"),
        (("--score", "TEXT", "--tokens", "9k", *SMALL), 1, "--repeat"),
        (("--score", "TEXT", "--tokens", "24", "--sinks", "1", *SMALL), 1, "drops none"),
        (("--prompt", "x", "--load", "TEXT", *SMALL), 1, "cannot be read as a stream's state"),
        (("--prompt", "x", "--save", "TEXT", *SMALL), 1, "--force"),
        (("--prompt", "x", "--save", "/proc/none/kept", *SMALL), 1, "cannot write"),
        (("--score", "TEXT", "-o", "/proc/none", *SMALL), 1, "cannot write"),
        (("--prompt", "\udcff", *SMALL), 2, "--prompt is not UTF-8"),
    ],
)
def test_bad_input_is_one_clear_line(run, tiny, text, words, code, told):
    got, out, err = run(tiny, *[text if word == "TEXT" else word for word in words])
    assert got == code, err
    assert out == ""
    last = " ".join(err.strip().split("Error: ")[-1].split())
    assert re.search(told, last), last
    assert "Traceback" not in err


def test_piped_bytes_that_are_not_text_are_refused(run, tiny):
    code, _, err = run(tiny, *SMALL, piped=b"\xff\xfe")
    assert code == 1
    assert "standard input is not UTF-8" in err


def test_a_chat_refuses_what_it_cannot_do(terminal, tiny, tmp_path):
    code, _, err = terminal([], tiny, *SMALL, "--json")
    assert (code, "--json does nothing in a chat" in err) == (2, True)
    code, _, err = terminal([], tiny, *SMALL, "--pin-prompt")
    assert (code, "--pin-prompt needs --system" in err) == (2, True)
    code, _, err = terminal([], tiny, *SMALL, "--system", "x" * 60, "--pin-prompt")
    assert (code, "are never to be dropped" in err) == (1, True)
    tiny_llama().save_pretrained(tmp_path)
    chat_tokenizer(None).save_pretrained(tmp_path)
    code, _, err = terminal(["Who?"], str(tmp_path), *SMALL)
    assert (code, "no chat template" in err) == (1, True)


def test_help_is_true(run):
    code, out, _ = run("--help")
    assert code == 0
    for word in ("MODEL", "--prompt", "--score", "--compare", "/quit or Ctrl-D"):
        assert word in out
