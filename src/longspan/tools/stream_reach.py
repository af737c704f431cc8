"""How far a model reads, and whether a cache keeps within that."""

from __future__ import annotations

from longspan.adapters.alibi_attention import STAND_INS
from longspan.adapters.config_fields import ConfigLike, as_mapping
from longspan.adapters.families import positions_without_rope, text_part
from longspan.adapters.lengths import Lengths, endless, lengths_of, sliding_layers
from longspan.adapters.rope import rope_from_config
from longspan.adapters.ropes import Ropes
from longspan.errors import ConfigError, UnsupportedModelError

WINDOW = 1020  # with four sinks, 1,024 tokens


def reach(
    config: ConfigLike, original_max_position_embeddings: int | None = None
) -> Lengths | None:
    """Returns how far a model reads, or None where no distance is too great for it (ALiBi).

    Raises:
        ConfigError: where the config declares no length, or one that may be either of two.
    """
    given = original_max_position_embeddings
    ropes = _ropes(config, given)
    if ropes is None:
        return None
    return lengths_of(config, ropes, original_max_position_embeddings=given)


def default_window(
    config: ConfigLike, num_sink_tokens: int, original_max_position_embeddings: int | None = None
) -> int:
    """Returns 1020 tokens, or what the sinks leave of what the model reads."""
    bound = _bound(config, original_max_position_embeddings)
    return WINDOW if bound is None else max(1, min(WINDOW, bound - num_sink_tokens))


def check_fits(
    config: ConfigLike,
    num_sink_tokens: int,
    sliding_window: int,
    *,
    seq_len: int | None = None,
    original_max_position_embeddings: int | None = None,
) -> None:
    """Refuses a cache in which distances would leave what the model can read.

    Dynamic NTK's table follows the length, so it has no end; layers that slide keep their own.

    Args:
        config: the model's.
        num_sink_tokens, sliding_window, seq_len, original_max_position_embeddings: see `stream`.

    Raises:
        ConfigError: naming the largest window, or why the declared length is of no use.
    """
    kept, given = num_sink_tokens + sliding_window, original_max_position_embeddings
    _check_declared(_ropes(config, given), seq_len, kept)
    bound = _bound(config, given)
    if bound is None or kept <= bound:
        return
    if num_sink_tokens >= bound:
        raise ConfigError(
            f"{num_sink_tokens} tokens are never to be dropped, and the model reads "
            f"{bound}: no window is left. Keep fewer, or pin a shorter prompt."
        )
    raise ConfigError(
        f"num_sink_tokens + sliding_window is {num_sink_tokens} + {sliding_window} = {kept}, and "
        f"the model reads {bound} tokens. Distances would leave that range: lower sliding_window "
        f"to {bound - num_sink_tokens} or less."
    )


def _bound(config: ConfigLike, given: int | None) -> int | None:
    """Returns the tokens that distances must keep within; None where there is no such bound."""
    ropes = _ropes(config, given)
    if ropes is None or endless(ropes) or slides_alone(config, given):
        return None
    return lengths_of(config, ropes, original_max_position_embeddings=given).usable


def slides_alone(config: ConfigLike, original_max_position_embeddings: int | None = None) -> bool:
    """Returns whether every layer keeps to a window of its own, so that none has sinks."""
    given = original_max_position_embeddings
    ropes = _ropes(config, given)
    return ropes is not None and all(
        sliding_layers(config, ropes, original_max_position_embeddings=given)
    )


def _check_declared(ropes: Ropes | None, seq_len: int | None, kept: int) -> None:
    if seq_len is None:
        return
    if not any(rope.method.depends_on_length for rope in (ropes or {}).values()):
        raise ConfigError(
            f"seq_len {seq_len} would change nothing: no table of this model depends on the length "
            "(those of dynamic NTK and LongRoPE do). Leave it out."
        )
    if seq_len < kept:
        raise ConfigError(
            f"seq_len {seq_len} is declared, and the cache holds {kept} tokens, so distances would "
            f"exceed it. Declare {kept} or more, or keep fewer."
        )


def _ropes(config: ConfigLike, original: int | None) -> Ropes | None:
    found = as_mapping(config)
    if found.get("model_type") in STAND_INS:
        return None
    if instead := positions_without_rope(text_part(found)):
        raise UnsupportedModelError(
            f"{found.get('model_type')!r} cannot be streamed: its positions come from {instead}. "
            f"Models with a rope can, and {' and '.join(sorted(STAND_INS))} with ALiBi."
        )
    return rope_from_config(config, original_max_position_embeddings=original)
