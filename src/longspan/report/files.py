"""Files appear whole or not at all: written beside, then renamed."""

from __future__ import annotations

import os
from pathlib import Path

from longspan.errors import OutputError


def replace_file(path: str | Path, data: bytes) -> Path:
    """Writes `data` to a temporary name beside `path`, then renames it over `path`.

    Returns:
        The path written.

    Raises:
        OutputError: if the folder is missing or cannot be written to; `path` is then untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {str(path)!r}: {error.strerror or error}. "
            "Give a file in an existing folder that can be written to."
        ) from error
    return path
