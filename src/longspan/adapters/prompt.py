"""A prompt read once, continued many times: its cache is never changed by a continuation."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from longspan.adapters.head import SplitForward
from longspan.errors import ShapeError, UnsupportedModelError


class ReadPrompt:
    """The state of a model that has read a prompt.

    Args:
        split: the model, see `SplitForward`.
        input_ids: [1, N] int64, the prompt.

    Raises:
        UnsupportedModelError: if the model's cache cannot be continued from twice, as that of
            recurrent layers.
    """

    def __init__(self, split: SplitForward, input_ids: Tensor) -> None:
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise ShapeError(f"a prompt is one row [1, N], got {tuple(input_ids.shape)}.")
        self.split = split
        self._cache = new_cache(split.model)
        self._last = split.hidden(input_ids, self._cache)[:, -1:]
        check_repeatable(self._cache, type(split.model).__name__)

    def next_logits(self, continuation: Sequence[int]) -> Tensor:
        """Returns the logits after the prompt and after each token of a continuation.

        Args:
            continuation: token ids, possibly none.

        Returns:
            [len(continuation) + 1, vocabulary] float32.
        """
        hidden = self._last
        if len(continuation):
            tokens = torch.tensor([list(continuation)], dtype=torch.int64)
            hidden = torch.cat((hidden, self.split.hidden(tokens, branch(self._cache))), dim=1)
        return self.split.logits(hidden)[0].float()


def new_cache(model: Any) -> Any:
    """Returns an empty cache with the kinds of layers the model needs."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def branch(cache: Any) -> Any:
    """Returns a cache that starts from the same keys and values and leaves them as they are."""
    other = copy(cache)
    other.layers = [copy(layer) for layer in cache.layers]
    return other


def check_repeatable(cache: Any, model_name: str) -> None:
    """Refuses layers that change their state in place, so that a branch would change its root."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    kinds = {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UnsupportedModelError(
            f"{model_name} caches {names}, whose state a continuation would overwrite. "
            "Passkey retrieval reads attention caches only; leave it out for this model."
        )
