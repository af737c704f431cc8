"""The ropes of one model, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longspan.rotary.rope import Rope


@dataclass(frozen=True, eq=False)  # compared as the mapping it is
class Ropes(Mapping[str, Rope]):
    """A rope for each layer type that rotates; `full_attention` alone when there is one.

    Attributes:
        by_type: the ropes.
        layers: each layer's key into `by_type`, None for a layer that does not rotate (NoPE).
        notes: what was assumed, or found and not used, in words.
    """

    by_type: Mapping[str, Rope]
    layers: tuple[str | None, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, layer_type: str) -> Rope:
        return self.by_type[layer_type]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_type)

    def __len__(self) -> int:
        return len(self.by_type)

    def for_layer(self, layer: int) -> Rope | None:
        """Returns the rope of layer `layer` (from 0), or None where it does not rotate."""
        key = self.layers[layer]
        return None if key is None else self.by_type[key]

    @property
    def reaching(self) -> str:
        """The layer type whose keys are furthest away: the one an extension scales."""
        return "full_attention" if "full_attention" in self.by_type else next(iter(self.by_type))
