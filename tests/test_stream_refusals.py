"""What a stream refuses, and that a refusal leaves nothing behind: each was once wrong."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from longspan.adapters.streamed import StreamedModel
from longspan.errors import LongspanError, ShapeError, UnsupportedModelError
from test_streamed import DOUBLE, N, S, W, fed, made
from tiny_families import tiny_config, tokens


def test_a_cache_of_another_stream_is_refused():
    model, row = made("llama"), tokens(N)
    stream, other = StreamedModel(model, S, W), StreamedModel(model, 1, 20)
    with pytest.raises(LongspanError):
        fed(stream, row, [20] + [1] * 40, other.new_cache())


def test_a_streams_cache_is_refused_by_a_model_that_is_not_streamed():
    model, row = made("llama"), tokens(N)
    cache = StreamedModel(model, S, W).new_cache()
    with torch.no_grad(), pytest.raises(LongspanError, match=r"Call stream\.model"):
        model(row, cache=cache)


def test_a_refused_forward_leaves_no_trace():
    stream, row = StreamedModel(made("llama"), S, W), tokens(8)
    pairs = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    wanted = fed(stream, row, None)
    with torch.no_grad(), pytest.raises(UnsupportedModelError):
        stream.model(row, attention_mask=pairs, cache=stream.new_cache())
    assert torch.equal(fed(stream, row, None), wanted)


def test_a_step_of_another_batch_is_refused_and_not_counted():
    stream, row = StreamedModel(made("llama"), S, W), tokens(N)
    cache = stream.new_cache()
    first = fed(stream, row[:, :40], [40], cache)
    with torch.no_grad(), pytest.raises(ShapeError):
        stream.model(tokens(1, 2), cache=cache)
    found = torch.cat((first, fed(stream, row[:, 40:], [1] * 20, cache)), dim=1)
    torch.testing.assert_close(found, fed(stream, row, None), **DOUBLE)


@pytest.mark.parametrize(
    ("family", "given"), [("gpt_oss", dict(use_cache=False)), ("llama", {}), ("llama", "cache")]
)
def test_packed_documents_are_refused_however_they_come(family, given):
    stream, row = StreamedModel(made(family), S, W), tokens(12)
    restarted = torch.cat((torch.arange(5), torch.arange(7)))[None]
    given = {"cache": stream.new_cache()} if given == "cache" else given
    with torch.no_grad(), pytest.raises(LongspanError):
        stream.model(row, position_ids=restarted, **given)


def test_the_state_of_a_cache_is_a_snapshot():
    stream, row = StreamedModel(made("llama"), S, W), tokens(N)
    kept, again = stream.new_cache(), stream.new_cache()
    fed(stream, row[:, :30], [30], kept)
    saved = kept.state()
    wanted = fed(stream, row[:, 30:], [1] * 30, kept)
    again.restore(saved)
    assert torch.equal(fed(stream, row[:, 30:], [1] * 30, again), wanted)


def test_a_stream_says_it_cannot_be_cropped():
    assert not StreamedModel(made("llama"), S, W).new_cache().is_croppable


def test_layers_that_share_keys_are_refused():
    changed = dict(
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        attention_k_eq_v=False,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    model = made("gemma4_text", **changed)
    with pytest.raises(UnsupportedModelError, match="num_kv_shared_layers"):
        StreamedModel(model, S, W)


def test_a_vision_tower_has_no_seats():
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2)
    config = CONFIG_MAPPING["gemma4"](
        text_config=tiny_config("gemma4_text", pad_token_id=0).to_dict(),
        vision_config=dict(**vision, num_key_value_heads=2, head_dim=8, global_head_dim=8),
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    stream, row = StreamedModel(model, S, W), tokens(N)
    assert not any(hasattr(m, "seat") for m in stream.model.model.vision_tower.modules())
    torch.testing.assert_close(fed(stream, row, [7, 53]), fed(stream, row, None), atol=2e-5, rtol=0)


def test_attention_weights_are_refused():
    stream = StreamedModel(made("llama"), S, W)
    with torch.no_grad(), pytest.raises(LongspanError):
        stream.model(tokens(8), output_attentions=True)
