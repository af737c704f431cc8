"""`evaluate` against transformers' own models, on disk, and where it must refuse."""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    ROTARY_DIM,
    THETA,
    TRAINED,
    VOCAB,
    ByteTokenizer,
    tiny_model,
    tokens,
)

from longspan.errors import (
    ConfigError,
    InputError,
    NumericalError,
    OutputError,
    UnsupportedModelError,
)
from longspan.tools import measuring
from longspan.tools.cells import weights_digest
from longspan.tools.evaluate import evaluate
from longspan.tools.evaluation import Evaluation, from_json, retrieval_rate, to_json
from longspan.tools.subjects import Applied
from longspan.tools.summary import position_buckets
from longspan.tools.texts import Text

LENGTH = 3 * TRAINED
FACTOR = 4.0  # not the ratio of lengths, where dynamic NTK would be NTK-aware
# Both sides are float32 and differ in the order of operations; a wrong method differs by 1e-2.
FLOAT32_NLL = 1e-4

# Each method as transformers itself runs it, written by hand.
BY_HAND: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": FACTOR},
    "ntk": {"rope_theta": THETA * FACTOR ** (ROTARY_DIM / (ROTARY_DIM - 2))},
    "dynamic": {"rope_type": "dynamic", "factor": FACTOR},
    "ntk-by-parts": {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": TRAINED,
        "attention_factor": 1.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": TRAINED,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": FACTOR,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}


def reference_nll(family: str, rope: dict[str, Any], row: torch.Tensor) -> torch.Tensor:
    """All logits of a freshly built transformers model, and cross entropy in float64."""
    model = tiny_model(family, rope)
    with torch.no_grad():
        logits = model(row, use_cache=False).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_gives_transformers_own_likelihoods(family: str) -> None:
    row = tokens(LENGTH)
    model = tiny_model(family)
    applied = Applied(
        reach=LENGTH,
        trained_length=TRAINED,
        factor=FACTOR,
        original_max_position_embeddings=None,
        phase="hf_float32",
    )
    expected = {method: reference_nll(family, rope, row) for method, rope in BY_HAND.items()}
    for method, reference in expected.items():
        nll = applied.subject(model, method).token_nll(row).double()
        torch.testing.assert_close(nll, reference, atol=FLOAT32_NLL, rtol=0, msg=f"{method}")
        others = [other for name, other in expected.items() if name != method]
        nearest = min((nll - other).abs().max() for other in others)
        assert nearest > 10 * FLOAT32_NLL, f"{method} cannot be told from another"
