"""An evaluation as rows of text for the page's tables."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from longspan.report.buckets import past_trained
from longspan.report.claims import verdict
from longspan.report.passkey import passkey_lengths, passkey_methods, tally, trials_of
from longspan.report.style import color_variable
from longspan.report.tables import factor_text
from longspan.report.wording import (
    number,
    result_title,
    sentence,
    signed,
    span,
    title_in,
    tokens,
)
from longspan.tools.evaluation import Bucket, Evaluation, MethodResult, Protocol

MEANINGS = {
    "model": "name or path as given",
    "texts": "name and sha256 of each source text",
    "length": "tokens a document",
    "documents": "how many documents",
    "bos": "whether BOS starts every document; it is never scored",
    "trained_length": "tokens the checkpoint was trained to read",
    "dtype": "of weights and activations",
    "phase": "how angles were computed",
    "bucket": "tokens a position bucket",
    "window": "tokens of a forward; none: a document is read whole",
    "stride": "tokens from one window's start to the next",
    "semantics": "which table a length-dependent method uses",
    "versions": "",
}


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method, every value as text."""

    method: str
    title: str
    variable: str
    factor: str
    attention_factor: str
    nll: str
    perplexity: str
    difference: str
    interval: str
    verdict: str
    tokens_scored: str
    seconds: str
    rope_parameters: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number with its interval, empty where there is none."""

    nll: str
    interval: str


@dataclass(frozen=True, kw_only=True)
class BucketRow:
    """One bucket over all methods; `first_past` where the trained length has just been passed."""

    positions: str
    cells: tuple[Cell, ...]
    first_past: bool


@dataclass(frozen=True, kw_only=True)
class PasskeyRow:
    """One method's rates by length, then over all, ranked first, and invalid."""

    title: str
    variable: str
    cells: tuple[str, ...]


def facts(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Returns the few numbers that stand under the headline."""
    protocol = evaluation.protocol
    return [
        ("trained length", tokens(protocol.trained_length)),
        ("measured length", tokens(protocol.length)),
        ("documents", f"{protocol.documents:,}"),
        ("tokens scored, each method", f"{evaluation.methods[0].tokens_scored:,}"),
        ("methods", str(len(evaluation.methods))),
    ]


def method_rows(evaluation: Evaluation) -> list[MethodRow]:
    """Returns a row for each method, in the order they ran."""
    return [method_row(result) for result in evaluation.methods]


def method_row(result: MethodResult) -> MethodRow:
    """Returns one method's numbers as text."""
    paired = result.versus_none
    return MethodRow(
        method=result.method,
        title=sentence(result_title(result)),
        variable=color_variable(result.method),
        factor=factor_text(result),
        attention_factor=f"{result.attention_factor:.4g}",
        nll=f"{result.nll:.3f}",
        perplexity=f"{result.perplexity:,.2f}",
        difference="–" if paired is None else signed(paired.mean),
        interval="" if paired is None else f"{signed(paired.low)} to {signed(paired.high)}",
        verdict="" if paired is None else verdict(paired).replace("noise", "within noise"),
        tokens_scored=f"{result.tokens_scored:,}",
        seconds=f"{result.seconds:,.1f}",
        rope_parameters=json.dumps(result.rope_parameters, ensure_ascii=False, default=str),
    )


def paired_note(evaluation: Evaluation) -> str:
    """Returns how to read the paired difference; empty where none was measured."""
    for result in evaluation.methods:
        if result.versus_none is not None:
            paired = result.versus_none
            return (
                f"The difference is the mean of the NLL of {title_in(evaluation, paired.baseline)} "
                f"minus the method's on the same tokens at {span(paired.start, paired.stop)}, in "
                f"nats: above 0 the method is better. Its 95 % interval is over {paired.unit}; "
                "within noise means that the interval holds 0."
            )
    return ""


def bucket_rows(evaluation: Evaluation) -> list[BucketRow]:
    """Returns a row for each bucket of the first method, with every method's number."""
    past_buckets = past_trained(evaluation.methods[0], evaluation.protocol)
    rows, was_past = [], False
    for bucket in evaluation.methods[0].buckets:
        past = bucket in past_buckets
        cells = tuple(bucket_cell(result, bucket.start) for result in evaluation.methods)
        positions = span(bucket.start, bucket.stop)
        rows.append(BucketRow(positions=positions, cells=cells, first_past=past and not was_past))
        was_past = past
    return rows


def bucket_cell(result: MethodResult, start: int) -> Cell:
    """Returns one method's number for the bucket that starts at `start`."""
    for bucket in result.buckets:
        if bucket.start == start:
            return Cell(nll=number(bucket.nll), interval=interval(bucket))
    return Cell(nll="–", interval="")


def interval(bucket: Bucket) -> str:
    """Returns a bucket's interval as text; empty where there is none."""
    if bucket.low is None or bucket.high is None:
        return ""
    return f"{number(bucket.low)}–{number(bucket.high)}"


def passkey_rows(evaluation: Evaluation) -> list[PasskeyRow]:
    """Returns each method's rates."""
    return [passkey_row(evaluation, method) for method in passkey_methods(evaluation)]


def passkey_row(evaluation: Evaluation, method: str) -> PasskeyRow:
    """Returns one method's rates by length and over all."""
    whole = tally(trials_of(evaluation, method))
    by_length = [
        tally(trials_of(evaluation, method, length)).fraction
        for length in passkey_lengths(evaluation)
    ]
    ranked = f"{whole.ranked_first}/{whole.valid}" if whole.valid else "–"
    return PasskeyRow(
        title=sentence(title_in(evaluation, method)),
        variable=color_variable(method),
        cells=(*by_length, whole.fraction, ranked, str(whole.invalid)),
    )


def protocol_rows(protocol: Protocol) -> list[tuple[str, list[str], str]]:
    """Returns every field of the protocol: name, lines of its value, meaning."""
    return [
        (item.name, value_lines(getattr(protocol, item.name)), MEANINGS.get(item.name, ""))
        for item in fields(protocol)
    ]


def value_lines(value: Any) -> list[str]:
    """Returns a protocol's value as lines of text.

    >>> value_lines(12_288), value_lines(True), value_lines((("torch", "2.13"),))
    (['12,288'], ['yes'], ['torch 2.13'])
    """
    if value is None:
        return ["none"]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if isinstance(value, int):
        return [f"{value:,}"]
    if isinstance(value, tuple):
        return [" ".join(map(str, part)) for part in value] or ["–"]
    return [str(value)]
