"""The root block `longspan`: how a config was extended, and from where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.errors import ConfigError
from longspan.rotary.rope import Rope
from longspan.rotary.scaling.base import check_length, check_number


def origin_block(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the block that longspan writes, None where there is none; refuses a broken one."""
    written = config.get("longspan")
    if written is None:
        return None
    keys = ("method", "factor", "original_max_position_embeddings", "rope_theta")
    missing = [key for key in keys if not isinstance(written, Mapping) or key not in written]
    if missing:
        raise ConfigError(
            f"the longspan block lacks {', '.join(missing)}. Remove it, or extend the original "
            "checkpoint again."
        )
    check_length("the longspan block's length", written["original_max_position_embeddings"])
    if written["factor"] is not None:  # LongRoPE may carry an attention factor instead
        check_number("the longspan block's factor", written["factor"])
    return written


def origin_of(rope: Rope, trained: int) -> dict[str, Any]:
    """Returns the block for a rope, with `trained` where its scaling does not name the length."""
    scaling = rope.method
    return {
        "method": scaling.method,
        "factor": scaling.factor,
        "original_max_position_embeddings": getattr(
            scaling, "original_max_position_embeddings", trained
        ),
        "rope_theta": rope.rope_theta,
    }
