"""Draws a run of attention.py: time by length, one line a contender.

python benchmarks/drawing.py docs/results/attention.json docs/results/attention.png
"""

from __future__ import annotations

from pathlib import Path

import click
from matplotlib.figure import Figure

from bars import OURS
from longspan.report.figures import save_figure
from longspan.report.labels import LineEnd, label_ends, labelled_axes
from longspan.report.style import FIXED, SPARE, figure_style, log_axis, token_axis
from longspan.report.wording import tokens
from results import Results, Row

LEFT = 0.9  # inches for ticks and their label
DENSE = "sdpa dense mask"
# The figures' tested colours, a contender's own in place of a method's.
STYLES = {
    OURS: FIXED["yarn"],
    DENSE: FIXED["llama3"],
    "transformers sdpa": FIXED["linear"],
    "flex compiled": FIXED["ntk-by-parts"],
    "local-attention": FIXED["dynamic"],
    "sdpa causal": SPARE[1],
}
NAMES = {
    OURS: "longspan",
    DENSE: "SDPA, dense mask",
    "transformers sdpa": "transformers, SDPA",
    "flex compiled": "FlexAttention, compiled",
    "sdpa causal": "SDPA, no window",
}


def draw(found: Results) -> Figure:
    """Returns the median time of a forward under a sliding window by length, on log axes."""
    lines = by_contender(found)
    longest = max(rows[-1].tokens for rows in lines.values())
    ends = [line_end(name, rows[-1], longest) for name, rows in lines.items()]
    with figure_style():
        figure, axes = labelled_axes(claim(lines), note(found), ends, LEFT)
        for order, (name, rows) in enumerate(reversed(lines.items())):
            style, xs = STYLES[name], [row.tokens for row in rows]
            axes.plot(
                xs,
                [row.median_ms for row in rows],
                color=style.color,
                marker=style.marker,
                linestyle=style.linestyle,
                zorder=3 + order,
            )
        lengths = [row.tokens for rows in lines.values() for row in rows]
        times = [row.median_ms for rows in lines.values() for row in rows]
        token_axis(axes, "x", min(lengths) / 1.2, max(lengths) * 1.2)
        ticks = [10.0**power for power in range(-1, 6)]
        named = [duration(tick) for tick in ticks]
        log_axis(axes, "y", min(times) / 1.5, max(times) * 1.5, ticks, named)
        axes.set_xlabel("tokens, N")
        axes.set_ylabel("time of one forward")
        label_ends(axes, ends)
    return figure


def by_contender(found: Results) -> dict[str, list[Row]]:
    """Returns the float32 forwards under a window, each contender's by length."""
    lines: dict[str, list[Row]] = {name: [] for name in STYLES}
    for row in sorted(found.rows, key=lambda row: row.tokens):
        if (row.setting, row.dtype, row.direction) == ("window", "float32", "forward"):
            lines[row.contender].append(row)
    return {name: rows for name, rows in lines.items() if rows}


def claim(lines: dict[str, list[Row]]) -> str:
    """Returns what the lines show: our time beside a dense mask's, and how it grows from there."""
    dense, last = lines[DENSE][-1], lines[OURS][-1]
    here = next(row for row in lines[OURS] if row.tokens == dense.tokens)
    start = (
        f"At {tokens(dense.tokens)} tokens longspan's window is "
        f"{two_figures(dense.median_ms / here.median_ms)}× as fast as a dense mask"
    )
    if last.tokens == here.tokens:
        return start
    slower = f"{last.median_ms / here.median_ms:.1f}"
    return f"{start}; {last.tokens / here.tokens:g}× the tokens then take {slower}× the time"


def note(found: Results) -> str:
    """Returns what is drawn."""
    shape, threads = found.protocol["shape"], found.protocol["threads"]
    sizes = f"[{shape['batch']}, {shape['heads']}, N, {shape['head_dim']}]"
    return (
        f"Median of {found.protocol['repeats']} forwards of {sizes} in float32, {threads} CPU "
        f"threads, {found.protocol['mask']}; masks built beforehand."
    )


def line_end(name: str, row: Row, longest: int) -> LineEnd:
    """Returns where a contender's line ends, with its name and last time."""
    text = f"{NAMES.get(name, name)} {duration(row.median_ms)}"
    if row.tokens < longest:
        text += f" at {tokens(row.tokens)}"
    return LineEnd(text=text, style=STYLES[name], x=row.tokens, y=row.median_ms)


def duration(ms: float) -> str:
    """Returns a time in two figures, in seconds from one second on."""
    return f"{two_figures(ms / 1e3)} s" if ms >= 999.5 else f"{two_figures(ms)} ms"


def two_figures(number: float) -> str:
    """Returns a number with at least two figures that count."""
    return f"{number:.0f}" if number >= 99.5 else f"{number:.2g}"


@click.command()
@click.argument("results", type=click.Path(path_type=Path, exists=True))
@click.argument("figure", type=click.Path(path_type=Path))
def main(results: Path, figure: Path) -> None:
    """Draws RESULTS, the JSON of attention.py, as FIGURE."""
    save_figure(draw(Results.read(results)), figure)


if __name__ == "__main__":
    main()
