"""The run behind `longspan study`: train and read with progress, leave a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from longspan.cli.evaluating import forget_finished, told_of_the_end
from longspan.files import refuse_existing
from longspan.report.progress import shown_parts
from longspan.report.study import PAGE, RESULT, write_study
from longspan.report.study_tables import print_study
from longspan.tools.ranks import Ranks
from longspan.tools.study import study
from longspan.tools.study_plan import ModelSizes
from longspan.tools.study_results import StudyResult
from longspan.tools.texts import read_texts

STATE = "state"
LONGEST_TRAINING = timedelta(days=7)  # a rank waits for whole trainings of another


def run(
    place: Path,
    *,
    force: bool,
    command: str,
    texts: tuple[str, ...],
    quiet: bool,
    **settings: Any,
) -> StudyResult | None:
    """Trains and reads, writes JSON, figures and page into `place`, and prints the tables.

    Finished parts are kept in `place`; an unfinished study goes on from them. Of several ranks the
    first alone writes, prints and returns the result.
    """
    names = {field.name for field in fields(ModelSizes)}
    sizes = ModelSizes(**{name: settings.pop(name) for name in names})
    joining = Ranks.from_environment(timeout=LONGEST_TRAINING)
    with joining as ranks, told_of_the_end(ranks), told_when_interrupted(place):
        with ranks.in_turn():
            refuse_existing(place / RESULT, force=force)
            forget_finished(place / RESULT, place / STATE)
            sources = read_texts(texts)
        with nullcontext() if ranks.rank else shown_parts() as tell:
            result = study(
                sources,
                sizes=sizes,
                state_dir=place / STATE,
                progress=tell,
                ranks=ranks,
                **settings,
            )
    if ranks.rank:
        return None
    write_study(place, result, force=force, command=command)
    if not quiet:
        print_result(result, place)
    return result


def print_result(result: StudyResult, place: Path) -> None:
    """Prints the tables, and where the page and the JSON are."""
    console = Console()
    print_study(result, console)
    for what, name in (("Page", PAGE), ("JSON", RESULT)):
        console.print(f"{what}: {place / name}", soft_wrap=True, highlight=False, markup=False)


@contextmanager
def told_when_interrupted(place: Path) -> Iterator[None]:
    """Turns Ctrl-C into a line that says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.ClickException(
            f"interrupted. Finished parts are kept in {place / STATE}; the same command goes on "
            "from them."
        ) from None
