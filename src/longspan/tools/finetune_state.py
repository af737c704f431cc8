"""A training kept on disk, so that an interrupted one goes on from it bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.errors import ConfigError, InputError
from longspan.files import write_text
from longspan.tools.finetune_results import (
    FineTuning,
    TrainingProtocol,
    finetuning_from_json,
    finetuning_to_json,
)
from longspan.training.processes import first_process
from longspan.training.state import load_training, read_notes, save_training

if TYPE_CHECKING:
    from accelerate import Accelerator

FILE = "training.safetensors"


class KeptTraining:
    """A folder with the state of one training, refused to any other.

    Args:
        folder: created if missing; None keeps nothing.
        protocol: what the training must have run under.
        weights: digest of the weights it began with.

    Attributes:
        step: steps done of the training found there, 0 without one.

    Raises:
        ConfigError: if the folder holds a training under another protocol.
        InputError: if what it holds is damaged.
        OutputError: if it cannot be written to.
    """

    def __init__(self, folder: str | Path | None, protocol: TrainingProtocol, weights: str) -> None:
        self.path = None if folder is None else Path(folder) / FILE
        self.folder, self.weights, self.step = folder, weights, 0
        if self.path is None:
            return
        if first_process():
            probe = self.path.with_name(".writable")
            write_text(probe, "")
            probe.unlink(missing_ok=True)  # another training may have begun beside it
        if self.path.exists():
            self.step, notes = read_notes(self.path)
            self._require(protocol, self.step, notes)

    def require_shared(self, accelerator: Accelerator) -> None:
        """Refuses processes that would go on from different steps: each looks for the state.

        All processes must call it, before any loads.

        Raises:
            ConfigError: on every process, if one found another step than the rest.
        """
        own = torch.tensor([self.step], device=accelerator.device)
        steps = cast(Tensor, accelerator.gather(own)).tolist()
        if len(set(steps)) > 1:
            raise ConfigError(
                f"the processes find different states in {self.folder}: of {steps} steps, by rank. "
                "The state folder must be one that all processes share."
            )

    def load(self, model: nn.Module, optimizer: Optimizer) -> tuple[int, FineTuning] | None:
        """Puts a kept training back; returns the steps done and its result so far, or None."""
        if self.path is None or not self.path.exists():
            return None
        step, notes = load_training(self.path, model, optimizer)
        return step, finetuning_from_json(notes["result"])

    def save(self, model: nn.Module, optimizer: Optimizer, step: int, result: FineTuning) -> None:
        """Keeps a training after `step` steps, whole or not at all."""
        if self.path is not None:
            notes = {"result": finetuning_to_json(result), "weights": self.weights}
            save_training(self.path, model, optimizer, step, notes)

    def _require(self, protocol: TrainingProtocol, step: int, notes: dict[str, str]) -> None:
        try:
            kept = finetuning_from_json(notes["result"]).protocol
            weights = notes["weights"]
        except (KeyError, InputError) as error:
            raise InputError(
                f"{self.path} is not the state of a fine-tuning ({error}). Name another folder."
            ) from None
        found: dict[str, Any] = {**fields_of(kept), "weights": weights}
        wanted: dict[str, Any] = {**fields_of(protocol), "weights": self.weights}
        for key, value in wanted.items():
            if found[key] != value:
                raise ConfigError(
                    f"{self.path} holds {step} steps of another training: {key} is {found[key]!r}, "
                    f"now {value!r}. Give the same settings to go on, another state folder, or "
                    "delete this one."
                )


def fields_of(protocol: TrainingProtocol) -> dict[str, Any]:
    """Returns a protocol's fields by name."""
    return {item.name: getattr(protocol, item.name) for item in dataclasses.fields(protocol)}
