"""One look for every figure: a colour and marker per method, log₂ token axes, a claim on top."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from longspan.report.wording import tokens
from longspan.rotary.scaling import METHODS

INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#dfe3e8", "#ffffff"


@dataclass(frozen=True)
class MethodStyle:
    """How one method or encoding is drawn, in every figure."""

    color: str
    marker: str
    linestyle: str = "-"


# Told apart under simulated protanopia, deuteranopia and tritanopia, and on white and black paper.
# Dashed where the rescale factors can be another's exactly: NTK-by-parts on YaRN, dynamic on NTK.
FIXED = {
    "none": MethodStyle(INK, "o"),
    "linear": MethodStyle("#d6981b", "s"),
    "ntk": MethodStyle("#2b7cf6", "^"),
    "dynamic": MethodStyle("#b457b8", "v", "--"),
    "ntk-by-parts": MethodStyle("#14b5a6", "p", "--"),
    "yarn": MethodStyle("#1b33d6", "D"),
    "llama3": MethodStyle("#d9501a", "P"),
    "longrope": MethodStyle("#9a0f62", "X"),
}
SPARE = (MethodStyle("#774a08", "*"), MethodStyle("#807d75", "<"))
UNKNOWN = MethodStyle(MUTED, "h")

# Encodings, told apart likewise. RoPE is ink, as plain RoPE is among the methods; the others have
# colours that no method has.
ENCODING_STYLES = {
    "rope": FIXED["none"],
    "alibi": MethodStyle("#3b55fc", "s"),
    "t5": MethodStyle("#c39a3b", "^"),
    "shaw": MethodStyle("#37a4e0", "v"),
    "transformer_xl": MethodStyle("#d52d89", "D"),
    "sinusoidal": MethodStyle("#c70007", "P"),
    "learned": MethodStyle("#671397", "X"),
    "none": MethodStyle("#668559", "p"),
}

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 4,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "path",
    "svg.hashsalt": "longspan",
}


def method_styles(methods: Iterable[str] = tuple(METHODS)) -> dict[str, MethodStyle]:
    """Returns every method's style: its fixed one, or for a new method the next spare one.

    A method past the spare ones is drawn as an unknown name is.

    >>> method_styles(["yarn", "new"])["new"].color
    '#774a08'
    """
    new = [method for method in methods if method not in FIXED]
    return {**FIXED, **dict(zip(new, SPARE, strict=False))}


def method_style(method: str) -> MethodStyle:
    """Returns one method's style; a grey hexagon for a name that no scaling bears.

    >>> method_style("none").color
    '#1f2328'
    """
    return method_styles().get(method, UNKNOWN)


def encoding_style(encoding: str) -> MethodStyle:
    """Returns a position encoding's style, dashed where its memory is not its own habit.

    >>> encoding_style("rope+memory").color, encoding_style("rope+memory").linestyle
    ('#1f2328', '--')
    """
    plain = encoding.removesuffix("+memory").removesuffix("-memory")
    style = ENCODING_STYLES.get(plain, UNKNOWN)
    return style if plain == encoding else replace(style, linestyle="--")


@dataclass(frozen=True)
class ThemeColor:
    """A colour of the figures as a variable of a page's style, on white and on black paper."""

    variable: str
    light: str
    dark: str


NEUTRAL = (
    ThemeColor("--ink", INK, "#e6edf3"),
    ThemeColor("--muted", MUTED, "#9aa5b1"),
    ThemeColor("--grid", GRID, "#2d333b"),
    ThemeColor("--paper", PAPER, "#14181d"),
)


def theme() -> tuple[ThemeColor, ...]:
    """Returns every colour of the figures; on black paper a line's is the same hue, lighter."""
    neutral = {color.light for color in NEUTRAL}
    styles = (*method_styles().values(), *ENCODING_STYLES.values())
    own = {style.color for style in styles} - neutral
    return (*NEUTRAL, *(ThemeColor(f"--c{c[1:]}", c, lighter(c)) for c in sorted(own)))


def color_variable(method: str) -> str:
    """Returns the variable of a method's colour, such as "--c1b33d6"."""
    return style_variable(method_style(method))


def style_variable(style: MethodStyle) -> str:
    """Returns the variable of a style's colour."""
    color = style.color
    return next(entry.variable for entry in theme() if entry.light == color)


def lighter(color: str) -> str:
    """Returns a colour mixed with white, three parts to two.

    >>> lighter("#000000")
    '#666666'
    """
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(0.6 * part + 0.4 * 255):02x}" for part in parts)


@contextmanager
def figure_style() -> Iterator[None]:
    """Applies the look while a figure is drawn or saved; the caller's settings come back after."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


EDGE = 0.14
"""Inches between a figure's edge and its text."""


def titled_figure(claim: str, note: str, *, width: float, body: float) -> tuple[Figure, float]:
    """Returns a figure with its claim and a note on top, and where its axes must end.

    Args:
        claim: the title, wrapped to the width.
        note: what is drawn, in small type under the claim.
        width: of the figure, inches.
        body: height under the title, inches.

    Returns:
        The figure, and the top of its axes as a fraction of the height.
    """
    claims = wrap_evenly(claim, int((width - 2 * EDGE) * 10.8))
    notes = wrap_evenly(note, int((width - 2 * EDGE) * 14.0))
    below = EDGE + 0.215 * len(claims) + 0.05
    head = below + 0.175 * len(notes) + 0.27
    height = head + body
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    title = figure.text(EDGE / width, 1 - EDGE / height, "\n".join(claims), va="top")
    title.set(fontsize=11.5, weight="bold", linespacing=1.25)
    small = figure.text(EDGE / width, 1 - below / height, "\n".join(notes), va="top")
    small.set(fontsize=8.8, color=MUTED, linespacing=1.3)
    return figure, 1 - head / height


def wrap_evenly(text: str, width: int) -> list[str]:
    """Returns as few lines of at most `width` letters as can be, and no short last one.

    Names such as Transformer-XL are not broken.

    >>> wrap_evenly("one two three-a four", 16)
    ['one two', 'three-a four']
    """
    lines = textwrap.wrap(text, width, break_on_hyphens=False)
    while width > 1:
        narrower = textwrap.wrap(text, width - 1, break_on_hyphens=False)
        if len(narrower) != len(lines):
            break
        lines, width = narrower, width - 1
    return lines


def token_axis(axes: Axes, which: str, low: float, high: float, most: int = 9) -> None:
    """Makes one axis log₂ from `low` to `high` tokens, with at most `most` ticks at powers of 2."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / most))
    ticks = [2**power for power in range(first, last + 1, step)]
    log_axis(axes, which, low, high, ticks, [tokens(int(tick)) for tick in ticks])


def log_axis(
    axes: Axes, which: str, low: float, high: float, ticks: list, labels: list[str]
) -> None:
    """Makes one axis, "x" or "y", log₂ with exactly these ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_ticklabels(labels)


def mark_trained(axes: Axes, x: float) -> None:
    """Draws the trained length: a thin dashed line, named over the axes."""
    axes.axvline(x, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    axes.annotate(
        "trained",
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8.5,
        color=MUTED,
    )
