"""`longspan finetune`: what it writes, prints and refuses, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.adapters.load import load_model
from longspan.cli.finetuning import state_beside
from longspan.tools.finetune_loop import FineTuneLoop
from longspan.tools.finetune_results import finetuning_from_json
from test_cli import run
from test_extend import tokenizer as words
from tiny_families import VOCAB, tiny
from tiny_families import tokens as some_tokens

TO = "128"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny base model, and a text of 2,000 of its words."""
    tiny("llama").save_pretrained(tmp_path / "base")
    words().save_pretrained(tmp_path / "base")
    ids = some_tokens(2000)[0].tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{one % VOCAB}" for one in ids))
    return tmp_path


def told(base: Path, *more: str, output: str = "out") -> list[str]:
    given = ["finetune", str(base / "base"), "--to", TO, "--text", str(base / "text.txt")]
    settings = ["--steps", "3", "--learning-rate", "1e-3", "-o", str(base / output)]
    return [*given, *settings, *more]


def test_a_whole_model_is_written_with_its_result(capsys: Any, base: Path):
    more = ["--evaluate-at", "0,2,3", "--evaluation-documents", "2", "--bucket", "32"]
    code, out, err = run(capsys, *told(base, *more))
    assert code == 0, err
    for said in ("64 → 128 tokens with yarn, factor 2", "all weights, 3 steps of 1 × 128 tokens"):
        assert said in " ".join(out.split())
    for said in ("NLL at positions", "0 steps", "3 steps", "Written: "):
        assert said in out
    assert "33% training: step 2 of 3, loss " in err
    result = finetuning_from_json((base / "out" / "finetune.json").read_text())
    assert [one.step for one in result.evaluations] == [0, 2, 3]
    assert len(result.evaluations[0].buckets) == 4
    model, tokenizer = load_model(base / "out")
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 128
    plain, _ = load_model(base / "base")
    assert not torch.equal(model.model.norm.weight, plain.model.norm.weight)
    assert sorted(path.name for path in base.iterdir()) == ["base", "out", "text.txt"]


def test_json_alone_is_printed(capsys: Any, base: Path):
    code, out, _ = run(capsys, *told(base, "--json"))
    assert code == 0
    assert json.loads(out) == json.loads((base / "out" / "finetune.json").read_text())


OPTIONS: list[tuple[str, list[str], dict[str, Any]]] = [
    ("length", ["--length", "48", "--pose"], {"length": 48, "pose": True}),
    ("packing", ["--packing"], {"packing": True}),
    ("lora", ["--lora", "2"], {"lora_rank": 2}),
    ("batch", ["--batch-size", "2", "--gradient-accumulation", "2"], {"rows_per_step": 4}),
    ("schedule", ["--schedule", "cosine", "--warmup-steps", "2"],
     {"schedule": "cosine", "warmup_steps": 2}),
    ("decay", ["--weight-decay", "0.1"], {"weight_decay": 0.1}),
    ("clip", ["--max-grad-norm", "0.5"], {"max_grad_norm": 0.5}),
    ("checkpointing", ["--gradient-checkpointing"], {"gradient_checkpointing": True}),
    ("seed", ["--seed", "7"], {"seed": 7}),
    ("method", ["--method", "pi", "--factor", "4"], {"method": "linear", "factor": 4.0}),
    ("evaluation", ["--evaluate-at", "1", "--evaluation-length", "100"],
     {"evaluate_at": (1,), "evaluation_length": 100, "evaluation_documents": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("more", "wanted"), [o[1:] for o in OPTIONS], ids=[o[0] for o in OPTIONS])
def test_every_option_arrives(capsys: Any, base: Path, more: list[str], wanted: dict[str, Any]):
    code, out, err = run(capsys, *told(base, *more, "--json"))
    assert code == 0, err
    protocol = finetuning_from_json(out).protocol
    assert {key: getattr(protocol, key) for key in wanted} == wanted


def test_an_adapter_alone_is_written_and_loads_with_its_scaling(capsys: Any, base: Path):
    code, _, err = run(capsys, *told(base, "--lora", "2", "--adapter"))
    assert code == 0, err
    code, _, err = run(capsys, *told(base, "--lora", "2", output="whole"))
    assert code == 0, err
    row = some_tokens(128)
    adapted, whole = (load_model(base / name)[0](row).logits for name in ("out", "whole"))
    torch.testing.assert_close(adapted, whole, atol=1e-5, rtol=0)
    assert not (base / "out" / "config.json").exists()
    code, out, _ = run(capsys, "plan", str(base / "out"), "--to", "256", "--json")
    assert json.loads(out)["config"]["rope_parameters"]["factor"] == 4.0


def test_the_same_command_goes_on(capsys: Any, base: Path, monkeypatch: Any):
    run(capsys, *told(base, output="straight"))
    own = FineTuneLoop._gradients

    def interrupted(self: FineTuneLoop, step: int) -> float:
        if step == 2:
            raise KeyboardInterrupt
        return own(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(FineTuneLoop, "_gradients", interrupted)
        code, _, err = run(capsys, *told(base))
        assert (code, "interrupted" in err) == (1, True)
    assert not (base / "out").exists()
    assert state_beside(base / "out").is_dir()
    code, _, err = run(capsys, *told(base, "--seed", "1"))
    assert code == 1
    assert "holds 2 steps of another training: seed is 0, now 1" in err
    code, _, err = run(capsys, *told(base))
    assert code == 0, err
    assert "step 3 of 3" in err
    assert "step 2 of 3" not in err
    assert not state_beside(base / "out").exists()
    same = [(base / name / "model.safetensors").read_bytes() for name in ("out", "straight")]
    assert same[0] == same[1]


def test_a_folder_that_is_there_stays_unless_forced(capsys: Any, base: Path):
    (base / "out").mkdir()
    (base / "out" / "mine").write_text("mine")
    code, _, err = run(capsys, *told(base, "--force"))
    assert (code, "holds no model" in err) == (1, True)
    (base / "out" / "config.json").write_text("{}")
    code, _, err = run(capsys, *told(base))
    assert code == 1
    assert "exists. Pass --force" in err
    code, _, err = run(capsys, *told(base, "--length", "64", "--force"))
    assert code == 1
    assert (base / "out" / "mine").exists()
    code, _, err = run(capsys, *told(base, "--force"))
    assert code == 0, err
    assert (base / "out" / "finetune.json").exists()
    assert not (base / "out" / "mine").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--adapter"], "--adapter writes what --lora RANK trains"),
        (["--steps", "0"], "0 is not in the range"),
        (["--evaluate-at", "1,x"], "'1,x' is not a list of counts, such as 0,50,100."),
        (["--schedule", "linear"], "'linear' is not one of"),
        (["--length", "few"], "'few' is not a number of tokens"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(capsys: Any, base: Path, more: list[str], said: str):
    code, _, err = run(capsys, *told(base, *more))
    assert code == 2
    assert said in " ".join(err.split())
    assert not (base / "out").exists()


def test_an_error_is_one_line_and_leaves_nothing(capsys: Any, base: Path):
    code, _, err = run(capsys, *told(base, "--length", "64"))
    assert code == 1
    assert "rows of 64 tokens never reach the positions up to 128" in err
    assert "Traceback" not in err
    (base / "text.txt").write_text("w1 w2 w3")
    code, _, err = run(capsys, *told(base))
    assert code == 1
    assert "1 × 128 tokens are needed" in err
    assert sorted(path.name for path in base.iterdir()) == ["base", "text.txt"]


@pytest.mark.parametrize("place", [".", "..", "/"])
def test_a_folder_without_a_name_of_its_own_is_refused_before_anything_is_loaded(
    capsys: Any, base: Path, monkeypatch: Any, place: str
):
    monkeypatch.chdir(base)
    monkeypatch.setattr("longspan.cli.finetuning.load_model", None)
    code, _, err = run(capsys, *told(base, "--force", "-o", place))
    assert (code, "Traceback" in err) == (1, False)
    assert f"{place} cannot be replaced as a whole. Name a folder of its own." in err


def test_infinity_never_clips(capsys: Any, base: Path):
    code, out, err = run(capsys, *told(base, "--max-grad-norm", "inf", "--json"))
    assert code == 0, err
    assert finetuning_from_json(out).protocol.max_grad_norm is None


def test_a_process_that_waits_for_one_that_ended_says_so_in_one_line(
    capsys: Any, base: Path, monkeypatch: Any
):
    class Waiting:
        process_index, num_processes = 1, 2

        def __init__(self, **_: Any) -> None: ...

        def main_process_first(self) -> Any:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")

    monkeypatch.setattr("accelerate.PartialState", Waiting)
    code, _, err = run(capsys, *told(base))
    assert (code, "Traceback" in err) == (1, False)
    assert "rank 1 of 2 lost another rank (Connection closed by peer)" in " ".join(err.split())


def test_the_base_of_an_adapter_is_the_model_that_was_named(capsys: Any, base: Path):
    code, _, err = run(capsys, *told(base, "--lora", "2", "--adapter"))
    assert code == 0, err
    settings = json.loads((base / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base / "base")
