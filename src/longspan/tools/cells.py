"""Finished parts of a measurement on disk, so that an interrupted run goes on from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from longspan.errors import ConfigError, InputError
from longspan.files import whole_file, write_text

SAMPLES = 1024


class Cells:
    """A folder of tensors, each carrying the circumstances it was measured under.

    A cell measured under other circumstances is refused, not used and not overwritten.

    Args:
        folder: created if missing; None keeps nothing.
        protocol: a dataclass, what every cell must have been measured under.
        weights: the model's `weights_digest`.

    Raises:
        OutputError: if the folder cannot be written to.
    """

    def __init__(self, folder: str | Path | None, protocol: Any, weights: str) -> None:
        self.folder = None if folder is None else Path(folder)
        self._common = {**circumstances(dataclasses.asdict(protocol)), "weights": weights}
        if self.folder is not None:
            probe = self.folder / ".writable"
            write_text(probe, "")
            probe.unlink(missing_ok=True)

    def load(self, name: str, own: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Returns a cell's tensors, or None if it is not there.

        Args:
            name: of the file, without its ending.
            own: the circumstances of this cell alone, such as its method's rope_parameters.

        Raises:
            ConfigError: naming the first circumstance that differs.
            InputError: if the file is damaged.
        """
        if self.folder is None or not (path := self._path(name)).exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged ({error}). Delete it to measure again.") from None
        wanted = {**self._common, **circumstances(own)}
        for key in sorted({*wanted, *found}):
            if wanted.get(key) != found.get(key):
                raise ConfigError(
                    f"{path} was measured under another protocol: {key} is {found.get(key)}, now "
                    f"{wanted.get(key)}. Give another state folder, or delete this one."
                )
        return tensors

    def save(self, name: str, tensors: Mapping[str, Tensor], own: Mapping[str, Any]) -> None:
        """Writes a cell whole or not at all.

        Raises:
            OutputError: if it cannot be written.
        """
        if self.folder is None:
            return
        data = save(dict(tensors), metadata={**self._common, **circumstances(own)})
        with whole_file(self._path(name)) as temporary:
            temporary.write_bytes(data)

    def _path(self, name: str) -> Path:
        return Path(self.folder or ".") / f"{name}.safetensors"


def circumstances(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns each value as text that is equal exactly when the value is."""
    return {key: json.dumps(value, sort_keys=True, default=str) for key, value in values.items()}


def weights_digest(model: nn.Module) -> str:
    """Returns a digest of samples from every parameter, so that other weights are noticed."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        samples = flat[:: max(1, flat.numel() // SAMPLES)].to("cpu", torch.float32)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(samples.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
