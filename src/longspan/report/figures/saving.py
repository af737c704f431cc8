"""Figures as files and as inline SVG, the same bytes for the same data."""

from __future__ import annotations

import io
import re
from pathlib import Path

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from longspan.errors import OutputError
from longspan.files import whole_file
from longspan.report.style import figure_style

DPI = 150
FORMATS = ("png", "svg")
SVG_METADATA = ("Creator", "Date", "Format", "Type")


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes a figure as PNG (150 dots an inch) or SVG, by the suffix; an older file is replaced.

    Raises:
        OutputError: for another suffix, or if the file cannot be written.
    """
    suffix = Path(path).suffix.lower().lstrip(".")
    if suffix not in FORMATS:
        raise OutputError(
            f"a figure's file must end in .png or .svg, got {str(path)!r}. "
            "Rename it, such as figure.svg."
        )
    with whole_file(Path(path)) as temporary:
        temporary.write_bytes(figure_bytes(figure, suffix))
    return Path(path)


def figure_bytes(figure: Figure, suffix: str, *, transparent: bool = False) -> bytes:
    """Returns the file's bytes, without a date, so that equal data give equal files."""
    buffer = io.BytesIO()
    metadata = {"Software": None} if suffix == "png" else dict.fromkeys(SVG_METADATA)
    with figure_style():
        figure.savefig(buffer, format=suffix, dpi=DPI, metadata=metadata, transparent=transparent)
    return buffer.getvalue()


def figure_svg(figure: Figure, description: str, name: str, colors: dict[str, str]) -> Markup:
    """Returns a figure as an SVG element to stand inside a page.

    Args:
        figure: the figure.
        description: its text alternative, read aloud in place of the picture.
        name: put before every id, so that figures of one page do not share ids.
        colors: what to write in place of each colour, such as a variable of the page's style.
    """
    text = figure_bytes(figure, "svg", transparent=True).decode()
    text = re.sub(r"<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'<svg ([^>]*?)\bwidth="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'<svg ([^>]*?)\bheight="[^"]*"', r"<svg \1", text, count=1)
    for color, instead in colors.items():
        text = text.replace(color, instead)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
    return Markup(text)
