"""`evaluate` in two processes is `evaluate` in one, and the loss of one is told and made good."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longspan.adapters.load import load_model
from longspan.cli.main import main
from longspan.errors import ConfigError, LongspanError, NumericalError
from longspan.tools import measuring
from longspan.tools.evaluate import evaluate
from longspan.tools.evaluation import Evaluation, from_json, to_json
from longspan.tools.ranks import Ranks
from longspan.tools.texts import Text, read_texts
from processes import PATIENCE, meet, side_by_side, torchrun
from tiny_models import TRAINED, ByteTokenizer, tiny_model

LENGTH, DOCUMENTS, KEY = 6 * TRAINED, 3, 340
METHODS = ["none", "yarn"]
FLOAT32_NLL = 1e-6  # the same operations in the same order; what is shared out is whole forwards
AGAIN = "Run the same command again: it goes on from what is finished."


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_item_is_one_ranks(size: int) -> None:
    shares = [Ranks(rank, size).share(range(5)) for rank in range(size)]
    assert sorted(item for share in shares for item in share) == [0, 1, 2, 3, 4]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_nothing_is_waited_for() -> None:
    with Ranks.from_environment() as ranks:
        assert (ranks.rank, ranks.size, ranks.group) == (0, 1, None)
        ranks.barrier()
        ranks.require_equal("protocol", "any")
        with ranks.in_turn():
            cells = [{"nll": torch.ones(2)}, {"nll": torch.zeros(2)}]
        assert ranks.gather(ranks.share(cells)) == cells
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        ("2", "2", "from 0 to WORLD_SIZE − 1, got 2 of 2"),
        ("one", "2", "RANK must be a whole number"),
    ],
)
def test_ranks_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, message: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=message):
        Ranks.from_environment()


def test_a_launcher_that_says_nothing_of_the_others_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR does not say where the others meet"):
        Ranks.from_environment()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and a text."""
    place = tmp_path_factory.mktemp("ranks")
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(place / "llama")
    tiny_model(vocab_size=len(tokens)).save_pretrained(place / "llama")
    (place / "text.txt").write_text(text())
    return place


def text() -> str:
    return "".join(chr(32 + (7 * i * i + i // 5) % 95) for i in range(DOCUMENTS * LENGTH))


def command(place: Path) -> list[str]:
    given = f"--length {LENGTH} --methods none,yarn --documents {DOCUMENTS} --depths 0,1"
    keys = f"--passkey {KEY} --passkey {2 * LENGTH}"  # the second is invalid
    folders = ["--text", str(place / "text.txt"), "-o", str(place / "result"), "--json"]
    return ["evaluate", str(place / "llama"), *given.split(), *keys.split(), *folders]


@pytest.fixture(scope="module")
def killed(place: Path) -> tuple[str, dict[str, int]]:
    """What a run says in which rank 1 is killed, and the cells it leaves, with their times."""
    found = torchrun(__file__, "killed", *command(place))
    assert found.returncode != 0
    cells = {cell.name: cell.stat().st_mtime_ns for cell in (place / "result/parts").iterdir()}
    return found.stderr, cells


def test_a_killed_rank_is_told_of_by_the_other(
    place: Path, killed: tuple[str, dict[str, int]]
) -> None:
    said, cells = killed
    errors = [line for line in said.splitlines() if line.startswith("Error: rank 0 of 2")]
    assert len(errors) == 1, said
    assert errors[0].endswith(AGAIN)
    assert not (place / "result/evaluation.json").exists()
    assert "none-document-0001.safetensors" in cells  # rank 1's one finished part
    assert "yarn-document-0000.safetensors" not in cells  # its next
    assert not [name for name in cells if name.startswith(".")]


def test_the_same_command_goes_on_and_ends_as_one_process_does(
    place: Path, killed: tuple[str, dict[str, int]]
) -> None:
    found = torchrun("-m", "longspan", *command(place))
    assert found.returncode == 0, found.stderr
    for name, time_ns in killed[1].items():
        assert (place / "result/parts" / name).stat().st_mtime_ns == time_ns, f"{name} made again"
    model, tokenizer = load_model(place / "llama")
    whole = evaluate(
        model,
        tokenizer,
        read_texts([str(place / "text.txt")]),
        length=LENGTH,
        methods=METHODS,
        documents=DOCUMENTS,
        passkey=((KEY, 2 * LENGTH), (0.0, 1.0)),
        name=str(place / "llama"),
    )
    printed = from_json(found.stdout)  # once: rank 1 prints nothing
    assert_same(printed, whole)
    assert from_json((place / "result/evaluation.json").read_text()) == printed
    assert {trial.status for trial in printed.passkey} == {"missed", "invalid"}
    told = [line for line in found.stderr.splitlines() if line.lstrip()[:1].isdigit()]
    assert told[-1] == "100% done"  # rank 0 tells of its own half
    assert len(told) == len(METHODS) * (DOCUMENTS + 2) // 2 + 1


def assert_same(one: Evaluation, other: Evaluation) -> None:
    """All but the seconds, likelihoods to float32's rounding."""
    assert one.protocol == other.protocol
    assert one.passkey == other.passkey
    for mine, theirs in zip(one.methods, other.methods, strict=True):
        assert mine.nll == pytest.approx(theirs.nll, abs=FLOAT32_NLL)
        assert mine.seconds > 0
        numbers = [[b.nll for b in each.buckets] for each in (mine, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], abs=FLOAT32_NLL)
        bare = {"nll": 0.0, "perplexity": 0.0, "seconds": 0.0, "buckets": (), "versus_none": None}
        assert replace(mine, **bare) == replace(theirs, **bare)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks tells of its cases."""
    place = tmp_path_factory.mktemp("side")
    for found in side_by_side(__file__, str(place)):
        assert found.returncode == 0, found.stderr
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(2)]


def test_without_a_folder_all_ranks_return_the_same_as_one(told: list[dict[str, Any]]) -> None:
    first, second = (from_json(each["evaluation"]) for each in told)
    assert first == second  # seconds too, which are gathered
    assert_same(first, small(Ranks()))
    assert [each["scored"] for each in told] == [["none", "none", "yarn"], ["none", "yarn", "yarn"]]


def test_cells_come_back_in_the_order_of_the_whole(told: list[dict[str, Any]]) -> None:
    assert [each["gathered"] for each in told] == [[0, 1, 4, 9, 16]] * 2
    assert [each["nothing"] for each in told] == [[], []]


def test_ranks_go_through_in_turn(told: list[dict[str, Any]]) -> None:
    assert told[0]["left"] <= told[1]["entered"]
    assert min(each["after"] for each in told) >= told[1]["left"]


def test_ranks_of_unlike_protocols_are_refused_everywhere(told: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(told):
        assert each["unlike"].startswith(f"rank {1 - rank} has another protocol than rank {rank}.")


def test_a_rank_that_raises_is_told_of_at_once(told: list[dict[str, Any]]) -> None:
    assert told[1]["raised"][0] == "none-document-0001: the logits are not finite"
    message, seconds = told[0]["raised"]
    assert re.match(r"rank 0 of 2 lost another rank \(.*(closed|reset) by peer", message), message
    assert message.endswith(AGAIN)
    assert seconds < STILL_S - 1  # though the other lives on


def test_a_rank_that_stands_still_is_waited_for_so_long(told: list[dict[str, Any]]) -> None:
    message, seconds = told[0]["still"]
    assert message.startswith("rank 0 of 2 lost another rank (Timed out waiting 1000ms")
    assert 0.5 < seconds < STILL_S - 1


STILL_S = 5.0


def small(ranks: Ranks, **changed: Any) -> Evaluation:
    drawn = Text("drawn", text(), hashlib.sha256(text().encode()).hexdigest())
    given: dict[str, Any] = {"length": LENGTH, "methods": METHODS, "documents": DOCUMENTS}
    return evaluate(tiny_model(), ByteTokenizer(), [drawn], ranks=ranks, **given | changed)


def side(rank: int, place: Path) -> dict[str, Any]:
    """Returns what one of two ranks sees."""
    meet(place, rank)
    found: dict[str, Any] = {}
    with Ranks.from_environment(PATIENCE) as ranks:
        found["scored"] = before_each_score(lambda *_: None)
        found["evaluation"] = to_json(small(ranks))
        found["scored"] = [*found["scored"]]
        squares = [{"square": torch.tensor(n * n)} for n in ranks.share(range(5))]
        found["gathered"] = [int(cell["square"]) for cell in ranks.gather(squares)]
        found["nothing"] = ranks.gather([])
        with ranks.in_turn():
            found["entered"] = time.time()
            time.sleep(0.1)
            found["left"] = time.time()
        found["after"] = time.time()
        found["unlike"], _ = error_of(lambda: small(ranks, bucket=16 * (rank + 1)))
    found["raised"] = error_of(lambda: one_raises(rank))
    found["still"] = error_of(lambda: one_stands_still(rank))
    return found


def one_raises(rank: int) -> None:
    def refuse(*_: Any) -> None:
        raise NumericalError("the logits are not finite")

    with Ranks.from_environment(PATIENCE) as ranks:
        if rank:
            before_each_score(refuse)
        small(ranks)


def one_stands_still(rank: int) -> None:
    with Ranks.from_environment(timeout=timedelta(seconds=1)) as ranks:
        if rank:
            time.sleep(STILL_S)
        ranks.barrier()


def error_of(call: Callable[[], Any]) -> tuple[str, float]:
    """Returns an error's message, and after how many seconds it came."""
    begun = time.monotonic()
    try:
        call()
    except LongspanError as error:
        return str(error), time.monotonic() - begun
    return "none", time.monotonic() - begun


def before_each_score(act: Callable[[Ranks, int], None]) -> list[str]:
    """Calls `act` with the number of documents scored, and returns the list of their methods."""
    scored: list[str] = []
    score = measuring.Run.score

    def counted(self: measuring.Run, one: Any, row: torch.Tensor) -> torch.Tensor:
        act(self.ranks, len(scored))
        scored.append(one.method)
        return score(self, one, row)

    measuring.Run.score = counted
    return scored


def end_the_second(ranks: Ranks, scored: int) -> None:
    """Kills rank 1 once it has scored one document."""
    if ranks.rank and scored:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "killed":
        before_each_score(end_the_second)
        main(sys.argv[2:])
    else:
        number, folder = int(sys.argv[1]), Path(sys.argv[2])
        (folder / f"{number}.json").write_text(json.dumps(side(number, folder)))
        dist.destroy_process_group()
