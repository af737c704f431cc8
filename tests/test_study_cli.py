"""`longspan study`: what it leaves, how it goes on, how it fails, and that every option counts."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from longspan.cli import studying
from longspan.cli.evaluating import forget_finished
from longspan.cli.main import main
from longspan.report.progress import PartLines
from longspan.tools.ranks import Ranks
from longspan.tools.study_results import StudyResult, from_json
from longspan.tools.study_training import Training

SIZES = "--hidden-size 8 --intermediate-size 8 --layers 1 --heads 2 --kv-heads 1"
TINY = f"--length 8 --reach 4 --vocabulary 256 --batch-size 2 --documents 3 {SIZES}".split()
ONE = (*TINY, "--seeds", "0", "--steps", "2")

Ran = tuple[int, str, str]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(draw.choice(("the", "cat", "sat", "on", "a")) for _ in range(600)))
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], text: str) -> Callable[..., Ran]:
    """Runs the command; TEXT among its words is the text."""

    def runs(*words: str) -> Ran:
        code = 0
        try:
            main(["study", *(text if word == "TEXT" else word for word in words)])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    return runs


def test_a_study_leaves_a_folder_and_goes_on_from_it(run, tmp_path, monkeypatch):
    place = tmp_path / "out"
    words = (*ONE, "--text", "TEXT", "--encodings", "rope,learned", "-o", str(place))
    code, out, err = run(*words, "--methods", "yarn")
    assert (code, err.splitlines()[0]) == (0, "  0% rope, seed 0: step 0 of 2")
    for told in ("2 encodings, 1 seed", "rope · yarn", f"Page: {place}/index.html"):
        assert told in out
    names = {path.name for path in place.iterdir()}
    assert names == {
        "index.html", "study.json", "state", "positions.png", "scalings.png", "windows.png",
    }  # fmt: skip
    found = from_json((place / "study.json").read_text())
    assert [one.encoding for one in found.models] == ["rope", "learned"]
    assert (found.protocol.length, found.protocol.reach) == (8, 32)

    code, _, err = run(*words, "--methods", "yarn")
    assert (code, "--force" in err) == (1, True)

    (place / "study.json").unlink()

    def never(*_: object) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_train", never)
        code, out, _ = run(*words, "--methods", "yarn", "--json")
    assert code == 0
    again = from_json(out)
    assert (again.models, again.protocol) == (found.models, found.protocol)
    assert again.curves == found.curves

    code, out, _ = run(*words, "--methods", "none", "--force", "--json", "--learning-rate", "0.1")
    assert code == 0
    other = from_json(out)
    assert other.models != found.models
    assert {one.method for one in other.curves} == {"none"}
    assert not (place / "scalings.png").exists()


def test_the_page_says_what_was_typed(run, tmp_path, monkeypatch):
    words = (*ONE, "--text", "TEXT", "--encodings", "alibi", "-o", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["longspan", "study", "--steps", "2 & more"])
    assert run(*words)[0] == 0
    assert "longspan study --steps &#39;2 &amp; more&#39;" in (tmp_path / "index.html").read_text()


OPTIONS = {
    "--length": "16",
    "--reach": "8",
    "--steps": "3",
    "--seeds": "1",
    "--vocabulary": "260",
    "--documents": "2",
    "--batch-size": "3",
    "--learning-rate": "0.5",
    "--memory": "4",
    "--hidden-size": "16",
    "--intermediate-size": "16",
    "--layers": "2",
    "--heads": "4",
    "--kv-heads": "2",
}


def test_every_option_counts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(studying, "write_study", lambda *_, **__: None)  # figures take long
    base = (*ONE, "--text", "TEXT", "--encodings", "transformer_xl", "--json")

    def result(*words: str) -> StudyResult:
        place = tmp_path / "".join(words)
        code, out, err = run(*base, *words, "-o", str(place))
        assert code == 0, err
        return from_json(out)

    plain = result()
    for option, value in OPTIONS.items():
        made = result(option, value)
        assert made.protocol != plain.protocol, option
        assert [one.nll for one in made.curves] != [one.nll for one in plain.curves], option


def test_every_option_was_tried(run):
    flags = set(re.findall(r"--[\w-]+", run("--help")[1]))
    known = {"--encodings", "--text", "--minutes", "--methods", "--output", "--force", "--json"}
    others = {"--nproc-per-node", "--help"}
    assert flags - others == set(OPTIONS) | known


def test_minutes_are_turned_into_steps(run, tmp_path):
    words = (*TINY, "--text", "TEXT", "--encodings", "alibi", "--seeds", "0", "--json")
    code, out, err = run(*words, "--minutes", "0.005", "-o", str(tmp_path / "out"))
    assert code == 0, err
    assert from_json(out).protocol.steps >= 1


def test_an_interrupted_study_says_what_is_kept(run, tmp_path, monkeypatch):
    step = Training._step

    def interrupted(self, decoder, number, memory):
        if self.name == "rope":
            raise KeyboardInterrupt
        return step(self, decoder, number, memory)

    place = tmp_path / "out"
    words = (*ONE, "--text", "TEXT", "--encodings", "alibi,rope", "-o", str(place))
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_step", interrupted)
        code, out, err = run(*words)
    assert (code, out) == (1, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"Error: interrupted. Finished parts are kept in {place}/state;")
    assert (place / "state" / "alibi-0" / "model").exists()
    assert not (place / "study.json").exists()
    assert run(*words)[0] == 0


def test_only_the_first_rank_writes_and_prints(run, tmp_path, monkeypatch):
    second = Ranks(rank=1, size=2)
    monkeypatch.setattr(Ranks, "from_environment", lambda **_: second)
    place = tmp_path / "out"
    words = (*ONE, "--text", "TEXT", "--encodings", "alibi,t5", "--json")
    assert run(*words, "-o", str(place)) == (0, "", "")
    assert [path.name for path in place.iterdir()] == ["state"]


def test_force_removes_a_finished_study_and_goes_on_with_an_unfinished_one(tmp_path):
    result, parts = tmp_path / "study.json", tmp_path / "state"
    parts.mkdir()
    forget_finished(result, parts)  # unfinished: --force and all, the same command goes on
    assert parts.exists()
    result.write_text("{}")
    forget_finished(result, parts)
    assert not result.exists()
    assert not parts.exists()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((), 2, "give either --steps, of each training, or --minutes"),
        (("--steps", "2", "--minutes", "1"), 2, "give either --steps"),
        (("--steps", "0"), 2, "steps"),
        (("--minutes", "0"), 2, "minutes"),
        (("--steps", "2", "--encodings", "alibbi"), 2, "Did you mean 'alibi'"),
        (("--steps", "2", "--encodings", ","), 2, "Name at least one"),
        (("--steps", "2", "--encodings", "t5,t5"), 2, "named twice"),
        (("--steps", "2", "--encodings", "learned+memory"), 2, "cannot remember"),
        (("--steps", "2", "--methods", "yran"), 2, "Did you mean 'yarn'"),
        (("--steps", "2", "--encodings", "alibi", "--methods", "yarn"), 2, "nothing without rope"),
        (("--steps", "2", "--encodings", "rope+memory", "--methods", "ntk"), 2, "without rope"),
        (("--steps", "2", "--encodings", "rope", "--memory", "8"), 2, "no model remembers"),
        (("--steps", "2", "--seeds", "a"), 2, "not a list of whole numbers"),
        (("--steps", "2", "--reach", "1"), 2, "reach"),
        (("--steps", "2", "--vocabulary", "255"), 2, "vocabulary"),
        (("--steps", "2", "--learning-rate", "0"), 2, "learning-rate"),
        (("--steps", "2", "--length", "x"), 2, "not a number of tokens"),
        (("--steps", "2", "--heads", "3"), 1, "hidden_size must be a multiple"),
        (("--steps", "2", "--text", "no-such.txt"), 1, "no text file 'no-such.txt'"),
        (("--steps", "2", "--text", "TEXT", "--length", "1k"), 1, "text"),
        (("--steps", "2", "-o", "/proc/none"), 1, "cannot write"),
        (("MODEL", "--steps", "2"), 2, "unexpected extra argument"),
    ],
)
def test_bad_input_is_one_clear_line(run, tmp_path, words, code, told):
    place = () if "-o" in words else ("-o", str(tmp_path / "out"))
    sources = () if "--text" in words else ("--text", "TEXT")
    got, out, err = run(*TINY, *sources, *place, *words)
    assert got == code, err
    assert out == ""
    last = " ".join(err.strip().split("Error: ")[-1].split())
    assert re.search(told, last), last
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "study.json").exists()


def test_progress_without_a_terminal_is_a_few_lines():
    shown = io.StringIO()
    tell = PartLines(Console(file=shown, width=80))
    for model in range(2):
        for step in range(1000):
            tell(f"rope, seed {model}: step {step} of 1,000", model * 1000 + step, 2000)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 20  # a twentieth is 100 steps; a model begins on one
    assert lines[:2] == [
        "  0% rope, seed 0: step 0 of 1,000",
        "  5% rope, seed 0: step 100 of 1,000",
    ]
    assert lines[10] == " 50% rope, seed 1: step 0 of 1,000"


def test_the_default_folder_is_named_after_the_length(run, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(*ONE, "--text", text, "--encodings", "none")
    assert code == 0
    assert "Page: longspan-results/study-8/index.html" in out
    assert Path("longspan-results/study-8/study.json").exists()
