"""What cannot be read as slices of a sequence, one a rank: refused before anything is exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from longspan.adapters.config_fields import as_mapping
from longspan.adapters.families import layer_types, text_part
from longspan.adapters.rope import rope_from_config
from longspan.adapters.rotation import LongspanRotary, require_family, rotary_modules
from longspan.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_group(group: Any) -> None:
    """Refuses a group that this process is no rank of."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "context_parallel needs the ranks of torch.distributed. Start the script with torchrun "
            "and call torch.distributed.init_process_group() first."
        )
    if dist.get_rank(group) < 0:
        raise ConfigError("this process is not a rank of the group that context_parallel is given.")


def check_model(model: PreTrainedModel) -> None:
    """Refuses a model in which more than attention goes from token to token."""
    kinds = set(layer_types(text_part(as_mapping(model.config)), require_family(model)))
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if other:
        raise UnsupportedModelError(
            f"layers of type {', '.join(other)} cannot read slices of a sequence; full_attention "
            "and sliding_attention can."
        )
    lent = all(isinstance(child, LongspanRotary) for _, _, child in rotary_modules(model))
    if not lent and any(
        rope.method.depends_on_length for rope in rope_from_config(model.config).values()
    ):
        raise UnsupportedModelError(
            "this model's rotation depends on the length of the whole sequence, which a slice does "
            "not know. Give it one table within exact_rotation(model, ropes, seq_len=N)."
        )


def refusal(tokens: Tensor | None, given: Mapping[str, Any]) -> ConfigError | None:
    """Returns why a slice cannot be read, or None.

    Args:
        tokens: [B, T], or their embeddings [B, T, hidden].
        given: what the body is called with, by name.
    """
    if given.get("use_cache") or any(
        given.get(name) is not None for name in ("cache", "past_key_values")
    ):
        return ConfigError(
            "slices of a sequence are read without key-value caches. Pass use_cache=False; to "
            "generate, leave the context_parallel block."
        )
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
        return ConfigError(
            "slices of a sequence have no padding and no mask of their own. Leave attention_mask "
            "out; tokens appended at the end are seen by none before them."
        )
    length = None if tokens is None else tokens.shape[1]
    if positions is None or positions.dim() != 2 or positions.shape[1] != length:
        fits = False
    else:
        fits = bool((positions == positions[:1]).all())
    if not fits:
        return ConfigError(
            "a slice needs its position_ids, [1 or B, T] and the same in every row. "
            "shard_sequence(input_ids, rank, size) returns them."
        )
    return None


def refuse_unshifted_labels(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    """Refuses labels that the model itself would shift; a forward pre-hook."""
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ConfigError(
            "labels would be shifted within a slice, which does not know the token after its last. "
            "Shift them before cutting, and pass labels and shift_labels, both the shifted slice."
        )
