"""transformers' own logits processors, by the names of its generation config."""

from __future__ import annotations

from typing import Any


def processors(**settings: float | None) -> list[Any]:
    """Returns the processors that are asked for, in transformers' order.

    Each takes the ids written, [1, N] int64, and logits [1, V], and returns logits [1, V].

    Args:
        settings: of `repetition_penalty`, `temperature`, `top_k`, `top_p` and `min_p`; None leaves
            one out.
    """
    import transformers

    kinds = {
        "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    made = []
    for name, kind in kinds.items():
        value = settings.get(name)
        if value is not None:  # their checks want a float, also for a whole number
            made.append(kind(int(value) if name == "top_k" else float(value)))
    return made
