"""The signature picture: λ against wavelength, all methods on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longspan.errors import ConfigError
from longspan.report.labels import LineEnd, label_ends, labelled_axes
from longspan.report.style import (
    figure_style,
    log_axis,
    mark_trained,
    method_style,
    token_axis,
)
from longspan.report.wording import sentence, tokens
from longspan.rotary.frequencies import rope_frequencies, wavelengths
from longspan.rotary.scaling import RopeScaling

LEFT = 0.8  # inches for ticks and their label
KEPT = 0.01
"""A pair counts as kept while its λ is within this share of 1."""


def rescale_factors(
    scalings: Sequence[RopeScaling],
    *,
    rotary_dim: int,
    rope_theta: float,
    trained_length: int,
    seq_len: int | None = None,
) -> Figure:
    """Returns each method's rescale factors λ by the pair's wavelength, on log₂ axes.

    Args:
        scalings: the methods; of a Rope, its `method`.
        rotary_dim: channels that turn.
        rope_theta: the frequency base.
        trained_length: tokens; the dashed line.
        seq_len: the length for tables that depend on it; unless given, the trained length times
            the largest factor, at least twice it.

    Raises:
        ConfigError: if there are no scalings, or `rotary_dim` or `rope_theta` is not allowed.
    """
    if not scalings:
        raise ConfigError("scalings must hold at least one method, got none.")
    if seq_len is None:
        largest = max(scaling.factor or 1.0 for scaling in scalings)
        seq_len = round(trained_length * max(largest, 2.0))
    waves = wavelengths(rope_frequencies(rotary_dim, rope_theta)).tolist()
    lines = [
        (scaling, scaling.rescale_factors(rotary_dim, rope_theta, seq_len).tolist())
        for scaling in scalings
    ]
    # Equal ends are told apart by the whole line: those that rise earlier are named higher.
    lines.sort(key=lambda line: sum(math.log(factor) for factor in line[1]))
    note = f"λ divides a pair's speed. rotary_dim {rotary_dim}, rope_theta {rope_theta:,.0f}."
    if any(scaling.depends_on_length for scaling in scalings):
        note += f" Tables that depend on the length are those at {tokens(seq_len)} tokens."
    return draw_lines(lines, waves, trained_length, note)


def draw_lines(
    lines: list[tuple[RopeScaling, list[float]]],
    waves: list[float],
    trained_length: int,
    note: str,
) -> Figure:
    """Returns the figure of ready factors."""
    ends = [
        LineEnd(text=name(scaling), style=method_style(scaling.method), x=waves[-1], y=row[-1])
        for scaling, row in lines
    ]
    with figure_style():
        figure, axes = labelled_axes(rescale_claim(lines), note, ends, LEFT)
        every = max(1, len(waves) // 8)
        for order, (scaling, row) in enumerate(lines):
            style = method_style(scaling.method)
            axes.plot(
                waves,
                row,
                color=style.color,
                marker=style.marker,
                linestyle=style.linestyle,
                markevery=(order % every, every),
                zorder=3 + order + 20 * (style.linestyle != "-"),
            )
        axes.set_xlabel("wavelength of the pair before scaling, tokens")
        axes.set_ylabel("rescale factor λ")
        token_axis(axes, "x", waves[0] / 1.2, max(waves[-1], trained_length) * 1.1)
        factor_axis(axes, [factor for _, row in lines for factor in row])
        mark_trained(axes, trained_length)
        label_ends(axes, ends)
    return figure


def factor_axis(axes: Axes, factors: list[float]) -> None:
    """Sets the log₂ axis of λ, 1 included, with a tick at every power of 2 that is reached."""
    low, high = min(1.0, *factors), max(factors)
    first, last = math.floor(math.log2(low) + 0.1), math.ceil(math.log2(high))
    ticks = [2.0**power for power in range(first, max(last, first + 1) + 1)]
    margin = (ticks[-1] / ticks[0]) ** 0.05
    log_axis(
        axes,
        "y",
        min(low, ticks[0]) / margin,
        max(high, ticks[-1]) * margin,
        ticks,
        [f"{tick:g}" for tick in ticks],
    )


def name(scaling: RopeScaling) -> str:
    """Returns the method's name and, where it is not 1, its factor."""
    return f"{scaling.title} {scaling.factor:g}×" if (scaling.factor or 1) > 1 else scaling.title


def rescale_claim(lines: list[tuple[RopeScaling, list[float]]]) -> str:
    """Returns which scaling keeps most pairs as trained, and which keeps fewest."""
    pairs = len(lines[0][1])
    kept = [
        (sum(abs(factor - 1) <= KEPT for factor in row), scaling.title)
        for scaling, row in lines
        if any(factor != 1 for factor in row)
    ]
    if not kept:
        return sentence(f"{lines[0][0].title} keeps all {pairs} pairs as trained")
    most, fewest = max(kept), min(kept)
    claim = f"{most[1]} keeps {most[0] or 'none'} of {pairs} pairs as trained"
    if most[0] == fewest[0]:
        return sentence(claim)
    return sentence(f"{claim}; {fewest[1]} keeps {fewest[0] or 'none'}")
