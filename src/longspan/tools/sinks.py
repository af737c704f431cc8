"""`sinks`: how much attention each head pays to the first tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from longspan.adapters.head import SplitForward
from longspan.adapters.observe import observed_attention
from longspan.errors import ConfigError, NumericalError, UnsupportedModelError
from longspan.metrics.sink_mass import SinkMass
from longspan.rotary.scaling.base import check_length
from longspan.tools.records import record_from_json, record_to_json
from longspan.tools.rows import bos_token, read_rows
from longspan.tools.texts import Text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

FORM = "longspan sinks 1"
SAME_OUTPUT = 2e-2  # of the largest hidden state; low precision adds up over layers


@dataclass(frozen=True, kw_only=True)
class SinkMap:
    """The attention mass on the first tokens, by layer and head.

    Attributes:
        model: name or path as the user gave it.
        text: (name, sha256) of the text read.
        length: tokens read.
        num_sink_tokens: how many first tokens count.
        bos: whether the first of them is BOS.
        layers: the layers observed; those without softmax attention are missing.
        mass: [layers][heads], from 0 to 1: the mean over all queries behind the first tokens.
        uniform: [layers], what it would be if every query spread evenly over what it sees.
    """

    model: str
    text: tuple[str, str]
    length: int
    num_sink_tokens: int
    bos: bool
    layers: tuple[int, ...]
    mass: tuple[tuple[float, ...], ...]
    uniform: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over all layers and heads."""
        heads = [mass for layer in self.mass for mass in layer]
        return sum(heads) / len(heads)


def sinks(
    model: PreTrainedModel,
    tokenizer: Any,
    text: Text,
    *,
    length: int = 1024,
    num_sink_tokens: int = 4,
    name: str | None = None,
) -> SinkMap:
    """Returns how much attention every head pays to the first tokens of a text.

    One forward, whose attention maps never exist whole. That the observed attention is the
    model's own is proven by the hidden states it leads to.

    Args:
        model: a live causal model, in eval mode; it is not changed.
        tokenizer: the model's.
        text: read from its start.
        length: tokens read, BOS included where the tokenizer adds one.
        num_sink_tokens: how many first tokens count.
        name: of the model in the result; its config's unless given.

    Raises:
        ConfigError: if no query lies behind the first tokens.
        InputError: if the text is too short.
        UnsupportedModelError: if the model's attention cannot be observed.
    """
    check_length("length", length)
    mass = SinkMass(num_sink_tokens)
    if length <= num_sink_tokens:
        raise ConfigError(
            f"length must be above num_sink_tokens, got {length} and {num_sink_tokens}. Only "
            "queries behind the first tokens are counted."
        )
    split = SplitForward(model)
    row = read_rows(tokenizer, [text], length=length, count=1, vocab_size=split.vocab_size)
    plain = split.hidden(row)
    with observed_attention(model, mass):
        observed = split.hidden(row)
    check_observed(mass, plain, observed, type(model).__name__)
    return SinkMap(
        model=name or model.config._name_or_path or type(model).__name__,
        text=(text.name, text.sha256),
        length=length,
        num_sink_tokens=num_sink_tokens,
        bos=bos_token(tokenizer) is not None,
        layers=tuple(mass.layers),
        mass=tuple(tuple(mass.mean(layer)) for layer in mass.layers),
        uniform=tuple(mass.uniform(layer) for layer in mass.layers),
    )


def check_observed(mass: SinkMass, plain: Tensor, observed: Tensor, model_name: str) -> None:
    """Refuses weights that are not the model's own.

    Raises:
        UnsupportedModelError: if nothing was observed, or it led to other hidden states.
        NumericalError: if a weight is not a finite number.
    """
    if not mass.layers:
        raise UnsupportedModelError(
            f"{model_name} has its attention written into its layers, where it cannot be observed."
        )
    if not all(math.isfinite(share) for layer in mass.layers for share in mass.mean(layer)):
        raise NumericalError(
            f"{model_name}'s attention weights are not finite. Load it in float32, or check the "
            "checkpoint for damage."
        )
    exact = plain.dtype in (torch.float32, torch.float64)
    allowed = (1e-3 if exact else SAME_OUTPUT) * plain.abs().max().item()
    difference = (plain - observed).abs().max().item()
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"{model_name}'s attention does more than longspan observes: hidden states differ by "
            f"{difference:.3g}, so its weights would be wrong."
        )


def to_json(sink_map: SinkMap) -> str:
    """Returns the map as JSON."""
    return record_to_json(sink_map, FORM)


def from_json(text: str) -> SinkMap:
    """Returns the map that `to_json` wrote."""
    return record_from_json(SinkMap, text, FORM)
