"""Streams over tokens: perplexity and memory of one score, and NLL of methods side by side."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from longspan.errors import ConfigError
from longspan.report.figures.nll import LEFT, nll_axis
from longspan.report.labels import LineEnd, label_ends, labelled_axes
from longspan.report.stream import comparison_claim, kept, recompute_claim, score_claim
from longspan.report.style import (
    FIXED,
    INK,
    MethodStyle,
    figure_style,
    mark_trained,
    titled_figure,
    token_axis,
)
from longspan.report.wording import counted, number, tokens
from longspan.tools.stream_results import Comparison, MethodScore, Part, Protocol, Score

STYLES = {
    "streaming": FIXED["yarn"],
    "window": FIXED["llama3"],
    "recompute": MethodStyle(FIXED["ntk-by-parts"].color, "^", "--"),
    "dense": MethodStyle(INK, "o"),
}
WIDTH, BODY, BOTTOM, RIGHT, BETWEEN = 7.2, 3.9, 0.55, 0.3, 0.28  # inches
FAR = 4  # a trained length so many times the text's is not drawn


def stream_score(score: Score) -> Figure:
    """Returns perplexity by doublings of the text, over resident memory as it went by."""
    protocol = score.protocol
    again = ", read again and again" if protocol.repeated else ""
    note = (
        f"{protocol.model} on {protocol.text[0]}{again}, keeping {protocol.num_sink_tokens} sinks "
        f"and the last {tokens(protocol.sliding_window)} tokens."
    )
    with figure_style():
        figure, top = titled_figure(score_claim(score), note, width=WIDTH, body=BODY)
        tall = float(figure.get_figheight())
        height = (top - (BOTTOM + BETWEEN) / tall) / 2
        across = LEFT / WIDTH, 1 - (LEFT + RIGHT) / WIDTH
        low = figure.add_axes((across[0], BOTTOM / tall, across[1], height))
        high = figure.add_axes((across[0], top - height, across[1], height))
        style = STYLES["streaming"]
        high.plot(
            [middle(part) for part in score.octaves],
            [part.perplexity for part in score.octaves],
            color=style.color,
            marker=style.marker,
        )
        low.plot(
            [at for at, _ in score.memory],
            [size / 1e9 for _, size in score.memory],
            color=style.color,
        )
        high.set_ylabel("perplexity")
        low.set_ylabel("resident memory, GB")
        for axes in (high, low):
            position_axis(axes, protocol, middle(score.octaves[0]))
            axes.set_ylim(bottom=0, top=1.15 * axes.get_ylim()[1])
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        high.set_xticklabels([])
        high.set_xlabel("")
        for mark in list(low.texts):  # the line is named above
            mark.remove()
    return figure


def stream_comparison(comparison: Comparison) -> Figure:
    """Returns NLL by target position, a line a method; recompute's few tokens are a level.

    Raises:
        ConfigError: if no method was measured.
    """
    if not comparison.methods:
        raise ConfigError("no method was compared, so there is nothing to draw.")
    protocol = comparison.protocol
    note = f"Mean NLL by target position, {counted(protocol.tokens, 'token')}. Lower is better."
    if same := recompute_claim(comparison):
        note += f" {same}."
    ends = [line_end(score) for score in comparison.methods]
    first = min(
        (middle(s.blocks[0]) for s in comparison.methods if s.blocks), default=kept(protocol)
    )
    with figure_style():
        figure, axes = labelled_axes(comparison_claim(comparison), note, ends, LEFT)
        for order, score in enumerate(comparison.methods):
            draw_method(axes, score, zorder=3 + order)
        position_axis(axes, protocol, first)
        nll_axis(axes)
        label_ends(axes, ends)
    return figure


def draw_method(axes: Axes, score: MethodScore, zorder: float) -> None:
    """Draws one method's blocks, or its mean where it scored tokens here and there."""
    style = STYLES[score.method]
    if not score.blocks:
        x, y = [score.whole.start, score.whole.stop], [score.whole.nll] * 2
        axes.plot(x, y, color=style.color, linestyle=style.linestyle, zorder=zorder)
        return
    axes.plot(
        [middle(block) for block in score.blocks],
        [block.nll for block in score.blocks],
        color=style.color,
        marker=style.marker,
        linestyle=style.linestyle,
        zorder=zorder,
    )


def line_end(score: MethodScore) -> LineEnd:
    """Returns where a method's line ends, with its name and last value."""
    style = STYLES[score.method]
    if not score.blocks:
        text = f"{score.method} {number(score.whole.nll)} ({score.whole.tokens:,} tokens)"
        return LineEnd(text=text, style=style, x=score.whole.stop, y=score.whole.nll)
    last = score.blocks[-1]
    text = f"{score.method} {number(last.nll)}"
    return LineEnd(text=text, style=style, x=middle(last), y=last.nll)


def position_axis(axes: Axes, protocol: Protocol, first: float) -> None:
    """Sets the log₂ axis from `first` to the last token; marks the trained length if it is near."""
    low, high, trained = first, float(protocol.tokens), protocol.trained_length
    if trained is not None and trained <= FAR * high:
        mark_trained(axes, trained)
        low, high = min(low, trained), max(high, trained)
    token_axis(axes, "x", low / 1.2, high * 1.04)
    axes.set_xlabel("position, tokens")
    axes.grid(visible=False, axis="x")


def middle(part: Part) -> float:
    """Returns the middle position of a part."""
    return (part.start + part.stop) / 2
