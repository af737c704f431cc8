"""The command line: what it prints, how it fails, what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longspan import __version__
from longspan.cli.main import main

NEW = ["linear", "ntk", "dynamic", "ntk-by-parts", "yarn", "llama3"]

LLAMA = {
    "model_type": "llama",
    "head_dim": 64,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}


@pytest.fixture
def config(tmp_path: Path):
    """Writes a config.json and returns its folder."""

    def write(**changes) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return str(tmp_path)

    return write


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(list(args))
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert __version__ in out


@pytest.mark.parametrize("verb", ["plan", "extend", "evaluate", "finetune", "sinks", "stream"])
def test_every_verb_has_help(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert "MODEL" in out


def test_study_has_help_and_trains_its_own_models(capsys):
    code, out, _ = run(capsys, "study", "--help")
    assert code == 0
    assert "--encodings" in out
    assert "MODEL" not in out


def test_plan_prints_what_to_write(capsys, config):
    code, out, _ = run(capsys, "plan", config(), "--to", "16k")
    assert code == 0
    for wanted in ('"rope_type": "yarn"', '"factor": 2.0', "12 of 32 pairs", "0.377 GB", "8192"):
        assert wanted in out


def test_plan_as_json_holds_every_pair(capsys, config):
    code, out, _ = run(capsys, "plan", config(), "--to", "16384", "--method", "pi", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["method"] == "linear"
    assert told["config"]["rope_parameters"]["factor"] == 2.0
    assert len(told["pairs"]) == 32
    assert sum(not pair["completes_a_turn"] for pair in told["pairs"]) == 12
    assert told["pairs"][0]["rescale_factors"]["linear"] == 2.0
    assert told["pairs"][0]["rescale_factors"]["ntk"] == 1.0


def test_plan_draws_its_figure(capsys, config, tmp_path):
    figure = tmp_path / "lambda.png"
    code, _, _ = run(capsys, "plan", config(), "--to", "16k", "--figure", str(figure))
    assert code == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (("plan", "CONFIG", "--to", "4096"), 1, "already reaches"),
        (("plan", "CONFIG", "--to", "lots"), 2, "not a number of tokens"),
        (("plan", "CONFIG", "--to", "1.5"), 2, "not a number of tokens"),
        (("plan", "CONFIG", "--to", "9" * 26 + "m"), 1, "at most 2^53"),
        (("plan", "CONFIG", "--to", "16k", "--original", "32k"), 1, "--original"),
        (("plan", "", "--to", "16k"), 1, "empty"),
        (("plan", "CONFIG"), 2, "--to"),
        (("plan", "CONFIG", "--to", "16k", "--method", "yran"), 2, "Did you mean 'yarn'?"),
        (("plan", "CONFIG", "--to", "16k", "--method", "none"), 1, "does not extend"),
        (("plan", "CONFIG", "--to", "16k", "--factor", "0.5"), 1, "must be ≥ 1"),
        (("plan", "CONFIG", "--to", "32k", "--factor", "2"), 1, "at least 4"),
        (("plan", "CONFIG", "--to", "32k", "--method", "longrope"), 1, "search"),
        (("plan", "CONFIG", "--to", "16k", "--fctor", "2"), 2, "--factor"),
        (("plna", "CONFIG"), 2, "Did you mean 'plan'?"),
        (("plan", "no/such/folder/here", "--to", "16k"), 1, "no file or folder"),
        (("evaluate", "CONFIG", "--length", "16k", "--methods", ","), 2, "at least one"),
        (("evaluate", "CONFIG", "--length", "16k", "--depths", "0,2"), 2, "between 0 and 1"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, config, args, code, told):
    got, out, err = run(capsys, *[config() if word == "CONFIG" else word for word in args])
    assert got == code
    assert out == ""
    assert told in err
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 16.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "beta_fsat": 3}}, "Did you mean 'beta_fast'?"),
        ({"model_type": "bloom", "alibi": True}, "ALiBi"),
        ({"model_type": "gpt2"}, "learned positions"),
        (
            {
                "longspan": {
                    "method": "ntk",
                    "factor": 2.0,
                    "original_max_position_embeddings": "y",
                    "rope_theta": 1e5,
                }
            },
            "positive whole number",
        ),
    ],
)
def test_bad_configs_are_one_clear_line(capsys, config, changes, told):
    code, _, err = run(capsys, "plan", config(**changes), "--to", "128k")
    assert code == 1
    assert told in err


def test_debug_shows_the_traceback_wherever_it_stands(config):
    for place in (0, 4):
        words = ["plan", config(), "--to", "100"]
        words.insert(place, "--debug")
        ran = subprocess.run(
            [sys.executable, "-m", "longspan", *words], capture_output=True, text=True
        )
        assert ran.returncode == 1
        assert "Traceback" in ran.stderr


def test_extend_refuses_an_existing_folder_before_loading(capsys, config, tmp_path):
    code, _, err = run(capsys, "extend", config(), "--to", "16k", "-o", str(tmp_path))
    assert code == 1
    assert "--force" in err


def test_a_full_disk_behind_standard_output_is_one_clear_line(config):
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "longspan", "plan", config(), "--to", "16k"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ran.returncode == 1
    assert "cannot write standard output" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_plan_fits_eighty_columns_with_every_method_named(capsys, config, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "plan", config(rope_theta=1e7), "--to", "1m")
    assert "…" not in out
    heading = next(line for line in out.splitlines() if "wavelength" in line)
    assert heading.split() == ["pair", "wavelength", "turns", *NEW]
