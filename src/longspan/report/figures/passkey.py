"""Passkey trials: one panel a method, depth by length."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from longspan.errors import ConfigError
from longspan.report.passkey import (
    Tally,
    passkey_claim,
    passkey_lengths,
    passkey_methods,
    score,
    tally,
    trials_of,
)
from longspan.report.style import (
    EDGE,
    GRID,
    INK,
    MUTED,
    PAPER,
    figure_style,
    mark_trained,
    method_style,
    titled_figure,
)
from longspan.report.wording import sentence, title_in, tokens
from longspan.tools.evaluation import Evaluation

WIDTH, CELL_WIDTH, MOST_CELL_WIDTH, CELL_HEIGHT = 7.2, 0.42, 1.3, 0.21
LEFT, GAP, HEAD, FOOT, KEY = 0.72, 0.3, 0.66, 0.5, 0.34  # inches around panels; KEY under all
NOTE = "Passkey by depth in the prompt and prompt length. Under each length: found / valid trials."


def passkey_grid(evaluation: Evaluation) -> Figure:
    """Returns each method's trials by depth and length: found, missed and invalid, with rates.

    A found cell is filled with the method's colour, a missed one is crossed out, an invalid one
    hatched. Where one depth and length was tried more than once, the cell is filled as far as the
    rate and says it in numbers.

    Raises:
        ConfigError: if the evaluation holds no passkey trials.
    """
    if not evaluation.passkey:
        raise ConfigError(
            "this evaluation holds no passkey trials, so there is no grid to draw. "
            "Run evaluate with passkey lengths."
        )
    methods = passkey_methods(evaluation)
    columns = panel_columns(len(methods), len(passkey_lengths(evaluation)))
    with figure_style():
        figure, panels = panel_grid(evaluation, columns, math.ceil(len(methods) / columns))
        for index, (method, axes) in enumerate(zip(methods, panels, strict=False)):
            draw_panel(axes, evaluation, method)
            if index % columns == 0:
                axes.set_ylabel("depth")
            else:
                axes.tick_params(labelleft=False)
        draw_key(figure)
    return figure


def panel_columns(methods: int, lengths: int) -> int:
    """Returns how many panels stand side by side: all, or as many as the width can hold."""
    room = WIDTH - LEFT - EDGE + GAP
    return max(1, min(methods, int(room / (max(1.3, CELL_WIDTH * lengths) + GAP))))


def panel_grid(evaluation: Evaluation, columns: int, rows: int) -> tuple[Figure, list[Axes]]:
    """Returns the titled figure and its panels, one a method, all of one size."""
    lengths, depths = passkey_lengths(evaluation), passkey_depths(evaluation)
    room = (WIDTH - LEFT - EDGE + GAP) / columns - GAP
    panel_width = max(CELL_WIDTH * len(lengths), min(room, MOST_CELL_WIDTH * len(lengths)))
    panel_height = CELL_HEIGHT * len(depths)
    inner = columns * panel_width + (columns - 1) * GAP
    width = max(WIDTH, LEFT + inner + EDGE)
    body = rows * (HEAD + panel_height + FOOT) + KEY - HEAD * 0.5
    figure, top = titled_figure(passkey_claim(evaluation), NOTE, width=width, body=body)
    height = float(figure.get_figheight())
    grid = figure.add_gridspec(
        rows,
        columns,
        left=LEFT / width,
        right=(LEFT + inner) / width,
        top=top - HEAD * 0.5 / height,
        bottom=(KEY + FOOT) / height,
        wspace=GAP / panel_width,
        hspace=(HEAD + FOOT) / panel_height,
    )
    count = len(passkey_methods(evaluation))
    return figure, [figure.add_subplot(grid[i // columns, i % columns]) for i in range(count)]


def passkey_depths(evaluation: Evaluation) -> list[float]:
    """Returns the depths that were tried, the start of the prompt first."""
    return sorted({trial.depth for trial in evaluation.passkey})


def draw_panel(axes: Axes, evaluation: Evaluation, method: str) -> None:
    """Draws one method's cells, and its rate over each length and over all."""
    lengths, depths = passkey_lengths(evaluation), passkey_depths(evaluation)
    axes.set_xlim(0, len(lengths))
    axes.set_ylim(len(depths), 0)
    for column, length in enumerate(lengths):
        trials = trials_of(evaluation, method, length)
        for row, depth in enumerate(depths):
            cell = tally(trial for trial in trials if trial.depth == depth)
            draw_cell(axes, column, row, cell, method_style(method).color)
    totals = [tally(trials_of(evaluation, method, length)) for length in lengths]
    names = [f"{tokens(n)}\n{total.fraction}" for n, total in zip(lengths, totals, strict=True)]
    axes.set_xticks([i + 0.5 for i in range(len(lengths))], names)
    axes.set_yticks([i + 0.5 for i in range(len(depths))], depth_names(depths))
    axes.tick_params(length=0, labelsize=8.5)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    whole = score(tally(trials_of(evaluation, method)))
    title = f"{sentence(title_in(evaluation, method))}\n{whole} found"
    axes.set_title(title, loc="left", fontsize=9.2, pad=15, color=INK, linespacing=1.3)
    mark_trained(axes, sum(n <= evaluation.protocol.trained_length for n in lengths))


def depth_names(depths: Sequence[float]) -> list[str]:
    """Returns the depths in percent; every other one where there are many."""
    step = 1 if len(depths) <= 12 else 2
    return [f"{100 * depth:.3g} %" if i % step == 0 else "" for i, depth in enumerate(depths)]


def draw_cell(axes: Axes, column: int, row: int, cell: Tally, color: str) -> None:
    """Draws one depth and length: filled as far as found, crossed out, hatched, or left empty."""
    x, y, wide, high = column + 0.05, row + 0.07, 0.9, 0.86
    if cell.rate is None:
        if cell.invalid:
            axes.add_patch(
                Rectangle((x, y), wide, high, fill=False, hatch="/////", edgecolor=MUTED, lw=0)
            )
        return
    axes.add_patch(Rectangle((x, y), wide, high, facecolor=PAPER, edgecolor=GRID, lw=0.8))
    filled = wide * cell.rate
    axes.add_patch(Rectangle((x, y), filled, high, facecolor=color, lw=0))
    if not cell.found:
        axes.plot(column + 0.5, row + 0.5, marker="x", color=MUTED, markersize=5, mew=1.3)
    elif cell.missed:
        axes.text(
            column + 0.5,
            row + 0.5,
            cell.fraction,
            ha="center",
            va="center_baseline",
            fontsize=7.5,
            color=INK,
            bbox=dict(facecolor=PAPER, edgecolor="none", pad=1.2),
        )


def draw_key(figure: Figure) -> None:
    """Says under the panels what the three kinds of cell mean."""
    kinds = [
        Patch(facecolor=MUTED, label="found"),
        Line2D([], [], linestyle="", marker="x", color=MUTED, mew=1.3, label="missed"),
        Patch(fill=False, hatch="/////", edgecolor=MUTED, lw=0, label="invalid, not counted"),
    ]
    figure.legend(
        handles=kinds,
        loc="lower left",
        bbox_to_anchor=(LEFT / figure.get_figwidth(), 0.0),
        ncols=3,
        frameon=False,
        fontsize=8.8,
        labelcolor=MUTED,
        borderpad=0.3,
        handlelength=1.5,
        handleheight=1.0,
        columnspacing=1.6,
    )
