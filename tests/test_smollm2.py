"""A real model: longspan's likelihoods are those of transformers' own scaling, token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from longspan import extend, load_model, rope_from_config
from longspan.adapters.rotation import exact_rotation
from longspan.metrics.likelihood import token_nll
from longspan.tools.texts import read_texts

pytestmark = pytest.mark.model

TOKENS = 4096
NATS = 1e-3  # float32 angles against float64 ones, over 30 layers
THETA, TRAINED = 100_000.0, 8192

# Each method at factor 2 as transformers spells it, written by hand.
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": TRAINED}
BY_HAND: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "ntk": {"rope_type": "default", "rope_theta": THETA * 2 ** (64 / 62)},
    "ntk-by-parts": {**YARN, "attention_factor": 1.0},
    "yarn": YARN,
    "llama3": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}


@pytest.fixture(scope="module")
def smollm2():
    model, tokenizer = load_model("smollm2")
    text = read_texts(["python-docs"])[0].content[: TOKENS * 8]
    ids = torch.tensor([tokenizer(text)["input_ids"][:TOKENS]])
    assert ids.shape == (1, TOKENS)
    return model, ids


def by_transformers(model: Any, block: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_theta": THETA, **block}
    config.max_position_embeddings = 2 * TRAINED
    theirs = LlamaForCausalLM(config).eval()
    theirs.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        hidden = theirs.model(ids, use_cache=False).last_hidden_state[0, :-1]
        nll = [
            F.cross_entropy(theirs.lm_head(part), targets, reduction="none")
            for part, targets in zip(hidden.split(1024), ids[0, 1:].split(1024), strict=True)
        ]
    return torch.cat(nll)


@pytest.mark.parametrize("method", BY_HAND)
def test_every_token_has_transformers_likelihood(smollm2, method):
    model, ids = smollm2
    if method != "none":
        model = extend(model, to=2 * TRAINED, method=method)
    with exact_rotation(model, rope_from_config(model.config), seq_len=TOKENS):
        ours = token_nll(model, ids)
    theirs = by_transformers(smollm2[0], BY_HAND[method], ids)
    assert (ours - theirs).abs().max() < NATS
    assert 1.0 < ours.mean() < 4.0
