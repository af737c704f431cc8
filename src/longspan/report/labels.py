"""Names written beside the ends of lines, moved apart where they would overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longspan.report.style import INK, MethodStyle, titled_figure

WIDTH, BODY, BOTTOM = 7.2, 3.5, 0.55  # inches
BESIDE = 1.035  # of the axes' width, where a label's marker stands


@dataclass(frozen=True, kw_only=True)
class LineEnd:
    """A line's last point in data coordinates, and what to write beside it."""

    text: str
    style: MethodStyle
    x: float
    y: float


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns places at least `gap` apart, in the same order and as near the wanted ones as can be.

    Labels that collide share out the space around their mean. Where there is no room for `gap`
    between `low` and `high`, the places are spaced evenly.

    >>> spread([0.5, 0.5, 0.9], gap=0.1, low=0.0, high=1.0)
    [0.45, 0.55, 0.9]
    """
    count = len(wanted)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    order = sorted(range(count), key=lambda i: wanted[i])
    # Subtracting rank · gap turns "at least gap apart" into "never falling": pool what falls.
    pools: list[tuple[float, int]] = []
    for rank, i in enumerate(order):
        total, size = wanted[i] - rank * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / size:
            before = pools.pop()
            total, size = total + before[0], size + before[1]
        pools.append((total, size))
    starts = [total / size for total, size in pools for _ in range(size)]
    ceiling = high - (count - 1) * gap
    places = [0.0] * count
    for rank, i in enumerate(order):
        places[i] = round(min(max(starts[rank], low), ceiling) + rank * gap, 9)
    return places


def label_ends(axes: Axes, ends: Sequence[LineEnd], fontsize: float = 9.5) -> None:
    """Writes each line's marker and name right of the axes, joined to its end by a dotted leader.

    The axes must have their final limits and size. Equal ends keep the order given, first lowest.
    """
    to_fraction = axes.transData + axes.transAxes.inverted()
    wanted = [float(to_fraction.transform((end.x, end.y))[1]) for end in ends]
    inches = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted()).height
    places = spread(wanted, gap=1.35 * fontsize / (72 * inches), low=0.0, high=1.0)
    for end, place in zip(ends, places, strict=True):
        label_end(axes, end, place, fontsize)


def label_end(axes: Axes, end: LineEnd, place: float, fontsize: float) -> None:
    """Writes one name at a height in fractions of the axes, with its marker and leader."""
    color = end.style.color
    axes.annotate(
        "",
        (end.x, end.y),
        xytext=(BESIDE, place),
        textcoords="axes fraction",
        annotation_clip=False,
        arrowprops=dict(
            arrowstyle="-", color=color, linewidth=0.9, linestyle=":", shrinkA=4, shrinkB=3
        ),
    )
    marker = end.style.marker
    axes.plot(BESIDE, place, marker=marker, color=color, transform=axes.transAxes, clip_on=False)
    axes.annotate(
        end.text,
        (BESIDE, place),
        xycoords="axes fraction",
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=fontsize,
        color=INK,
    )


def labelled_axes(
    claim: str, note: str, ends: Sequence[LineEnd], left: float
) -> tuple[Figure, Axes]:
    """Returns a titled figure and axes that leave `left` inches for ticks, and room for labels."""
    figure, top = titled_figure(claim, note, width=WIDTH, body=BODY)
    bottom = BOTTOM / figure.get_figheight()
    room = (left + label_room(ends)) / WIDTH
    return figure, figure.add_axes((left / WIDTH, bottom, 1 - room, top - bottom))


def label_room(ends: Sequence[LineEnd], fontsize: float = 9.5) -> float:
    """Returns the inches to leave right of the axes for these names."""
    longest = max(len(end.text) for end in ends)
    return 0.38 + longest * fontsize * 0.62 / 72
