"""A study as rows of text for the page's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from longspan.report.page_rows import Cell, interval, value_lines
from longspan.report.study_curves import (
    bucket_span,
    encoding_title,
    encodings,
    past_buckets,
    segment_curves,
    window_curves,
)
from longspan.report.style import encoding_style, method_style, style_variable
from longspan.report.wording import counted, method_title, number, sentence, tokens
from longspan.tools.study_results import StudyCurve, StudyProtocol, StudyResult

MEANINGS = {
    "texts": "name and sha256 of each source text",
    "vocabulary": "tokens of the tokenizer trained on the texts; 256 is bytes",
    "length": "tokens of a training row, the trained length",
    "reach": "tokens of a held-out document",
    "documents": "held out from the ends of the texts; no model was trained on them",
    "memory_length": "tokens remembered where a model remembers",
    "steps": "of training, every model alike",
    "batch_size": "rows a step",
    "learning_rate": "of AdamW at its peak, with a cosine schedule",
    "warmup_steps": "steps until the peak",
    "weight_decay": "of AdamW",
    "train_tokens": "tokens of the training text, read in turn",
    "hidden_size": "of every model",
    "num_hidden_layers": "of every model",
    "num_attention_heads": "of every model",
    "num_key_value_heads": "of every model",
    "intermediate_size": "of every model",
    "seeds": "of weights and of the order of the text; one model of each encoding a seed",
    "versions": "",
}
READINGS = {
    "whole": "whole",
    "window": "in windows",
    "segments": "each alone",
    "recurrent": "with memory",
}


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """One reading, every value as text.

    Attributes:
        title, variable: its name in prose, and the page's variable of its colour.
        reading: how it was read, in words.
        cells: NLL with its interval by bucket, or by window.
        nll: over all positions.
        seeds: the same of each seed.
    """

    title: str
    variable: str
    reading: str
    cells: tuple[Cell, ...]
    nll: str
    seeds: str


@dataclass(frozen=True, kw_only=True)
class CurveTable:
    """Rows under one heading; `past` columns, the last ones, lie past the trained length."""

    columns: tuple[str, ...]
    rows: tuple[CurveRow, ...]
    past: int


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One encoding's training, all seeds, every value as text."""

    title: str
    variable: str
    name: str
    parameters: str
    loss: str
    seeds: str
    seconds: str


def facts(result: StudyResult) -> list[tuple[str, str]]:
    """Returns the few numbers that stand under the headline."""
    protocol = result.protocol
    return [
        ("trained length", tokens(protocol.length)),
        ("read to", tokens(protocol.reach)),
        ("encodings", str(len(encodings(result)))),
        ("models", str(len(result.models))),
        ("tokens, each model", f"{protocol.tokens:,}"),
        ("documents", f"{protocol.documents:,}"),
    ]


def position_table(
    curves: Sequence[StudyCurve], protocol: StudyProtocol, *, scaled: bool = False
) -> CurveTable | None:
    """Returns readings by bucket of positions, or None without any; see `curve_row`."""
    if not curves:
        return None
    first = max(curves, key=lambda one: len(one.buckets))
    starts = [bucket.start for bucket in first.buckets]
    rows = []
    for one in curves:
        by_start = {bucket.start: bucket for bucket in one.buckets}
        found = [by_start.get(start) for start in starts]
        cells = [
            Cell(nll="–", interval="")
            if bucket is None
            else Cell(nll=number(bucket.nll), interval=interval(bucket))
            for bucket in found
        ]
        rows.append(curve_row(one, cells, scaled=scaled))
    return CurveTable(
        columns=tuple(bucket_span(bucket, protocol) for bucket in first.buckets),
        rows=tuple(rows),
        past=len(past_buckets(first, protocol.length)),
    )


def segment_table(result: StudyResult) -> CurveTable | None:
    """Returns the readings in segments, alone and with memory; None without any."""
    return position_table(segment_curves(result), result.protocol)


def window_table(result: StudyResult) -> CurveTable | None:
    """Returns NLL over all positions by window, with each seed's; None without windows."""
    lines = window_curves(result)
    windows = sorted({one.window for line in lines.values() for one in line})
    if not windows:
        return None
    rows = []
    for line in lines.values():
        by_window = {one.window: one for one in line}
        cells = [
            Cell(nll=number(found.nll), interval=seed_text(found))
            if (found := by_window.get(window))
            else Cell(nll="–", interval="")
            for window in windows
        ]
        rows.append(curve_row(line[-1], cells))
    past = sum(window > result.protocol.length for window in windows)
    return CurveTable(columns=tuple(map(tokens, windows)), rows=tuple(rows), past=past)


def curve_row(curve: StudyCurve, cells: Sequence[Cell], *, scaled: bool = False) -> CurveRow:
    """Returns one reading's row around its cells, named by its scaling if that is compared."""
    name = method_title(curve.method) if scaled else encoding_title(curve.encoding)
    style = method_style(curve.method) if scaled else encoding_style(curve.encoding)
    return CurveRow(
        title=sentence(name),
        variable=style_variable(style),
        reading=READINGS[curve.reading],
        cells=tuple(cells),
        nll=number(curve.nll),
        seeds=seed_text(curve),
    )


def seed_text(curve: StudyCurve) -> str:
    """Returns the mean of each seed, in the protocol's order; empty where there is one."""
    return ", ".join(map(number, curve.by_seed)) if len(curve.by_seed) > 1 else ""


def model_rows(result: StudyResult) -> list[ModelRow]:
    """Returns a row an encoding: what its models are, and where their training ended."""
    rows = []
    for name in dict.fromkeys(one.encoding for one in result.models):
        models = [one for one in result.models if one.encoding == name]
        ends = [one.loss[-1][1] for one in models if one.loss]
        rows.append(
            ModelRow(
                title=sentence(encoding_title(name)),
                variable=style_variable(encoding_style(name)),
                name=name,
                parameters=f"{models[0].parameters:,}",
                loss=number(sum(ends) / len(ends)) if ends else "–",
                seeds=", ".join(map(number, ends)) if len(ends) > 1 else "",
                seconds=f"{sum(one.seconds for one in models):,.0f}",
            )
        )
    return rows


def training_note(protocol: StudyProtocol) -> str:
    """Returns what every model was trained on, in words."""
    passes = protocol.tokens / protocol.train_tokens
    return (
        f"Each model read {counted(protocol.tokens, 'token')} in {protocol.steps:,} steps, "
        f"{passes:.2g} times the training text. The loss is the mean of the last steps noted, in "
        "nats per token."
    )


def protocol_rows(protocol: StudyProtocol) -> list[tuple[str, list[str], str]]:
    """Returns every field of the protocol: name, lines of its value, meaning."""
    return [
        (item.name, study_lines(getattr(protocol, item.name)), MEANINGS.get(item.name, ""))
        for item in fields(protocol)
    ]


def study_lines(value: Any) -> list[str]:
    """Returns a protocol's value as lines of text; numbers of a tuple share one.

    >>> study_lines((0, 1)), study_lines(0.002), study_lines(4096)
    (['0, 1'], ['0.002'], ['4,096'])
    """
    if isinstance(value, tuple) and all(isinstance(part, int) for part in value):
        return [", ".join(map(str, value))]
    return value_lines(value)
