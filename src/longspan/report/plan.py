"""A plan for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from longspan.tools.pairs import PairEffect
from longspan.tools.plan import Plan

SHOWN_PAIRS = 12


def print_plan(model: str, planned: Plan, effects: Sequence[PairEffect]) -> None:
    """Prints lengths, pairs, the config to write, memory and warnings."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{planned.method}[/bold], factor {planned.factor:g}: {headline(planned)}")
    console.print(pair_table(planned, effects))
    console.print(turns_sentence(planned, effects), markup=False)
    console.print("\nWrite into config.json:", style="bold")
    written = json.dumps(dict(planned.changed), indent=2, ensure_ascii=False)
    console.print(Padding(written, (0, 2)), markup=False)
    if planned.removed:
        console.print(f"and remove: {', '.join(planned.removed)}", markup=False)
    gigabytes = planned.kv_cache_bytes / 1e9
    console.print(f"\nKey-value cache at {planned.to} tokens, bfloat16: {gigabytes:.3g} GB")
    for heading, lines in (("Noted", planned.notes), ("Mind", planned.warnings)):
        for line in lines:
            console.print(f"{heading}: {line}", markup=False)
    console.print(f"\nNext: longspan extend {model} --to {planned.to} -o FOLDER", markup=False)


def headline(planned: Plan) -> str:
    """Returns the lengths before and after in words."""
    now = planned.usable_length
    today = "" if now == planned.trained_length else f" (reaches {now} as configured)"
    return (
        f"trained on {planned.trained_length} tokens{today}, to read {planned.to}; the smallest "
        f"sufficient factor is {planned.smallest_factor:g}"
    )


def turns_sentence(planned: Plan, effects: Sequence[PairEffect]) -> str:
    """Returns how many pairs never complete a turn in training."""
    unfinished = [effect.pair for effect in effects if not effect.completes_a_turn]
    if not unfinished:
        return f"Every pair completes a turn within {planned.trained_length} tokens."
    return (
        f"{len(unfinished)} of {len(effects)} pairs ({unfinished[0]} to {unfinished[-1]}) never "
        f"complete a turn within {planned.trained_length} tokens: beyond, plain RoPE shows them "
        "angles they were never trained on."
    )


def pair_table(planned: Plan, effects: Sequence[PairEffect]) -> Table:
    """Returns a table of some pairs, from the fastest to the slowest, and every method's λ."""
    methods = list(effects[0].rescale)
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        caption=f"turns within {planned.trained_length} tokens; then what each method divides by",
    )
    for heading in ("pair", "wavelength", "turns", *methods):
        table.add_column(
            heading, justify="right", style="bold" if heading == planned.method else ""
        )
    for effect in spread(effects):
        table.add_row(
            str(effect.pair),
            f"{effect.wavelength:,.0f}",
            f"{effect.rotations:,.0f}" if effect.rotations >= 100 else f"{effect.rotations:.3g}",
            *(f"{effect.rescale[method]:.3g}" for method in methods),
        )
    return table


def spread(effects: Sequence[PairEffect]) -> list[PairEffect]:
    """Returns at most `SHOWN_PAIRS` of the pairs, evenly spread, both ends included."""
    last = len(effects) - 1
    count = min(SHOWN_PAIRS, len(effects))
    indices = {round(step * last / max(1, count - 1)) for step in range(count)}
    return [effects[index] for index in sorted(indices)]
