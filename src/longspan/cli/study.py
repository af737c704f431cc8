"""`longspan study`: train small models that differ in their position encoding, and read on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from longspan.cli.evaluate import typed_command
from longspan.cli.options import Methods, Tokens, json_option, texts_option
from longspan.cli.stream import Numbers
from longspan.errors import ConfigError
from longspan.tools.study_plan import ModelSizes, variants

SIZES = ModelSizes()


class Encodings(click.ParamType):
    """Several position encodings, separated by commas."""

    name = "ENCODING,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        """Returns the names in order; a misspelt one gets the nearest."""
        names = [word.strip() for word in str(value).split(",") if word.strip()]
        try:
            return [one.name for one in variants(names)]
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def size(flag: str, name: str, about: str) -> Any:
    """Returns the option of one of the models' sizes."""
    return click.option(
        flag,
        name,
        type=click.IntRange(min=1),
        metavar="N",
        default=getattr(SIZES, name),
        show_default=True,
        help=about,
    )


@click.command("study", short_help="Compare position encodings on small models.")
@click.option(
    "--encodings",
    type=Encodings(),
    default="rope,alibi,t5,sinusoidal,none,transformer_xl",
    show_default=True,
    help="Of rope, alibi, t5, shaw, transformer_xl, sinusoidal, learned, none. With +memory behind "
    "it an encoding remembers earlier segments; transformer_xl does so, unless -memory is behind.",
)
@texts_option
@click.option(
    "--length", type=Tokens(), default=256, show_default=True, help="Tokens to train on at once."
)
@click.option(
    "--reach",
    type=click.IntRange(min=2),
    metavar="N",
    default=16,
    show_default=True,
    help="Times the length that a held-out document is long.",
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Of each training …")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="M",
    help="… or for all trainings together.",
)
@click.option(
    "--seeds",
    type=Numbers(),
    default="0,1",
    show_default=True,
    help="One model of each encoding a seed.",
)
@click.option(
    "--methods",
    type=Methods(),
    default="linear,ntk,yarn",
    show_default=True,
    help="Scalings to read the RoPE models under, without more training; none for plain only.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(min=256),
    metavar="N",
    default=512,
    show_default=True,
    help="Of the tokenizer trained on the texts; 256 is bytes.",
)
@click.option("--documents", type=click.IntRange(min=1), metavar="N", help="Held out at most.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    default=8,
    show_default=True,
    help="Rows a step.",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    default=2e-3,
    show_default=True,
    help="At its peak.",
)
@click.option(
    "--memory",
    "memory_length",
    type=Tokens(),
    help="Tokens remembered, where a model remembers. [default: the length]",
)
@size("--hidden-size", "hidden_size", "Of every model.")
@size("--intermediate-size", "intermediate_size", "Of every model.")
@size("--layers", "num_hidden_layers", "Of every model.")
@size("--heads", "num_attention_heads", "Of every model.")
@size("--kv-heads", "num_key_value_heads", "Of every model.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the page, figures, JSON and finished parts "
    "[default: longspan-results/study-LENGTH].",
)
@click.option("--force", is_flag=True, help="Replace a finished study, its parts too.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, output: Path | None, force: bool, as_json: bool, **options: Any
) -> None:
    """Train small models that differ only in their position encoding, and read far beyond.

    All are trained alike on short rows, then read the same held-out documents: whole, in longer
    windows, in segments with and without memory, and under RoPE scalings. Tables, figures, a page.
    An interrupted study goes on from its finished parts with the same command. Several processes
    share the work when started as `torchrun --nproc-per-node 2 -m longspan study …`.
    """
    refuse_unread(ctx)
    from longspan.cli.studying import run

    place = output or Path("longspan-results") / f"study-{options['length']}"
    result = run(place, force=force, command=typed_command(), quiet=as_json, **options)
    if as_json and result is not None:
        from longspan.tools.study_results import to_json

        click.echo(to_json(result))


def refuse_unread(ctx: click.Context) -> None:
    """Refuses options that contradict each other, or that no model of the study would read."""
    given = {
        str(option.name)
        for option in ctx.command.params
        if ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    }
    if len(given & {"steps", "minutes"}) != 1:
        raise click.UsageError(
            "give either --steps, of each training, or --minutes, for all of them together.", ctx
        )
    chosen = variants(ctx.params["encodings"])
    if "methods" in given and not any(
        one.encoding == "rope" and not one.remembers for one in chosen
    ):
        raise click.UsageError(
            "--methods does nothing without rope: they scale RoPE. Add rope to --encodings.", ctx
        )
    if "memory_length" in given and not any(one.remembers for one in chosen):
        raise click.UsageError(
            "--memory does nothing here: no model remembers. Add transformer_xl or rope+memory to "
            "--encodings.",
            ctx,
        )
