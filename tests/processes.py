"""Runs a script in two real processes, with and without a launcher; a hang is a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

LIMIT_S = 150.0
"""Far above what any of these takes, on a busy machine too."""
PATIENCE = timedelta(seconds=60)
"""Of one rank with another, so that none is left behind where a test was stopped."""


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs `command` (a script, or -m and a module) in two processes under torch's launcher."""
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    return ended(started(*launcher, *command))


def side_by_side(script: str, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs a script twice, its rank first among the arguments; nobody stops one for the other."""
    both = [started("-W", "error", script, rank, *arguments) for rank in "01"]
    try:
        return [ended(one) for one in both]
    finally:
        for one in both:
            if one.poll() is None:
                stop(one)


def meet(place: Path, rank: int) -> None:
    """Joins the other of two processes at a place that is theirs alone."""
    where = f"file://{place / 'meet'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=PATIENCE)


def started(*arguments: str) -> subprocess.Popen[str]:
    """Starts Python with the given arguments."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
        start_new_session=True,  # so that its own children can be stopped with it
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Returns a process's end; one that does not come to it is stopped, and is a failure."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        out, err = stop(process)
        raise AssertionError(f"still running after {LIMIT_S} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kills a process and its children, and returns what it printed."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()
