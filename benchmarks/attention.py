"""Times attention against what people use: windows, biases, growth with the length, memory.

    python benchmarks/attention.py --json docs/results/attention.json

Contenders of a setting get the same q, k and v and run in turn within each repeat, so a slow moment
of the machine falls on all of them; medians are shown. Masks, biases and block masks of all pairs
are built beforehand, outside the time. Peak memory is that of a process of its own, masks included.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from longspan.attention import attend, flex
from longspan.attention.rules import Options, check
from longspan.bias import Alibi, T5Bias
from longspan.files import write_text
from longspan.masks import attention_sinks, causal, sliding_window

HEADS, DIM, WINDOW, SINKS = 8, 64, 512, 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASK = causal() & (sliding_window(WINDOW) | attention_sinks(SINKS))
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """What is measured: which contenders, on what."""

    name: str
    tokens: int
    dtype: str = "float32"
    backward: bool = False


@dataclass
class Row:
    """One contender in one setting."""

    setting: str
    tokens: int
    dtype: str
    direction: str
    contender: str
    median_ms: float
    fastest_ms: float
    of_ours: float
    """The median as a multiple of the first contender's."""


@dataclass
class Peak:
    """What one call and its masks need beyond q, k and v."""

    contender: str
    tokens: int
    direction: str
    peak_mb: float


def dense_mask(tokens: int) -> Attention:
    """Returns SDPA under a window mask of all pairs."""
    mask = MASK(torch.arange(tokens), torch.arange(tokens))
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def dense_alibi(tokens: int) -> Attention:
    """Returns SDPA under an ALiBi bias of all pairs."""
    at = torch.arange(tokens)
    bias = Alibi(HEADS).scores(torch.zeros(1), at, at).masked_fill_(~causal()(at, at), -torch.inf)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def flex_ready(tokens: int, **options: Any) -> Attention:
    """Returns compiled FlexAttention with its block mask at hand."""
    q = torch.empty(1, HEADS, tokens, DIM)
    _, rules = check(q, q, q, False, Options(**options))
    blocks = flex.block_mask(rules.seen)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs, rules = check(q, k, v, False, Options(**options))
        return flex.flex_attend(inputs, rules, blocks)[0]

    return run


def local_attention(tokens: int) -> Attention:
    """Returns lucidrains' local-attention with the same window; it has no sinks."""
    from local_attention import LocalAttention

    return LocalAttention(
        window_size=WINDOW, causal=True, exact_windowsize=True, autopad=True, dim=None
    )


def ours(**options: Any) -> Callable[[int], Attention]:
    """Returns how to make attend's tiles ready: there is nothing to do."""
    return lambda tokens: lambda q, k, v: attend(q, k, v, impl="tiled", **options)


def plain(tokens: int) -> Attention:
    """Returns SDPA over all keys before the query."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


WINDOWED: dict[str, Callable[[int], Attention]] = {
    "longspan tiled": ours(mask=MASK),
    "sdpa dense mask": dense_mask,
    "flex compiled": lambda tokens: flex_ready(tokens, mask=MASK),
    "local-attention": local_attention,
    "sdpa causal": plain,
}
BIASED: dict[str, Callable[[int], Attention]] = {
    "sdpa causal": plain,
    "longspan ALiBi": ours(mask=causal(), bias=Alibi(HEADS)),
    "longspan T5": ours(mask=causal(), bias=T5Bias(HEADS)),
    "sdpa dense ALiBi": dense_alibi,
    "flex ALiBi": lambda tokens: flex_ready(tokens, mask=causal(), bias=Alibi(HEADS)),
}
GROWTH = {"longspan tiled": WINDOWED["longspan tiled"]}
SETS = {"window": WINDOWED, "bias": BIASED, "growth": GROWTH}


def contenders(setting: Setting) -> dict[str, Attention]:
    """Returns who can take part, ready to run."""
    missing = {"local-attention"} if find_spec("local_attention") is None else set()
    if setting.backward:
        missing |= {name for name in SETS[setting.name] if name.startswith("flex")}
    return {
        name: make(setting.tokens)
        for name, make in SETS[setting.name].items()
        if name not in missing
    }


def inputs(setting: Setting) -> list[Tensor]:
    """Returns q, k and v, [1, 8, N, 64]."""
    random = torch.Generator().manual_seed(0)
    shape = 1, HEADS, setting.tokens, DIM
    return [torch.randn(shape, generator=random).to(DTYPES[setting.dtype]) for _ in range(3)]


def run(attention: Attention, qkv: list[Tensor], backward: bool) -> None:
    """Runs one contender once."""
    if not backward:
        with torch.no_grad():
            attention(*qkv)
        return
    leaves = [x.detach().requires_grad_() for x in qkv]
    attention(*leaves).backward(qkv[0])


def measure(setting: Setting, repeats: int) -> Iterator[Row]:
    """Yields a row a contender, the first one being what the others are compared with."""
    ready, qkv = contenders(setting), inputs(setting)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for attention in ready.values():
        run(attention, qkv, setting.backward)
    gc.disable()
    for _ in range(repeats):
        for name, attention in ready.items():
            start = time.perf_counter()
            run(attention, qkv, setting.backward)
            times[name].append((time.perf_counter() - start) * 1e3)
    gc.enable()
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, median in medians.items():
        yield Row(
            setting=setting.name,
            tokens=setting.tokens,
            dtype=setting.dtype,
            direction="forward+backward" if setting.backward else "forward",
            contender=name,
            median_ms=median,
            fastest_ms=min(times[name]),
            of_ours=median / next(iter(medians.values())),
        )


def peak(name: str, tokens: int, backward: bool) -> Peak:
    """Returns the peak of one call, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", name, "--tokens", str(tokens)]
    command += ["--backward"] if backward else []
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Peak(name, tokens, "forward+backward" if backward else "forward", float(printed))


def print_peak(name: str, tokens: int, backward: bool) -> None:
    """Prints how many MB this process grows by in one call, once q, k and v are there."""
    run(WINDOWED[name](256), inputs(Setting("window", 256)), backward)  # loads what it needs
    qkv = inputs(Setting("window", tokens))
    before = held()
    run(WINDOWED[name](tokens), qkv, backward)
    print((held() - before) / 1e6)


def held() -> int:
    """Returns the most bytes this process has held."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux ru_maxrss would start at the parent's peak.
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def show(rows: list[Row], console: Console) -> None:
    """Prints the rows of one setting."""
    first = rows[0]
    table = Table(title=f"{first.setting}, {first.tokens} tokens, {first.dtype}, {first.direction}")
    for column in ("", "median ms", "fastest ms", f"× {first.contender}"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        numbers = f"{row.median_ms:.1f}", f"{row.fastest_ms:.1f}", f"{row.of_ours:.2f}"
        table.add_row(row.contender, *numbers)
    console.print(table)


def show_peaks(peaks: list[Peak], console: Console) -> None:
    """Prints the peaks of memory."""
    table = Table(title="peak memory above q, k and v, masks included")
    for column in ("", "tokens", "direction", "MB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for each in peaks:
        table.add_row(each.contender, str(each.tokens), each.direction, f"{each.peak_mb:.0f}")
    console.print(table)


def protocol(repeats: int) -> dict[str, object]:
    """Returns what a reader needs to repeat the measurement."""
    names = ["torch", "longspan"] + ["local-attention"] * (find_spec("local_attention") is not None)
    return {
        "shape": {"batch": 1, "heads": HEADS, "head_dim": DIM},
        "mask": repr(MASK),
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "load_average_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": {name: version(name) for name in names},
    }


def settings(tokens: int, longest: int) -> Iterator[Setting]:
    """Yields what is timed."""
    for dtype in DTYPES:
        yield Setting("window", tokens, dtype)
    yield Setting("window", tokens, backward=True)
    yield Setting("bias", tokens)
    length = 2 * tokens
    while length <= longest:
        yield Setting("growth", length)
        length *= 2


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--tokens", default=8192, show_default=True)
@click.option("--longest", default=131072, show_default=True, help="Of the growth table.")
@click.option("--peak-of", hidden=True)
@click.option("--backward", is_flag=True, hidden=True)
def main(
    path: Path | None,
    repeats: int,
    threads: int,
    tokens: int,
    longest: int,
    peak_of: str | None,
    backward: bool,
) -> None:
    """Times attention over [1, 8, N, 64]."""
    torch.set_num_threads(threads)
    if peak_of is not None:
        print_peak(peak_of, tokens, backward)
        return
    console, facts = Console(width=100), protocol(repeats)
    console.print(facts)
    rows: list[Row] = []
    for setting in settings(tokens, longest):
        measured = list(measure(setting, repeats))
        show(measured, console)
        rows += measured
    peaks = [peak("longspan tiled", length, False) for length in (2 * tokens, longest)]
    peaks += [peak("longspan tiled", longest // 4, True)]
    peaks += [peak(name, 2 * tokens, False) for name in ("sdpa dense mask", "flex compiled")]
    show_peaks(peaks, console)
    if path is not None:
        tables = {"rows": rows, "peaks": peaks}
        lists = {name: [asdict(each) for each in table] for name, table in tables.items()}
        write_text(path, json.dumps({"protocol": facts, **lists}, indent=1) + "\n")


if __name__ == "__main__":
    main()
