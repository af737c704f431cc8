"""`study` in two processes is `study` in one, and one that is killed is told of and made good."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.cli.main import main
from longspan.tools.study_results import StudyResult, from_json
from longspan.tools.study_training import Training
from processes import torchrun

FLOAT32_NLL = 1e-6  # whole models are shared out, so nothing is added up in another order
SIZES = "--hidden-size 8 --intermediate-size 8 --layers 1 --heads 2 --kv-heads 1"
TINY = f"--length 8 --reach 4 --vocabulary 256 --batch-size 2 --documents 3 --steps 3 {SIZES}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text in it."""
    place = tmp_path_factory.mktemp("study")
    (place / "text.txt").write_text("the cat sat on a mat. " * 200)
    return place


def command(place: Path, output: str) -> list[str]:
    asked = "--encodings rope,transformer_xl --seeds 0,1 --methods yarn"
    folders = ["--text", str(place / "text.txt"), "-o", str(place / output)]
    return ["study", *TINY.split(), *asked.split(), *folders, "--json"]


@pytest.fixture(scope="module")
def whole(place: Path) -> StudyResult:
    """What one process finds."""
    main(command(place, "whole"))
    return bare(from_json((place / "whole/study.json").read_text()))


def bare(result: StudyResult) -> StudyResult:
    """The result without what differs from run to run."""
    return replace(
        result,
        models=tuple(replace(model, seconds=0.0) for model in result.models),
        curves=tuple(replace(curve, seconds=0.0) for curve in result.curves),
    )


def assert_same(one: StudyResult, other: StudyResult) -> None:
    assert one.protocol == other.protocol
    assert [m.loss for m in one.models] == [m.loss for m in other.models]
    assert one.models == other.models
    for mine, theirs in zip(one.curves, other.curves, strict=True):
        assert (mine.name, mine.reading, mine.window) == (
            theirs.name,
            theirs.reading,
            theirs.window,
        )
        assert mine.by_seed == pytest.approx(theirs.by_seed, abs=FLOAT32_NLL)


def test_two_processes_find_what_one_does(place: Path, whole: StudyResult) -> None:
    found = torchrun("-m", "longspan", *command(place, "two"))
    assert found.returncode == 0, found.stderr
    assert_same(bare(from_json(found.stdout)), whole)  # printed once: rank 1 prints nothing
    assert (place / "two/index.html").exists()
    losses = [model.loss for model in whole.models]
    assert losses[0] != losses[1]  # by seed
    assert losses[0] != losses[2]  # by encoding


def test_a_killed_rank_is_told_of_and_the_same_command_goes_on(
    place: Path, whole: StudyResult
) -> None:
    killed = torchrun(__file__, *command(place, "killed"))
    assert killed.returncode != 0
    told = [line for line in killed.stderr.splitlines() if line.startswith("Error: rank 0 of 2")]
    assert len(told) == 1, killed.stderr
    assert told[0].endswith("Run the same command again: it goes on from what is finished.")
    assert not (place / "killed/study.json").exists()
    found = torchrun("-m", "longspan", *command(place, "killed"))
    assert found.returncode == 0, found.stderr
    assert_same(bare(from_json(found.stdout)), whole)


def end_the_second() -> None:
    """Kills rank 1 in the middle of its first model."""
    own = Training._step

    def killing(self: Training, decoder: Any, step: int, memory: Any) -> Any:
        if os.environ["RANK"] == "1" and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, decoder, step, memory)

    Training._step = killing


if __name__ == "__main__":
    end_the_second()
    main(sys.argv[1:])
