"""Times attention on a CUDA GPU against FlexAttention, flash-attn and SDPA, correctness first.

    python benchmarks/gpu.py --json gpu.json

Without a GPU it exits with 2, and with 1 where longspan is wrong on it. What does not fit in the
memory or in the minutes is listed as left out. Times are medians between CUDA events, contenders in
turn. Masks and block masks are built beforehand, but for longspan's flex, which builds its own in
every call. Peaks are torch's allocated bytes above q, k and v, ready masks included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import click
import psutil
import torch
from rich.console import Console

from gpu_checks import Check, Chosen, checked, checks, choices
from gpu_peers import tables
from gpu_rotation import IMPLS, Rotations
from gpu_session import LeftOut, Session, Setting
from longspan.files import write_text
from peers import DTYPES, doublings
from timing import show_table, surroundings

ROTATED = 4096  # tokens
GPU_ONLY = ("flash-attn", "triton")  # packages
# One function is compiled for every mask, dtype and direction here; torch stops at 8 by default.
torch._dynamo.config.recompile_limit = 64


def settings(lengths: Sequence[int]) -> Iterator[Setting]:
    """Yields what is timed, the most telling first."""
    second = lengths[min(1, len(lengths) - 1)]
    for table, dtype, some in (
        ("window", "bfloat16", lengths),
        ("ALiBi", "bfloat16", lengths[:4]),
        ("T5", "bfloat16", (second,)),
        ("soft cap", "bfloat16", (second,)),
        ("window", "float32", lengths),
    ):
        for backward in (False, True):
            yield from (Setting(table, tokens, dtype, backward) for tokens in some)


def check(device: str, console: Console) -> list[Check | Chosen]:
    """Prints who is right and what "auto" takes, and returns it."""
    found = [*checks(device)]
    for dtype in DTYPES:
        rotations = Rotations(256, dtype, device)
        for impl in IMPLS:
            error = partial(rotations.error, impl)
            found.append(checked(error, "rotation", f"longspan {impl}", dtype))
    chosen = [*choices(device)]
    columns = "against float64", "", "dtype", "max error", ""
    show_table(console, "correctness", columns, (cells(each) for each in found))
    for each in found:
        if each.refusal:
            line = f"{each.what}, {each.contender}, {each.dtype}: {each.refusal}"
            console.print(line, markup=False, highlight=False)
    columns = "what auto takes", "takes", "wanted", ""
    show_table(
        console, "choices", columns, ((c.what, c.impl, c.wanted, verdict(c)) for c in chosen)
    )
    return [*found, *chosen]


def cells(check: Check) -> tuple[str, ...]:
    """Returns one check as a row of a table."""
    error = "refused" if check.error is None else f"{check.error:.1e}"
    return check.what, check.contender, check.dtype, error, verdict(check)


def verdict(each: Check | Chosen) -> str:
    """Returns the word to look for."""
    return "OFF" if each.off else ""


def time_rotation(session: Session) -> None:
    """Times the rotation of one layer's q and k."""
    for dtype in DTYPES:
        what = f"rotation of q [1, 32, {ROTATED}, 128] and k [1, 8, {ROTATED}, 128], {dtype}"
        if session.late:
            session.left_out.append(LeftOut(what, "all", "no time left"))
        else:
            session.time(what, Rotations(ROTATED, dtype, session.device).calls(), {})


def machine(device: str) -> tuple[str, float]:
    """Returns the device's name and its free bytes."""
    if device == "cuda":
        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    return "CPU", psutil.virtual_memory().available


def installed(package: str) -> bool:
    """Returns whether a package is there, by its own name."""
    return any(True for _ in distributions(name=package))


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--minutes", default=8.0, show_default=True, help="What is later is left out.")
@click.option("--shortest", default=4096, show_default=True, help="Tokens.")
@click.option("--longest", default=131072, show_default=True, help="Tokens.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
def main(path: Path | None, minutes: float, shortest: int, longest: int, device: str) -> None:
    """Times attention over [1, 8, N, 64] on a GPU."""
    ends = time.monotonic() + 60 * minutes
    if device == "cuda" and not torch.cuda.is_available():
        click.echo("This benchmark needs a CUDA GPU, and torch finds none here.", err=True)
        sys.exit(2)
    console, (device_name, memory) = Console(width=110), machine(device)
    packages = ["torch", "longspan", *filter(installed, GPU_ONLY)]
    facts = {"device": device_name, "memory_gb": memory / 1e9, **surroundings(packages)}
    console.print(facts)
    checked = check(device, console)
    session = Session(device, console, memory, ends)

    def save() -> None:
        lists = {"checks": checked, "rows": session.rows, "left_out": session.left_out}
        found = {key: [asdict(each) for each in some] for key, some in lists.items()}
        if path is not None:
            write_text(path, json.dumps({"protocol": facts, **found}, indent=1) + "\n")

    time_rotation(session)
    contenders = tables(device)
    for setting in settings(doublings(shortest, longest)):
        session.measure(setting, contenders[setting.table])
        save()  # a run that is cut short keeps what it has
    for each in session.left_out:
        line = f"left out: {each.setting}, {each.contender}: {each.why}"
        console.print(line, markup=False, highlight=False)
    off = [each for each in checked if each.off]
    console.print(f"{len(off)} of {len(checked)} checks of longspan are off.")
    sys.exit(1 if off else 0)


if __name__ == "__main__":
    main()
