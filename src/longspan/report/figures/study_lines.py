"""Lines of NLL over log₂ tokens, named at their ends; what is too high for the view is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longspan.errors import ConfigError
from longspan.report.figures.nll import LEFT, middle, nll_axis
from longspan.report.labels import LineEnd, label_ends, labelled_axes
from longspan.report.style import MethodStyle, figure_style, mark_trained, token_axis
from longspan.report.wording import number
from longspan.tools.study_results import StudyCurve, StudyProtocol

LEAST_VIEW = 1.0
"""Nats above the lowest point that a figure always shows."""
SPARE_VIEW = 1.4
"""How much higher than the view a line may reach before the axis is cut."""

BANDS = 0.24
"""How dark all bands are together: they share their documents, so they mostly overlap."""
MARKER = 0.06
"""The share of the view that a point needs around it."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line to draw.

    Attributes:
        title: written at its end, before its last value.
        style: of the line.
        points: (x in tokens, nats), by x.
        bands: (low, high) of each point, NaN where there is none.
        dots: (x, nats) of single seeds.
    """

    title: str
    style: MethodStyle
    points: tuple[tuple[float, float], ...]
    bands: tuple[tuple[float, float], ...] = ()
    dots: tuple[tuple[float, float], ...] = ()

    @property
    def highest(self) -> float:
        """The highest NLL of the line."""
        return max(y for _, y in self.points)


def position_line(curve: StudyCurve, title: str, style: MethodStyle) -> Line:
    """Returns a curve by target position; a point stands at the middle of its bucket."""
    nan = math.nan
    return Line(
        title=title,
        style=style,
        points=tuple((middle(bucket), bucket.nll) for bucket in curve.buckets),
        bands=tuple(
            (nan if one.low is None else one.low, nan if one.high is None else one.high)
            for one in curve.buckets
        ),
    )


def drawn(
    claim: str,
    note: str,
    lines: Sequence[Line],
    protocol: StudyProtocol,
    *,
    xlabel: str = "target position, tokens",
    last: float | None = None,
) -> Figure:
    """Returns the figure; what is above its view is named in the note.

    Raises:
        ConfigError: if there is no claim, and so nothing to draw.
    """
    if not claim:
        raise ConfigError(
            "this study holds no numbers for this figure. study_figures draws those it has."
        )
    top = view_top(lines, protocol.length)
    if top is not None:
        note += f" {above_note(lines, top)}"
    first = min(x for line in lines for x, _ in line.points)
    right = max([last or protocol.reach, *(x for line in lines for x, _ in line.points)]) * 1.04
    ends = [line_end(line, top, right) for line in sorted(lines, key=lambda one: one.points[-1][1])]
    with figure_style():
        figure, axes = labelled_axes(claim, note, ends, LEFT)
        for order, line in enumerate(lines):
            draw_line(axes, line, zorder=3 + order, alpha=min(0.13, BANDS / len(lines)))
        mark_trained(axes, protocol.length)
        token_axis(axes, "x", min(first, protocol.length) / 1.2, right)
        axes.set_xlabel(xlabel)
        axes.grid(visible=False, axis="x")
        nll_axis(axes)
        cut_view(axes, lines, top)
        label_ends(axes, ends)
    return figure


def view_top(lines: Sequence[Line], trained: int) -> float | None:
    """Returns where the axis is cut so that low lines stay apart; None where all fits well.

    All that is within the trained length is shown, and `LEAST_VIEW` nats; no point lies on the cut.
    """
    values = sorted(y for line in lines for _, y in line.points)
    within = [y for line in lines for x, y in line.points if x <= trained]
    top = max([values[0] + LEAST_VIEW, *within])
    view = top - values[0]
    if values[-1] <= values[0] + SPARE_VIEW * view:
        return None
    for value in values:
        if abs(value - top) < MARKER * view:
            top = value + MARKER * view
    return top if values[-1] > top else None


def above_note(lines: Sequence[Line], top: float) -> str:
    """Returns which lines leave the view, and how high they go."""
    gone = [line for line in lines if line.highest > top]
    gone.sort(key=lambda line: -line.highest)
    return f"Above the axis: {', '.join(f'{one.title} to {number(one.highest)}' for one in gone)}."


def line_end(line: Line, top: float | None, right: float) -> LineEnd:
    """Returns where a line ends; above the view, an arrow in the corner with its value."""
    x, y = line.points[-1]
    if top is not None and y > top:
        text = f"{line.title} ↑ {number(y)}"
        return LineEnd(text=text, style=line.style, x=right, y=top)
    return LineEnd(text=f"{line.title} {number(y)}", style=line.style, x=x, y=y)


def draw_line(axes: Axes, line: Line, zorder: float, alpha: float) -> None:
    """Draws one line, its band or whiskers, and the dots of its seeds."""
    style = line.style
    xs = [x for x, _ in line.points]
    axes.plot(
        xs,
        [y for _, y in line.points],
        color=style.color,
        marker=style.marker,
        linestyle=style.linestyle,
        zorder=zorder,
    )
    if line.bands:
        lows, highs = zip(*line.bands, strict=True)
        axes.fill_between(xs, lows, highs, color=style.color, alpha=alpha, linewidth=0, zorder=2)
    if line.dots:
        across, up = zip(*line.dots, strict=True)
        axes.scatter(across, up, s=9, color=style.color, alpha=0.5, linewidths=0, zorder=zorder)


def cut_view(axes: Axes, lines: Sequence[Line], top: float | None) -> None:
    """Ends the NLL axis at `top`, and marks where each line leaves it."""
    if top is None:
        return
    lowest = min(y for line in lines for _, y in line.points)
    axes.set_ylim(lowest - 0.08 * (top - lowest), top)
    for line in lines:
        for x in leavings(line, top):
            axes.plot(x, top, marker="^", color=line.style.color, markersize=6, clip_on=False)


def leavings(line: Line, top: float) -> list[float]:
    """Returns the places where a line rises above `top`, as it is drawn on a log axis."""
    found = []
    for (x, y), (x2, y2) in zip(line.points, line.points[1:], strict=False):
        if y <= top < y2:
            found.append(x * (x2 / x) ** ((top - y) / (y2 - y)))
    return found
