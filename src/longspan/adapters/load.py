"""Checkpoints from a folder, a .gguf file, a hub id or an embedded name: config or live model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longspan.adapters.adapter_load import adapter_config, adapter_model
from longspan.adapters.adapter_rope import is_adapter
from longspan.adapters.attention import NAME, lend
from longspan.adapters.checkpoints import LOAD_ERRORS, Source, find_checkpoint, first_line, hub_file
from longspan.adapters.config_fields import as_mapping
from longspan.adapters.families import family_of, layer_types, text_part
from longspan.errors import ConfigError, InputError, LongspanError, UnsupportedModelError
from longspan.models.config import MODEL_TYPE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from longspan.adapters.gguf_file import GgufFile

_SILENT = logging.CRITICAL


def read_config(model: str | Path) -> dict[str, Any]:
    """Returns the content of a checkpoint's config.json, without reading its weights.

    From a folder or a hub id it is the raw content, misspelt keys and all; a GGUF file has none, so
    it is what transformers would save, with the file's RoPE scaling in it. An adapter's is its
    base model's, with the rope the adapter carries.

    Args:
        model: a folder, a config's .json file, a .gguf file, a hub id or an embedded name. A string
            that is an embedded name means that model, even beside a folder so called.

    Raises:
        InputError: if it is not found, or cannot be read.
        UnsupportedModelError: for a GGUF file that cannot be read rightly.
    """
    if is_adapter(model):
        return adapter_config(model, read_config)
    source = find_checkpoint(model)
    if source.kind == "gguf":
        with _explained(model), _quiet():
            return json.loads(_gguf_config(source.place)[0].to_json_string())
    if source.kind == "hub":
        return _read_json(Path(hub_file(source.place, "config.json")))
    path = Path(source.place)
    return _read_json(path / "config.json" if source.kind == "folder" else path)


def load_model(
    model: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the checkpoint's model, in eval mode, and its tokenizer.

    Only safetensors and GGUF weights are read, never pickle. A GGUF file's weights are unpacked. An
    adapter is merged into its base model, under the rope it carries.

    Args:
        model: a folder, a .gguf file, a hub id or an embedded name.
        dtype: of the weights; float32 by default.
        device: where the weights go.
        trust_remote_code: whether code that comes with the checkpoint may run.
        attn_implementation: one of transformers' attention functions, or `longspan`. Unless given,
            `longspan` for a model with sliding layers, for which the others build a mask of all
            pairs, and transformers' own choice for the rest (sdpa where the family allows it).

    Raises:
        InputError: if it is not found, incomplete, or its tokenizer is another model's.
        ConfigError: if `device` cannot be used here, or an adapter's base has another scaling.
        UnsupportedModelError: for a GGUF file that cannot be read rightly.
    """
    _check_device(device)
    if is_adapter(model):
        how = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        how["attn_implementation"] = attn_implementation
        return adapter_model(model, partial(load_model, **how))
    source = find_checkpoint(model)
    _require_safetensors(source)
    options = {
        "dtype": dtype or torch.float32,
        "trust_remote_code": trust_remote_code,
        "attn_implementation": attn_implementation,
    }
    if attn_implementation == NAME:
        lend()
    with _explained(model), _quiet(bars=source.kind == "hub"):
        read = _reader(source)
        loaded, tokenizer, report = read(source, options)
    _check_weights(report, model)
    _check_vocabulary(loaded, tokenizer, model)
    _check_attention(loaded, attn_implementation)
    return loaded.to(device).eval(), tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


def _require_safetensors(source: Source) -> None:
    if source.kind == "config":
        raise InputError(f"{source.place} is only a config; name the folder that has the weights.")
    if source.kind == "hub":
        hub_file(source.place, "config.json")
    if source.kind != "folder":
        return
    names = sorted(path.name for path in Path(source.place).iterdir())
    if not any(name.endswith(".safetensors") for name in names):
        pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        has = f"only pickle ({pickled[0]}), which can run code" if pickled else "no weights"
        raise InputError(
            f"{source.place} has {has}. Only .safetensors and .gguf are read; "
            "convert it with save_pretrained first."
        )


def _reader(source: Source) -> Callable[[Source, dict[str, Any]], tuple[Any, Any, Any]]:
    if source.kind == "gguf":
        return _read_gguf_model
    if source.kind == "folder":
        written = _read_json(Path(source.place) / "config.json")
        if written.get("model_type") == MODEL_TYPE:
            return _read_decoder_model
    return _read_safetensors_model


def _read_decoder_model(source: Source, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    from transformers import PreTrainedTokenizerFast

    from longspan.adapters.decoder_model import read_decoder

    if options["attn_implementation"] not in (None, NAME):
        raise ConfigError(
            f"a longspan decoder attends by itself, got attn_implementation="
            f"{options['attn_implementation']!r}. Leave it out."
        )
    file = str(Path(source.place) / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file)
    model = read_decoder(source.place).to(options["dtype"])
    return model, tokenizer, {"missing_keys": (), "mismatched_keys": ()}


def _read_safetensors_model(source: Source, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    from transformers import AutoTokenizer

    where = {"local_files_only": source.kind == "folder"}
    trust = {"trust_remote_code": options["trust_remote_code"]}
    tokenizer = AutoTokenizer.from_pretrained(source.place, **where, **trust)
    model, report = _with_report(source.place, use_safetensors=True, **where, **options)
    return model, tokenizer, report


def _read_gguf_model(source: Source, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    from transformers import AutoTokenizer

    from longspan.adapters.gguf_file import lend_to_transformers
    from longspan.adapters.gguf_mend import mend_model, mend_tokenizer

    config, file = _gguf_config(source.place)
    folder, name = str(file.path.parent), {"gguf_file": file.path.name, "local_files_only": True}
    with lend_to_transformers(file):
        tokenizer = AutoTokenizer.from_pretrained(folder, **name)
        mend_tokenizer(tokenizer, file)
        model, report = _with_report(folder, config=config, **name, **options)
    mend_model(model)
    return model, tokenizer, report


def _with_report(place: str, **options: Any) -> Any:
    """Returns the model and what transformers found wrong with its weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        place, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )


def _gguf_config(place: str) -> tuple[PreTrainedConfig, GgufFile]:
    from transformers import AutoConfig

    from longspan.adapters.gguf_file import lend_to_transformers, read_gguf
    from longspan.adapters.gguf_mend import mend_config

    file = read_gguf(Path(place))
    with lend_to_transformers(file):
        config = AutoConfig.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, local_files_only=True
        )
    return mend_config(config, file), file


def _check_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {str(device)!r} cannot be used here: {first_line(error)} 'cpu' always can."
        ) from error


def _check_weights(report: dict[str, Any], model: str | Path) -> None:
    """Refuses what transformers would only log: weights it made up because none fit."""
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"{model} lacks {len(missing)} of its model's weights, such as {missing[0]}. "
            "It may be half a download, or another model's weights; get it again."
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise InputError(
            f"{model} has {len(mismatched)} weights of another shape than its config says, such as "
            f"{name}: {list(stored)} instead of {list(expected)}. Config and weights must belong "
            "together; get both again."
        )


def _check_vocabulary(
    loaded: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, model: str | Path
) -> None:
    embedding: Any = loaded.get_input_embeddings()
    rows = embedding.weight.shape[0]
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > rows:
        raise InputError(
            f"vocabulary mismatch in {model}: the tokenizer has ids up to {needed - 1}, the model "
            f"embeds {rows} tokens. The tokenizer is another model's; copy the right one beside it."
        )


def _check_attention(loaded: PreTrainedModel, asked: str | None) -> None:
    """Chooses the attention of a model with sliding layers; refuses one that was not taken."""
    text = text_part(as_mapping(loaded.config))
    if text.get("model_type") == MODEL_TYPE:
        return  # it attends by itself, through the same functions
    if asked is None and "sliding_attention" in layer_types(text, family_of(text)):
        lend()
        loaded.set_attn_implementation(NAME)
    taken = loaded.config._attn_implementation
    if asked == NAME and (taken != NAME or not loaded._can_set_attn_implementation()):
        raise UnsupportedModelError(
            f"{type(loaded).__name__} has its attention written into its layers, so "
            f"attn_implementation={NAME!r} cannot be lent to it. Leave it out."
        )


@contextmanager
def _explained(model: str | Path) -> Iterator[None]:
    """Turns transformers' many errors into one line that names the model."""
    try:
        yield
    except LongspanError:
        raise
    except LOAD_ERRORS as error:
        trust = " Pass trust_remote_code only if you trust it."
        remedy = trust if "trust_remote_code" in str(error) else ""
        raise InputError(f"{model} could not be loaded: {first_line(error)}{remedy}") from error


@contextmanager
def _quiet(bars: bool = False) -> Iterator[None]:
    """Silences transformers' log, and its progress bars unless `bars`; restores both after."""
    from transformers.utils import logging as log

    verbosity, shown = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(_SILENT)
    if not bars:
        log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if shown:
            log.enable_progress_bar()
