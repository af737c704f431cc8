"""The run behind `longspan finetune`: load, train with progress, leave a folder."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from longspan.adapters.load import load_model, read_config
from longspan.cli.evaluating import told_of_the_end
from longspan.errors import OutputError
from longspan.files import refuse_folder
from longspan.report.finetune import finetuning_heading, finetuning_table
from longspan.report.progress import shown_parts
from longspan.tools.finetune import finetune
from longspan.tools.finetune_results import FineTuning
from longspan.tools.finetune_saving import save_finetuned
from longspan.tools.plan import plan
from longspan.tools.ranks import Ranks, told_of_loss
from longspan.tools.texts import read_texts
from longspan.training.processes import on_cpu_only


def run(
    model: str,
    place: Path,
    *,
    to: int,
    method: str | None,
    factor: float | None,
    original: int | None,
    texts: tuple[str, ...],
    adapter: bool,
    force: bool,
    trust_remote_code: bool,
    quiet: bool,
    **settings: Any,
) -> FineTuning | None:
    """Trains, writes the folder, prints how it went, and returns the result.

    The state of an unfinished run lies beside `place`. Of several processes the first alone writes,
    prints and returns it.
    """
    from accelerate import PartialState

    processes = PartialState(cpu=on_cpu_only())
    rank, size = processes.process_index, processes.num_processes
    scaling = {"to": to, "method": method, "factor": factor}
    scaling["original_max_position_embeddings"] = original
    with told_of_loss(rank, size), processes.main_process_first():
        state = state_beside(place)
        refuse_folder(place, force=force)
        plan(read_config(model), **scaling)  # refuses before any weight is read
        sources = read_texts(texts)
        loaded, tokenizer = load_model(model, trust_remote_code=trust_remote_code)
    ending = told_of_the_end(Ranks(rank, size))
    with ending, shown_parts() if rank == 0 else nullcontext() as tell:
        tuned = finetune(
            loaded,
            tokenizer,
            sources,
            name=model,
            base=model,
            progress=tell,
            state_dir=state,
            **scaling,
            **settings,
        )
    if not processes.is_main_process:
        return None
    save_finetuned(tuned, tokenizer, place, adapter=adapter, force=force)
    shutil.rmtree(state, ignore_errors=True)
    if not quiet:
        print_result(tuned.result, place)
    return tuned.result


def state_beside(place: Path) -> Path:
    """Returns the folder that holds an unfinished run.

    Raises:
        OutputError: if `place` has no name for it to have too, such as the folder one is in.
    """
    if place.name in ("", ".."):
        raise OutputError(f"{place} cannot be replaced as a whole. Name a folder of its own.")
    return place.with_name(f"{place.name}.training")


def print_result(result: FineTuning, place: Path) -> None:
    """Prints how the loss went, the held-out likelihood, and where the folder is."""
    console = Console()
    console.print(finetuning_heading(result), highlight=False, markup=False)
    if result.evaluations:
        console.print(finetuning_table(result))
    console.print(f"Written: {place}", soft_wrap=True, highlight=False, markup=False)
