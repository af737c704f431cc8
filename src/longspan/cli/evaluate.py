"""`longspan evaluate`: measure methods on long documents, with a page that shows it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from longspan.cli.options import (
    Fractions,
    Methods,
    Tokens,
    dtype_option,
    json_option,
    model_argument,
    original_option,
    texts_option,
    trust_option,
)

DEPTHS = "0,0.11,0.22,0.33,0.44,0.56,0.67,0.78,0.89,1"


@click.command("evaluate", short_help="Measure methods on long documents.")
@model_argument
@texts_option
@click.option(
    "--length",
    type=Tokens(),
    help="Tokens of every document. [default: twice the trained length]",
)
@click.option(
    "--methods",
    type=Methods(),
    default="none,linear,ntk,yarn",
    show_default=True,
    help="none (as it stands), linear (pi), ntk, dynamic, ntk-by-parts, yarn, llama3, longrope.",
)
@click.option("--factor", type=float, help="Of every method; length / trained length unless given.")
@original_option
@click.option(
    "--documents", type=int, help="How many. [default: all that the texts hold, at most 64]"
)
@click.option("--bucket", type=Tokens(), help="Tokens a position bucket.")
@click.option("--window", type=Tokens(), help="Read documents in windows of this many tokens …")
@click.option("--stride", type=Tokens(), help="… this many tokens apart.")
@click.option(
    "--passkey",
    type=Tokens(),
    multiple=True,
    help="Hide a key in a prompt of this many tokens. Repeat for more.",
)
@click.option("--depths", type=Fractions(), default=DEPTHS, help="Where the keys are hidden.")
@click.option(
    "--phase",
    type=click.Choice(["float64", "hf_float32"]),
    default="float64",
    show_default=True,
    help="Exact angles, or transformers' own rounding.",
)
@click.option("--allow-short", is_flag=True, help="Measure within the trained length too.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the page, figures, JSON and finished parts "
    "[default: longspan-results/MODEL-LENGTH, or MODEL].",
)
@click.option("--force", is_flag=True, help="Replace a finished result.")
@dtype_option
@trust_option
@json_option
def command(model: str, output: Path | None, force: bool, as_json: bool, **options: Any) -> None:
    """Measure scaling methods on documents longer than MODEL was trained to read.

    One forward a document and method, on the same tokens; the negative log-likelihood by
    position, passkey retrieval by depth and length, a table, figures and a page. An interrupted
    run goes on from its finished parts with the same command. Several processes share the work
    when started as `torchrun --nproc-per-node 2 -m longspan evaluate …`.
    """
    from longspan.cli.evaluating import run

    place = output or default_output(model, options["length"])
    evaluation = run(model, place, force=force, command=typed_command(), quiet=as_json, **options)
    if as_json and evaluation is not None:
        from longspan.tools.evaluation import to_json

        click.echo(to_json(evaluation))


def default_output(model: str, length: int | None) -> Path:
    """Returns the folder a model's results go to unless another is named."""
    name = Path(model).name
    return Path("longspan-results") / (name if length is None else f"{name}-{length}")


def typed_command() -> str:
    """Returns the command as it can be typed again."""
    return shlex.join(["longspan", *sys.argv[1:]])
