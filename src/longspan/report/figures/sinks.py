"""Attention mass on the first tokens, by layer and head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from longspan.errors import ShapeError
from longspan.report.style import GRID, MUTED, figure_style, titled_figure

WIDTH = 7.2
LEFT, RIGHT, BOTTOM, BAR = 0.65, 1.15, 0.55, 0.14  # inches
# One hue from pale to near black, so that lightness alone carries the number.
MASS = LinearSegmentedColormap.from_list("mass", ["#eef3fb", "#8fb4e6", "#2b66c2", "#0d2350"])


def sink_heatmap(
    matrix: Sequence[Sequence[float]], num_sink_tokens: int, uniform: float
) -> Figure:
    """Returns the attention mass on the first tokens, layers across and heads down.

    Args:
        matrix: [layers][heads], each in [0, 1]; NaN for a head that was not measured. Layers may
            differ in their number of heads.
        num_sink_tokens: how many first tokens the mass is over.
        uniform: the mass they would have if every visible token had an equal share; marked on the
            colour bar.

    Raises:
        ShapeError: if the matrix is empty, or holds a number outside [0, 1].
    """
    rows = [[float(mass) for mass in layer] for layer in matrix]
    masses = [mass for layer in rows for mass in layer if not math.isnan(mass)]
    if not masses:
        raise ShapeError("the sink matrix must hold at least one measured head, got none.")
    if min(masses) < 0 or max(masses) > 1 + 1e-6:
        raise ShapeError(
            f"attention mass must lie in [0, 1], got {min(masses)} to {max(masses)}. "
            "It is a sum of attention weights, averaged over queries."
        )
    heads = max(len(layer) for layer in rows)
    picture = [
        [layer[head] if head < len(layer) else math.nan for layer in rows] for head in range(heads)
    ]
    note = "Share of attention on them, averaged over queries. Dashed on the bar: an equal share."
    with figure_style():
        figure, top = titled_figure(
            sink_claim(masses, num_sink_tokens, uniform), note, width=WIDTH,
            body=min(4.5, max(1.4, 0.17 * heads)) + BOTTOM,
        )  # fmt: skip
        image = draw_picture(figure, top, picture)
        draw_bar(figure, top, image, uniform)
    return figure


def draw_picture(figure: Figure, top: float, picture: list[list[float]]) -> AxesImage:
    """Draws the cells, [heads][layers]."""
    height = float(figure.get_figheight())
    bottom = BOTTOM / height
    axes = figure.add_axes((LEFT / WIDTH, bottom, 1 - (LEFT + RIGHT) / WIDTH, top - bottom))
    image = axes.imshow(
        picture, cmap=MASS, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
    )  # fmt: skip
    axes.patch.set(hatch="/////", edgecolor=GRID)  # shows where no head was measured
    axes.set_xlabel("layer")
    axes.set_ylabel("head")
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(9, integer=True))
    bare(axes)
    return image


def draw_bar(figure: Figure, top: float, image: AxesImage, uniform: float) -> None:
    """Draws the colour bar, with a dashed line where an equal share would be."""
    bottom = BOTTOM / float(figure.get_figheight())
    axes = figure.add_axes((1 - (RIGHT - 0.2) / WIDTH, bottom, BAR / WIDTH, top - bottom))
    bar = figure.colorbar(image, cax=axes)
    bar.outline.set_visible(False)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0 %", "25 %", "50 %", "75 %", "100 %"])
    bare(axes)
    axes.axhline(uniform, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))


def bare(axes: Axes) -> None:
    """Takes grid, frame and tick marks away."""
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, which="both")


def sink_claim(masses: list[float], num_sink_tokens: int, uniform: float) -> str:
    """Returns how much attention the first tokens take, beside an equal share."""
    mean = sum(masses) / len(masses)
    who = "first token takes" if num_sink_tokens == 1 else f"first {num_sink_tokens} tokens take"
    many = sum(mass > 0.5 for mass in masses)
    claim = f"The {who} {percent(mean)} of attention, where an equal share is {percent(uniform)}"
    if many:
        return f"{claim}; more than half in {many} of {len(masses)} heads"
    return f"{claim}; in no head more than half"


def percent(share: float) -> str:
    """Returns a share in percent, with a decimal where it is small.

    >>> percent(0.583), percent(0.0049)
    ('58 %', '0.5 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
