"""The cache of a streamed model, as transformers wants one: for forward and for generate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from transformers import Cache

from longspan.caches import KeyValueCache
from longspan.errors import UnsupportedModelError

if TYPE_CHECKING:
    from longspan.adapters.streamed import StreamedModel

SINKS, SLIDING = "sinks", "sliding"


class Pending(NamedTuple):
    """Keys that were handed to a cache, and that its layer's attention will meet next."""

    cache: StreamCache
    layer: int
    keys: Tensor


class Handover(threading.local):
    """From a cache's update to the attention that follows it, in the same thread."""

    pending: Pending | None = None


HANDOVER = Handover()


def _hand_over(pending: Pending | None) -> Pending | None:
    """Leaves what the next attention call of this thread is about; returns what lay there."""
    before, HANDOVER.pending = HANDOVER.pending, pending
    return before


# dynamo loses what is set on a thread's own object
hand_over = cast("Callable[[Pending | None], Pending | None]", torch.compiler.disable(_hand_over))


class StreamCache(Cache):
    """What a streamed model remembers of one batch; its memory does not grow.

    Args:
        streamed: the model it belongs to.
        caches: by kind of layer.
        kinds: of each layer.
    """

    def __init__(
        self, streamed: StreamedModel, caches: Mapping[str, KeyValueCache], kinds: tuple[str, ...]
    ) -> None:
        super().__init__(layers=[])
        self.streamed, self.caches, self.kinds = streamed, dict(caches), kinds

    @property
    def columns(self) -> int:
        """Tokens fed, padding counted, as transformers counts them."""
        return next(iter(self.caches.values())).at_most

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Notes whose turn it is; the attention function stores what it meets.

        Raises:
            UnsupportedModelError: where the layer before had no attention of a stream.
        """
        before = hand_over(Pending(self, layer_idx, key_states))
        if before and before.cache is self and before.layer == layer_idx - 1:
            hand_over(None)
            raise UnsupportedModelError(
                "this model does not remember in a stream's cache. Call stream.model, the model "
                "that longspan.stream(…) made, with cache=stream.new_cache()."
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the tokens fed so far, padding counted."""
        return self.columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns the index of the next token."""
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns the new tokens alone, and the first one's index: no mask of all keys is built.

        BLOOM would make a bias of every key that is named here.
        """
        return query_length, self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns −1: there is no limit."""
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers keep to a window of the model's own."""
        return [kind == SLIDING for kind in self.kinds]

    @property
    def is_compileable(self) -> bool:
        """False: transformers would make masks ahead for it."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False: what left the window cannot come back."""
        return False

    @property
    def batch_size(self) -> int:
        """Rows, or −1 before the first forward."""
        for cache in self.caches.values():
            for kept in cache.layers.values():
                return kept.raw.shape[0]
        return -1

    def __len__(self) -> int:
        return len(self.kinds)

    def state(self) -> dict[str, Tensor]:
        """Returns all it remembers as tensors by name."""
        return {
            f"{kind}.{name}": tensor
            for kind, cache in self.caches.items()
            for name, tensor in cache.state().items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` returned.

        Raises:
            ConfigError: where it was saved from a cache of other sizes.
        """
        for kind, cache in self.caches.items():
            start = f"{kind}."
            own = {
                name.removeprefix(start): tensor
                for name, tensor in state.items()
                if name.startswith(start)
            }
            cache.restore(own, self.streamed.encodings)

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused: beams share a past that each would have to keep."""
        _refuse("beam search", "use num_beams=1, with or without sampling")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused: what left the window cannot come back."""
        _refuse("assisted decoding, which takes tokens back", "leave the assistant out")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused; see `reorder_cache`."""
        _refuse("repeating rows", "feed every row its own prompt")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refused; see `reorder_cache`."""
        _refuse("selecting rows", "feed every row its own prompt")

    def reset(self) -> None:
        """Forgets everything."""
        for cache in self.caches.values():
            cache.forget()


def _refuse(what: str, remedy: str) -> NoReturn:
    raise UnsupportedModelError(f"a stream's cache does not do {what}: {remedy}.")
