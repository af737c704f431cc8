"""Attention mass on the first tokens against transformers' own attention maps."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import transformers

from longspan.adapters import observe as observing
from longspan.adapters.head import SplitForward
from longspan.adapters.observe import observed_attention
from longspan.errors import ConfigError, InputError, NumericalError, UnsupportedModelError
from longspan.metrics.sink_mass import SinkMass
from longspan.tools import sinks as tool
from longspan.tools.sinks import sinks
from longspan.tools.texts import Text
from tiny_models import SMALL, VOCAB, ByteTokenizer, tiny_model, tokens

WEIGHTS = 1e-5  # float32 softmax, summed in another order


def text_of(row: torch.Tensor) -> Text:
    content = "".join(map(chr, row[0].tolist()))
    return Text("drawn", content, hashlib.sha256(content.encode()).hexdigest())


def eager_maps(model: Any, row: torch.Tensor) -> list[torch.Tensor]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(row, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return [attention[0].double() for attention in maps]


def build(name: str, **changed: Any) -> Any:
    arguments = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **changed}
    config = getattr(transformers, f"{name}Config")(**arguments)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def gpt_oss() -> Any:
    model = build(
        "GptOss",
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


MODELS = {
    "llama with grouped queries": lambda: tiny_model("llama"),
    "llama, a key head a query head": lambda: tiny_model("llama", num_key_value_heads=4),
    "gpt-neox": lambda: tiny_model("gpt_neox"),
    "gemma3 with sliding layers": lambda: tiny_model("gemma3"),
    "gemma2 with a soft cap": lambda: build(
        "Gemma2", head_dim=8, attn_logit_softcapping=1.0, query_pre_attn_scalar=4, sliding_window=16
    ),
    "gpt-oss with learned sinks": gpt_oss,
}


@pytest.mark.parametrize("name", MODELS)
def test_mass_is_that_of_the_eager_attention_maps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing, "CHUNK_BYTES", 4 * 4 * 50 * 7)  # 7 queries a chunk, or 14
    model, row = MODELS[name](), tokens(50)
    found = sinks(model, ByteTokenizer(), text_of(row), length=50, num_sink_tokens=3)
    maps = eager_maps(model, row)
    assert found.layers == tuple(range(len(maps)))
    for layer, weights in enumerate(maps):
        expected = weights[:, 3:, :3].sum(dim=-1).mean(dim=-1)
        got = torch.tensor(found.mass[layer], dtype=torch.float64)
        torch.testing.assert_close(got, expected, atol=WEIGHTS, rtol=0)
    assert found.mean == pytest.approx(
        torch.stack([w[:, 3:, :3].sum(-1).mean(-1) for w in maps]).mean().item(), abs=WEIGHTS
    )


def test_uniform_is_what_even_attention_would_give() -> None:
    found = sinks(
        tiny_model("gemma3"), ByteTokenizer(), text_of(tokens(50)), length=50, num_sink_tokens=2
    )
    full = [2 / (query + 1) for query in range(2, 50)]
    # a sliding layer of 16 sees keys query − 15 … query
    sliding = [max(0, 2 - max(0, query - 15)) / min(query + 1, 16) for query in range(2, 50)]
    assert found.uniform[0] == pytest.approx(sum(sliding) / 48)
    assert found.uniform[1] == pytest.approx(sum(full) / 48)


def test_more_first_tokens_get_more_mass_and_bos_is_one_of_them() -> None:
    model, text = tiny_model(), text_of(tokens(60))
    two = sinks(model, ByteTokenizer(), text, length=40, num_sink_tokens=2)
    six = sinks(model, ByteTokenizer(), text, length=40, num_sink_tokens=6)
    assert all(b > a for a, b in zip(two.mass[0], six.mass[0], strict=True))
    with_bos = sinks(model, ByteTokenizer(bos_token_id=1), text, length=40, num_sink_tokens=2)
    assert with_bos.bos
    assert with_bos.mass != two.mass
    expected = eager_maps(model, torch.cat((torch.tensor([[1]]), tokens(60)[:, :39]), dim=1))
    assert with_bos.mass[1][0] == pytest.approx(
        expected[1][0, 2:, :2].sum(-1).mean().item(), abs=WEIGHTS
    )


def test_no_map_of_all_pairs_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "CHUNK_BYTES", 4 * 4 * 512 * 32)
    largest = 0

    def watch(layer: int, first: int, weights: torch.Tensor, visible: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, weights.numel())

    model = tiny_model(max_position_embeddings=1024)
    with observed_attention(model, watch):
        SplitForward(model).hidden(tokens(512))
    assert 0 < largest <= 4 * 512 * 32


def test_the_models_attention_is_restored_even_after_an_error() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    model = tiny_model()
    before = model.config._attn_implementation

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), observed_attention(model, fail):
        model(tokens(8))
    assert model.config._attn_implementation == before
    assert observing.NAME not in AttentionInterface._global_mapping
    assert observing.NAME not in AttentionMaskInterface._global_mapping
    model(tokens(8))


def test_the_output_under_observation_is_the_models_own() -> None:
    model, row = tiny_model("gemma3"), tokens(40)
    with torch.no_grad():
        plain = model(row).logits
        with observed_attention(model, lambda *_: None):
            observed = model(row).logits
    torch.testing.assert_close(observed, plain, atol=1e-4, rtol=0)


def test_attention_that_cannot_be_observed_is_refused() -> None:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="cannot be observed"):
        sinks(model, ByteTokenizer(), text_of(tokens(20)), length=20)


def test_weights_that_are_not_the_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(scores: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
        return torch.full_like(scores, 1 / scores.shape[-1])

    monkeypatch.setattr(observing, "softmax", blind)
    with pytest.raises(UnsupportedModelError, match="does more than longspan observes"):
        sinks(tiny_model(), ByteTokenizer(), text_of(tokens(20)), length=20)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    model.model.layers[0].self_attn.q_proj.weight.data.fill_(float("nan"))
    with pytest.raises(NumericalError, match="not finite"):
        sinks(model, ByteTokenizer(), text_of(tokens(20)), length=20)


def test_settings_that_count_nothing_are_refused() -> None:
    model, text = tiny_model(), text_of(tokens(20))
    with pytest.raises(ConfigError, match="num_sink_tokens must be at least 1"):
        sinks(model, ByteTokenizer(), text, length=10, num_sink_tokens=0)
    with pytest.raises(ConfigError, match="got 4 and 4"):
        sinks(model, ByteTokenizer(), text, length=4)
    with pytest.raises(InputError):
        sinks(model, ByteTokenizer(), text, length=21)


def test_json_gives_the_same_map_back() -> None:
    found = sinks(tiny_model(), ByteTokenizer(), text_of(tokens(20)), length=20, name="tiny")
    assert found.model == "tiny"
    assert tool.from_json(tool.to_json(found)) == found


def test_a_chunk_counts_only_queries_behind_the_first_tokens() -> None:
    mass = SinkMass(num_sink_tokens=2)
    visible = torch.ones(5, 5, dtype=torch.bool).tril().view(1, 1, 5, 5)
    weights = visible.float() / visible.float().sum(-1, keepdim=True)
    for first in (0, 1, 4):  # chunks of 1, 3 and 1 queries
        stop = {0: 1, 1: 4, 4: 5}[first]
        mass(0, first, weights[:, :, first:stop], visible[:, :, first:stop])
    even = (2 / 3 + 2 / 4 + 2 / 5) / 3
    assert mass.mean(0) == [pytest.approx(even)]
    assert mass.uniform(0) == pytest.approx(even)


def test_queries_are_aligned_with_the_last_keys() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    layer = torch.nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    output = observing.observe(lambda *_: None, layer, query, key, value, None)
    scores = query.double() @ key.double().repeat_interleave(2, dim=1).mT / 8**0.5
    scores[:, :, 0, 4] = -torch.inf  # the first of two queries is at key 3
    expected = scores.softmax(-1) @ value.double().repeat_interleave(2, dim=1)
    torch.testing.assert_close(output.transpose(1, 2).double(), expected, atol=WEIGHTS, rtol=0)
