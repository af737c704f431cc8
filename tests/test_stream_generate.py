"""A streamed model inside transformers: generate, torch.compile, and the model it stands beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longspan.adapters.rotation import rotary_modules
from longspan.adapters.streamed import StreamedModel
from longspan.errors import ConfigError, UnsupportedModelError
from test_streamed import SEEN, N, S, W, fed, made
from tiny_families import SHAPE, logits, tiny, tokens

SINKS, WINDOW, NEW = 4, 64, 200
PROMPTS = (5, 30, 300)
# with its embedding as its head, a random Gemma says its last token again and again
FAMILIES = {"llama": {}, "gemma3_text": dict(tie_word_embeddings=False)}


def generated(stream: StreamedModel, ids: Tensor, new: int = NEW, **options: Any) -> Tensor:
    """The tokens that transformers' own generate adds, [B, new]."""
    options = {"do_sample": False, "cache": stream.new_cache(), **options}
    torch.manual_seed(options.pop("seed", 0))
    found = stream.model.generate(ids, max_new_tokens=new, **options)
    return found[:, ids.shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_each_left_padded_row_what_it_gets_alone(family: str) -> None:
    stream = StreamedModel(made(family, **FAMILIES[family]), SINKS, WINDOW)
    prompts = [tokens(length, seed=length) for length in PROMPTS]
    longest = max(PROMPTS)
    assert min(PROMPTS) < SINKS + WINDOW < longest < NEW + longest
    ids, mask = torch.zeros(2, len(PROMPTS), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.shape[1] :] = prompt
        mask[row, longest - prompt.shape[1] :] = 1
    together = generated(stream, ids, attention_mask=mask)
    assert together.shape == (len(PROMPTS), NEW)
    for row, prompt in zip(together, prompts, strict=True):
        assert row.tolist() == generated(stream, prompt)[0].tolist()
        assert len(row.unique()) > 8  # it has not stuck to one token


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_without_a_cache_or_with_a_prefill_in_chunks_gives_the_same(family: str) -> None:
    stream, prompt = StreamedModel(made(family, **FAMILIES[family]), S, W), tokens(40)
    wanted = generated(stream, prompt, 30).tolist()
    assert generated(stream, prompt, 30, cache=None, use_cache=False).tolist() == wanted
    assert generated(stream, prompt, 30, prefill_chunk_size=7).tolist() == wanted
    other = StreamedModel(made(family, **FAMILIES[family]), S + 1, W)
    assert generated(other, prompt, 30).tolist() != wanted


def test_sampling_goes_by_the_seed() -> None:
    stream, prompt = StreamedModel(made("llama"), S, W), tokens(3 * W)
    first, again, other = (
        generated(stream, prompt, 40, do_sample=True, seed=seed).tolist() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(num_beams=2), UnsupportedModelError, "does not do beam search: use num_beams=1"),
        (dict(prompt_lookup_num_tokens=2), ValueError, "a cache that can be cropped"),
        (dict(cache=None), ConfigError, r"cache=stream\.new_cache\(\)"),
        (
            dict(cache=None, cache_implementation="static"),
            ConfigError,
            r"cache=stream\.new_cache\(\)",
        ),
    ],
    ids=["beams", "prompt lookup", "transformers' cache", "static cache"],
)
def test_generation_it_cannot_follow_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    stream = StreamedModel(made("llama"), S, W)
    with pytest.raises(error, match=message):
        generated(stream, tokens(2 * W), 4, **options)


def test_assisted_decoding_is_refused() -> None:
    stream, assistant = StreamedModel(tiny("llama"), S, W), tiny("llama")
    with pytest.raises(ValueError, match="a cache that can be cropped"):  # by transformers itself
        generated(stream, tokens(2 * W), 4, assistant_model=assistant)


def test_transformers_cache_is_refused_at_the_first_step_after_the_prompt() -> None:
    stream, row = StreamedModel(made("llama"), S, W), tokens(N)
    with torch.no_grad():
        prompt = stream.model(row)  # transformers makes a cache by itself
        torch.testing.assert_close(prompt.logits, fed(stream, row, None), atol=0, rtol=0)
        with pytest.raises(ConfigError, match=r"Pass cache=stream\.new_cache\(\) to generate"):
            stream.model(row[:, :1], cache=prompt.cache)


@pytest.mark.parametrize("cached", [False, True])
def test_a_mask_of_all_pairs_is_refused(cached: bool) -> None:
    stream, row = StreamedModel(made("llama"), S, W), tokens(8)
    given = {"cache": stream.new_cache()} if cached else {"use_cache": False}
    pairs = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"mask of Tensor.*2-D"):
        stream.model(row, attention_mask=pairs, **given)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere2"])
def test_packed_documents_are_refused(family: str) -> None:
    stream, row = StreamedModel(made(family), S, W), tokens(12)
    restarted = torch.cat((torch.arange(5), torch.arange(7)))[None]
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="over packed documents"):
        stream.model(row, position_ids=restarted, use_cache=False)


def test_gradients_and_dropout_are_refused() -> None:
    stream, row = StreamedModel(made("llama", attention_dropout=0.1), S, W), tokens(8)
    assert not stream.model.training
    with pytest.raises(ConfigError, match=r"without gradients.*torch\.no_grad"):
        stream.model(row, use_cache=False)
    with torch.no_grad(), pytest.raises(ConfigError, match=r"drops nothing.*model\.eval"):
        stream.model.train()(row, use_cache=False)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_model_stays_as_it_is(family: str) -> None:
    model, row = made(family), tokens(N)
    before, rotary = logits(model, row), [child for *_, child in rotary_modules(model)]
    config = model.config.to_dict()
    stream = StreamedModel(model, S, W)
    during = [logits(model, row)]
    cache = stream.new_cache()
    for part in row.split(7, dim=1):
        with torch.no_grad():
            stream.model(part, cache=cache)
        during.append(logits(model, row))
    del stream, cache
    assert all(torch.equal(found, before) for found in [*during, logits(model, row)])
    assert [child for *_, child in rotary_modules(model)] == rotary
    assert model.config._attn_implementation == "eager"
    assert model.config.to_dict() == config
    assert not any(hasattr(module, "seat") for module in model.modules())


def test_weights_are_shared_not_copied() -> None:
    model = made("gemma3_text")
    stream = StreamedModel(model, S, W)
    own, lent = dict(model.named_parameters()), dict(stream.model.named_parameters())
    assert own.keys() == lent.keys()
    assert all(own[name].data_ptr() == lent[name].data_ptr() for name in own)


def test_two_streams_of_one_model_do_not_disturb_each_other() -> None:
    model, row = made("gemma3_text"), tokens(N)
    streams = [StreamedModel(model, S, W), StreamedModel(model, 1, 20)]
    apart = [fed(stream, row, [5] * 12) for stream in streams]
    lanes = [(stream, stream.new_cache()) for stream in (*streams, streams[0])]
    outs: list[list[Tensor]] = [[], [], []]
    for part in row.split(5, dim=1):
        for lane, (stream, cache) in enumerate(lanes):
            outs[lane].append(fed(stream, part, [5], cache))
            logits(stream.model, part)  # a forward without a cache, between
    together = [torch.cat(out, dim=1) for out in outs]
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1], apart[1])
    assert torch.equal(together[2], apart[0])
    assert (apart[0] - apart[1]).abs().max() > SEEN


def test_what_cannot_be_streamed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sliding_window must be .* ≥ 1, got 0"):
        StreamedModel(made("llama"), S, 0)
    unknown = AutoModelForCausalLM.from_config(CONFIG_MAPPING["arcee"](**SHAPE))
    with pytest.raises(UnsupportedModelError, match="'arcee' is not known to longspan"):
        StreamedModel(unknown, S, W)
    sizes = dict(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    config = CONFIG_MAPPING["gptj"](**sizes, bos_token_id=None, eos_token_id=None)
    with pytest.raises(UnsupportedModelError, match="'gptj' does not rotate through a rotary"):
        StreamedModel(AutoModelForCausalLM.from_config(config), S, W)
    chunked = made("llama")
    chunked.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="layers of type chunked_attention"):
        StreamedModel(chunked, S, W)


STEPS = 40


def test_compiled_steps_are_eager_ones_and_compile_anew_only_when_the_cache_fills() -> None:
    torch._dynamo.reset()
    stream, row, prompt = StreamedModel(made("gemma3_text"), S, 20), tokens(N), 12
    assert prompt < S + 20 < prompt + STEPS
    eager, cache = stream.new_cache(), stream.new_cache()
    counter = CompileCounter()
    compiled, graphs = torch.compile(stream.model, backend=counter), []
    fed(stream, row[:, :prompt], [prompt], eager)
    fed(stream, row[:, :prompt], [prompt], cache)
    for at in range(prompt, prompt + STEPS):
        token = row[:, at : at + 1]
        with torch.no_grad():
            found = compiled(token, cache=cache).logits
        torch.testing.assert_close(found, fed(stream, token, [1], eager), atol=1e-6, rtol=0)
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert graphs[-1] - graphs[2] <= 1
