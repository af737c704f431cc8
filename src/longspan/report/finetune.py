"""A fine-tuning for the terminal: one line, and the held-out likelihood by position."""

from __future__ import annotations

from rich.table import Table

from longspan.report.wording import number, span
from longspan.tools.finetune_results import FineTuning

MOST_ROWS = 16


def finetuning_heading(result: FineTuning) -> str:
    """Returns what was trained, and how the loss went."""
    protocol, first, last = result.protocol, result.curve[0], result.curve[-1]
    what = "all weights" if protocol.lora_rank is None else f"LoRA rank {protocol.lora_rank}"
    seconds = sum(step.seconds for step in result.curve)
    return (
        f"{protocol.model}: {protocol.trained_length} → {protocol.to} tokens with "
        f"{protocol.method}, factor {protocol.factor:g}. {what}, {protocol.steps} steps of "
        f"{protocol.rows_per_step} × {protocol.length} tokens, {seconds:.0f} s: loss "
        f"{number(first.loss)} → {number(last.loss)}."
    )


def finetuning_table(result: FineTuning) -> Table:
    """Returns the mean NLL of held-out documents, one row a position bucket, one column a time.

    Of many buckets every other one is shown, or every fourth, and so on; the last always is.
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("NLL at positions", no_wrap=True)
    for one in result.evaluations:
        table.add_column(f"{one.step} steps", justify="right", no_wrap=True)
    table.add_row("all", *(number(one.nll) for one in result.evaluations))
    buckets = result.evaluations[0].buckets
    stride = -(-len(buckets) // MOST_ROWS)
    for place in sorted({*range(0, len(buckets), stride), len(buckets) - 1}):
        shown = [number(one.buckets[place].nll) for one in result.evaluations]
        table.add_row(span(buckets[place].start, buckets[place].stop), *shown)
    return table
