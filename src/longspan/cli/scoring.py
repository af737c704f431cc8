"""The runs of `longspan stream` that read: a score, a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from longspan.adapters.load import load_model, read_config
from longspan.cli.streaming import open_stream, require_writable
from longspan.files import refuse_existing, whole_file, write_text
from longspan.report.figures import save_figure, stream_comparison, stream_score
from longspan.report.progress import shown_text
from longspan.report.stream import print_comparison, print_score
from longspan.tools.stream_compare import compare as compare_methods
from longspan.tools.stream_reach import check_fits, default_window
from longspan.tools.stream_results import to_json
from longspan.tools.stream_score import score_text
from longspan.tools.texts import read_texts

SCORE, COMPARISON, NLL, STATE = "score.json", "comparison.json", "nll.safetensors", "state"


def score(
    model: str,
    *,
    score: str,
    output: Path | None,
    resume: bool,
    save_every: int,
    as_json: bool,
    force: bool,
    tokens: int | None,
    repeat: bool,
    chunk_size: int,
    **options: Any,
) -> None:
    """Scores a text, with a folder that an interrupted run goes on from."""
    state = None if output is None else output / f"{STATE}.safetensors"
    if output is not None and state is not None:
        prepare(output, state, force=force, resume=resume)
    text = read_texts([score])[0]
    opened = open_stream(model, force=force, **options)
    with told_when_interrupted(state), shown_text() as announce:
        found, nll = score_text(
            opened,
            text,
            tokens=tokens,
            repeat=repeat,
            chunk_size=chunk_size,
            name=model,
            announce=announce,
            state=state,
            save_every=save_every,
        )
    if output is not None and state is not None:
        with whole_file(output / NLL) as temporary:
            save_file({"nll": nll}, temporary)
        save_figure(stream_score(found), output / "score.png")
        write_text(output / SCORE, to_json(found))
        for left in (state, state.with_suffix(".json")):
            left.unlink(missing_ok=True)
    if as_json:
        click.echo(to_json(found))
        return
    print_score(found)
    if output is not None:
        click.echo(f"Written: {output}")


def prepare(output: Path, state: Path, *, force: bool, resume: bool) -> None:
    """Refuses to replace a result or an unfinished run, unless told to."""
    refuse_existing(output / SCORE, force=force)
    require_writable(output)
    if not state.exists() or resume:
        return
    if not force:
        raise click.ClickException(
            f"{output} holds an unfinished score. Pass --resume to go on from it, or --force to "
            "begin anew."
        )
    state.unlink()


@contextmanager
def told_when_interrupted(state: Path | None) -> Iterator[None]:
    """Turns Ctrl-C into a line that says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "Nothing was saved."
        if state is not None and state.exists():
            kept = "The same command with --resume goes on from where it was last saved."
        raise click.ClickException(f"interrupted. {kept}") from None


def compare(
    model: str,
    *,
    score: str,
    compare: list[str] | None,
    output: Path | None,
    as_json: bool,
    original: int | None,
    force: bool,
    dtype: str,
    trust_remote_code: bool,
    sinks: list[int] | None,
    num_sink_tokens: int,
    sliding_window: int | None,
    **settings: Any,
) -> None:
    """Compares methods and numbers of sinks on a text."""
    if output is not None:
        refuse_existing(output / COMPARISON, force=force)
        require_writable(output)
    text = read_texts([score])[0]
    config = read_config(model)
    window = sliding_window or default_window(config, num_sink_tokens, original)
    check_fits(config, num_sink_tokens, window, original_max_position_embeddings=original)
    loaded, tokenizer = load_model(
        model, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    with told_when_interrupted(None), shown_text() as announce:
        found = compare_methods(
            loaded,
            tokenizer,
            text,
            methods=compare or [],
            sinks=sinks or [],
            num_sink_tokens=num_sink_tokens,
            sliding_window=window,
            original_max_position_embeddings=original,
            name=model,
            announce=announce,
            **settings,
        )
    if output is not None:
        if found.methods:
            save_figure(stream_comparison(found), output / "comparison.png")
        write_text(output / COMPARISON, to_json(found))
    if as_json:
        click.echo(to_json(found))
        return
    print_comparison(found)
    if output is not None:
        click.echo(f"Written: {output}")
