"""An adapter that carries its rope: loaded on the plain base, it brings the scaling with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from longspan.adapters.embedded import embedded_models
from longspan.adapters.zoo import is_zoo
from longspan.errors import InputError, OutputError
from longspan.files import write_text

if TYPE_CHECKING:
    from peft import PeftModel

FORM = "longspan adapter 1"
ROPE, SETTINGS, WEIGHTS = (
    "longspan_adapter.json",
    "adapter_config.json",
    "adapter_model.safetensors",
)


@dataclass(frozen=True, kw_only=True)
class AdapterRope:
    """The rope an adapter was trained under.

    Attributes:
        method: the scaling method's name.
        factor: its factor.
        to: tokens to read.
        config: the keys of config.json that say it: rope_parameters, max_position_embeddings and
            the longspan block.
        base_method: the scaling of the base model it was made from, "none" for a plain one.
        base_factor: its factor.
    """

    method: str
    factor: float
    to: int
    config: Mapping[str, Any]
    base_method: str
    base_factor: float


@dataclass(frozen=True)
class Adapter:
    """A trained adapter, apart from its base.

    Attributes:
        settings: peft's, as adapter_config.json holds them.
        tensors: by peft's names.
        rope: what it was trained under.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    rope: AdapterRope

    def save(self, folder: Path) -> None:
        """Writes peft's two files and longspan's own into a folder that is there.

        Raises:
            OutputError: if it cannot be written.
        """
        write_text(folder / SETTINGS, json.dumps(self.settings, indent=2, sort_keys=True) + "\n")
        write_text(
            folder / ROPE, json.dumps({"format": FORM, **asdict(self.rope)}, indent=2) + "\n"
        )
        try:
            save_file(dict(self.tensors), folder / WEIGHTS, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise OutputError(f"cannot write {folder}: {error}. Name another place.") from error


def adapter_of(adapted: PeftModel, rope: AdapterRope, base: str) -> Adapter:
    """Returns a live model's adapter.

    Args:
        adapted: what `add_lora` returned.
        rope: what it was trained under.
        base: name or path of the base model; a path is written whole, so that it is found.
    """
    from peft import get_peft_model_state_dict

    config: Any = adapted.peft_config["default"]
    settings = config.to_dict()
    settings["base_model_name_or_path"] = _found_again(base)
    settings["inference_mode"] = True
    plain = json.loads(json.dumps(settings, default=_plain))
    tensors = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return Adapter(plain, kept, rope)


def _found_again(base: str) -> str:
    """Returns a path whole; a model's own name stays, even beside a folder so called."""
    path = Path(base).expanduser()
    own = base in embedded_models() or is_zoo(base)
    return str(path.resolve()) if not own and path.exists() else base


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", None)


def is_adapter(model: str | Path) -> bool:
    """Returns whether a name means a folder that holds an adapter."""
    embedded = isinstance(model, str) and model in embedded_models()
    return not embedded and (Path(model).expanduser() / SETTINGS).is_file()


def base_of(folder: Path) -> str:
    """Returns the base model that an adapter names.

    Raises:
        InputError: if it names none.
    """
    base = _read(folder / SETTINGS).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(
            f"{folder / SETTINGS} names no base model. Write its hub id or folder into "
            "base_model_name_or_path."
        )
    return base


def read_adapter_rope(folder: Path) -> AdapterRope:
    """Returns the rope an adapter carries.

    Raises:
        InputError: if it carries none, so that it could only be loaded plain.
    """
    if not (folder / ROPE).is_file():
        raise InputError(
            f"{folder} holds an adapter without {ROPE}, so nothing says which scaling it was "
            "trained under. Merge it into its base model first, extended as it was in training."
        )
    content = _read(folder / ROPE)
    if content.pop("format", None) != FORM:
        raise InputError(f"{folder / ROPE} is not of the form {FORM!r}. Save the adapter again.")
    try:
        rope = AdapterRope(**content)
        missing = {"rope_parameters", "longspan"} - set(rope.config)
    except TypeError as error:
        raise InputError(f"{folder / ROPE} is damaged: {error}. Save the adapter again.") from None
    if missing:
        raise InputError(
            f"{folder / ROPE} lacks {', '.join(sorted(missing))}. Save the adapter again."
        )
    return rope


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content
