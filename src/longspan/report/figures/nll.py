"""NLL by target position, one line a method."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from longspan.report.claims import nll_claim
from longspan.report.labels import WIDTH, LineEnd, label_ends, labelled_axes
from longspan.report.style import (
    figure_style,
    mark_trained,
    method_style,
    token_axis,
)
from longspan.report.wording import counted, number, result_title, tokens
from longspan.tools.evaluation import Bucket, Evaluation, MethodResult

LEFT = 1.18  # inches for ticks and their label
MOST_BUCKET_MARKS = 24


def nll_by_position(evaluation: Evaluation) -> Figure:
    """Returns NLL by target position per method, 95 % intervals as bands; the claim is the title.

    A point stands at the middle of its bucket. Perplexity stands beside every tick.

    Raises:
        ConfigError: if the evaluation holds no method or no buckets.
    """
    claim = nll_claim(evaluation)
    ends = [line_end(result) for result in evaluation.methods]
    with figure_style():
        figure, axes = labelled_axes(claim, note(evaluation), ends, LEFT)
        alpha = 0.13 if len(ends) <= 3 else 0.07  # many bands would turn to mud
        for order, result in enumerate(evaluation.methods):
            draw_method(axes, result, zorder=3 + order, alpha=alpha)
        position_axis(axes, evaluation)
        nll_axis(axes)
        label_ends(axes, ends)
    return figure


def note(evaluation: Evaluation) -> str:
    """Returns what the figure shows, with the interval's meaning where there is one."""
    over = counted(evaluation.protocol.documents, "document")
    intervals = any(b.low is not None for result in evaluation.methods for b in result.buckets)
    bands = "with 95 % intervals" if intervals else "too few for intervals"
    window = evaluation.protocol.window
    windows = f", read in windows of {tokens(window)}" if window is not None else ""
    return f"Mean NLL by target position over {over}{windows}, {bands}. Lower is better."


def middle(bucket: Bucket) -> float:
    """Returns the middle position of a bucket."""
    return (bucket.start + bucket.stop) / 2


def line_end(result: MethodResult) -> LineEnd:
    """Returns where a method's line ends, with its name and last value."""
    last = result.buckets[-1]
    text = f"{result_title(result)} {number(last.nll)}"
    return LineEnd(text=text, style=method_style(result.method), x=middle(last), y=last.nll)


def draw_method(axes: Axes, result: MethodResult, zorder: float, alpha: float) -> None:
    """Draws one method's line, with a band where buckets have intervals."""
    style = method_style(result.method)
    xs = [middle(bucket) for bucket in result.buckets]
    axes.plot(
        xs,
        [bucket.nll for bucket in result.buckets],
        color=style.color,
        marker=style.marker,
        linestyle=style.linestyle,
        zorder=zorder,
    )
    lows = [math.nan if bucket.low is None else bucket.low for bucket in result.buckets]
    highs = [math.nan if bucket.high is None else bucket.high for bucket in result.buckets]
    axes.fill_between(xs, lows, highs, color=style.color, alpha=alpha, linewidth=0, zorder=2)
    for i in lone_intervals(result):
        axes.vlines(xs[i], lows[i], highs[i], color=style.color, alpha=0.35, zorder=2)


def lone_intervals(result: MethodResult) -> list[int]:
    """Returns the buckets whose interval has no neighbour, so that a band would have no width."""
    has = [False, *(bucket.low is not None for bucket in result.buckets), False]
    return [i for i in range(len(result.buckets)) if has[i + 1] and not has[i] and not has[i + 2]]


def position_axis(axes: Axes, evaluation: Evaluation) -> None:
    """Sets the log₂ axis from the first bucket's middle to the last position measured.

    Read in windows, a position is not the place it was read at, and the trained length no mark.
    """
    trained, buckets = evaluation.protocol.trained_length, evaluation.methods[0].buckets
    whole = evaluation.protocol.window is None
    low, high = middle(buckets[0]), buckets[-1].stop
    if whole:
        mark_trained(axes, trained)
        low, high = min(low, trained), max(high, trained)
    token_axis(axes, "x", low / 1.2, high * 1.04)
    edges = [bucket.stop for bucket in buckets]
    if len(edges) <= MOST_BUCKET_MARKS:
        axes.xaxis.set_minor_locator(FixedLocator(edges))
    axes.set_xlabel("target position, tokens")
    axes.grid(visible=False, axis="x")


def nll_axis(axes: Axes) -> None:
    """Writes perplexity beside every tick of nats."""
    axes.margins(y=0.08)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda nll, _: f"{nll:g} ({perplexity(nll)})"))
    axes.set_ylabel("nats per token (perplexity)")
    edge = 0.2 / WIDTH  # the label keeps its place, however wide the ticks are
    across = axes.figure.transFigure + axes.transAxes.inverted()
    axes.yaxis.set_label_coords(float(across.transform((edge, 0))[0]), 0.5)


def perplexity(nll: float) -> str:
    """Returns exp(nll) in three figures at most.

    >>> perplexity(3.0), perplexity(12.0)
    ('20.1', '163k')
    """
    value = math.exp(nll)
    return f"{value / 1000:.3g}k" if value >= 1000 else f"{value:.3g}"
