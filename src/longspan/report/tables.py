"""Results as tables for the terminal; readable at 80 columns."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from longspan.report.buckets import check_measured, past_trained, within_trained
from longspan.report.passkey import (
    invalid_reasons,
    passkey_lengths,
    passkey_methods,
    tally,
    trials_of,
)
from longspan.report.wording import counted, number, rope_blocks, signed, span, tokens
from longspan.tools.evaluation import Bucket, Evaluation, MethodResult, PairedDifference, Protocol

MOST_LENGTHS = 6


def evaluation_table(evaluation: Evaluation) -> Table:
    """Returns one row a method: NLL over all, in telling buckets, and against plain RoPE.

    The buckets shown are the first, the last within the trained length, and past it the first and
    the last; the page shows all of them.

    Raises:
        ConfigError: if the evaluation holds no method or no buckets.
    """
    check_measured(evaluation)
    shown = telling_buckets(evaluation.methods[0], evaluation.protocol)
    past = past_trained(evaluation.methods[0], evaluation.protocol)
    paired = [r.versus_none for r in evaluation.methods if r.versus_none is not None]
    table = Table(
        caption=caption(paired),
        caption_justify="left",
        box=None,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        header_style="bold",
    )
    for name in ("method", "×", "all"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for bucket in shown:
        style = "cyan" if bucket in past else ""
        table.add_column(span(bucket.start, bucket.stop), justify="right", style=style)
    if paired:
        table.add_column("none − method", justify="right", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for result in evaluation.methods:
        table.add_row(*(Text(cell) for cell in cells(result, shown, bool(paired))))
    return table


def telling_buckets(result: MethodResult, protocol: Protocol) -> list[Bucket]:
    """Returns the first bucket, the last trained one, and the first and the last past it."""
    within, past = within_trained(result, protocol), past_trained(result, protocol)
    chosen = [result.buckets[0], *within[-1:], *past[:1], result.buckets[-1]]
    return list(dict.fromkeys(chosen))


def cells(result: MethodResult, shown: list[Bucket], paired: bool) -> list[str]:
    """Returns one method's row."""
    by_start = {bucket.start: number(bucket.nll) for bucket in result.buckets}
    row = [result.method, factor_text(result), number(result.nll)]
    row += [by_start.get(bucket.start, "–") for bucket in shown]
    if paired:
        row.append(difference_text(result.versus_none))
    return [*row, f"{result.seconds:.0f}"]


def factor_text(result: MethodResult) -> str:
    """Returns the factor the method ran under; a dash where it has none."""
    if result.factor is not None:
        return f"{result.factor:g}"
    factors = [block["factor"] for block in rope_blocks(result) if "factor" in block]
    return ", ".join(f"{factor:g}" for factor in dict.fromkeys(factors)) or "–"


def difference_text(difference: PairedDifference | None) -> str:
    """Returns the mean with its interval, such as "+0.51 [+0.40, +0.62]"."""
    if difference is None:
        return "–"
    return f"{signed(difference.mean)} [{signed(difference.low)}, {signed(difference.high)}]"


def evaluation_heading(evaluation: Evaluation) -> Text:
    """Returns the line to print over the table: what was measured, on what."""
    protocol = evaluation.protocol
    return Text(
        f"{protocol.model}: NLL in nats per token, {counted(protocol.documents, 'document')} of "
        f"{tokens(protocol.length)} tokens, trained to {tokens(protocol.trained_length)}"
    )


def caption(paired: list[PairedDifference]) -> Text | None:
    """Returns how to read the difference, where there is one."""
    if not paired:
        return None
    first = paired[0]
    where = span(first.start, first.stop)
    return Text(
        f"none − method: positive is better than none; same tokens at {where}, "
        f"95 % interval over {first.unit}"
    )


def passkey_table(evaluation: Evaluation) -> Table:
    """Returns found / valid trials by method and length; invalid ones are counted apart.

    Where there are more than six lengths, the shortest and the longest are shown.
    """
    lengths = passkey_lengths(evaluation)
    if len(lengths) > MOST_LENGTHS:
        lengths = [*lengths[: MOST_LENGTHS // 2], *lengths[-MOST_LENGTHS // 2 :]]
    reasons = invalid_reasons(evaluation)
    table = Table(
        title="Passkeys found, of valid trials",
        title_justify="left",
        caption=f"Invalid, and no misses: {'; '.join(reasons)}." if reasons else None,
        caption_justify="left",
        box=None,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        header_style="bold",
    )
    table.add_column("method", no_wrap=True)
    for name in (*map(tokens, lengths), "all", "ranked first", "invalid"):
        table.add_column(name, justify="right")
    for method in passkey_methods(evaluation):
        counts = [tally(trials_of(evaluation, method, length)) for length in lengths]
        whole = tally(trials_of(evaluation, method))
        row = [method, *(count.fraction for count in counts), whole.fraction]
        ranked = f"{whole.ranked_first}/{whole.valid}" if whole.valid else "–"
        table.add_row(*(Text(cell) for cell in (*row, ranked, str(whole.invalid))))
    return table
