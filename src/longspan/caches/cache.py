"""Caches on one contract: fixed buffers, positions that are counted, attention over what is kept.

A chunk of any size gives what its tokens one at a time would. Distances within the window are true;
distances to the sinks stop at S + W − 1, so a text of any length stays within the trained range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from longspan.caches.buffers import Buffers
from longspan.caches.encoding import LayerEncoding, Scoring
from longspan.caches.many import attend_many
from longspan.caches.one import attend_one
from longspan.caches.sinks import Sinks, sinks_of
from longspan.caches.slots import Slots
from longspan.caches.step import Step, positions_after
from longspan.errors import ConfigError, ShapeError

REBASE = 1 << 20
"""Positions of turned keys are counted anew before they pass it. Their angles are float64: at this
position they are right to 3e-10 radians."""
GROWTH = 256  # slots a cache of everything grows by, at least
PLAIN = Scoring()


class KeyValueCache:
    """The keys and values of all layers of one kind, and what position comes next.

    Args:
        num_sink_tokens: first tokens that are never dropped.
        sliding_window: last tokens kept, the newest included; None keeps all.
    """

    def __init__(self, num_sink_tokens: int = 0, sliding_window: int | None = None) -> None:
        self.slots = Slots(num_sink_tokens, sliding_window)
        self.forget()

    def forget(self) -> None:
        """Empties the cache."""
        self.layers: dict[int, Buffers] = {}
        self.encodings: dict[int, LayerEncoding] = {}
        self.sinks: list[Sinks] | None = None
        """The sinks of all layers, once a single token has found all of them stored."""
        self.seen = torch.zeros(1, dtype=torch.int64)
        """[R] tokens each row has seen, so each row's next position."""
        self.base = 0
        """Where positions of turned keys are counted from."""
        self.at_least = self.at_most = 0
        """Bounds of `seen` that need no look at the tensor."""

    @property
    def num_sink_tokens(self) -> int:
        """First tokens that are never dropped."""
        return self.slots.num_sink_tokens

    @property
    def sliding_window(self) -> int | None:
        """Last tokens kept, the newest included; None keeps all."""
        return self.slots.sliding_window

    @property
    def stored(self) -> Tensor:
        """[R] rows kept of the tokens seen."""
        capacity = self.slots.capacity
        return self.seen if capacity is None else self.seen.clamp_max(capacity)

    def begin(self, tokens: int, present: Tensor | None = None, device: Any = None) -> Step:
        """Returns the step of new tokens, and counts them; then every layer attends once.

        Args:
            tokens: T.
            present: [B, T] bool, False at padding; None where all are there.
            device: of the keys that will come.
        """
        if present is not None and bool(present.all()):
            present = None
        before = self.seen.to(device)
        if present is not None and len(before) == 1:
            before = before.expand(len(present))
        self.seen = before + (tokens if present is None else present.sum(-1))
        self.at_least += tokens if present is None else 0
        self.at_most += tokens
        if self.at_most - self.base > REBASE:
            self._count_anew(before)
        capacity = self.slots.capacity
        step = Step(
            self.slots,
            positions_after(before, tokens, present),
            before,
            self.base,
            count=self.at_most if capacity is None else capacity,
            padded=present is not None,
            full=self.at_least >= (self.at_most if capacity is None else capacity),
        )
        if step.single and self.at_least > self.num_sink_tokens > 0:
            self._move_sinks(step)
        return step

    def attend(
        self,
        step: Step,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        encoding: LayerEncoding,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """Returns the new tokens' attention over what is kept and themselves, and stores them.

        Args:
            step: what `begin` returned for these tokens.
            layer: whose keys these are.
            q: [B, H, T, D], not turned.
            k, v: [B, K, T, D] and [B, K, T, Dv], not turned.
            encoding: the layer's rotation or bias.
            scoring: scale, learned sinks and soft cap.

        Returns:
            [B, H, T, Dv].

        Raises:
            ShapeError: where the tokens are not the step's, or rows came or went.
        """
        kept = self._buffers(step, layer, k, v, encoding)
        run = attend_one if step.single else attend_many
        return run(step, kept, q, k, v, encoding, scoring)

    def check_rows(self, rows: int) -> None:
        """Refuses another number of rows than are remembered.

        Raises:
            ShapeError: naming both.
        """
        for kept in self.layers.values():  # all have as many
            held = kept.raw.shape[0]
            if held != rows:
                raise ShapeError(
                    f"the cache holds {held} rows, got {rows}. Begin a new cache for another batch."
                )
            return

    def state(self) -> dict[str, Tensor]:
        """Returns a copy of all it remembers, tensors by name; `restore` takes it back."""
        counts = torch.tensor([self.base, self.at_least, self.at_most])
        found = {"seen": self.seen, "counts": counts}
        for layer, kept in self.layers.items():
            found[f"{layer}.raw"], found[f"{layer}.values"] = kept.raw, kept.values
            if kept.turned is not None:
                found[f"{layer}.turned"] = kept.turned
        return {name: tensor.clone() for name, tensor in found.items()}

    def restore(self, state: Mapping[str, Tensor], encodings: Mapping[int, LayerEncoding]) -> None:
        """Takes back what `state` returned, in place of what is remembered now.

        Args:
            state: from a cache of the same sizes.
            encodings: of every layer.

        Raises:
            ConfigError: where the sizes are others.
        """
        layers = sorted({int(name.split(".")[0]) for name in state if "." in name})
        capacity = self.slots.capacity
        stored = {state[f"{layer}.raw"].shape[2] for layer in layers}
        if capacity is not None and stored - {capacity}:
            raise ConfigError(
                f"the saved cache has {sorted(stored)[0]} slots, this one num_sink_tokens + "
                f"sliding_window = {capacity}. Use the sizes it was saved with."
            )
        self.seen = state["seen"].clone()
        self.base, self.at_least, self.at_most = state["counts"].tolist()
        self.encodings = dict(encodings)
        self.layers, self.sinks = {}, None
        for layer in layers:
            turned = state.get(f"{layer}.turned")
            raw, values = state[f"{layer}.raw"].clone(), state[f"{layer}.values"].clone()
            self.layers[layer] = Buffers(raw, None if turned is None else turned.clone(), values)

    def _buffers(
        self, step: Step, layer: int, k: Tensor, v: Tensor, encoding: LayerEncoding
    ) -> Buffers:
        capacity = self.slots.capacity
        if layer not in self.layers:
            room = step.count + GROWTH if capacity is None else capacity
            self.layers[layer] = Buffers.like(k, v, room, encoding.turns)
            self.encodings[layer] = encoding
        kept = self.layers[layer]
        self.check_rows(k.shape[0])
        if k.shape[2] != step.tokens:
            raise ShapeError(f"the step has {step.tokens} tokens, got keys of {tuple(k.shape)}.")
        if step.count > kept.capacity:
            kept.grow(step.count + max(GROWTH, kept.capacity // 2))
        return kept

    def _move_sinks(self, step: Step) -> None:
        """Turns the sinks, all stored before the step, to where its single token needs them."""
        if self.sinks is None:
            self.sinks = sinks_of(self.layers, self.encodings, self.num_sink_tokens)
        for sinks in self.sinks:
            sinks.move(step)
        step.sinks_moved = True

    def _count_anew(self, before: Tensor) -> None:
        """Counts positions of turned keys from a later one, each turned once, from its original."""
        window = self.slots.sliding_window
        base = 0 if window is None else self.at_least - window - (self.at_most - self.at_least)
        if base - self.base < REBASE // 4:  # rows too unlike in length, or nothing is dropped
            return
        self.base = base
        for layer, kept in self.layers.items():
            if kept.turned is not None:
                positions = self.slots.positions(before - 1, kept.capacity)
                kept.turned.copy_(self.encodings[layer].turn(kept.raw, positions - base))


class FullCache(KeyValueCache):
    """Keeps everything; buffers grow by half when they are full."""

    def __init__(self) -> None:
        super().__init__()


class WindowCache(KeyValueCache):
    """Keeps the last `sliding_window` tokens, the newest included."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(0, sliding_window)


class SinkCache(KeyValueCache):
    """Keeps the first tokens and a window of the last, as StreamingLLM does.

    Source: Xiao et al. 2023 (arXiv:2309.17453) §3.2.
    """

    def __init__(self, num_sink_tokens: int = 4, sliding_window: int = 1020) -> None:
        super().__init__(num_sink_tokens, sliding_window)
