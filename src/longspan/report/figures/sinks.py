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
NOTE = "Mean share over the queries behind them. Dashed on the bar: an equal share."
ROUNDING = 1e-4  # a float32 mean of sums of weights may pass 1 by so much
# One hue from pale to near black, so that lightness alone carries the number.
MASS = LinearSegmentedColormap.from_list("mass", ["#eef3fb", "#8fb4e6", "#2b66c2", "#0d2350"])


def sink_heatmap(
    matrix: Sequence[Sequence[float]],
    num_sink_tokens: int,
    uniform: float | Sequence[float],
    *,
    layers: Sequence[int] | None = None,
) -> Figure:
    """Returns the attention mass on the first tokens, layers across and heads down.

    Args:
        matrix: [layers][heads], each in [0, 1]; NaN for a head that was not measured. Layers may
            differ in their number of heads.
        num_sink_tokens: how many first tokens the mass is over.
        uniform: the mass they would have if every visible token had an equal share, of all layers
            or of each; the mean is marked on the colour bar.
        layers: the number of each layer; 0 and up unless given.

    Raises:
        ShapeError: if the matrix is empty, or holds a number outside [0, 1], or `uniform` or
            `layers` has another number of layers.
    """
    rows = [[float(mass) for mass in layer] for layer in matrix]
    masses = measured(rows)
    numbers = list(range(len(rows)) if layers is None else layers)
    shares = [uniform] * len(rows) if isinstance(uniform, (int, float)) else list(uniform)
    if len(numbers) != len(rows) or len(shares) != len(rows):
        raise ShapeError(
            f"layers and uniform must have one entry a layer of the matrix, {len(rows)}, got "
            f"{len(numbers)} and {len(shares)}."
        )
    equal = sum(shares) / len(shares)
    picture = heads_by_layers(rows)
    body = min(4.5, max(1.4, 0.17 * len(picture))) + BOTTOM
    claim = sink_claim(masses, num_sink_tokens, equal)
    with figure_style():
        figure, top = titled_figure(claim, NOTE, width=WIDTH, body=body)
        image = draw_picture(figure, top, picture, numbers)
        draw_bar(figure, top, image, equal)
    return figure


def measured(rows: list[list[float]]) -> list[float]:
    """Returns every measured mass; none at all, or one outside [0, 1], is refused."""
    masses = [mass for layer in rows for mass in layer if not math.isnan(mass)]
    if not masses:
        raise ShapeError(
            "the sink matrix must hold at least one measured head, got none. "
            "Give [layers][heads] of attention mass."
        )
    if min(masses) < 0 or max(masses) > 1 + ROUNDING:
        raise ShapeError(
            f"attention mass must lie in [0, 1], got {min(masses)} to {max(masses)}. "
            "It is a sum of attention weights, averaged over queries."
        )
    return masses


def heads_by_layers(rows: list[list[float]]) -> list[list[float]]:
    """Returns [heads][layers] of [layers][heads], NaN where a layer has fewer heads."""
    heads = max(len(layer) for layer in rows)
    return [
        [layer[head] if head < len(layer) else math.nan for layer in rows] for head in range(heads)
    ]


def draw_picture(
    figure: Figure, top: float, picture: list[list[float]], layers: list[int]
) -> AxesImage:
    """Draws the cells, [heads][layers], under the layers' own numbers."""
    height = float(figure.get_figheight())
    bottom = BOTTOM / height
    axes = figure.add_axes((LEFT / WIDTH, bottom, 1 - (LEFT + RIGHT) / WIDTH, top - bottom))
    image = axes.imshow(picture, cmap=MASS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.patch.set(hatch="/////", edgecolor=GRID)  # shows where no head was measured
    axes.set_xlabel("layer")
    axes.set_ylabel("head")
    step = math.ceil(len(layers) / 16)
    axes.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
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
    """Returns a share in whole percent, in two figures where it is below a tenth.

    >>> percent(0.583), percent(0.0049)
    ('58 %', '0.49 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
