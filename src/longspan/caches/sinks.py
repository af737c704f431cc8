"""The sinks of all layers, turned together: a few calls a token, not a few a layer.

A token's distance to a sink stops growing once the cache is full, while the window's keys stay as
they were turned: so the sinks move along with the newest token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.caches.buffers import Buffers
from longspan.caches.encoding import LayerEncoding
from longspan.caches.step import Step


@dataclass(frozen=True, eq=False)
class Sinks:
    """The sinks of layers that turn alike, once all of them are stored and change no more."""

    encoding: LayerEncoding
    raw: Tensor
    """[L, B, K, S, D], never turned."""
    places: tuple[Tensor, ...]
    """L times [B, K, S, D], where queries meet them."""

    def move(self, step: Step) -> None:
        """Turns them to where a single new token needs them."""
        moved = self.encoding.turn(self.raw, step.sinks_at, known=(step.tables, "sinks"))
        for place, keys in zip(self.places, moved.unbind(), strict=True):
            place.copy_(keys)


def sinks_of(
    layers: Mapping[int, Buffers], encodings: Mapping[int, LayerEncoding], count: int
) -> list[Sinks]:
    """Returns the sinks of all layers that turn, those that turn alike together.

    Args:
        layers, encodings: of a cache, by layer.
        count: S, which all rows have stored.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for layer, kept in layers.items():
        if kept.turned is not None:
            how, raw = encodings[layer], kept.raw
            key = id(how.rope), how.seq_len, raw.shape, raw.dtype, raw.device
            alike.setdefault(key, []).append(layer)
    return [
        Sinks(
            encodings[same[0]],
            torch.stack([layers[layer].raw[:, :, :count] for layer in same]),
            tuple(layers[layer].keys[:, :, :count] for layer in same),
        )
        for same in alike.values()
    ]
