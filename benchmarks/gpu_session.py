"""One run on one device: times what fits in its memory and minutes, and lists what does not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.console import Console

from gpu_checks import reason
from peers import Peer, inputs, run
from results import DIRECTIONS
from timing import Call, on_gpu, on_host, show_table, time_in_turn

MOST = 0.6  # of the memory, that one contender may need
GUARD_S = 25.0  # a first run may compile this long, so nothing begins later
TIMED_MS = 1000.0  # of the slowest contender, repeats together
REPEATS = range(3, 21)


@dataclass(frozen=True)
class Setting:
    """What is timed."""

    table: str
    tokens: int
    dtype: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.table}, {self.tokens} tokens, {self.dtype}, {DIRECTIONS[self.backward]}"


@dataclass(frozen=True)
class GpuRow:
    """One contender in one setting."""

    setting: str
    contender: str
    median_ms: float
    fastest_ms: float
    of_first: float
    """The median as a multiple of the setting's first contender's."""
    peak_mb: float | None
    """Above q, k and v, masks included; None where it was not measured."""


@dataclass(frozen=True)
class LeftOut:
    """What was not timed, and why."""

    setting: str
    contender: str
    why: str


@dataclass
class Session:
    """What has been found so far, and what is left of memory and time."""

    device: str
    console: Console
    memory: float
    """Bytes of the device."""
    ends: float
    """When the run is over, on the clock of time.monotonic."""
    rows: list[GpuRow] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """True when nothing may begin any more."""
        return time.monotonic() > self.ends - GUARD_S

    def measure(self, setting: Setting, peers: Sequence[Peer]) -> None:
        """Times one setting and prints it."""
        what, calls, peaks = str(setting), dict[str, Call](), dict[str, float]()
        if self.late:
            self.left_out.append(LeftOut(what, "all", "no time left"))
            return
        qkv = inputs(setting.tokens, setting.dtype, self.device)
        for peer in peers:
            why = self._refused(peer, setting)
            if not why:
                before = self._held()
                try:
                    call = partial(run, peer.ready(qkv[0]), qkv, setting.backward)
                    call()  # loads and compiles
                    if self.device == "cuda":
                        peaks[peer.name] = (peak(call) - before) / 1e6
                    calls[peer.name] = call
                except Exception as raised:  # one contender's trouble is not the others'
                    why = reason(raised)
            if why:
                self.left_out.append(LeftOut(what, peer.name, why))
        self.time(what, calls, peaks)
        calls.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _refused(self, peer: Peer, setting: Setting) -> str:
        """Returns why a contender does not even begin, or nothing."""
        needs = peer.needs(setting.tokens)
        if needs > MOST * self.memory:
            return f"needs about {needs / 1e9:.0f} GB, over {MOST:.0%} of the memory"
        if self.device == "cpu" and setting.backward and not peer.trains_on_cpu:
            return "no backward on a CPU"
        return "no time left" if self.late else ""

    def time(self, what: str, calls: Mapping[str, Call], peaks: Mapping[str, float]) -> None:
        """Times ready contenders in turn and prints them; what fails then is left out."""
        try:
            rows = self._timed(what, calls, peaks) if calls else []
        except Exception as raised:  # such as no memory for all their masks together
            self.left_out.append(LeftOut(what, "all", reason(raised)))
            return
        self.rows += rows
        if rows:
            columns = "", "median ms", "fastest ms", f"× {rows[0].contender}", "peak MB"
            show_table(self.console, what, columns, (_cells(row) for row in rows))

    def _timed(
        self, what: str, calls: Mapping[str, Call], peaks: Mapping[str, float]
    ) -> list[GpuRow]:
        clock = on_gpu if self.device == "cuda" else on_host
        slowest = max(clock(call) for call in calls.values())
        repeats = int(min(max(TIMED_MS / slowest, REPEATS.start), REPEATS.stop - 1))
        times = time_in_turn(calls, repeats, warm_ups=1, clock=clock)
        medians = {name: statistics.median(each) for name, each in times.items()}
        first = next(iter(medians))
        return [
            GpuRow(what, name, ms, min(times[name]), ms / medians[first], peaks.get(name))
            for name, ms in medians.items()
        ]

    def _held(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0


def peak(call: Call) -> int:
    """Returns the most bytes that are allocated on the GPU during a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _cells(row: GpuRow) -> tuple[str, ...]:
    peak = "" if row.peak_mb is None else f"{row.peak_mb:.0f}"
    times = f"{row.median_ms:.3f}", f"{row.fastest_ms:.3f}", f"{row.of_first:.2f}"
    return row.contender, *times, peak
