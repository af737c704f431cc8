"""How far a model reads, and whether a cache keeps within that."""

from __future__ import annotations

from longspan.adapters.alibi_attention import STAND_INS
from longspan.adapters.config_fields import ConfigLike, as_mapping
from longspan.adapters.lengths import Lengths, lengths_of
from longspan.adapters.rope import rope_from_config
from longspan.errors import ConfigError


def reach(
    config: ConfigLike, original_max_position_embeddings: int | None = None
) -> Lengths | None:
    """Returns how far a model reads, or None where no distance is too great for it (ALiBi).

    Raises:
        ConfigError: where the config declares no length, or one that may be either of two.
    """
    if as_mapping(config).get("model_type") in STAND_INS:
        return None
    given = original_max_position_embeddings
    ropes = rope_from_config(config, original_max_position_embeddings=given)
    return lengths_of(config, ropes, original_max_position_embeddings=given)


def check_fits(lengths: Lengths | None, num_sink_tokens: int, sliding_window: int) -> None:
    """Refuses a cache in which distances would leave what the model can read.

    Raises:
        ConfigError: naming the largest window.
    """
    kept = num_sink_tokens + sliding_window
    if lengths is not None and kept > lengths.usable:
        raise ConfigError(
            f"num_sink_tokens + sliding_window is {num_sink_tokens} + {sliding_window} = {kept}, "
            f"and the model reads {lengths.usable} tokens. Distances would leave that range: "
            f"lower sliding_window to {lengths.usable - num_sink_tokens} or less."
        )
