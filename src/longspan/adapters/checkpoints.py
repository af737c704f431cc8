"""Where a named checkpoint lies: a folder, a .gguf file, the hub, or an embedded model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from longspan.adapters.embedded import embedded_models, fetch
from longspan.adapters.zoo import is_zoo, zoo_folder
from longspan.errors import InputError, did_you_mean

LOAD_ERRORS = (
    *(OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError),
    SafetensorError,
)
"""What transformers may raise over a checkpoint that it cannot load."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies: `place` is a path, or the hub id."""

    kind: Literal["folder", "config", "gguf", "hub"]
    place: str


def find_checkpoint(model: str | Path) -> Source:
    """Returns where the checkpoint lies, fetching an embedded model; the zoo comes with longspan.

    A string that is an embedded name means that model, even beside a folder so called; a path with
    a slash never does.

    Raises:
        InputError: for what is neither a file, a folder, a hub id nor an embedded name.
    """
    if isinstance(model, str) and model in embedded_models():
        return Source("gguf", str(fetch(model)))
    if is_zoo(model):
        return Source("folder", str(zoo_folder(str(model))))
    if not str(model).strip():
        raise InputError(f"the model's name is empty. {_allowed()}")
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return Source("folder", str(path))
        raise InputError(
            f"the folder {path} has no config.json, so it is no checkpoint. {_allowed()}"
        )
    if path.is_file():
        return _find_file(path)
    looks_local = path.suffix.lower() in (".gguf", ".json", ".safetensors") or path.is_absolute()
    if isinstance(model, str) and not looks_local and _HUB_ID.fullmatch(model):
        return Source("hub", model)
    meant = did_you_mean(str(model), embedded_models())
    raise InputError(f"no file or folder {str(model)!r}.{meant} {_allowed()}")


def _find_file(path: Path) -> Source:
    if path.suffix.lower() == ".gguf":
        return Source("gguf", str(path))
    if path.suffix.lower() == ".json":
        return Source("config", str(path))
    raise InputError(f"{path} is neither a .gguf nor a .json file. {_allowed()}")


def _allowed() -> str:
    names = ", ".join(embedded_models())
    return (
        "A model is a hub id, a folder with config.json, a .gguf file, "
        f"or an embedded name: {names}, zoo:rope and others of the zoo."
    )


def hub_file(hub_id: str, filename: str) -> str:
    """Returns the local path of a hub model's file: from the cache, or downloaded.

    Raises:
        InputError: if it is in neither place.
    """
    from transformers.utils.hub import cached_file

    try:
        with _hushed():
            path = cached_file(hub_id, filename)
    except LOAD_ERRORS as error:
        raise InputError(
            f"no local folder and no reachable hub model {hub_id!r}: {first_line(error)}"
            f"{did_you_mean(hub_id, embedded_models())} {_allowed()}"
        ) from error
    if path is None:
        raise InputError(f"the hub model {hub_id!r} has no {filename}. {_allowed()}")
    return path


@contextmanager
def _hushed() -> Iterator[None]:
    """Silences the hub's log of its retries: the error that follows says it in one line."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error that may have many, as a sentence."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".") + "."
