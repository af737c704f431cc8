"""The position encodings a decoder layer may have: what each adds, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from longspan.bias import Alibi, ShawRelative, T5Bias, TransformerXLBias
from longspan.bias.base import Bias
from longspan.errors import ConfigError, did_you_mean
from longspan.models.inputs import LearnedPositions, SinusoidalPositions

if TYPE_CHECKING:
    from longspan.models.config import DecoderConfig

SHAW_DISTANCE = 16  # k of Shaw et al. 2018, table 3: more gained them nothing

BiasBuilder = Callable[["DecoderConfig", "Bias | None"], Bias]
"""From a config and the first layer's bias (None for that layer itself) to a layer's bias."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """One way of knowing positions; all parts None is NoPE.

    Attributes:
        name: as in `position_encoding`.
        about: a line on it, with its source.
        rotates: whether queries and keys are turned.
        bias: builds what is added to the scores.
        inputs: builds what is added to the embeddings.
        scaled: whether q·k is divided by √d; T5 does not.
    """

    name: str
    about: str
    rotates: bool = False
    bias: BiasBuilder | None = None
    inputs: Callable[[DecoderConfig], nn.Module] | None = None
    scaled: bool = True

    @property
    def recurrent(self) -> bool:
        """Whether layers may remember earlier segments: where only distances count."""
        return self.inputs is None


def _alibi(config: DecoderConfig, first: Bias | None) -> Bias:
    return first or Alibi(config.num_attention_heads)


def _t5(config: DecoderConfig, first: Bias | None) -> Bias:
    return first or T5Bias(config.num_attention_heads)


def _shaw(config: DecoderConfig, first: Bias | None) -> Bias:
    return ShawRelative(config.num_attention_heads, config.head_dim, SHAW_DISTANCE)


def _transformer_xl(config: DecoderConfig, first: Bias | None) -> Bias:
    u, v = (first.u, first.v) if isinstance(first, TransformerXLBias) else (None, None)
    return TransformerXLBias(config.num_attention_heads, config.head_dim, u=u, v=v)


def _sinusoidal(config: DecoderConfig) -> nn.Module:
    return SinusoidalPositions(config.hidden_size)


def _learned(config: DecoderConfig) -> nn.Module:
    return LearnedPositions(config.max_position_embeddings, config.hidden_size)


_ALL = (
    Encoding(name="rope", about="queries and keys turned (Su et al. 2021)", rotates=True),
    Encoding(name="alibi", about="a slope a head on the distance (Press et al. 2021)", bias=_alibi),
    Encoding(
        name="t5",
        about="a learned number for each bucket of distances (Raffel et al. 2020)",
        bias=_t5,
        scaled=False,
    ),
    Encoding(
        name="shaw",
        about="a learned vector for each clipped distance (Shaw et al. 2018)",
        bias=_shaw,
    ),
    Encoding(
        name="transformer_xl",
        about="the query meets a projected sinusoid of the distance (Dai et al. 2019)",
        bias=_transformer_xl,
    ),
    Encoding(
        name="sinusoidal",
        about="sines and cosines added to the embeddings (Vaswani et al. 2017)",
        inputs=_sinusoidal,
    ),
    Encoding(
        name="learned",
        about="a learned vector for each position, added to the embeddings (Gehring et al. 2017)",
        inputs=_learned,
    ),
    Encoding(name="none", about="nothing but the causal mask (NoPE, Haviv et al. 2022)"),
)

ENCODINGS: Mapping[str, Encoding] = MappingProxyType({one.name: one for one in _ALL})
INPUTS = tuple(one.name for one in _ALL if one.inputs is not None)


def encoding(name: str) -> Encoding:
    """Returns an encoding by name.

    Raises:
        ConfigError: for an unknown name.

    >>> encoding("alibi").recurrent, encoding("sinusoidal").recurrent
    (True, False)
    """
    if name not in ENCODINGS:
        raise ConfigError(
            f"unknown position encoding {name!r}.{did_you_mean(name, ENCODINGS)} "
            f"Known: {', '.join(ENCODINGS)}."
        )
    return ENCODINGS[name]
