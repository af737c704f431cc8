"""A second model over the same weights, under another rope."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longspan.adapters.rope import rope_from_config
from longspan.adapters.rope_writing import REPLACED_KEYS, with_kept_keys
from longspan.adapters.ropes import Ropes
from longspan.adapters.rotation import rebuild_rotation, require_family, text_config
from longspan.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a second model object over the same weights and buffers, with its own config."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    shared |= {id(tensor): tensor for tensor in model.buffers()}
    return copy.deepcopy(model, shared)


def with_config(model: PreTrainedModel, changed: Mapping[str, Any]) -> PreTrainedModel:
    """Returns a twin whose rotation is rebuilt from the changed config.

    Args:
        model: a live model.
        changed: config keys and their new values, as `rope_to_config` returns them.
    """
    extended = twin(model)
    text = text_config(extended)
    set_rope(text, changed)
    rebuild_rotation(extended, text)
    rescale_softmax(extended)
    if extended.generation_config is not None:
        reset_lengths(extended.generation_config)
    return extended


def set_rope(config: Any, changed: Mapping[str, Any]) -> None:
    """Writes an extension into a config object, and drops what would contradict it."""
    before = config.to_dict()
    share = (before.get("rope_parameters") or {}).get("partial_rotary_factor")
    for key in REPLACED_KEYS:
        if key in config.__dict__:
            delattr(config, key)
    for key, value in changed.items():
        setattr(config, key, copy.deepcopy(value))
    config.rope_parameters = with_kept_keys(before, config.rope_parameters)
    if share is not None:  # some families' classes need it even where the whole head turns
        config.rope_parameters.setdefault("partial_rotary_factor", share)
    if before.get("head_dim", 1) is None:  # transformers' YaRN reads it and fails on None
        config.head_dim = config.hidden_size // config.num_attention_heads


def check_loads(model: PreTrainedModel, ropes: Ropes) -> None:
    """Refuses a config that transformers' own class refuses, or reads otherwise than planned.

    Raises:
        UnsupportedModelError: naming the class and what it made of the config.
    """
    kind = type(model.config)
    try:
        found = dict(rope_from_config(kind.from_dict(model.config.to_dict())))
    except Exception as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())
    if found != dict(ropes):
        raise UnsupportedModelError(
            f"transformers' {kind.__name__} does not load this rope as it is meant: {found}. "
            "Method 'ntk', which only raises rope_theta, works for every family."
        )


def rescale_softmax(model: PreTrainedModel) -> None:
    """Sets the softmax scale of latent attention, which transformers computes only once."""
    if not require_family(model).mla:
        return
    ropes = rope_from_config(model.config)
    multiplier = ropes[ropes.reaching].softmax_scale_multiplier
    for module in model.modules():
        if hasattr(module, "qk_head_dim") and hasattr(module, "scaling"):
            module.scaling = module.qk_head_dim**-0.5 * multiplier  # type: ignore[operator]


def reset_lengths(generation_config: Any) -> None:
    """Drops a generation limit that was set to the old length."""
    generation_config.max_length = None
