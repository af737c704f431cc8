"""Small random models of several families, and a tokenizer of bytes: no download, no training."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 128
TRAINED = 64
THETA = 10_000.0

SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=TRAINED,
    initializer_range=0.3,  # attention that is far from uniform, so that rotation matters
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3", {"original_max_position_embeddings": TRAINED}),
    "gpt_neox": ("GPTNeoX", {"num_attention_heads": 2}),  # half of each head turns
    "cohere": ("Cohere", {"logit_scale": 1.0}),
}
ROTARY_DIM = 8  # of every family here

LOCAL = {"rope_type": "default", "rope_theta": 1000.0}


def tiny_model(family: str = "llama", rope: dict[str, Any] | None = None, **changed: Any) -> Any:
    """Returns a random causal model in eval mode; equal seeds, so equal weights, whatever `rope`.

    Args:
        family: a key of FAMILIES.
        rope: rope_parameters of the layers that reach furthest; plain ones unless given.
        changed: other config keys.
    """
    name, own = FAMILIES[family]
    block = {"rope_type": "default", "rope_theta": THETA, **(rope or {})}
    if family == "gpt_neox":
        block["partial_rotary_factor"] = 0.5
    written: dict[str, Any] = block
    if family == "gemma3":
        written = {"sliding_attention": dict(LOCAL), "full_attention": block}
    arguments = {**SMALL, **own, **changed}
    if family == "gpt_neox":
        del arguments["num_key_value_heads"]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )
    config = config_class(**arguments)
    config.rope_parameters = written  # past the config's checks: Phi3's knows longrope alone
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    """Returns [1, count] random token ids."""
    return torch.randint(1, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


class ByteTokenizer:
    """One token a character of ASCII."""

    def __init__(self, bos_token_id: int | None = None) -> None:
        self.bos_token_id = bos_token_id

    def __len__(self) -> int:
        return VOCAB

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [min(ord(letter), VOCAB - 1) for letter in text]
        lead = add_special_tokens and self.bos_token_id is not None
        return [self.bos_token_id, *ids] if lead else ids  # type: ignore[list-item]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))
