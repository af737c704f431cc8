"""What transformers drops when it reads a GGUF file, put back: RoPE scaling and how text is split.

It ignores `rope.scaling.*` and the tensors of per-pair factors, so a file extended with YaRN would
run unscaled; it splits digits like GPT-2 whatever the file says; and it marks the unpacked model as
quantized, so that it could be neither saved nor trained. What cannot be put back is refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from longspan.adapters.gguf_file import GgufFile
from longspan.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_SCALING = "rope.scaling."
_READ_HERE = {
    "none": {"type", "factor"},
    "linear": {"type", "factor"},
    "yarn": {
        *("type", "factor", "original_context_length", "attn_factor", "yarn_attn_factor"),
        *("yarn_beta_fast", "yarn_beta_slow"),
    },
    "longrope": {"type", "factor", "original_context_length", "attn_factor"},
}
_GEMMA3_27B_LAYERS = 62

# tokenizer.ggml.pre of vocabularies whose merges were learned on single digits (llama.cpp).
_DIGITS_FIRST = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
# Those that GPT-2's own pattern splits rightly; "default" is what old files say for want of a name.
_LIKE_GPT2 = frozenset({"default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"})


def mend_config(config: PreTrainedConfig, file: GgufFile) -> PreTrainedConfig:
    """Returns the config with the file's RoPE scaling in it.

    Raises:
        UnsupportedModelError: for a scaling or a rotary dimension that transformers cannot express.

    Source: llama.cpp's reading of `{arch}.rope.scaling.*`: a YaRN `attn_factor` multiplies the
    usual 0.1·ln(factor) + 1; Gemma 3 scales its full layers only, and its 27B divides the score by
    √(hidden_size / heads).
    """
    written = config.to_dict()
    rope = written.get("rope_parameters")
    if rope:
        nested = "full_attention" in rope
        scaling = _scaling(file, config.max_position_embeddings)
        if scaling and nested:
            if scaling["rope_type"] != "linear":
                raise _refused(file, f"scaling {scaling['rope_type']!r} beside sliding layers")
            rope["full_attention"] = {**rope["full_attention"], **scaling}
        elif scaling:
            written["rope_parameters"] = {**rope, **scaling}
        elif not nested:
            _check_rotary_dim(written, file)
    if file.architecture == "gemma3" and file.get_own("block_count") == _GEMMA3_27B_LAYERS:
        written["query_pre_attn_scalar"] = config.hidden_size // config.num_attention_heads
    return type(config).from_dict(written)


def _scaling(file: GgufFile, max_position_embeddings: int) -> dict[str, Any] | None:
    """Returns the scaling part of config.json's rope_parameters; None where there is none."""
    tensors = {tensor.name: tensor for tensor in file.tensors if tensor.name.startswith("rope_")}
    kind = file.get_own(f"{_SCALING}type", "linear")  # llama.cpp's default, with factor 1
    factor = file.get_own(f"{_SCALING}factor", file.get_own("rope.scale_linear", 1.0)) or 1.0
    _check_keys(file, kind)
    if "rope_freqs.weight" in tensors:
        if kind != "none" and factor != 1.0:
            raise _refused(file, f"scaling {kind!r} together with rope_freqs")
        factors = tensors["rope_freqs.weight"].data.tolist()
        return _longrope(factors, factors, max_position_embeddings, 1.0, 1.0)
    if kind == "longrope":
        original = _original_length(file)
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
        if not tensors.keys() >= set(names):
            raise _refused(file, f"scaling 'longrope' without {' and '.join(names)}")
        short, long = (tensors[name].data.tolist() for name in names)
        attention_factor = file.get_own(f"{_SCALING}attn_factor", 1.0)
        ratio = max_position_embeddings / original
        return _longrope(short, long, original, ratio, attention_factor)
    if kind == "yarn":
        return _yarn(file, factor)
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    return None


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _original_length(file),
    }
    for name in ("beta_fast", "beta_slow"):
        if (value := file.get_own(f"{_SCALING}yarn_{name}")) is not None:
            scaling[name] = value
    attention = [file.get_own(f"{_SCALING}{name}") for name in ("attn_factor", "yarn_attn_factor")]
    if any(value not in (None, 1.0) for value in attention):
        multiplier = math.prod(1.0 if value is None else value for value in attention)
        scaling["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
    return scaling


def _longrope(
    short: list[float], long: list[float], original: int, factor: float, attention_factor: float
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "factor": factor,
        "attention_factor": attention_factor,
    }


def _original_length(file: GgufFile) -> int:
    original = file.get_own(f"{_SCALING}original_context_length")
    if original is None:
        raise _refused(file, "scaling without rope.scaling.original_context_length")
    return original


def _check_keys(file: GgufFile, kind: str) -> None:
    prefix = f"{file.architecture}.{_SCALING}"
    found = {key.removeprefix(prefix) for key in file.fields if key.startswith(prefix)}
    unknown = found - _READ_HERE.get(kind, set()) - {"finetuned"}
    if kind not in _READ_HERE or unknown:
        raise _refused(file, f"rope.scaling.type {kind!r} with {sorted(unknown) or 'no other key'}")


def _check_rotary_dim(config: dict[str, Any], file: GgufFile) -> None:
    stated = file.get_own("rope.dimension_count")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    if stated is not None and stated != int(head_dim * share):
        raise _refused(file, f"rope.dimension_count {stated} where {int(head_dim * share)} turn")


def _refused(file: GgufFile, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file.path.name} ({file.architecture}) has {what}, which cannot be read from GGUF. "
        "Load the model's safetensors folder or hub id instead."
    )


def mend_tokenizer(tokenizer: PreTrainedTokenizerBase, file: GgufFile) -> None:
    """Splits text as the file's byte-level vocabulary was trained to, digit by digit if so.

    Raises:
        UnsupportedModelError: for a way of splitting that is not known here.

    Source: llama.cpp's table of `tokenizer.ggml.pre`.
    """
    if file.get("tokenizer.ggml.model") != "gpt2":
        return
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre in _DIGITS_FIRST:
        from tokenizers import pre_tokenizers

        backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009 (absent on the base)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre not in _LIKE_GPT2 and pre not in _split_by_transformers():
        raise _refused(file, f"tokenizer.ggml.pre {pre!r}")


def _split_by_transformers() -> frozenset[str]:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    return frozenset(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)


def mend_model(model: PreTrainedModel) -> None:
    """Unmarks a fully unpacked model as quantized, so that it can be saved and trained."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return
    packed = [name for name, weight in model.named_parameters() if not weight.is_floating_point()]
    if packed:
        raise UnsupportedModelError(
            f"transformers kept {len(packed)} weights packed, such as {packed[0]}. "
            "Uninstall the `kernels` package, or load the model's safetensors folder."
        )
    quantizer.remove_quantization_config(model)
