"""A second model over the same weights, under another rope."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longspan.adapters.rope import REPLACED_KEYS, rope_from_config
from longspan.adapters.rotation import rebuild_rotation, require_family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def with_config(model: PreTrainedModel, changed: Mapping[str, Any]) -> PreTrainedModel:
    """Returns a copy that shares every weight, its rotation rebuilt from the changed config.

    Args:
        model: a live model.
        changed: config keys and their new values, as `rope_to_config` returns them.
    """
    config = copy.deepcopy(model.config)
    set_rope(config.get_text_config(), changed)
    shared: dict[int, Any] = {id(tensor): tensor for tensor in model.parameters()}
    shared |= {id(tensor): tensor for tensor in model.buffers()}
    shared[id(model.config)] = config
    extended = copy.deepcopy(model, shared)
    rebuild_rotation(extended, config.get_text_config())
    rescale_softmax(extended)
    if extended.generation_config is not None:
        reset_lengths(extended.generation_config)
    return extended


def set_rope(config: Any, changed: Mapping[str, Any]) -> None:
    """Writes an extension into a config object, and drops what would contradict it."""
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    for key in REPLACED_KEYS:
        if key in config.__dict__:
            delattr(config, key)
    for key, value in changed.items():
        setattr(config, key, copy.deepcopy(value))
    if share is not None:  # some families' classes need it even where the whole head turns
        config.rope_parameters.setdefault("partial_rotary_factor", share)


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
