"""`longspan sinks`: how much attention the first tokens get, by layer and head."""

from __future__ import annotations

from pathlib import Path

import click

from longspan.cli.options import (
    Tokens,
    dtype_option,
    json_option,
    model_argument,
    trust_option,
)


@click.command("sinks", short_help="Show how much attention the first tokens get.")
@model_argument
@click.option("--text", default="python-docs", show_default=True, help="What to read.")
@click.option("--length", type=Tokens(), default=1024, show_default=True, help="Tokens to read.")
@click.option(
    "--num-sink-tokens", type=int, default=4, show_default=True, help="How many first tokens count."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw a heat map (.png, .svg).",
)
@click.option("--force", is_flag=True, help="Replace an existing figure.")
@dtype_option
@trust_option
@json_option
def command(
    model: str,
    text: str,
    length: int,
    num_sink_tokens: int,
    output: Path | None,
    force: bool,
    dtype: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Show the attention mass every head of MODEL puts on the first tokens of a text.

    Streaming without those tokens breaks the heads that lean on them.
    """
    import torch

    from longspan.adapters.load import load_model
    from longspan.files import refuse_existing
    from longspan.report.figures import save_figure, sink_heatmap
    from longspan.report.sinks import print_sinks
    from longspan.tools.sinks import sinks, to_json
    from longspan.tools.texts import read_texts

    if output is not None:
        refuse_existing(output, force=force)
    source = read_texts([text])[0]
    loaded, tokenizer = load_model(
        model, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    found = sinks(
        loaded, tokenizer, source, length=length, num_sink_tokens=num_sink_tokens, name=model
    )
    if output is not None:
        uniform = sum(found.uniform) / len(found.uniform)
        save_figure(sink_heatmap(found.mass, num_sink_tokens, uniform), output)
    if as_json:
        click.echo(to_json(found))
        return
    print_sinks(found)
    if output is not None:
        click.echo(f"Figure: {output}")
