"""How much attention the first tokens get, per layer and head."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.errors import ConfigError


class SinkMass:
    """Adds up the attention that queries behind the first tokens pay to them.

    An observer of `adapters.observe.observed_attention`: it never sees more than one chunk.

    Args:
        num_sink_tokens: how many first tokens count.

    >>> mass = SinkMass(num_sink_tokens=1)
    >>> weights = torch.tensor([[1.0, 0.0], [0.75, 0.25]]).view(1, 1, 2, 2)
    >>> mass(0, 0, weights, torch.ones(2, 2, dtype=torch.bool).tril().view(1, 1, 2, 2))
    >>> mass.mean(0), mass.uniform(0)
    ([0.75], 0.5)
    """

    def __init__(self, num_sink_tokens: int) -> None:
        if num_sink_tokens < 1:
            raise ConfigError(f"num_sink_tokens must be at least 1, got {num_sink_tokens}.")
        self.num_sink_tokens = num_sink_tokens
        self._mass: dict[int, Tensor] = {}
        self._uniform: dict[int, float] = {}
        self._queries: dict[int, int] = {}

    def __call__(self, layer: int, first: int, weights: Tensor, visible: Tensor) -> None:
        """Adds a chunk: weights [1, H, C, S] and visible [1, 1, C, S] of queries from `first`."""
        skipped = max(0, self.num_sink_tokens - first)
        weights, visible = weights[0, :, skipped:], visible[0, 0, skipped:]
        sinks = slice(0, self.num_sink_tokens)
        mass = weights[..., sinks].double().sum(dim=(1, 2))  # [H]
        share = visible[:, sinks].sum(dim=1) / visible.sum(dim=1).clamp_min(1)
        self._mass[layer] = self._mass.get(layer, torch.zeros_like(mass)) + mass
        self._uniform[layer] = self._uniform.get(layer, 0.0) + share.double().sum().item()
        self._queries[layer] = self._queries.get(layer, 0) + weights.shape[1]

    @property
    def layers(self) -> list[int]:
        """The layers seen, in order."""
        return sorted(self._mass)

    def mean(self, layer: int) -> list[float]:
        """Returns each head's mean share on the first tokens, from 0 to 1."""
        return (self._mass[layer] / self._queries[layer]).tolist()

    def uniform(self, layer: int) -> float:
        """Returns the share they would get if every query spread evenly over what it sees."""
        return self._uniform[layer] / self._queries[layer]
