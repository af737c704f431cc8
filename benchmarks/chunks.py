"""A stream's likelihoods of a long text in chunks of several sizes, against one token at a time.

    python benchmarks/chunks.py --json docs/results/chunks.json

The text is many times the cache, so whatever a chunk does otherwise than its tokens one by one,
when the cache fills and when it drops something, shows in a likelihood.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor

from longspan.adapters.load import load_model
from longspan.files import write_text
from longspan.tools.stream import stream
from longspan.tools.texts import read_texts
from timing import say_if_busy, show_table, surroundings

SIZES = (1, 7, 64, 256, 1000)  # the first is what the others are held against
BAR = 1e-4  # nats: float32 sums in another order, over all layers


@dataclass
class Row:
    """One size of chunks."""

    chunk_size: int
    nats_per_token: float
    largest_difference: float
    """Nats, over all tokens, from one at a time."""
    at: int
    """The token it belongs to."""
    tokens_per_second: float


def readings(model: Any, row: Tensor, sinks: int, window: int) -> list[Row]:
    """Returns how each size of chunks reads a row, [1, N], the first size first."""
    ours, found, alone = stream(model, None, sinks, window), [], None
    ours.score(row[:, :2])  # proves the model's head, once for all sizes
    for size in SIZES:
        start = time.perf_counter()
        nll = ours.score(row, size).nll
        seconds = time.perf_counter() - start
        alone = nll if alone is None else alone
        off = (nll - alone).abs()
        found.append(
            Row(
                chunk_size=size,
                nats_per_token=nll.double().mean().item(),
                largest_difference=off.max().item(),
                at=int(off.argmax()) + 1,
                tokens_per_second=len(nll) / seconds,
            )
        )
    return found


def show(found: list[Row], console: Console) -> None:
    """Prints a line a size, and whether the bar is met."""
    cells = [
        (
            str(row.chunk_size),
            f"{row.nats_per_token:.5f}",
            f"{row.largest_difference:.1e}",
            f"{row.tokens_per_second:.0f}",
        )
        for row in found
    ]
    columns = ("chunk", "nats per token", "largest |ΔNLL|", "tokens/s")
    show_table(console, "chunks against one token at a time", columns, cells)
    most = max(row.largest_difference for row in found)
    console.print(f"largest |ΔNLL| {most:.1e} ≤ {BAR:g} nats: {'met' if met(found) else 'NOT MET'}")


def met(found: list[Row]) -> bool:
    """Returns whether every size is within the bar."""
    return all(row.largest_difference <= BAR for row in found)


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--model", "name", default="smollm2", show_default=True)
@click.option("--text", default="moby-dick", show_default=True)
@click.option("--tokens", default=3000, show_default=True, help="Read in chunks of each size.")
@click.option("--sinks", default=4, show_default=True, help="First tokens never dropped.")
@click.option("--window", default=252, show_default=True, help="Last tokens kept.")
@click.option("--threads", default=2, show_default=True)
def main(
    path: Path | None, name: str, text: str, tokens: int, sinks: int, window: int, threads: int
) -> None:
    """Reads a text in chunks of several sizes; exits with 1 where they disagree."""
    if tokens <= sinks + window + 1:
        raise click.UsageError(f"--tokens must be above {sinks + window + 1}: nothing is dropped.")
    torch.set_num_threads(threads)
    console, facts = Console(width=100), surroundings(("torch", "transformers", "longspan"))
    say_if_busy(console)
    model, tokenizer = load_model(name)
    content = read_texts([text])[0].content[: 8 * tokens + 1000]
    row = tokenizer(content, return_tensors="pt", verbose=False).input_ids[:, :tokens]
    found = readings(model, row, sinks, window)
    show(found, console)
    if path is not None:
        facts |= {"model": name, "text": text, "tokens": row.shape[1], "bar_nats": BAR}
        facts |= {"num_sink_tokens": sinks, "sliding_window": window}
        content_json = {"protocol": facts, "rows": [asdict(each) for each in found]}
        write_text(path, json.dumps(content_json, indent=1) + "\n")
    if not met(found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
