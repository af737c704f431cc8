"""pip and npm as downloaders of one pinned archive, nothing installed and nothing run.

Wheels alone are asked of pip, because for a source archive pip would run its setup.py; npm is told
to ignore scripts. Which registry is asked is the installer's own setting.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from longspan.errors import InputError

Installer = Literal["pip", "npm"]

_POLL_S = 0.2


def run_installer(
    installer: Installer, requirement: str, folder: Path, on_bytes: Callable[[int], None]
) -> None:
    """Downloads an archive into `folder`, which is also the installer's scratch space.

    Args:
        installer: "pip" or "npm".
        requirement: the exact version, in the installer's words.
        folder: an empty folder.
        on_bytes: called every so often with the bytes now in `folder`.

    Raises:
        InputError: if the installer is missing or fails, with its own first complaint.
    """
    command = _command(installer, requirement, folder)
    scratch = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **scratch},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while _still_runs(process):
                on_bytes(_bytes_under(folder))
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if process.returncode:
        raise InputError(_failure(command, said))


def _command(installer: Installer, requirement: str, folder: Path) -> list[str]:
    if installer == "pip":
        options = "--no-deps --only-binary=:all: --no-cache-dir --no-input"
        quiet = "--disable-pip-version-check --progress-bar=off"
        command = [sys.executable, "-m", "pip", "download", *options.split(), *quiet.split()]
        return [*command, "--dest", str(folder), requirement]
    npm = shutil.which("npm")
    if npm is None:
        raise InputError(
            f"npm is needed to download {requirement}, and is not on the PATH. "
            "Install Node.js, or give a text file of your own."
        )
    return [npm, "pack", "--ignore-scripts", "--pack-destination", str(folder), requirement]


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except OSError:  # the installer has just moved it
                continue
    return total


def _failure(command: Sequence[str], said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return (
            "this Python has no pip to download with. "
            f"Run `{command[0]} -m ensurepip`, then run again."
        )
    complaints = [line for line in lines if line.lower().startswith(("error", "npm err"))]
    reason = (complaints or lines[-1:] or ["it said nothing"])[0]
    return (
        f"could not download {command[-1]}: {reason.rstrip('.')}. "
        "Check the network and the installer's registry settings, then run again."
    )
