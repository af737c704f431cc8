"""How speed and memory are measured here: contenders in turn, a peak in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

Call = Callable[[], object]
QUIET = 0.5  # load average, in processes


def on_host(call: Call) -> float:
    """Returns the milliseconds of one call that has finished when it returns."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def on_gpu(call: Call) -> float:
    """Returns the milliseconds between two events on an idle GPU, gaps between kernels included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_in_turn(
    calls: Mapping[str, Call],
    repeats: int,
    warm_ups: int,
    clock: Callable[[Call], float] = on_host,
) -> dict[str, list[float]]:
    """Returns each contender's milliseconds, one a repeat.

    Every contender runs once within each repeat, so a slow moment falls on all of them.

    Args:
        calls: the contenders, by name.
        repeats: how often each is timed.
        warm_ups: how often each runs before that.
        clock: times one call.
    """
    for call in calls.values():
        for _ in range(warm_ups):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(clock(call))
    finally:
        gc.enable()
    return times


def peak_of(call: Call) -> float:
    """Returns how many MB this process grows by, at most, while `call` runs."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what an earlier call left with the allocator would hide what this one needs
    marks = Path("/proc/self/clear_refs")
    if marks.exists():
        marks.write_text("5")  # the peak starts again from what is held now
    before = most_held()
    call()
    return (most_held() - before) / 1e6


def most_held() -> int:
    """Returns the most bytes this process has held."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux ru_maxrss would start at the parent's peak.
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def number_of_child(script: str, *arguments: str) -> float:
    """Returns the number that a script prints last, run in a process of its own."""
    command = [sys.executable, script, *arguments]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(printed.split()[-1])


def surroundings(packages: Iterable[str]) -> dict[str, object]:
    """Returns the machine and the releases, without which no time can be read."""
    return {
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "load_average_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": {name: version(name) for name in packages},
    }


def say_if_busy(console: Console) -> None:
    """Warns where other processes share the cores: then threads wait for one another."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > QUIET:
        console.print(
            f"The machine is busy (load {load:.1f}): whoever makes many short calls looks slow. "
            "Run again when it is quiet."
        )


def show_table(
    console: Console, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]
) -> None:
    """Prints a table, the first column to the left and the others to the right."""
    table = Table(title=title)
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
