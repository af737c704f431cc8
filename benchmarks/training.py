"""Training steps of the small decoder: ALiBi and windows through tiles, against dense attention.

    python benchmarks/training.py --json docs/results/training.json

Contenders take turns in one process; they share weights, rows and everything but how attention is
computed. "Dense" is torch's scaled_dot_product_attention with a mask or bias of all pairs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console
from torch.nn import functional as F

from longspan.attention import attend
from longspan.files import write_text
from longspan.models import Decoder, DecoderConfig, layers
from timing import Call, say_if_busy, show_table, surroundings, time_in_turn

LENGTHS = (2048, 4096)
WINDOW = 512
PLAIN = DecoderConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)


@dataclass
class Row:
    """One contender at one length."""

    length: int
    contender: str
    milliseconds: float
    """The median, for a step: forward, backward, optimizer."""
    tokens_per_second: float
    of_dense: float
    """Its speed as a multiple of its own dense form's; 1 where it is dense."""


@contextmanager
def dense() -> Iterator[None]:
    """Makes the decoder's layers attend with a tensor of all pairs."""
    layers.attend = partial(attend, impl="sdpa")
    try:
        yield
    finally:
        layers.attend = attend


def step_of(decoder: Decoder, tokens: torch.Tensor, all_pairs: bool) -> Call:
    """Returns a training step."""
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4)

    def step() -> None:
        logits = decoder.logits(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def dense_step() -> None:
        with dense():
            step()

    return dense_step if all_pairs else step


def contenders(length: int) -> dict[str, Call]:
    """Returns the training steps to compare, by name."""
    kinds: Any = ("sliding_attention",) * PLAIN.num_hidden_layers
    configs = {
        "causal": replace(PLAIN, position_encoding="rope"),
        "ALiBi": replace(PLAIN, position_encoding="alibi"),
        f"window {WINDOW}": replace(PLAIN, layer_types=kinds, sliding_window=WINDOW),
        f"window {WINDOW} + 4 sinks": replace(
            PLAIN, layer_types=kinds, sliding_window=WINDOW, num_sink_tokens=4
        ),
    }
    tokens = torch.randint(PLAIN.vocab_size, (1, length + 1))
    calls = {}
    for name, config in configs.items():
        calls[name] = step_of(Decoder(config), tokens, all_pairs=False)
        if name != "causal":  # torch's own causal kernel is no dense one
            calls[f"{name}, dense"] = step_of(Decoder(config), tokens, all_pairs=True)
    return calls


def measured(length: int, repeats: int) -> list[Row]:
    """Returns every contender's row at a length."""
    times = time_in_turn(contenders(length), repeats, 1)
    found = {name: median(values) for name, values in times.items()}
    return [
        Row(
            length=length,
            contender=name,
            milliseconds=time,
            tokens_per_second=length / time * 1e3,
            of_dense=found.get(f"{name}, dense", time) / time,
        )
        for name, time in found.items()
    ]


@click.command()
@click.option("--repeats", default=5, show_default=True)
@click.option("--lengths", default=",".join(map(str, LENGTHS)), show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(repeats: int, lengths: str, path: Path | None) -> None:
    """Compares training steps, tiled against dense."""
    console = Console()
    say_if_busy(console)
    about = surroundings(["torch"])
    found = [row for length in lengths.split(",") for row in measured(int(length), repeats)]
    show_table(
        console,
        "A training step",
        ("contender", "length", "ms", "tokens/s", "× its dense form's speed"),
        (
            (
                row.contender,
                f"{row.length:,}",
                f"{row.milliseconds:.0f}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.of_dense:.2f}",
            )
            for row in found
        ),
    )
    if path is not None:
        content = {"config": asdict(PLAIN), "surroundings": about, "rows": list(map(asdict, found))}
        write_text(path, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
