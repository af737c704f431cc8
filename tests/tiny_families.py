"""A tiny random causal model of every family that transformers can build and longspan can turn."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longspan.adapters.families import FAMILIES

VOCAB = 64
TRAINED = 64
THETA = 1_000.0

SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=TRAINED,
    initializer_range=0.2,  # attention far from uniform, so that rotation matters
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(
    num_key_value_heads=2,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
SLIDING_THEN_FULL = dict(
    head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
)
OWN_THETA = {"rope_type": "default", "rope_theta": 100.0}

# What each family's config needs beside SHAPE; the share of a head that turns goes into the rope.
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=None),
    "mixtral": EXPERTS,
    "ministral": SLIDING_THEN_FULL,
    "ministral3": dict(head_dim=16),
    "qwen2": {},
    "qwen2_moe": dict(**EXPERTS, shared_expert_intermediate_size=16),
    "qwen3": dict(head_dim=16),
    "qwen3_moe": dict(head_dim=16, **EXPERTS),
    "gemma": dict(head_dim=16),
    "gemma2": SLIDING_THEN_FULL,
    "gemma3_text": SLIDING_THEN_FULL,
    "gemma4_text": dict(
        **SLIDING_THEN_FULL,
        global_head_dim=32,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
        enable_moe_block=False,
    ),
    "phi": {},
    "phi3": dict(original_max_position_embeddings=TRAINED),
    "olmo": {},
    "olmo2": {},
    "granite": {},
    "starcoder2": {},
    "stablelm": {},
    "smollm3": dict(no_rope_layer_interval=2),
    "seed_oss": dict(head_dim=16),
    "minimax_m2": dict(head_dim=16, **EXPERTS),
    "gpt_neox": {},
    "cohere": dict(logit_scale=1.0),
    "cohere2": dict(**SLIDING_THEN_FULL, logit_scale=1.0),
    "glm": dict(head_dim=16),
    "glm4": dict(head_dim=16),
    "gpt_oss": dict(**SLIDING_THEN_FULL, **EXPERTS),
    "deepseek_v3": LATENT,
    "glm_moe_dsa": dict(**LATENT, index_head_dim=16, index_n_heads=2, index_topk=512),
}
SHARES = {
    "phi": 0.5,
    "stablelm": 0.25,
    "gpt_neox": 0.25,
    "glm": 0.5,
    "glm4": 0.5,
    "minimax_m2": 0.5,
}
PLAIN: dict[str, dict[str, Any]] = {
    # its attention scales queries by position with two keys of the rope block
    "ministral3": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": TRAINED // 2,
        "llama_4_scaling_beta": 0.5,
    },
    "gemma4_text": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
UNREAD = {"gpt_neox": ("num_key_value_heads",)}


def tiny_config(model_type: str, rope: dict[str, Any] | None = None, **changed: Any) -> Any:
    """Returns a small config of one family, with plain rope unless given another block."""
    plain = PLAIN.get(model_type, {"rope_type": "default"})
    block = {"rope_theta": THETA, **(plain if rope is None else rope)}
    if model_type in SHARES:
        block.setdefault("partial_rotary_factor", SHARES[model_type])
    written: dict[str, Any] = block
    if FAMILIES[model_type].sliding_theta is not None:
        written = {"sliding_attention": dict(OWN_THETA), "full_attention": block}
    arguments = {**SHAPE, **OWN[model_type], **changed}
    for key in UNREAD.get(model_type, ()):
        arguments.pop(key, None)
    return CONFIG_MAPPING[model_type](rope_parameters=written, **copy.deepcopy(arguments))


def tiny(model_type: str, rope: dict[str, Any] | None = None, **changed: Any) -> Any:
    """Returns a random causal model; equal seeds, so equal weights, whatever `rope`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type, rope, **changed), attn_implementation="eager"
    )
    return model.eval()


def tokens(count: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Returns [rows, count] random token ids."""
    return torch.randint(VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, row: torch.Tensor) -> torch.Tensor:
    """Returns all logits of one uncached forward, [B, T, V]."""
    with torch.no_grad():
        return model(row, use_cache=False).logits


def table_by_transformers(config: Any, kind: str, seq_len: int) -> tuple[Tensor, float]:
    """Returns inv_freq and the attention factor of one layer type."""
    nested = kind in config.rope_parameters
    rope = config.rope_parameters[kind] if nested else config.rope_parameters
    layer_type = kind if nested else None
    sizes = config.per_layer_config[kind] if "per_layer_config" in config.to_dict() else config
    if rope["rope_type"] != "default":
        compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        return compute(sizes, torch.device("cpu"), seq_len=seq_len, layer_type=layer_type)
    modeling = importlib.import_module(
        type(config).__module__.replace("configuration_", "modeling_")
    )
    rotary = [
        value
        for name, value in vars(modeling).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    ]
    assert len(rotary) == 1
    given = {} if layer_type is None else {"layer_type": layer_type}
    return rotary[0].compute_default_rope_parameters(sizes, **given)
