"""A training's state in one safetensors file, from which it goes on bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.errors import ConfigError, InputError, OutputError
from longspan.files import whole_file
from longspan.training.processes import first_process, spread_like, whole_tensor

FORM = "longspan training 1"
RNG = "rng"
WEIGHT, MOMENT = "weight", "optimizer"


def save_training(
    path: str | Path, model: nn.Module, optimizer: Optimizer, step: int, notes: Mapping[str, str]
) -> None:
    """Writes what a training needs to go on: whole, or not at all.

    Kept are the parameters that are trained, what the optimizer remembers of each (AdamW's
    moments and step), and torch's CPU random state. The optimizer's settings are not: the one
    that goes on has its own. Every process of a training calls it; the first one writes.

    Args:
        path: of the file; its folder is made.
        model: its parameters with `requires_grad` are kept, by name.
        optimizer: of those parameters.
        step: steps that are done.
        notes: texts to find again, such as the protocol and the losses so far.

    Raises:
        ConfigError: if the optimizer has parameters that the model does not train.
        OutputError: if it cannot be written.
    """
    tensors = {key: _on_cpu(value) for key, value in _tensors(model, optimizer)}
    if not first_process():
        return
    tensors[RNG] = torch.get_rng_state()
    metadata = {"format": FORM, "step": json.dumps(step), "notes": json.dumps(dict(notes))}
    try:
        with whole_file(Path(path)) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as error:  # its own kind of I/O error
        raise OutputError(f"cannot write {path}: {error}. Name another place.") from error


def load_training(
    path: str | Path, model: nn.Module, optimizer: Optimizer
) -> tuple[int, dict[str, str]]:
    """Puts a saved training back into a model and an optimizer, and sets torch's random state.

    Nothing is changed unless all of it fits.

    Args:
        path: what `save_training` wrote.
        model: built as the saved one was.
        optimizer: of its trained parameters, with the settings to go on with.

    Returns:
        The steps that are done, and the notes.

    Raises:
        InputError: if the file is missing, damaged, or of another model.
    """
    metadata, tensors = _read(Path(path))
    step, notes = _step_and_notes(Path(path), metadata)
    named = _trained(model)
    _check_fits(Path(path), tensors, named)
    places = _places(named, optimizer)
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == MOMENT:
            entry, _, name = rest.partition("/")
            spread = spread_like(value, named[name]) if value.dim() else value
            state.setdefault(places[name], {})[entry] = spread
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(spread_like(tensors[f"{WEIGHT}/{name}"], parameter))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    torch.set_rng_state(tensors[RNG])
    return step, notes


def read_notes(path: str | Path) -> tuple[int, dict[str, str]]:
    """Returns the steps done and the notes of a saved training, without its tensors.

    Raises:
        InputError: if the file is missing, damaged, or something else.
    """
    return _step_and_notes(Path(path), _read(Path(path), tensors=False)[0])


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    named = _trained(model)
    _places(named, optimizer)
    for name, parameter in named.items():
        yield f"{WEIGHT}/{name}", parameter
        for entry, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"{MOMENT}/{entry}/{name}", value


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def _places(named: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, int]:
    """Returns each trained parameter's place in the optimizer, as its state_dict counts them."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    place_of = {id(one): place for place, one in enumerate(parameters)}
    if place_of.keys() != {id(one) for one in named.values()}:
        raise ConfigError(
            f"the optimizer has {len(parameters)} parameters, the model trains {len(named)}, and "
            "they must be the same. Give the optimizer all that have requires_grad, and no others."
        )
    return {name: place_of[id(one)] for name, one in named.items()}


def _on_cpu(value: Any) -> Tensor:
    # a tensor of its own: safetensors refuses memory that two names share
    return whole_tensor(torch.as_tensor(value).detach()).to("cpu", copy=True).contiguous()


def _read(path: Path, tensors: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.exists():
        raise InputError(f"there is no training state {path}. Start without it.")
    try:
        with safe_open(path, framework="pt") as file:
            names: Iterable[str] = file.keys() if tensors else ()
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is damaged ({error}). Delete it to train from the start."
        ) from None


def _step_and_notes(path: Path, metadata: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    if metadata.get("format") != FORM:
        raise InputError(
            f"{path} is not a training state of longspan: its format is "
            f"{metadata.get('format')!r}, not {FORM!r}. Name another file or folder."
        )
    try:
        return int(json.loads(metadata["step"])), dict(json.loads(metadata["notes"]))
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}). Delete it to train anew.") from None


def _check_fits(
    path: Path, tensors: Mapping[str, Tensor], named: Mapping[str, nn.Parameter]
) -> None:
    remedy = "It belongs to another model or other settings; delete it, or give those again."
    if RNG not in tensors:
        raise InputError(f"{path} is damaged: it lacks the random state. Delete it to train anew.")
    saved = {key.partition("/")[2] for key in tensors if key.startswith(f"{WEIGHT}/")}
    for name in sorted(saved ^ named.keys()):
        where = "the file has it" if name in saved else "the model trains it"
        raise InputError(f"{path} does not fit this model: {name}, only {where}. {remedy}")
    for key, value in tensors.items():
        is_moment = key.startswith(f"{MOMENT}/")
        name = key.split("/", 2 if is_moment else 1)[-1]
        counts_steps = is_moment and value.dim() == 0 and name in named
        if key == RNG or counts_steps:
            continue
        if name not in named or value.shape != named[name].shape:
            wanted = list(named[name].shape) if name in named else "nothing of that name"
            raise InputError(
                f"{path} does not fit this model: {key} is {list(value.shape)}, the model has "
                f"{wanted}. {remedy}"
            )
