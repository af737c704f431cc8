"""A study's figures: NLL by position, RoPE under scalings, windows, memory."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from longspan.report.figures.study_lines import Line, drawn, position_line
from longspan.report.study_claims import (
    memory_claim,
    position_claim,
    scaling_claim,
    window_claim,
)
from longspan.report.study_curves import (
    check_measured,
    encoding_title,
    joined,
    memory_curves,
    scaled_curves,
    unread_encodings,
    whole_curves,
    window_curves,
)
from longspan.report.style import encoding_style, method_style
from longspan.report.wording import counted, method_title, tokens
from longspan.tools.study_results import StudyProtocol, StudyResult


def study_figures(result: StudyResult) -> dict[str, Figure]:
    """Returns the figures that the study has numbers for, by name, in the order of the page.

    Raises:
        ConfigError: if the study holds no curve.
    """
    check_measured(result)
    draw = {
        "positions": (position_claim, study_positions),
        "scalings": (scaling_claim, study_scalings),
        "windows": (window_claim, study_windows),
        "memory": (memory_claim, study_memory),
    }
    return {name: figure(result) for name, (claim, figure) in draw.items() if claim(result)}


def study_positions(result: StudyResult) -> Figure:
    """Returns NLL by target position, a line an encoding, each document read whole.

    Raises:
        ConfigError: if no encoding was read past the trained length.
    """
    lines = [
        position_line(one, encoding_title(one.encoding), encoding_style(one.encoding))
        for one in whole_curves(result)
    ]
    unread = [encoding_title(name) for name in unread_encodings(result)]
    note = f"Mean NLL by target position, {read_note(result.protocol)}. Lower is better."
    if unread:
        note += f" Not read whole: {joined(unread)}."
    return drawn(position_claim(result), note, lines, result.protocol)


def study_scalings(result: StudyResult) -> Figure:
    """Returns NLL by target position of the RoPE models, plain and under each scaling.

    Raises:
        ConfigError: if no scaling was read.
    """
    lines = [
        position_line(one, method_title(one.method), method_style(one.method))
        for one in scaled_curves(result)
    ]
    note = (
        f"RoPE models trained without scaling, {read_note(result.protocol)}. Mean NLL by target "
        "position; lower is better."
    )
    return drawn(scaling_claim(result), note, lines, result.protocol)


def study_windows(result: StudyResult) -> Figure:
    """Returns NLL over all positions by the window it was read in, with every seed as a dot.

    Raises:
        ConfigError: if no encoding was read in two windows.
    """
    protocol = result.protocol
    lines = [
        Line(
            title=encoding_title(encoding),
            style=encoding_style(encoding),
            points=tuple((one.window, one.nll) for one in line),
            dots=tuple((one.window, nll) for one in line for nll in one.by_seed),
        )
        for encoding, line in window_curves(result).items()
    ]
    note = (
        f"Mean NLL of {counted(protocol.documents, 'document')} of {tokens(protocol.reach)} tokens "
        f"by the window they are read in; dots are the {counted(len(protocol.seeds), 'seed')}. "
        "Lower is better."
    )
    return drawn(
        window_claim(result), note, lines, protocol, xlabel="window, tokens", last=protocol.reach
    )


def study_memory(result: StudyResult) -> Figure:
    """Returns NLL by position of segments, read alone and with the memory of those before.

    Raises:
        ConfigError: if no encoding was read with memory.
    """
    protocol, lines = result.protocol, []
    pairs = memory_curves(result)
    for alone, recurrent in pairs:
        style, title = encoding_style(alone.encoding), encoding_title(alone.encoding)
        names = (title, f"{title}, alone") if len(pairs) > 1 else ("with memory", "each alone")
        solid, dotted = replace(style, linestyle="-"), replace(style, linestyle=":")
        lines.append(position_line(recurrent, names[0], solid))
        lines.append(position_line(alone, names[1], dotted))
    note = (
        f"Mean NLL by target position, {read_note(protocol, 'in segments of the trained length')}, "
        "each alone (dotted) or with the memory of those before it. Lower is better."
    )
    return drawn(memory_claim(result), note, lines, protocol)


def read_note(protocol: StudyProtocol, how: str = "read whole") -> str:
    """Returns what was read, by how many models, and what the bands are."""
    documents = counted(protocol.documents, "document")
    seeds = counted(len(protocol.seeds), "seed")
    bands = ", 95 % intervals over documents" if protocol.documents > 1 else ""
    return f"{documents} of {tokens(protocol.reach)} tokens {how}, mean of {seeds}{bands}"
