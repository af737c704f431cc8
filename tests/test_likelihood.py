"""NLL in chunks against all logits at once, for the heads of many families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.adapters.head import SplitForward
from longspan.errors import ConfigError, NumericalError, ShapeError, UnsupportedModelError
from longspan.metrics.likelihood import chunked_nll, token_nll
from tiny_models import SMALL, VOCAB, tiny_model, tokens

FLOAT32_ROUNDING = 2e-6  # nats, at likelihoods of a few nats


class BiggestTensor(TorchDispatchMode):
    """Records the most elements any operation's result has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result


def naive_nll(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """−ln of the target's softmax, over all logits, in float64."""
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].double()
    probability = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    return -probability[torch.arange(len(logits)), ids[0, 1:]].log()


def build(name: str, **changed: Any) -> Any:
    arguments = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **changed}
    config = getattr(transformers, f"{name}Config")(**arguments)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


# What each family does to its logits, and a config key that changes it.
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("Llama", {}, {"tie_word_embeddings": True}),
    "logit_scale": ("Cohere", {"logit_scale": 0.5}, {"logit_scale": 1.0}),
    "softcap": (
        "Gemma2",
        {"head_dim": 8, "final_logit_softcapping": 2.0},
        {"final_logit_softcapping": None},
    ),
    "divisor": ("Granite", {"logits_scaling": 3.0}, {"logits_scaling": 1.0}),
}


@pytest.mark.parametrize("head", HEADS)
def test_chunked_likelihood_is_that_of_all_logits(head: str) -> None:
    name, own, other = HEADS[head]
    ids = tokens(50)
    model = build(name, **own)
    nll = token_nll(model, ids, chunk_tokens=7)
    assert nll.dtype == torch.float32
    expected = naive_nll(model, ids)
    torch.testing.assert_close(nll.double(), expected, atol=FLOAT32_ROUNDING, rtol=0)
    changed = token_nll(build(name, **{**own, **other}), ids)
    assert (changed - nll).abs().max() > 1e-3  # the head's option matters


def test_a_biased_head_is_the_models_own() -> None:
    config = transformers.GPTJConfig(
        vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8
    )
    torch.manual_seed(0)
    model = transformers.GPTJForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.bias, std=2.0)
    ids = tokens(40)
    with_bias = token_nll(model, ids)
    torch.testing.assert_close(
        with_bias.double(), naive_nll(model, ids), atol=FLOAT32_ROUNDING, rtol=0
    )
    torch.nn.init.zeros_(model.lm_head.bias)
    assert (token_nll(model, ids) - with_bias).abs().max() > 0.1


def test_chunk_size_changes_nothing_but_memory() -> None:
    model, ids = tiny_model(), tokens(65)
    whole = token_nll(model, ids, chunk_tokens=1000)
    for chunk_tokens in (1, 63, 64):
        torch.testing.assert_close(
            token_nll(model, ids, chunk_tokens=chunk_tokens), whole, atol=FLOAT32_ROUNDING, rtol=0
        )


def test_case_23_loss_never_holds_all_logits() -> None:
    length, vocabulary, chunk = 32_768, 151_936, 1024
    head = torch.nn.Linear(4, vocabulary, bias=False, device="meta")
    hidden = torch.empty(1, length - 1, 4, device="meta")
    targets = torch.empty(length - 1, dtype=torch.int64, device="meta")
    with torch.no_grad(), BiggestTensor() as biggest:
        nll = chunked_nll(head, hidden, targets, chunk)
    assert nll.shape == (length - 1,)
    assert biggest.elements == chunk * vocabulary  # 0.62 GB in float32; all would be 19.9


def test_case_23_chunks_give_the_same_likelihood() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 3000, bias=False)
    hidden, targets = torch.randn(1, 2500, 16), torch.randint(3000, (2500,))
    with torch.no_grad():
        nll = chunked_nll(head, hidden, targets, 1024)
        whole = torch.nn.functional.cross_entropy(head(hidden)[0], targets, reduction="none")
    torch.testing.assert_close(nll, whole, atol=FLOAT32_ROUNDING, rtol=0)
    assert nll.double().mean().item() == pytest.approx(whole.double().mean().item(), abs=1e-6)


def test_no_attention_map_or_mask_of_all_pairs_is_built() -> None:
    model, ids = tiny_model(max_position_embeddings=4096), tokens(2048)
    with BiggestTensor() as biggest:
        token_nll(model, ids, chunk_tokens=256)
    assert biggest.elements < 2048 * 2048 / 8


def test_the_model_is_left_as_it_was() -> None:
    model, ids = tiny_model(), tokens(20)
    before = model(ids).logits
    token_nll(model, ids)
    assert "forward" not in model.base_model.__dict__
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)


def test_a_head_that_reads_more_than_hidden_states_is_refused() -> None:
    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **given: Any) -> Any:
            output = super().forward(input_ids=input_ids, **given)
            output.logits = output.logits + input_ids.unsqueeze(-1).float()
            output.logits[..., 0] += input_ids
            return output

    model = tiny_model()
    with pytest.raises(UnsupportedModelError, match="not those of its whole forward"):
        token_nll(Shifted(model.config).eval(), tokens(20))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused_with_their_position(broken: float) -> None:
    class Head(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = super().forward(hidden)
            if logits.shape[1] == 10:  # the third chunk
                logits[0, 4, 3] = broken
            return logits

    model = tiny_model()
    model.lm_head = Head(32, VOCAB, bias=False)
    with pytest.raises(NumericalError, match=r"position 84 .*float32: check the checkpoint"):
        token_nll(model, tokens(91), chunk_tokens=40)


def test_half_precision_that_overflows_is_told_to_try_float32() -> None:
    model = tiny_model().to(torch.bfloat16)
    model.lm_head.weight.data.fill_(float("inf"))
    with pytest.raises(NumericalError, match="bfloat16: try float32"):
        token_nll(model, tokens(20))


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(2, 8, dtype=torch.int64),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(1, 8),
    ],
    ids=["one token", "two rows", "no batch", "floats"],
)
def test_ids_of_another_shape_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match=r"input_ids must be"):
        token_nll(tiny_model(), ids)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ShapeError, match="token 128 is outside the model's vocabulary of 128"):
        token_nll(tiny_model(), torch.tensor([[1, VOCAB]]))


def test_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.eval\(\)"):
        token_nll(tiny_model().train(), tokens(8))


def test_a_body_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no language head"):
        SplitForward(tiny_model().base_model)
