"""`extend`: a live model, or a saved folder, that reads further, with proof that it changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from longspan.adapters.extended import check_loads, with_config
from longspan.adapters.rope import rope_from_config
from longspan.adapters.rotation import prove_rotation, require_family
from longspan.errors import NumericalError, OutputError, UnsupportedModelError
from longspan.files import whole_folder
from longspan.tools.plan import Plan, plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def extend(
    model: PreTrainedModel,
    *,
    to: int,
    method: str | None = None,
    factor: float | None = None,
    original_max_position_embeddings: int | None = None,
) -> PreTrainedModel:
    """Returns a new model object that reads `to` tokens; the given one stays as it is.

    The weights are shared, the config and the rotary modules are its own. Its frequencies are
    read back and held against the plan before it is returned.

    Args:
        model: a live transformers model of a known family.
        to: tokens to read, more than it reaches today.
        method: see `plan`.
        factor: see `plan`.
        original_max_position_embeddings: see `plan`.

    Raises:
        ConfigError: see `plan`.
        UnsupportedModelError: for a family longspan cannot extend.
        NumericalError: if the live frequencies are not the planned ones.
    """
    planned = plan(
        model.config,
        to=to,
        method=method,
        factor=factor,
        original_max_position_embeddings=original_max_position_embeddings,
    )
    return apply_plan(model, planned)


def apply_plan(model: PreTrainedModel, planned: Plan) -> PreTrainedModel:
    """Returns a new model object under a plan, proven; see `extend`."""
    if not require_family(model).extendable:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} cannot be extended: transformers' own "
            "module for it does not read rope scaling, so a saved folder would not do what it "
            "says. `plan` still tells what to write."
        )
    extended = with_config(model, planned.changed)
    prove_rotation(extended, planned.ropes, planned.to)
    return extended


def save_extended(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    planned: Plan,
    path: Path,
    *,
    force: bool = False,
) -> None:
    """Writes an extended model as a folder that plain transformers loads, whole or not at all.

    Safetensors, the config of the plan, the generation config, and the tokenizer with its limit
    raised. The written config is read back and must give the planned ropes.

    Args:
        model: what `extend` returned.
        tokenizer: its tokenizer; changed only on disk.
        planned: the plan it was extended under.
        path: the folder to make.
        force: whether an existing folder is replaced.

    Raises:
        OutputError: if the folder exists, or cannot be written.
        UnsupportedModelError: if transformers would not load it as planned.
        NumericalError: if the written config does not say what was planned.
    """
    check_loads(model, planned.ropes)
    needs = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    with whole_folder(path, force=force, needs=needs) as temporary:
        try:
            model.save_pretrained(temporary)
        except SafetensorError as error:  # its own kind of I/O error
            raise OutputError(f"cannot write {path}: {error}. Name another place.") from error
        tokenizer.save_pretrained(temporary)
        _raise_tokenizer_limit(temporary, planned.to)
        written = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
        if rope_from_config(written) != planned.ropes:
            raise NumericalError(
                f"the config transformers wrote does not read back as planned: "
                f"{dict(rope_from_config(written))} instead of {dict(planned.ropes)}."
            )


def _raise_tokenizer_limit(folder: Path, to: int) -> None:
    place = folder / "tokenizer_config.json"
    if place.exists():
        settings = json.loads(place.read_text(encoding="utf-8"))
        settings["model_max_length"] = to
        place.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
