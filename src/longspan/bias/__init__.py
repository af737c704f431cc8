"""Way two a position enters attention: something added to the score, one bias a file."""

from __future__ import annotations

from longspan.bias.alibi import Alibi, alibi_slopes
from longspan.bias.base import Bias
from longspan.bias.shaw import ShawRelative
from longspan.bias.t5 import T5Bias, t5_bucket
from longspan.bias.transformer_xl import TransformerXLBias

BIASES: tuple[type[Bias], ...] = (Alibi, T5Bias, ShawRelative, TransformerXLBias)

__all__ = [
    "BIASES",
    "Alibi",
    "Bias",
    "ShawRelative",
    "T5Bias",
    "TransformerXLBias",
    "alibi_slopes",
    "t5_bucket",
]
