"""Times attention against what people use: windows, biases, growth with the length, memory.

    python benchmarks/attention.py --json docs/results/attention.json \
        --figure docs/results/attention.png

Contenders of a setting get the same q, k and v and run in turn within each repeat, so a slow moment
of the machine falls on all of them; medians are shown. Masks, biases and block masks of all pairs
are built beforehand, outside the time. Peak memory is that of a process of its own, masks included.
Every contender's last queries are held against the float64 definition.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import click
import torch
from rich.console import Console

from bars import bars
from drawing import draw
from longspan.report.figures import save_figure
from memory import peaks
from peers import BIASED, DTYPES, WINDOWED, Peer, doublings, inputs, run
from results import DIRECTIONS, Results, Row
from rivals import DIM, HEADS, MASK
from timing import Call, say_if_busy, show_table, surroundings, time_in_turn

TABLES = {"window": WINDOWED, "bias": BIASED}
MOST_BYTES = 4e9  # a contender that needs more beside its inputs is left out


@dataclass(frozen=True)
class Setting:
    """What is measured: which contenders, on what."""

    name: str
    tokens: int
    backward: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    quadratic: bool = True
    """Whether contenders whose time grows with N² take part."""

    def __str__(self) -> str:
        return f"{self.name}, {self.tokens} tokens, {DIRECTIONS[self.backward]}"

    def takes(self, peer: Peer) -> bool:
        """Returns whether a contender takes part."""
        slow = peer.quadratic and not self.quadratic
        untrained = self.backward and not peer.trains_on_cpu
        return not (slow or untrained or peer.needs(self.tokens) > MOST_BYTES)


def settings(tokens: int, longest: int) -> Iterator[Setting]:
    """Yields what is timed, at one length and then along it."""
    yield Setting("window", tokens, dtypes=tuple(DTYPES))
    yield Setting("window", tokens, backward=True)
    yield Setting("bias", tokens)
    for name, length in product(TABLES, (tokens // 4, tokens // 2)):
        yield Setting(name, length, backward=True)
    for length in doublings(tokens // 4, longest):
        if length != tokens:
            yield Setting("window", length, quadratic=length <= 2 * tokens)


def measure(setting: Setting, repeats: int) -> Iterator[Row]:
    """Yields a row a contender and dtype."""
    torch.compiler.reset()  # torch recompiles one function a few times only
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    who = [*product(setting.dtypes, filter(setting.takes, TABLES[setting.name]))]
    for dtype, peer in who:
        qkv = inputs(setting.tokens, dtype)
        attention, name = peer.ready(qkv[0]), f"{peer.name} {dtype}"
        errors[name] = peer.error(attention, *qkv)
        calls[name] = partial(run, attention, qkv, setting.backward)
    times = time_in_turn(calls, repeats, warm_ups=1)
    medians = {name: statistics.median(each) for name, each in times.items()}
    for (dtype, peer), name in zip(who, calls, strict=True):
        yield Row(
            setting=setting.name,
            tokens=setting.tokens,
            direction=DIRECTIONS[setting.backward],
            contender=peer.name,
            dtype=dtype,
            median_ms=medians[name],
            fastest_ms=min(times[name]),
            of_first=medians[name] / next(iter(medians.values())),
            error=errors[name],
        )


def show(setting: Setting, rows: list[Row], console: Console) -> None:
    """Prints the rows of one setting, and who is left out of it."""
    show_table(
        console,
        str(setting),
        ("", "dtype", "median ms", "fastest ms", f"× {rows[0].contender}", "error"),
        (
            (
                row.contender,
                row.dtype,
                f"{row.median_ms:.1f}",
                f"{row.fastest_ms:.1f}",
                f"{row.of_first:.2f}",
                f"{row.error:.1e}",
            )
            for row in rows
        ),
    )
    left_out = [peer.name for peer in TABLES[setting.name] if not setting.takes(peer)]
    if left_out:
        console.print(f"left out (too long, too large or no backward): {', '.join(left_out)}\n")


def protocol(repeats: int) -> dict[str, object]:
    """Returns what a reader needs to repeat the measurement."""
    packages = "torch", "transformers", "local-attention", "longspan"
    return {
        "shape": {"batch": 1, "heads": HEADS, "head_dim": DIM},
        "mask": repr(MASK),
        "repeats": repeats,
        **surroundings(packages),
    }


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw the growth here.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--tokens", default=8192, show_default=True)
@click.option("--longest", default=131072, show_default=True, help="Of the growth.")
def main(
    path: Path | None,
    figure: Path | None,
    repeats: int,
    threads: int,
    tokens: int,
    longest: int,
) -> None:
    """Times attention over [1, 8, N, 64] and holds it to its bars."""
    torch.set_num_threads(threads)
    console, found = Console(width=100), Results(protocol(repeats), [], [])
    console.print(found.protocol)
    say_if_busy(console)
    for setting in settings(tokens, longest):
        rows = [*measure(setting, repeats)]
        show(setting, rows, console)
        found.rows.extend(rows)
    found.peaks.extend(peaks(tokens, doublings(2 * tokens, longest), threads))
    columns = "peak above q, k and v, masks included", "tokens", "direction", "MB"
    cells = ((p.contender, str(p.tokens), p.direction, f"{p.peak_mb:.0f}") for p in found.peaks)
    show_table(console, "memory", columns, cells)
    reached = bars(found, tokens, longest)
    show_table(console, "bars", ("", "wanted", "seen", ""), (bar.cells() for bar in reached))
    if path is not None:
        found.write(path, bars=[{**asdict(bar), "met": bar.met} for bar in reached])
    if figure is not None:
        save_figure(draw(found), figure)


if __name__ == "__main__":
    main()
