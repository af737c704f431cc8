"""`finetune` in two processes is `finetune` in one that reads twice the rows; a loss is made good.

Accelerate takes FSDP2 for GPUs alone: asked for it on CPUs it goes on with DDP and says nothing. So
one of these runs sets what Accelerate would have set, and from there on its own FSDP2 code runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import longspan.tools.finetune as tool
from longspan.tools.finetune_loop import FineTuneLoop
from longspan.tools.finetune_results import FineTuning, finetuning_from_json, finetuning_to_json
from longspan.tools.finetune_saving import FineTuned
from longspan.tools.texts import Text
from longspan.training.processes import first_process
from longspan.training.state import read_notes
from processes import torchrun
from tiny_models import TRAINED, ByteTokenizer, tiny_model

STEPS, SAVE_EVERY, KILLED_AT = 5, 2, 3
FLOAT32 = 1e-5  # losses of order 6, steps of 1e-3; sums over processes run in another order


def trained(batch_size: int, state_dir: Path | None = None) -> FineTuned:
    """Trains on four rows a step, whatever the processes."""
    letters = "".join(chr(32 + (7 * i * i + i // 5) % 95) for i in range(40 * TRAINED))
    return tool.finetune(
        tiny_model(),
        ByteTokenizer(),
        [Text("drawn", letters, hashlib.sha256(letters.encode()).hexdigest())],
        to=2 * TRAINED,
        method="yarn",
        steps=STEPS,
        batch_size=batch_size,
        gradient_accumulation=2,
        learning_rate=1e-3,
        warmup_steps=2,
        evaluate_at=(0, 1, STEPS),
        name="tiny",
        state_dir=state_dir,
        save_every=SAVE_EVERY,
    )


@pytest.fixture(scope="module")
def whole() -> FineTuned:
    """The training of one process, which reads both rows."""
    return trained(batch_size=2)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a training leaves in which rank 1 is killed, and what it says."""
    place = tmp_path_factory.mktemp("killed")
    found = torchrun(__file__, "killed", str(place))
    assert found.returncode != 0
    return place, found.stderr


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def resumed(
    request: pytest.FixtureRequest, killed: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[FineTuning, dict[str, Tensor]]]:
    """What each rank returns of the training that goes on."""
    place = tmp_path_factory.mktemp(request.param)
    shutil.copytree(killed[0] / "state", place / "state")
    found = torchrun(__file__, request.param, str(place))
    assert found.returncode == 0, found.stderr
    return [read(place, rank) for rank in range(2)]


def test_a_killed_rank_ends_the_other_and_leaves_the_last_kept_state(
    killed: tuple[Path, str],
) -> None:
    place, said = killed
    assert "lost another rank" in said or "SIGTERM" in said
    step, notes = read_notes(place / "state/training.safetensors")
    assert step == SAVE_EVERY < KILLED_AT
    assert len(finetuning_from_json(notes["result"]).curve) == SAVE_EVERY
    assert [path.name for path in (place / "state").iterdir()] == ["training.safetensors"]


def test_two_processes_go_on_to_the_losses_of_one(resumed: Any, whole: FineTuned) -> None:
    for result, _ in resumed:
        assert result.protocol == whole.result.protocol
        for mine, one in zip(result.curve, whole.result.curve, strict=True):
            assert mine.loss == pytest.approx(one.loss, abs=FLOAT32)
            assert mine.grad_norm == pytest.approx(one.grad_norm, abs=FLOAT32)
        measured = [one.nll for one in result.evaluations]
        wanted = [one.nll for one in whole.result.evaluations]
        assert measured == pytest.approx(wanted, abs=FLOAT32)
        assert abs(measured[1] - measured[0]) > 100 * FLOAT32  # it learns


def test_two_processes_end_with_the_weights_of_one(resumed: Any, whole: FineTuned) -> None:
    (_, first), (_, second) = resumed
    start = dict(tiny_model().named_parameters())
    for name, weight in whole.model.named_parameters():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight, atol=FLOAT32, rtol=0)
        assert (weight - start[name]).abs().max() > 100 * FLOAT32, f"{name} was not trained"


def test_processes_that_find_different_states_are_refused(
    killed: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(killed[0] / "state", tmp_path / "0/state")
    found = torchrun(__file__, "apart", str(tmp_path))
    assert found.returncode != 0
    assert f"of {[SAVE_EVERY, 0]} steps, by rank. The state folder must be one" in found.stderr


# What runs in the processes.


def end_the_second() -> None:
    """Lets rank 1 be killed in the middle of a step."""
    gradients = FineTuneLoop._gradients

    def killing(self: FineTuneLoop, step: int) -> float:
        if step == KILLED_AT and not first_process():
            os.kill(os.getpid(), signal.SIGKILL)
        return gradients(self, step)

    FineTuneLoop._gradients = killing


def take_fsdp2() -> None:
    """Lets Accelerate spread the weights, layer by layer, as it does on GPUs."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator_for, run = tool.accelerator_for, FineTuneLoop.run

    def spreading(gradient_accumulation: int) -> Accelerator:
        accelerator = accelerator_for(gradient_accumulation)
        assert accelerator.distributed_type == DistributedType.MULTI_CPU
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        return accelerator

    def spread(self: FineTuneLoop) -> FineTuning:
        assert all(hasattr(one, "full_tensor") for one in self.model.parameters())
        return run(self)

    tool.accelerator_for, FineTuneLoop.run = spreading, spread


def plain() -> None:
    """Lets all run as it is."""


def write(tuned: FineTuned, place: Path, rank: str) -> None:
    (place / f"{rank}.json").write_text(finetuning_to_json(tuned.result))
    weights = {name: one.detach().clone() for name, one in tuned.model.named_parameters()}
    save_file(weights, place / f"{rank}.safetensors")


def read(place: Path, rank: int) -> tuple[FineTuning, dict[str, Tensor]]:
    result = finetuning_from_json((place / f"{rank}.json").read_text())
    return result, load_file(place / f"{rank}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"killed": end_the_second, "fsdp2": take_fsdp2, "ddp": plain, "apart": plain}[sys.argv[1]]()
    folder = Path(sys.argv[2])
    if sys.argv[1] == "apart":
        folder /= os.environ["RANK"]
    write(trained(batch_size=1, state_dir=folder / "state"), folder, os.environ["RANK"])
