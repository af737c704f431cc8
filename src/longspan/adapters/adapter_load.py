"""An adapter on its base model: under the rope it carries, merged, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file

from longspan.adapters.adapter_rope import (
    SETTINGS,
    WEIGHTS,
    AdapterRope,
    base_of,
    is_adapter,
    read_adapter_rope,
)
from longspan.adapters.config_fields import as_mapping
from longspan.adapters.extended import with_config
from longspan.adapters.families import text_part
from longspan.adapters.lora import require_peft, without_peft_warnings
from longspan.adapters.rope import rope_from_config
from longspan.adapters.rope_writing import updated_config
from longspan.adapters.rotation import prove_rotation
from longspan.errors import ConfigError, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Found = TypeVar("Found")


def adapter_config(model: str | Path, read: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the config.json of an adapter's base, with the rope the adapter carries.

    Args:
        model: the adapter's folder.
        read: returns a model's config.json by name.

    Raises:
        ConfigError: if the base has another scaling.
        InputError: if the base is not found, or the adapter carries no rope.
    """
    folder = Path(model).expanduser()
    rope = read_adapter_rope(folder)
    config = _of_base(folder, read)
    check_base(config, rope)
    return updated_config(config, _complete(config, rope))[0]


def adapter_model(
    model: str | Path, load: Callable[[str], tuple[PreTrainedModel, Any]]
) -> tuple[PreTrainedModel, Any]:
    """Returns an adapter's base under the adapter's rope, merged, and the base's tokenizer.

    Args:
        model: the adapter's folder.
        load: returns a model and its tokenizer by name.

    Raises:
        ConfigError: if the base has another scaling.
        InputError: if the base is not found, or the adapter does not fit it or carries no rope.
        NumericalError: if the live frequencies are not the adapter's.
    """
    folder = Path(model).expanduser()
    rope = read_adapter_rope(folder)
    base, tokenizer = _of_base(folder, load)
    return merged(base, folder, rope).eval(), tokenizer


def _of_base(folder: Path, get: Callable[[str], Found]) -> Found:
    base = base_of(folder)
    try:
        if is_adapter(base):
            raise InputError(f"{base} is an adapter itself.")
        return get(base)
    except InputError as error:
        raise InputError(
            f"the adapter {folder} needs its base model: {error} Put it there, or write its place "
            f"into base_model_name_or_path of {folder / SETTINGS}."
        ) from error


def merged(base: PreTrainedModel, folder: Path, rope: AdapterRope) -> PreTrainedModel:
    """Returns the base model under the adapter's rope, with the adapter merged into its weights.

    Args:
        base: a live model; its weights are used up.
        folder: the adapter's.
        rope: what it carries.

    Raises:
        ConfigError: if the base has another scaling.
        InputError: if the weights do not fit.
        NumericalError: if the live frequencies are not the adapter's.
    """
    require_peft()
    from peft import PeftModel, get_peft_model_state_dict

    check_base(as_mapping(base.config), rope)
    extended = with_config(base, rope.config)
    prove_rotation(extended, rope_from_config(extended.config), rope.to)
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{folder} has no {WEIGHTS}; other files, such as pickle, are not read.")
    try:
        stored = load_file(folder / WEIGHTS)
        with without_peft_warnings():
            adapted = PeftModel.from_pretrained(extended, folder, torch_device=str(base.device))
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"the adapter {folder} does not fit its base model: {reason} It needs the base it was "
            "trained on."
        ) from error
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    if stored.keys() != expected:
        name = sorted(stored.keys() ^ expected)[0]
        raise InputError(f"the adapter {folder} does not fit its base model, such as in {name}.")
    whole: Any = adapted
    return whole.merge_and_unload()


def check_base(config: Mapping[str, Any], rope: AdapterRope) -> None:
    """Refuses a base that is neither plain, nor what the adapter was made from, nor its result."""
    found = rope_from_config(config)
    scaling = found[found.reaching].method
    wanted = rope_from_config(updated_config(config, _complete(config, rope))[0])
    as_trained = (scaling.method, scaling.factor) == (rope.base_method, rope.base_factor)
    if scaling.method != "none" and not as_trained and dict(found) != dict(wanted):
        raise ConfigError(
            f"the base model has a scaling of its own ({scaling.method}, factor "
            f"{scaling.factor:g}), but the adapter was trained under {rope.method} at factor "
            f"{rope.factor:g}. Load it on the base it was trained on."
        )


def _complete(config: Mapping[str, Any], rope: AdapterRope) -> dict[str, Any]:
    length = text_part(config).get("max_position_embeddings")
    return {"max_position_embeddings": length, **rope.config}
