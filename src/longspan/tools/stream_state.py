"""A stream's memory on disk: one safetensors file, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.errors import ConfigError, InputError
from longspan.files import whole_file

FORM = "longspan stream 1"


def write_state(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, and the facts that a later reader must agree with.

    Raises:
        OutputError: if the place cannot be written.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole_file(path) as temporary:
        save_file(whole, temporary, {"form": FORM, "facts": json.dumps(dict(facts))})


def read_state(path: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a file that `write_state` wrote.

    Raises:
        InputError: if it is not there, damaged, or another kind of file.
        ConfigError: if a fact differs, naming both values.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read as a stream's state: {error}") from error
    if about.get("form") != FORM:
        raise InputError(f"{path} is not a stream's state; those are written by save and --save.")
    saved = json.loads(about["facts"])
    for name, value in facts.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{path} was saved with {name} {saved.get(name)!r}, and this stream has {value!r}. "
                "Use the same model, text and sizes, or remove the file."
            )
    return tensors
