"""`longspan plan`: what to write into a config, from the config alone."""

from __future__ import annotations

from typing import Any

import click

from longspan.cli.options import json_option, model_argument, print_json, scaling_options


@click.command("plan", short_help="Tell what it takes to read further; reads only the config.")
@model_argument
@scaling_options
@click.option(
    "--on-conflict",
    type=click.Choice(["refuse", "factor", "length"]),
    default="refuse",
    show_default=True,
    help="What to believe where max_position_embeddings exceeds factor · original.",
)
@click.option(
    "--figure", type=click.Path(dir_okay=False), help="Draw λ of every method (.png, .svg)."
)
@json_option
def command(
    model: str,
    to: int,
    method: str | None,
    factor: float | None,
    original: int | None,
    on_conflict: Any,
    figure: str | None,
    as_json: bool,
) -> None:
    """Tell what it takes for MODEL to read further; only its config is read.

    Prints the trained length, the turns of each rotary pair within it, what each method would do
    to them, the smallest sufficient factor, the exact config to write, the memory of the
    key-value cache, and what other readers get wrong.
    """
    from longspan.adapters.load import read_config
    from longspan.tools.pairs import pair_effects
    from longspan.tools.plan import plan

    planned = plan(
        read_config(model),
        to=to,
        method=method,
        factor=factor,
        original_max_position_embeddings=original,
        on_conflict=on_conflict,
    )
    effects = pair_effects(planned)
    if figure:
        from longspan.report.figures import rescale_factors, save_figure
        from longspan.tools.pairs import comparable_scalings

        rope = planned.ropes[planned.ropes.reaching]
        drawn = rescale_factors(
            list(comparable_scalings(planned).values()),
            rotary_dim=rope.turning,
            rope_theta=rope.rope_theta,
            trained_length=planned.trained_length,
            seq_len=planned.to,
        )
        save_figure(drawn, figure)
    if as_json:
        from longspan.tools.plan_json import plan_to_json

        print_json(plan_to_json(model, planned, effects))
        return
    from longspan.report.plan import print_plan

    print_plan(model, planned, effects)
