"""Transformer-XL's memory against reading the whole context again for every token.

    python benchmarks/recurrence.py --json docs/results/recurrence.json

A token scored with so much context costs one forward over all of it, or its share of a segment that
meets remembered states. Contenders take turns in one process. Dai et al. 2019 §4.5 report 363, 773,
1409 and 1874 times on a GPU, for a model of 24 layers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console

from longspan.files import write_text
from longspan.models import Decoder, DecoderConfig, Memory
from timing import Call, say_if_busy, show_table, surroundings, time_in_turn

CONTEXTS = (800, 1800, 2800, 3800)
SEGMENT = 128


@dataclass
class Row:
    """One context length."""

    context: int
    rereading_milliseconds: float
    """The median, for one token: a forward over the context."""
    recurrent_milliseconds: float
    """The median, for one token: a segment's forward, divided by its tokens."""
    ratio: float


def decoder(context: int) -> Decoder:
    """Returns a Transformer-XL that remembers a context."""
    config = DecoderConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        position_encoding="transformer_xl",
        memory_length=context,
    )
    return Decoder(config).eval()


@torch.no_grad()
def filled(model: Decoder, tokens: torch.Tensor) -> Memory | None:
    """Returns what is remembered of a row."""
    memory = None
    for part in tokens.split(SEGMENT, dim=1):
        memory = model(part, memory=memory).memory
    return memory


def calls(context: int) -> dict[str, Call]:
    """Returns both ways to score."""
    model = decoder(context)
    alone = model.with_memory(0)
    past = torch.randint(512, (1, context))
    segment = torch.randint(512, (1, SEGMENT))
    memory = filled(model, past)

    @torch.no_grad()
    def rereading() -> None:
        alone.head(alone(past).hidden[:, -1:])

    @torch.no_grad()
    def recurrent() -> None:
        model.head(model(segment, memory=memory).hidden)

    return {"rereading": rereading, "recurrent": recurrent}


def measured(context: int, repeats: int) -> Row:
    """Returns the row of a context."""
    times = {name: median(t) for name, t in time_in_turn(calls(context), repeats, 1).items()}
    a_token = times["recurrent"] / SEGMENT
    return Row(context, times["rereading"], a_token, times["rereading"] / a_token)


@click.command()
@click.option("--repeats", default=5, show_default=True)
@click.option("--contexts", default=",".join(map(str, CONTEXTS)), show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(repeats: int, contexts: str, path: Path | None) -> None:
    """Compares recurrence with reading the context again."""
    console = Console()
    say_if_busy(console)
    about = surroundings(["torch"])
    found = [measured(int(context), repeats) for context in contexts.split(",")]
    show_table(
        console,
        "One token, scored",
        ("context", "reading again, ms", "recurrent, ms", "times faster"),
        (
            (
                f"{row.context:,}",
                f"{row.rereading_milliseconds:.1f}",
                f"{row.recurrent_milliseconds:.3f}",
                f"{row.ratio:.0f}",
            )
            for row in found
        ),
    )
    if path is not None:
        content = {
            "config": asdict(decoder(0).config),
            "segment": SEGMENT,
            "surroundings": about,
            "rows": list(map(asdict, found)),
        }
        write_text(path, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
