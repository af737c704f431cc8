"""A decoder on disk: config.json and safetensors, its own or as a Llama checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.adapters.rope_writing import rope_to_config
from longspan.errors import ConfigError, InputError
from longspan.files import whole_folder
from longspan.models.config import MODEL_TYPE, DecoderConfig
from longspan.models.decoder import Decoder
from longspan.rotary.scaling import scaling_for_method

WEIGHTS = "model.safetensors"


def save_decoder(
    decoder: Decoder,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    force: bool = False,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Writes config.json and model.safetensors, whole or not at all.

    Args:
        decoder: any decoder.
        folder: made; an existing one is replaced only with `force`.
        dtype: of the weights on disk; as they are unless given.
        force: replace what is there.
        beside: further text files to write, by name, such as a tokenizer.

    Raises:
        OutputError: if the folder exists or cannot be written.
    """
    config = {"model_type": MODEL_TYPE, **asdict(decoder.config)}
    if decoder.config.scaling is not None:
        scaling = decoder.config.scaling
        config["scaling"] = {"method": scaling.method, **scaling.parameters()}
    weights = {name: _stored(weight, dtype) for name, weight in decoder.named_parameters()}
    _write(folder, config, weights, force, beside)


def load_decoder(folder: Path) -> Decoder:
    """Returns the decoder that `save_decoder` wrote, in float32 and eval mode.

    Raises:
        InputError: if it is missing, damaged or another kind of checkpoint.
        ConfigError: for a config that contradicts itself.
    """
    config = _read_config(Path(folder) / "config.json")
    decoder = Decoder(config)
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}. Save the decoder again.") from error
    wanted = dict(decoder.named_parameters())
    if wanted.keys() != weights.keys():
        odd = sorted(wanted.keys() ^ weights.keys())
        raise InputError(f"{path} does not fit its config.json: {odd[0]} is in only one of them.")
    with torch.no_grad():
        for name, weight in wanted.items():
            if weight.shape != weights[name].shape:
                raise InputError(
                    f"{path}: {name} is {list(weights[name].shape)}, and config.json asks for "
                    f"{list(weight.shape)}."
                )
            weight.copy_(weights[name])
    return decoder.eval()


def save_llama(
    decoder: Decoder,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    force: bool = False,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Writes the decoder as a Llama checkpoint, which transformers loads with equal logits.

    Args:
        decoder: one whose every layer rotates, sees all, and remembers nothing.
        folder, dtype, force, beside: as for `save_decoder`.

    Raises:
        ConfigError: for a decoder that Llama cannot be.
        OutputError: if the folder exists or cannot be written.
    """
    config = decoder.config
    for name, differs in (
        ("position_encoding", set(config.encodings) != {"rope"}),
        ("sliding_window", config.sliding_window is not None),
        ("learned_sinks", config.learned_sinks),
        ("memory_length", config.memory_length > 0),
    ):
        if differs:
            raise ConfigError(
                f"a Llama has no {name}={getattr(config, name)!r}, so this decoder cannot be "
                "exported as one. save_decoder keeps it."
            )
    shared = {item.name for item in fields(config)} - _OWN
    written = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": config.head_dim,
        "dtype": str(dtype or decoder.embed_tokens.weight.dtype).removeprefix("torch."),
        **{name: value for name, value in asdict(config).items() if name in shared},
        **_rope_keys(decoder),
    }
    weights = {
        name if name == "lm_head.weight" else f"model.{name}": _stored(weight, dtype)
        for name, weight in decoder.named_parameters()
    }
    _write(folder, written, weights, force, beside)


_OWN = {
    "position_encoding",
    "layer_types",
    "sliding_window",
    "num_sink_tokens",
    "learned_sinks",
    "memory_length",
    "rope_theta",
    "scaling",
}


def _rope_keys(decoder: Decoder) -> dict[str, Any]:
    config = decoder.config
    if config.rope is None:
        return {}
    trained = config.max_position_embeddings
    factor = config.rope.method.factor or 1
    return rope_to_config(
        {"full_attention": config.rope}, round(trained * factor), trained_length=trained
    )


def _stored(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight.detach().to("cpu", dtype).contiguous()


def _write(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    force: bool,
    beside: Mapping[str, str] | None,
) -> None:
    with whole_folder(Path(folder), force=force) as temporary:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, content in {**(beside or {}), "config.json": text}.items():
            (temporary / name).write_text(content, encoding="utf-8")
        save_file(weights, temporary / WEIGHTS, {"format": "pt"})


def _read_config(path: Path) -> DecoderConfig:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if content.pop("model_type", None) != MODEL_TYPE:
        raise InputError(f"{path} is not a longspan decoder's; load_model reads other models.")
    known = {item.name for item in fields(DecoderConfig)}
    if unknown := sorted(content.keys() - known):
        raise ConfigError(f"{path} has an unknown key {unknown[0]!r}. Known: {sorted(known)}.")
    for name in ("position_encoding", "layer_types"):
        if isinstance(content.get(name), list):
            content[name] = tuple(content[name])
    if content.get("scaling") is not None:
        keys = dict(content["scaling"])
        content["scaling"] = scaling_for_method(keys.pop("method"))(**keys)
    return DecoderConfig(**content)
