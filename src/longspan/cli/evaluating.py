"""The run behind `longspan evaluate`: load, measure with progress, leave a folder."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from longspan.adapters.load import load_model
from longspan.errors import LongspanError
from longspan.files import refuse_existing, write_text
from longspan.report.figures import nll_by_position, passkey_grid, save_figure
from longspan.report.page import evaluation_page, write_page
from longspan.report.progress import shown_parts
from longspan.report.tables import evaluation_heading, evaluation_table, passkey_table
from longspan.tools.evaluate import evaluate
from longspan.tools.evaluation import Evaluation, to_json
from longspan.tools.ranks import Ranks
from longspan.tools.texts import read_texts

RESULT, PAGE, PARTS = "evaluation.json", "index.html", "parts"


def run(
    model: str,
    place: Path,
    *,
    force: bool,
    command: str,
    texts: tuple[str, ...],
    dtype: str,
    trust_remote_code: bool,
    passkey: tuple[int, ...],
    depths: list[float],
    original: int | None,
    quiet: bool,
    **settings: Any,
) -> Evaluation | None:
    """Measures, writes JSON, figures and page into `place`, and prints the table.

    Finished parts are kept in `place` until the result is whole; an unfinished run goes on. Of
    several ranks the first alone writes, prints and returns it.
    """
    with Ranks.from_environment() as ranks, told_of_the_end(ranks):
        with ranks.in_turn():
            refuse_existing(place / RESULT, force=force)
            forget_finished(place / RESULT, place / PARTS)
            sources = read_texts(texts)
            loaded, tokenizer = load_model(
                model, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
            )
        with nullcontext() if ranks.rank else shown_parts() as tell:
            evaluation = evaluate(
                loaded,
                tokenizer,
                sources,
                passkey=(list(passkey), depths) if passkey else None,
                original_max_position_embeddings=original,
                name=model,
                progress=tell,
                state_dir=place / PARTS,
                ranks=ranks,
                **settings,
            )
    if ranks.rank:
        return None
    write_result(evaluation, place, command)
    if not quiet:
        print_result(evaluation, place)
    return evaluation


def forget_finished(result: Path, parts: Path) -> None:
    """Removes a finished result and its parts, which --force replaces; unfinished parts stay.

    So the same command, --force and all, goes on where it was interrupted.
    """
    if result.exists():
        shutil.rmtree(parts, ignore_errors=True)
        result.unlink()


@contextmanager
def told_of_the_end(ranks: Ranks) -> Iterator[None]:
    """Lets a rank say why it ends when its launcher stops it, as it does once another has ended."""
    if ranks.size == 1:
        yield
        return

    def stop(*_: object) -> None:
        raise LongspanError(
            f"rank {ranks.rank} of {ranks.size} was stopped by its launcher, as all are when one "
            "ends. Run the same command again: it goes on from what is finished."
        )

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself, and says why
        raise
    signal.signal(signal.SIGTERM, before)


def write_result(evaluation: Evaluation, place: Path, command: str) -> None:
    """Writes the figures and the page, then the JSON that says the result is whole."""
    save_figure(nll_by_position(evaluation), place / "nll.png")
    if evaluation.passkey:
        save_figure(passkey_grid(evaluation), place / "passkey.png")
    write_page(place / PAGE, evaluation_page(evaluation, command=command))
    write_text(place / RESULT, to_json(evaluation))


def print_result(evaluation: Evaluation, place: Path) -> None:
    """Prints the tables, and where the page and the JSON are."""
    console = Console()
    console.print(evaluation_heading(evaluation))
    console.print(evaluation_table(evaluation))
    if evaluation.passkey:
        console.print(passkey_table(evaluation))
    console.print(f"Page: {place / PAGE}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"JSON: {place / RESULT}", soft_wrap=True, highlight=False, markup=False)
