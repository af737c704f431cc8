"""`longspan finetune`: train an extended model on long text, as a folder that loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from longspan.cli.options import (
    Tokens,
    json_option,
    model_argument,
    scaling_options,
    texts_option,
    trust_option,
)


class Counts(click.ParamType):
    """Several counts, separated by commas."""

    name = "STEP,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Returns the counts in order; none of an empty text."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",") if word.strip()]
        if not all(word.isdecimal() for word in words):
            self.fail(f"{value!r} is not a list of counts, such as 0,50,100.", param, ctx)
        return tuple(int(word) for word in words)


@click.command("finetune", short_help="Train an extended checkpoint on long text.")
@model_argument
@scaling_options
@texts_option
@click.option("--steps", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--length",
    type=Tokens(),
    help="Tokens a row; --to unless given; with --pose the trained length, at most 4,096.",
)
@click.option("--pose", is_flag=True, help="Skip positions, so that shorter rows train far ones.")
@click.option("--packing", is_flag=True, help="Rows of several texts each, kept apart.")
@click.option("--lora", "lora_rank", type=int, help="Train adapters of this rank, not all weights.")
@click.option("--batch-size", type=int, default=1, show_default=True, help="Rows of a forward.")
@click.option(
    "--gradient-accumulation",
    type=int,
    default=1,
    show_default=True,
    help="Forwards of a step.",
)
@click.option("--learning-rate", type=float, default=2e-5, show_default=True)
@click.option("--warmup-steps", type=int, help="20, or a tenth of --steps where that is less.")
@click.option(
    "--schedule",
    type=click.Choice(["constant", "cosine"]),
    default="constant",
    show_default=True,
    help="Of the learning rate, after the warm-up.",
)
@click.option("--weight-decay", type=float, default=0.0, show_default=True)
@click.option(
    "--max-grad-norm",
    type=float,
    default=1.0,
    show_default=True,
    help="The gradient's norm is clipped to it; inf never clips.",
)
@click.option("--gradient-checkpointing", is_flag=True, help="Less memory, about a third slower.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of rows, skips and dropout.")
@click.option(
    "--evaluate-at",
    type=Counts(),
    default="",
    help="Steps done, such as 0,50,100, when held-out documents are measured.",
)
@click.option("--evaluation-length", type=Tokens(), help="Tokens of each; --to unless given.")
@click.option("--evaluation-documents", type=int, default=1, show_default=True)
@click.option("--bucket", type=Tokens(), help="Tokens a position bucket of an evaluation.")
@click.option(
    "--save-every",
    type=int,
    default=50,
    show_default=True,
    help="Steps from one kept state to the next.",
)
@click.option("--adapter", is_flag=True, help="Write the adapter alone, with the rope it needs.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="The folder to write; OUTPUT.training beside it holds an unfinished run.",
)
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@trust_option
@json_option
def command(model: str, output: Path, adapter: bool, as_json: bool, **options: Any) -> None:
    """Extend MODEL to --to tokens and train it on long text, all weights or adapters.

    Writes a folder that plain transformers loads, whole or not at all, with the result in
    finetune.json. An interrupted run goes on from its kept state with the same command. Several
    processes share each step when started by `accelerate launch` or as
    `torchrun --nproc-per-node 2 -m longspan finetune …`.
    """
    if adapter and options["lora_rank"] is None:
        raise click.UsageError("--adapter writes what --lora RANK trains; give that too.")
    from longspan.cli.finetuning import run

    result = run(model, output, adapter=adapter, quiet=as_json, **options)
    if as_json and result is not None:
        from longspan.tools.finetune_results import finetuning_to_json

        click.echo(finetuning_to_json(result))
