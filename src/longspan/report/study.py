"""A study as a folder: its figures, a page that needs nothing else, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from longspan.files import refuse_existing, whole_file
from longspan.report.figures.saving import figure_bytes, figure_svg
from longspan.report.figures.study import study_figures
from longspan.report.page import render, svg_colors
from longspan.report.study_claims import study_claims
from longspan.report.study_curves import (
    encoding_title,
    joined,
    scaled_curves,
    unread_encodings,
    whole_curves,
)
from longspan.report.study_rows import (
    facts,
    model_rows,
    position_table,
    protocol_rows,
    segment_table,
    training_note,
    window_table,
)
from longspan.report.wording import tokens
from longspan.tools.study_results import StudyResult, to_json

RESULT, PAGE = "study.json", "index.html"
FIGURES = ("positions", "scalings", "windows", "memory")
BY_POSITION = (
    "Each point is the mean of one bucket of positions, at the bucket's middle, over documents and "
    "seeds; bands are the mean's 95 % interval over documents. Perplexity stands in brackets. The "
    "dashed line is the trained length."
)
CAPTIONS = {
    "positions": BY_POSITION,
    "scalings": BY_POSITION,
    "windows": "Each point is the mean over all positions of the documents; small dots are single "
    "seeds. Perplexity stands in brackets. The dashed line is the trained length.",
    "memory": BY_POSITION,
}


def write_study(folder: Path, result: StudyResult, force: bool = False, command: str = "") -> None:
    """Writes a study's figures and page into a folder, then the JSON that says they are whole.

    All of it is made before any of it is written. What else is in the folder stays.

    Args:
        folder: made if missing.
        result: what was measured.
        force: whether a finished result is replaced.
        command: the command line that measures it again.

    Raises:
        ConfigError: if the study holds no curve.
        NumericalError: if a number is NaN or infinite.
        OutputError: if a result is there already, or cannot be written.
    """
    refuse_existing(folder / RESULT, force=force)
    content, figures = to_json(result), study_figures(result)
    files = {f"{name}.png": figure_bytes(figure, "png") for name, figure in figures.items()}
    files[PAGE] = filled_page(result, figures, command).encode()
    files[RESULT] = content.encode()  # the last: where it is, all is
    for name in (RESULT, *(f"{name}.png" for name in FIGURES)):
        if (folder / name).exists():
            (folder / name).unlink()
    for name, raw in files.items():
        with whole_file(folder / name) as temporary:
            temporary.write_bytes(raw)


def study_page(result: StudyResult, *, command: str = "") -> str:
    """Returns the study as a self-contained HTML page; parts that were not measured are left out.

    Args:
        result: what was measured.
        command: the command line that measures it again; left out if empty.

    Raises:
        ConfigError: if the study holds no curve.
    """
    return filled_page(result, study_figures(result), command)


def filled_page(result: StudyResult, figures: Mapping[str, Figure], command: str) -> str:
    """Returns the page around figures that are drawn already."""
    protocol, claims = result.protocol, study_claims(result)
    return render(
        "study.html.j2",
        texts=joined([name for name, _ in protocol.texts]),
        headline=claims[0] if claims else "No reading reaches past the trained length",
        leads=claims[1:],
        facts=facts(result),
        figures={
            name: figure_svg(figure, f"Line chart. {claim}.", name, svg_colors())
            for (name, figure), claim in zip(figures.items(), claims, strict=True)
        },
        captions=CAPTIONS,
        trained=tokens(protocol.length),
        reach=tokens(protocol.reach),
        memory=tokens(protocol.memory_length),
        positions=position_table(whole_curves(result), protocol),
        scalings=position_table(scaled_curves(result), protocol, scaled=True),
        windows=window_table(result),
        segments=segment_table(result),
        position_caption=position_caption(result),
        unread=unread_note(result),
        models=model_rows(result),
        training_note=training_note(protocol),
        protocol_rows=protocol_rows(protocol),
        command=command,
    )


def position_caption(result: StudyResult) -> str:
    """Returns what the tables by position hold."""
    intervals = any(b.low is not None for one in result.curves for b in one.buckets)
    over = ", with its 95 % interval over documents" if intervals else ""
    return f"Mean NLL of the target positions, in nats per token{over}. Lower is better."


def unread_note(result: StudyResult) -> str:
    """Returns which encodings have no whole reading; empty where all have."""
    unread = [encoding_title(name) for name in unread_encodings(result)]
    return f"Not read whole: {joined(unread)}; see the segments below." if unread else ""
