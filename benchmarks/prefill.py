"""Reads one long text with a real sliding-window model: longspan's attention against sdpa.

    python benchmarks/prefill.py --json docs/results/prefill.json

Every reading has a process of its own, so that its peak memory is its own; the two take turns. The
logits of both are compared, a chunk at a time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.adapters import register
from longspan.adapters.head import SplitForward
from longspan.adapters.load import load_model
from longspan.files import write_text
from longspan.tools.texts import read_texts

CONTENDERS = ("longspan", "sdpa")
CHUNK = 512  # positions whose logits exist at once


@dataclass
class Reading:
    """One forward over the whole text."""

    attention: str
    seconds: float
    attention_seconds: float
    """Within the attention function and the making of masks, all layers."""
    peak_mb: float
    """What the process grew by beyond the model and the token ids, keys and values included."""


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Returns the function with its seconds added to `spent`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        return result

    return run


def time_attention(name: str) -> list[float]:
    """Makes transformers time every call of one attention and of its masks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    spent: list[float] = []
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface.register(name, timed(interface()[name], spent))
    return spent


def token_ids(tokenizer: Any, text: str, tokens: int) -> Tensor:
    """Returns the first tokens of a text, [1, N]."""
    ids = tokenizer(read_texts([text])[0].content[: 8 * tokens], return_tensors="pt").input_ids
    return ids[:, :tokens]


def read(model_name: str, text: str, tokens: int, attention: str, hidden_path: Path) -> Reading:
    """Reads the text in this process and keeps the last hidden states on disk."""
    register()
    model, tokenizer = load_model(model_name, attn_implementation=attention)
    ids = token_ids(tokenizer, text, tokens)
    split = SplitForward(model)
    split.hidden(ids[:, :1024])
    spent = time_attention(attention)
    forget_peak()
    before, start = held("VmRSS"), time.perf_counter()
    hidden = split.hidden(ids)
    reading = Reading(
        attention=attention,
        seconds=time.perf_counter() - start,
        attention_seconds=sum(spent),
        peak_mb=(held("VmHWM") - before) / 1e6,
    )
    save_file({"hidden": hidden.contiguous()}, hidden_path)
    return reading


def held(what: str) -> int:
    """Returns the bytes this process holds (VmRSS), or the most it has held (VmHWM). Linux only."""
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines[what].split()[0]) * 1024


def forget_peak() -> None:
    """Starts the count of the most bytes held again: loading a model held more."""
    Path("/proc/self/clear_refs").write_text("5")


def largest_difference(split: SplitForward, hidden: dict[str, Tensor]) -> float:
    """Returns how far the logits of two readings are apart at most."""
    split.hidden(torch.zeros(1, 16, dtype=torch.int64))
    parts = zip(*(hidden[name].split(CHUNK, dim=1) for name in CONTENDERS), strict=True)
    return max(float((split.logits(a) - split.logits(b)).abs().max()) for a, b in parts)


def show(readings: dict[str, Reading], difference: float, console: Console) -> None:
    """Prints both, and what the second is of the first."""
    table = Table(title=f"largest difference of a logit: {difference:.2g}")
    for column in ("", "seconds", "in attention", "peak MB above the model"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    numbers = {
        name: (each.seconds, each.attention_seconds, each.peak_mb)
        for name, each in readings.items()
    }
    for name, row in numbers.items():
        table.add_row(name, *(f"{number:.1f}" for number in row))
    ours, theirs = (numbers[name] for name in CONTENDERS)
    ratios = [f"{b / a:.2f}×" for a, b in zip(ours, theirs, strict=True)]
    table.add_row("sdpa ÷ longspan", *ratios, style="bold")
    console.print(table)


def median(readings: list[Reading]) -> Reading:
    """Returns the medians of several readings of one contender."""
    names = "seconds", "attention_seconds", "peak_mb"
    middle = {name: statistics.median(getattr(each, name) for each in readings) for name in names}
    return Reading(readings[0].attention, **middle)


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--model", "model_name", default="gemma3-270m", show_default=True)
@click.option("--text", default="moby-dick", show_default=True)
@click.option("--tokens", default=16384, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--read", "reads", nargs=2, hidden=True, default=None)
def main(
    path: Path | None,
    model_name: str,
    text: str,
    tokens: int,
    repeats: int,
    threads: int,
    reads: tuple[str, str] | None,
) -> None:
    """Times the reading of one long text."""
    torch.set_num_threads(threads)
    if reads is not None:
        reading = read(model_name, text, tokens, reads[0], Path(reads[1]))
        print(json.dumps(asdict(reading)))
        return
    console, done = Console(width=100), {name: [] for name in CONTENDERS}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.safetensors" for name in CONTENDERS}
        model, tokenizer = load_model(model_name)
        for part in (model, tokenizer):  # a GGUF file would be unpacked every time
            part.save_pretrained(Path(folder) / "model")
        same = ["--model", f"{folder}/model", "--text", text, "--tokens", str(tokens)]
        same += ["--threads", str(threads)]
        for _ in range(repeats):
            for name, file in files.items():
                command = [sys.executable, __file__, *same, "--read", name, str(file)]
                printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                done[name].append(Reading(**json.loads(printed.stdout.splitlines()[-1])))
                console.print(done[name][-1])
        hidden = {name: load_file(file)["hidden"] for name, file in files.items()}
    difference = largest_difference(SplitForward(model), hidden)
    readings = {name: median(each) for name, each in done.items()}
    show(readings, difference, console)
    if path is not None:
        facts = {
            "model": model_name,
            "text": text,
            "tokens": tokens,
            "repeats": repeats,
            "threads": threads,
            "load_average_before": load,
            "versions": {name: version(name) for name in ("torch", "transformers", "longspan")},
        }
        found = {name: asdict(reading) for name, reading in readings.items()}
        content = {"protocol": facts, "largest_logit_difference": difference, "medians": found}
        write_text(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
