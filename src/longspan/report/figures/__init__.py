"""One figure a file; each returns a figure and changes no global state."""

from __future__ import annotations

from longspan.report.figures.nll import nll_by_position
from longspan.report.figures.passkey import passkey_grid
from longspan.report.figures.rescale import rescale_factors
from longspan.report.figures.saving import figure_svg, save_figure
from longspan.report.figures.sinks import sink_heatmap
from longspan.report.figures.stream import stream_comparison, stream_score

__all__ = [
    "figure_svg",
    "nll_by_position",
    "passkey_grid",
    "rescale_factors",
    "save_figure",
    "sink_heatmap",
    "stream_comparison",
    "stream_score",
]
