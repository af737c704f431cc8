"""What each model family does with positions: one row a family.

A row tells what the weights cannot: the pair layout, the defaults of keys a config may leave out,
which layers do not rotate. An unknown family can be read, but not extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from longspan.rotary.rotate import Layout

TableForm = Literal["half", "interleaved", "pairs"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family of models rotates.

    Attributes:
        layout: how the weights pair channels.
        table: the shape of cos and sin its rotary module returns: each pair's value twice, in
            halves or interleaved, or once (`pairs`); None where it has no such module.
        rope_theta: the documented default of a config that names none (v4 spelling); None where
            the family documents none.
        theta_keys: root keys that hold the base.
        theta_ratio_key: root key of a number the base is multiplied by.
        partial_rotary_factor: the default share of a head that turns.
        partial_keys: root keys that hold that share.
        length_keys: root keys that hold the trained (or extended) length.
        mla: multi-head latent attention: only qk_rope_head_dim channels turn, and YaRN's
            mscale_all_dim multiplies the softmax scale.
        nope: `interval` (every n-th layer does not rotate), `full` (only sliding layers rotate).
        sliding_theta: default base of sliding layers that have their own.
        sliding: which layers keep to a sliding window where the config does not list layer types:
            `all`, all but every n-th (`full_every`), or those `after` max_window_layers.
        full_every: every n-th layer is a full one.
        full_head_dim_key: root key of full layers' own head_dim.
        inert: keys of a rope block that do not change the rotation here.
        extendable: False where transformers' own modules ignore scaling.
    """

    layout: Layout
    table: TableForm | None = "half"
    rope_theta: float | None = 10_000.0
    theta_keys: tuple[str, ...] = ("rope_theta",)
    theta_ratio_key: str | None = None
    partial_rotary_factor: float = 1.0
    partial_keys: tuple[str, ...] = ("partial_rotary_factor",)
    length_keys: tuple[str, ...] = ("max_position_embeddings",)
    mla: bool = False
    nope: Literal["interval", "full"] | None = None
    sliding_theta: float | None = None
    sliding: Literal["all", "every", "after"] | None = None
    full_every: int | None = None
    full_head_dim_key: str | None = None
    inert: tuple[str, ...] = ()
    extendable: bool = True


LLAMA = Family(layout="half")
MISTRAL = replace(LLAMA, sliding="all")
QWEN = replace(LLAMA, sliding="after")
COHERE = Family(layout="interleaved", table="interleaved")
GLM = Family(layout="interleaved", partial_rotary_factor=0.5)
GEMMA3 = Family(
    layout="half",
    rope_theta=1_000_000.0,
    sliding_theta=10_000.0,
    sliding="every",
    full_every=6,
)
DEEPSEEK = Family(layout="interleaved", mla=True)
MROPE = ("mrope_section", "mrope_interleaved")

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": replace(MISTRAL, rope_theta=1_000_000.0),
    "ministral": LLAMA,
    "ministral3": replace(LLAMA, inert=("llama_4_scaling_beta",)),
    "qwen2": QWEN,
    "qwen2_moe": QWEN,
    "qwen3": QWEN,
    "qwen3_moe": QWEN,
    "qwen2_vl_text": replace(LLAMA, table=None, inert=MROPE, extendable=False),
    "qwen2_5_vl_text": replace(LLAMA, table=None, inert=MROPE, extendable=False),
    "qwen3_vl_text": replace(LLAMA, table=None, inert=MROPE, extendable=False),
    "gemma": LLAMA,
    "gemma2": replace(LLAMA, sliding="every", full_every=2),
    "gemma3_text": GEMMA3,
    "gemma4_text": replace(GEMMA3, full_head_dim_key="global_head_dim"),
    "phi": replace(LLAMA, partial_rotary_factor=0.5),
    "phi-msft": replace(LLAMA, table=None, length_keys=("n_positions",), extendable=False),
    "phi3": MISTRAL,
    "phi3_v": replace(MISTRAL, extendable=False),
    "olmo": LLAMA,
    "olmo2": LLAMA,
    "granite": LLAMA,
    "starcoder2": MISTRAL,
    "stablelm": replace(LLAMA, partial_rotary_factor=0.25),
    "smollm3": replace(LLAMA, rope_theta=2_000_000.0, nope="interval"),
    "seed_oss": LLAMA,
    "internlm2": replace(LLAMA, extendable=False),
    "minicpm": replace(LLAMA, extendable=False),
    "minimax_m2": replace(LLAMA, rope_theta=5_000_000.0),
    "gpt_neox": replace(
        LLAMA,
        theta_keys=("rotary_emb_base", "rope_theta"),
        partial_rotary_factor=0.25,
        partial_keys=("rotary_pct", "partial_rotary_factor"),
    ),
    "gptj": replace(COHERE, table=None, length_keys=("n_positions",), extendable=False),
    "cohere": replace(COHERE, rope_theta=500_000.0),
    "cohere2": replace(COHERE, nope="full", sliding="every", full_every=4),
    "glm": GLM,
    "glm4": GLM,
    "chatglm": replace(
        GLM,
        table=None,
        theta_ratio_key="rope_ratio",
        length_keys=("seq_length",),
        extendable=False,
    ),
    "gpt_oss": replace(LLAMA, table="pairs", rope_theta=150_000.0),
    "llama4_text": replace(
        COHERE, table=None, rope_theta=500_000.0, nope="interval", extendable=False
    ),
    "deepseek_v2": replace(DEEPSEEK, table=None, extendable=False),
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": replace(DEEPSEEK, extendable=False),
    "glm_moe_dsa": DEEPSEEK,
}

WITHOUT_ROPE: Mapping[str, str] = {
    "mpt": "ALiBi biases",
    "bloom": "ALiBi biases",
    "gpt2": "learned positions",
    "opt": "learned positions",
    "gpt_neo": "learned positions",
    "gpt_bigcode": "learned positions",
    "bert": "learned positions",
    "t5": "T5's relative biases",
}

TEXT_KEYS = ("text_config", "llm_config", "language_config")


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's part of a config, the whole where it is not nested."""
    for key in TEXT_KEYS:
        if isinstance(config.get(key), Mapping):
            return config[key]
    return config


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Returns the row of a config's `model_type`, or None for an unknown family."""
    model_type = config.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def positions_without_rope(config: Mapping[str, Any]) -> str | None:
    """Returns what the model uses instead of rotation, or None if it may rotate.

    >>> positions_without_rope({"model_type": "bloom"})
    'ALiBi biases'
    """
    alibi = config.get("alibi") or (config.get("attn_config") or {}).get("alibi")
    if alibi:
        return "ALiBi biases"
    if config.get("position_embedding_type") == "absolute":
        return "learned positions"
    return WITHOUT_ROPE.get(str(config.get("model_type")))


def layer_types(config: Mapping[str, Any], family: Family | None) -> tuple[str, ...]:
    """Returns each layer's type, `full_attention` or `sliding_attention`, in order."""
    count = layer_count(config)
    listed = config.get("layer_types")
    if isinstance(listed, (list, tuple)) and listed:
        return tuple(str(kind) for kind in listed[:count])
    return tuple(
        "sliding_attention" if _slides(layer, config, family) else "full_attention"
        for layer in range(count)
    )


def _slides(layer: int, config: Mapping[str, Any], family: Family | None) -> bool:
    """Whether a layer keeps to the sliding window, by the family's rule."""
    if family is None or not config.get("sliding_window"):
        return False
    if family.sliding == "after":
        return bool(config.get("use_sliding_window")) and layer >= config.get(
            "max_window_layers", 0
        )
    if family.sliding == "every":
        every = config.get("sliding_window_pattern") or family.full_every or 1
        return (layer + 1) % every != 0
    return family.sliding == "all"


def rotating_layers(config: Mapping[str, Any], family: Family | None) -> tuple[bool, ...]:
    """Returns whether each layer rotates; False marks a NoPE layer."""
    kinds = layer_types(config, family)
    if family is None or family.nope is None:
        return (True,) * len(kinds)
    if family.nope == "full":
        return tuple(kind == "sliding_attention" for kind in kinds)
    listed = config.get("no_rope_layers")
    if listed:  # 1 marks a layer that rotates, in spite of the name
        return tuple(bool(rotates) for rotates in listed)
    interval = config.get("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(len(kinds)))


def layer_count(config: Mapping[str, Any]) -> int:
    """Returns the number of layers under whichever name the family gives it."""
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(config.get(key), int):
            return config[key]
    return 0
