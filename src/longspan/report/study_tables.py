"""A study as tables for the terminal; readable at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan.report.study_curves import (
    bucket_at,
    check_measured,
    encodings,
    multiples,
    segment_curves,
    window_curves,
)
from longspan.report.study_rows import READINGS, model_rows
from longspan.report.wording import counted, number, tokens
from longspan.tools.study_results import StudyCurve, StudyResult

MOST_MULTIPLES = 5


def print_study(result: StudyResult, console: Console | None = None) -> None:
    """Prints what the study measured: the readings by position and by window, and the trainings.

    Raises:
        ConfigError: if the study holds no curve.
    """
    check_measured(result)
    console = console or Console()
    console.print(study_heading(result), soft_wrap=True)
    whole = [one for one in result.curves if one.reading == "whole"]
    segments = segment_curves(result)
    if whole:
        said = "±: half the 95 % interval over documents; spread: between the seeds' means"
        show(console, position_table(result, whole), "Read whole", said)
    if segments:
        said = "spread: between the seeds' means"
        show(console, position_table(result, segments), "In segments of the trained length", said)
    if window_curves(result):
        said = "over all positions; the longest window is the whole document"
        show(console, window_table(result), "By window, tokens", said)
    if result.models:
        said = "loss: the mean of the last steps noted, then each seed's"
        show(console, training_table(result), "Training", said)


def show(console: Console, table: Table, title: str, said: str) -> None:
    """Prints a table under its title, and how to read it."""
    console.print(Text(f"\n{title}", style="italic"))
    console.print(table)
    console.print(Text(said, style="dim"), soft_wrap=True)


def study_heading(result: StudyResult) -> Text:
    """Returns the lines to print over the tables: what was trained and read, and what 2× means."""
    protocol = result.protocol
    return Text(
        f"{counted(len(encodings(result)), 'encoding')}, {counted(len(protocol.seeds), 'seed')}, "
        f"trained on {tokens(protocol.length)} tokens: NLL in nats, "
        f"{counted(protocol.documents, 'document')} of {tokens(protocol.reach)}\n"
        "2×: the positions from once to twice the trained length, and so on"
    )


def position_table(result: StudyResult, curves: Sequence[StudyCurve]) -> Table:
    """Returns a row a reading: the bucket that ends at each multiple of the trained length.

    Each is followed by half its 95 % interval, except beside another reading of the same models;
    the last column is the spread between seeds. Where there are more than five multiples, the first
    and the last four are shown.
    """
    protocol = result.protocol
    places = multiples(protocol)
    if len(places) > MOST_MULTIPLES:
        places = [places[0], *places[1 - MOST_MULTIPLES :]]
    several = len({one.reading for one in curves}) > 1
    table = plain_table()
    table.add_column("model", no_wrap=True)
    if several:
        table.add_column("reading", no_wrap=True)
    for place in places:
        past = place > protocol.length
        name = f"{place / protocol.length:g}×"
        table.add_column(name, justify="right", style="cyan" if past else "", no_wrap=True)
    for name in ("all", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in curves:
        names = (one.name, READINGS[one.reading]) if several else (one.name,)
        cells = [cell(one, place, half=not several) for place in places]
        table.add_row(*map(Text, (*names, *cells, number(one.nll), spread(one))))
    return table


def cell(curve: StudyCurve, place: int, *, half: bool) -> str:
    """Returns the NLL of the bucket that ends at a place, such as "3.10±.05"."""
    bucket = bucket_at(curve, place)
    if bucket is None:
        return "–"
    if not half or bucket.low is None or bucket.high is None:
        return number(bucket.nll)
    return f"{number(bucket.nll)}±{number((bucket.high - bucket.low) / 2).removeprefix('0')}"


def spread(curve: StudyCurve) -> str:
    """Returns the largest seed's mean minus the smallest; a dash for one seed."""
    if len(curve.by_seed) < 2:
        return "–"
    return number(max(curve.by_seed) - min(curve.by_seed))


def window_table(result: StudyResult) -> Table:
    """Returns a row an encoding: NLL over all positions by window, the longest the document."""
    lines = window_curves(result)
    windows = sorted({one.window for line in lines.values() for one in line})
    table = plain_table()
    table.add_column("model", no_wrap=True)
    for window in windows:
        past = window > result.protocol.length
        style = "cyan" if past else ""
        table.add_column(tokens(window), justify="right", style=style, no_wrap=True)
    for encoding, line in lines.items():
        by_window = {one.window: number(one.nll) for one in line}
        table.add_row(*map(Text, (encoding, *(by_window.get(one, "–") for one in windows))))
    return table


def training_table(result: StudyResult) -> Table:
    """Returns a row an encoding: parameters, tokens read, and the loss its training ended with."""
    table = plain_table()
    for name in ("model", "parameters", "tokens", "loss", "by seed", "s"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    read = f"{result.protocol.tokens:,}"
    for row in model_rows(result):
        cells = (row.name, row.parameters, read, row.loss, row.seeds or "–", row.seconds)
        table.add_row(*map(Text, cells))
    return table


def plain_table() -> Table:
    """Returns an empty table without a box."""
    return Table(
        box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold"
    )
