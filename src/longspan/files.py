"""Writes that are whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longspan.errors import OutputError

MODEL_FILES = ("config.json", "adapter_config.json")


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name beside `path`, then renames it.

    Raises:
        OutputError: if the place cannot be written.
    """
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it there on success, removes it on failure."""
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent
        )
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.chmod(0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path, *, force: bool = False, needs: int = 0) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; renames it there on success.

    Args:
        path: the folder to make.
        force: whether an existing one is replaced, after the new one is whole.
        needs: bytes about to be written, checked against the free space first.

    Raises:
        OutputError: if `path` exists, or may not be replaced (`refuse_folder`), cannot be written,
            or the disk is too full.
    """
    refuse_folder(path, force=force)
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        require_space(path.parent, needs)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield temporary
            temporary.chmod(0o755)
            for file in temporary.rglob("*"):  # some writers leave theirs to the owner alone
                file.chmod(0o755 if file.is_dir() else 0o644)
            _replace_folder(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(new: Path, path: Path) -> None:
    if not path.exists():
        os.rename(new, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    os.rename(path, old / path.name)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(old / path.name, path)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuses to overwrite what is there, unless told to."""
    if path.exists() and not force:
        raise OutputError(f"{path} exists. Pass --force to replace it, or name another place.")


def refuse_folder(path: Path, *, force: bool) -> None:
    """Refuses to replace a folder, unless told to and it is a model's alone.

    Raises:
        OutputError: if `path` exists and `force` is false; and even then if it is a file, holds
            no model, or has the current folder or the user's own within it.
    """
    refuse_existing(path, force=force)
    if not path.exists():
        return
    for held, what in ((Path.cwd(), "the folder you are in"), (Path.home(), "your home folder")):
        if held.resolve().is_relative_to(path.resolve()):
            raise OutputError(f"{path} holds {what} and is not replaced. Name one of its own.")
    if not path.is_dir():
        raise OutputError(f"{path} is a file and is not replaced by a folder. Name another place.")
    if any(path.iterdir()) and not any((path / name).exists() for name in MODEL_FILES):
        raise OutputError(
            f"{path} holds no model ({' or '.join(MODEL_FILES)}), so it is not replaced. Name "
            "another place, or remove it yourself."
        )


def require_space(folder: Path, needs: int) -> None:
    """Refuses to begin a write that the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needs > free:
        raise OutputError(
            f"{folder} has {free / 1e9:.1f} GB free, but {needs / 1e9:.1f} GB are needed. "
            "Free some space, or name another place."
        )


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write {path}: {reason}. Name another place.") from error
