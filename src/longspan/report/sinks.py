"""A sink map for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from longspan.tools.sinks import SinkMap


def print_sinks(found: SinkMap) -> None:
    """Prints each layer's mean and largest mass on the first tokens."""
    table = Table(title=f"Attention on the first {found.num_sink_tokens} of {found.length} tokens")
    for heading in ("layer", "mean", "largest head", "if uniform"):
        table.add_column(heading, justify="right")
    for layer, mass, uniform in zip(found.layers, found.mass, found.uniform, strict=True):
        mean = sum(mass) / len(mass)
        table.add_row(str(layer), f"{mean:.1%}", f"{max(mass):.1%}", f"{uniform:.1%}")
    console = Console()
    console.print(table)
    console.print(f"All heads: {found.mean:.1%} of the attention.", highlight=False)
