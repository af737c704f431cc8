"""How far long work is: a bar on a terminal's standard error, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from torch import Tensor

from longspan.tools.measuring import Progress as Tell
from longspan.tools.stream_score import Announce, Seen
from longspan.tools.stream_state import resident_bytes

LINES = 20  # of work in parts, where there is no terminal, beside one for each that begins


@contextmanager
def shown_parts() -> Iterator[Tell]:
    """Yields what shows how many parts of some work are done, and the one under way."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PartLines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=None)
        yield lambda what, done, parts: bar.update(
            task, description=what, completed=done, total=parts
        )


class PartLines:
    """Prints a line where a part begins, as told before a colon, and at twentieths of the whole."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last = ("", -1)

    def __call__(self, what: str, done: int, parts: int) -> None:
        """Told how many parts are done, and which is under way."""
        here = (what.partition(":")[0], LINES * done // parts)
        if here != self.last:
            self.last = here
            line = f"{done / parts:4.0%} {what}"
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def shown_text() -> Iterator[Announce]:
    """Yields what shows how much of a text is read: a line a tenth where there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, tokens: TextLines(console, what, tokens)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("{task.fields[said]}"), console=console
    ) as bar:

        def announce(what: str, tokens: int) -> Seen:
            task, running = bar.add_task(what, total=tokens, said=""), Running()

            def seen(nll: Tensor) -> None:
                bar.update(task, completed=len(nll), said=running.said(nll))

            return seen

        yield announce


class TextLines:
    """Prints a line at every tenth of a text."""

    def __init__(self, console: Console, what: str, tokens: int) -> None:
        self.console, self.what, self.tokens = console, what, tokens
        self.running, self.tenths = Running(), -1

    def __call__(self, nll: Tensor) -> None:
        """Told the likelihoods so far."""
        said, tenths = self.running.said(nll), 10 * len(nll) // self.tokens
        if tenths > self.tenths and len(nll):
            self.tenths = tenths
            line = f"{self.what}: {len(nll):,} of {self.tokens:,} tokens, {said}"
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)


class Running:
    """Running perplexity, speed and memory of a text under way."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.first: int | None = None
        self.done, self.total = 0, 0.0

    def said(self, nll: Tensor) -> str:
        """Returns them in words, for the likelihoods so far."""
        self.total += float(nll[self.done :].double().sum())
        self.done = len(nll)
        if self.first is None:
            self.first, self.begun = self.done, time.perf_counter()
        if not self.done:
            return ""
        mean = torch.tensor(self.total / self.done).exp()
        seconds = time.perf_counter() - self.begun
        speed = f", {(self.done - self.first) / seconds:,.0f} tokens/s" if seconds else ""
        size = resident_bytes()
        return f"perplexity {mean:.2f}{speed}" + ("" if size is None else f", {size / 1e9:.2f} GB")
