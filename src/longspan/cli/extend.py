"""`longspan extend`: a checkpoint that reads further, as a folder."""

from __future__ import annotations

from pathlib import Path

import click

from longspan.cli.options import (
    dtype_option,
    json_option,
    model_argument,
    print_json,
    scaling_options,
    trust_option,
)


@click.command("extend", short_help="Write a checkpoint that reads further.")
@model_argument
@scaling_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to write. Without it the model is only extended in memory and proven.",
)
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@dtype_option
@trust_option
@json_option
def command(
    model: str,
    to: int,
    method: str | None,
    factor: float | None,
    original: int | None,
    output: Path | None,
    force: bool,
    dtype: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Extend MODEL and prove it: its live frequencies are read back and must be the planned ones.

    With -o, writes a folder that plain transformers loads with the same logits, whole or not at
    all.
    """
    import torch

    from longspan.adapters.load import load_model, read_config
    from longspan.files import refuse_folder
    from longspan.tools.extend import apply_plan, save_extended
    from longspan.tools.plan import plan

    if output is not None:
        refuse_folder(output, force=force)
    settings = {"method": method, "factor": factor, "original_max_position_embeddings": original}
    plan(read_config(model), to=to, **settings)  # refuses before any weight is read
    loaded, tokenizer = load_model(
        model, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    planned = plan(loaded.config, to=to, **settings)
    extended = apply_plan(loaded, planned)
    if output is not None:
        save_extended(extended, tokenizer, planned, output, force=force)
    if as_json:
        print_json(
            {
                "model": model,
                "output": None if output is None else str(output),
                "method": planned.method,
                "factor": planned.factor,
                "to": planned.to,
                "rope_parameters": planned.changed["rope_parameters"],
                "live_frequencies": "read back, as planned",
            }
        )
        return
    click.echo(
        f"{model}: {planned.trained_length} → {planned.to} tokens with {planned.method}, factor "
        f"{planned.factor:g}. Live frequencies read back: as planned."
    )
    if output is not None:
        click.echo(f"Written: {output}")
