"""What each model family does with positions: one row a family.

A row tells what the weights cannot: the pair layout, the defaults of keys a config may leave out,
which layers do not rotate. An unknown family can be read, but not extended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from longspan.errors import ConfigError
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
        head_dim: the documented default of a config that names none; hidden_size over heads
            where the family documents none.
        inert: keys of a rope block that do not change the rotation here.
        extendable: False where transformers' own modules ignore scaling.
        needs_block: a config without a rope block means a scaled or partial rope in transformers,
            so it is not read as a plain one.
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
    head_dim: int | None = None
    inert: tuple[str, ...] = ()
    extendable: bool = True
    needs_block: bool = False


LLAMA = Family(layout="half")
MISTRAL = replace(LLAMA, sliding="all")
QWEN = replace(LLAMA, sliding="after")
COHERE = Family(layout="interleaved", table="interleaved")
GLM = Family(layout="interleaved", partial_rotary_factor=0.5, head_dim=128)
GEMMA = replace(LLAMA, head_dim=256)
GEMMA3 = replace(
    GEMMA, rope_theta=1_000_000.0, sliding_theta=10_000.0, sliding="every", full_every=6
)
DEEPSEEK = Family(layout="interleaved", mla=True)
MROPE = replace(LLAMA, table=None, inert=("mrope_section", "mrope_interleaved"), extendable=False)

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": replace(MISTRAL, rope_theta=1_000_000.0),
    "ministral": MISTRAL,
    "ministral3": replace(
        MISTRAL,
        head_dim=128,
        inert=("llama_4_scaling_beta", "max_position_embeddings"),
        needs_block=True,
    ),
    "qwen2": QWEN,
    "qwen2_moe": QWEN,
    "qwen3": replace(QWEN, head_dim=128),
    "qwen3_moe": QWEN,
    "qwen2_vl_text": replace(MROPE, rope_theta=1_000_000.0),
    "qwen2_5_vl_text": replace(MROPE, rope_theta=1_000_000.0),
    "qwen3_vl_text": replace(MROPE, rope_theta=None, head_dim=128),
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, sliding="every", full_every=2),
    "gemma3_text": GEMMA3,
    "gemma4_text": replace(GEMMA3, needs_block=True),
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
    "seed_oss": replace(LLAMA, head_dim=128),
    "internlm2": replace(LLAMA, extendable=False),
    "minicpm": replace(LLAMA, extendable=False),
    "minimax_m2": replace(LLAMA, rope_theta=5_000_000.0, head_dim=128),
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
    "gpt_oss": replace(
        LLAMA,
        table="pairs",
        rope_theta=150_000.0,
        head_dim=64,
        sliding="every",
        full_every=2,
        needs_block=True,
    ),
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
    "longspan_decoder": "its own layers",
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
    attention = config.get("attn_config")
    if config.get("alibi") or (isinstance(attention, Mapping) and attention.get("alibi")):
        return "ALiBi biases"
    if config.get("position_embedding_type") == "absolute":
        return "learned positions"
    return WITHOUT_ROPE.get(str(config.get("model_type")))


def layer_types(config: Mapping[str, Any], family: Family | None) -> tuple[str, ...]:
    """Returns each layer's type in order: `full_attention`, `sliding_attention` and others.

    Raises:
        ConfigError: if the config lists layer types, but not one a layer.
    """
    count = layer_count(config)
    listed = config.get("layer_types")
    if listed:
        return tuple(str(kind) for kind in _one_a_layer("layer_types", listed, count))
    if family and family.nope == "interval" and config.get("attention_chunk_size"):
        return tuple(
            "chunked_attention" if rotates else "full_attention"
            for rotates in _listed_or_interval(config, count)
        )
    return tuple(
        "sliding_attention" if _slides(layer, config, family) else "full_attention"
        for layer in range(count)
    )


def _one_a_layer(name: str, listed: Any, count: int) -> Sequence[Any]:
    """Returns one entry for each layer; a list may go on for layers that predict further tokens."""
    if not isinstance(listed, (list, tuple)) or len(listed) < count:
        raise ConfigError(f"{name} must list one entry for each of {count} layers, got {listed!r}.")
    return listed[:count]


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
    return _listed_or_interval(config, len(kinds))


def _listed_or_interval(config: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Returns which layers rotate where the config lists them, or every n-th does not."""
    listed = config.get("no_rope_layers")
    if listed:  # 1 marks a layer that rotates, in spite of the name
        return tuple(bool(rotates) for rotates in _one_a_layer("no_rope_layers", listed, count))
    interval = config.get("no_rope_layer_interval", 4)
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigError(f"no_rope_layer_interval must be a positive number, got {interval!r}.")
    return tuple((layer + 1) % interval != 0 for layer in range(count))


def layer_count(config: Mapping[str, Any]) -> int:
    """Returns the number of layers under whichever name the family gives it."""
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        count = config.get(key)
        if isinstance(count, int) and not isinstance(count, bool):
            return count
    return 0


def as_layers_see_it(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Returns a config with the sizes that layers of one type have of their own.

    Gemma 4's full layers have another head_dim and other key-value heads: under `global_` keys in
    its published configs, layer by layer in those that transformers writes.
    """
    own: dict[str, Any] = {}
    if kind == "full_attention":
        own["head_dim"] = config.get("global_head_dim")
        if config.get("attention_k_eq_v", True):
            own["num_key_value_heads"] = config.get("num_global_key_value_heads")
    by_layer, kinds = config.get("per_layer_config"), config.get("layer_types") or ()
    if isinstance(by_layer, Mapping) and kinds:
        layers = (sizes for layer, sizes in by_layer.items() if kinds[int(layer)] == kind)
        own.update(next(layers, {}))
    return {**config, **{key: value for key, value in own.items() if value is not None}}
