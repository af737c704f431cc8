"""The only place that imports transformers: families, configs, live models, loading."""

from __future__ import annotations


def register() -> None:
    """Makes `attn_implementation="longspan"` known to transformers; asking twice is harmless.

    With it a model's sliding layers cost O(N·W), soft caps and learned sinks work on every device,
    and no mask of all pairs is built. It reads padding on either side, packed position ids and any
    of transformers' caches. Attention weights (`output_attentions`) do not exist in it.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> register()
    >>> tiny = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    >>> model = LlamaForCausalLM._from_config(tiny, attn_implementation="longspan")
    >>> model(torch.arange(8)[None]).logits.shape
    torch.Size([1, 8, 8])
    """
    from longspan.adapters.attention import lend

    lend()
