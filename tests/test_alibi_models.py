"""MPT and BLOOM through `attend` and in a stream, against their own code and a naive stream."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    StaticCache,
)
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt.modeling_mpt import MptAttention

from fresh import printed
from longspan.adapters.alibi_attention import alibi_attention, alibi_of
from longspan.adapters.alibi_modules import AlibiAttention
from longspan.adapters.streamed import StreamedModel
from longspan.attention import dispatch
from longspan.bias import Alibi
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.masks import causal

FAMILIES = ["mpt", "bloom"]
VOCAB, WIDTH, TRAINED = 64, 48, 64
FLOAT32 = dict(atol=1e-5, rtol=0)
FLOAT64 = dict(atol=1e-9, rtol=0)
S, W = 2, 6

each_family = pytest.mark.parametrize("family", FAMILIES)


def tiny(family, heads=4, dtype=torch.float64, **changed):
    """Returns a random model in eval mode; attention far from uniform, biases not zero."""
    shared = dict(vocab_size=VOCAB, initializer_range=0.2, eos_token_id=None, **changed)
    torch.manual_seed(0)
    if family == "mpt":
        sizes = dict(d_model=WIDTH, n_heads=heads, n_layers=2, max_seq_len=TRAINED)
        model = MptForCausalLM(MptConfig(**{**sizes, **shared}))
    else:
        sizes = dict(hidden_size=WIDTH, n_head=heads, n_layer=2, bos_token_id=None)
        model = BloomForCausalLM(BloomConfig(**{**sizes, **shared}))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.2)
    return model.to(dtype).eval()


def tokens(rows, count, seed=1):
    return torch.randint(VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def padded(lengths, side):
    """Returns token ids [B, N] and their mask, rows of these lengths filled up on one side."""
    ids = tokens(len(lengths), max(lengths))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, (-length if side == "left" else 0) : (None if side == "left" else length)] = 1
    return ids, mask


def attentions(model):
    return [part for part in model.modules() if "Attention" in type(part).__name__]


class InFloat64:
    """torch, for BLOOM's code: what it casts to float32 stays float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def familys_own():
    """Lets transformers' code run as it is, but for its float32 slopes and softmax.

    In them a float64 mask's least number is −inf, and rows of padding alone are NaN.
    """
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # MPT's
        patch.setattr(modeling_bloom, "torch", InFloat64())
        yield


@contextmanager
def lent(model):
    with torch.no_grad(), alibi_attention(model):
        yield


@pytest.fixture(params=["few pairs", "tiles"])
def engine(request, monkeypatch):
    """Few pairs go to sdpa under a small mask; here they also go the way of long texts."""
    if request.param == "tiles":
        monkeypatch.setattr(dispatch, "SMALL_PAIRS", 0)
        asked = [torch.zeros(1, 2, 4, 8)] * 3
        assert dispatch.choose_impl(*asked, mask=causal(), bias=Alibi(2)).impl == "tiled"


@each_family
@pytest.mark.parametrize("heads", [4, 6, 12])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.usefixtures("engine")
def test_it_is_the_familys_own_attention(family, heads, side):
    model = tiny(family, heads)
    ids, mask = padded([23, 9, 16], side if side != "none" else "left")
    given = dict(input_ids=ids, attention_mask=None if side == "none" else mask)
    with familys_own():
        expected = model(**given).logits
    with lent(model):
        found = model(**given).logits
    real = mask.bool() if side != "none" else torch.ones_like(mask).bool()
    torch.testing.assert_close(found[real], expected[real], **FLOAT64)


@each_family
@pytest.mark.parametrize("heads", [4, 6, 12])
def test_in_float32_too(family, heads):
    model = tiny(family, heads, torch.float32)
    ids, mask = padded([23, 9, 16], "left")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    with lent(model):
        found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], **FLOAT32)


@each_family
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunks_and_steps_with_any_cache(family, side, cache):
    """After right padding, a row's tokens have a gap; BLOOM counts over it and MPT does not."""
    model = tiny(family, heads=6)
    ids, mask = padded([12, 7], side)
    ids, mask = torch.cat((ids, tokens(2, 6, 2)), 1), torch.cat((mask, torch.ones(2, 6).long()), 1)

    def logits():
        config, outs, start = model.config, [], 0
        kept = DynamicCache() if cache == "dynamic" else StaticCache(config, max_cache_len=24)
        for count in (5, 7, 1, 4, 1):
            seen = mask[:, : start + count]
            if cache == "static":  # as generate hands it over
                seen = nn.functional.pad(seen, (0, 24 - seen.shape[1]))
            chunk = ids[:, start : start + count]
            outs.append(model(chunk, attention_mask=seen, cache=kept, use_cache=True).logits)
            start += count
        return torch.cat(outs, dim=1)[mask.bool()]

    with familys_own():
        expected = logits()
    with lent(model):
        torch.testing.assert_close(logits(), expected, **FLOAT64)


OPTIONS = [
    ("mpt", dict(attn_config=dict(clip_qkv=0.5))),
    ("mpt", dict(attn_config=dict(softmax_scale=0.9))),
    ("bloom", dict(pretraining_tp=3, slow_but_exact=True)),
    ("bloom", dict(apply_residual_connection_post_layernorm=True)),
]


@pytest.mark.parametrize(("family", "changed"), OPTIONS)
def test_options_of_a_config_are_followed(family, changed):
    plain, model, ids = tiny(family), tiny(family, **changed), tokens(2, 20)
    with familys_own():
        expected = model(ids).logits
    with lent(model):
        found = model(ids).logits
    with lent(plain):
        assert (plain(ids).logits - found).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, **FLOAT64)


@each_family
def test_it_generates_the_same_tokens(family):
    model = tiny(family)
    ids, mask = padded([12, 7], "left")
    given = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=True)
    with familys_own():
        expected = model.generate(ids, **given)
    with lent(model):
        assert model.generate(ids, **given).tolist() == expected.tolist()
        static = model.generate(ids, **given, cache_implementation="static")
    assert static.tolist() == expected.tolist()


@each_family
def test_gradients_are_the_familys_own(family):
    ours, own = tiny(family), tiny(family)
    ids, mask = padded([14, 9], "left")

    def descend(model):
        model(ids, attention_mask=mask).logits[mask.bool()].square().sum().backward()

    with familys_own(), torch.enable_grad():
        descend(own)
    with alibi_attention(ours):
        descend(ours)
    for (name, found), expected in zip(ours.named_parameters(), own.parameters(), strict=True):
        assert found.grad is not None, name
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-9, rtol=1e-9)


@each_family
def test_dropout_in_training_is_followed(family):
    model, ids = tiny(family), tokens(1, 12)
    for part in attentions(model):
        if family == "mpt":
            part.attn_dropout_p = 0.5
        else:
            part.attention_dropout.p = 0.5
    with lent(model):
        assert not any(part.training for part in model.modules())
        quiet = model(ids).logits
        model.train()
        assert (model(ids).logits - quiet).abs().max() > 1e-3
    with lent(model):
        assert all(part.training for part in model.modules())
    assert all(part.training for part in model.modules())


def test_mpt_reads_past_its_trained_length():
    model, longer, ids = tiny("mpt"), tiny("mpt", max_seq_len=3 * TRAINED), tokens(1, 2 * TRAINED)
    with familys_own():
        expected = longer(ids).logits
    with lent(model):
        torch.testing.assert_close(model(ids).logits, expected, **FLOAT64)


def test_compiled_is_eager():
    model, ids = tiny("mpt"), tokens(1, 12)  # BLOOM's own code warns when it is compiled
    with lent(model):
        compiled = torch.compile(model.transformer, backend="eager")(ids)
        eager = model.transformer(ids)
    torch.testing.assert_close(compiled.last_hidden_state, eager.last_hidden_state, **FLOAT64)


@each_family
def test_the_model_gets_its_own_attention_back(family):
    model, ids = tiny(family), tokens(1, 12)
    own, names, config = attentions(model), list(model.state_dict()), model.config.to_dict()
    logits = model(ids).logits
    with alibi_attention(model):
        assert all(isinstance(part, AlibiAttention) for part in attentions(model))
        assert list(model.state_dict()) == names
        with pytest.raises(IndexError), alibi_attention(model):  # once more, and it fails
            model(ids + VOCAB)
        assert all(isinstance(part, AlibiAttention) for part in attentions(model))
    assert all(a is b for a, b in zip(attentions(model), own, strict=True))
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, logits)
    assert model(ids, output_attentions=True).attentions is not None


@each_family
def test_other_slopes_are_other_logits(family):
    model, ids = tiny(family), tokens(1, 20)
    with lent(model):
        before = model(ids).logits
        for part in attentions(model):
            part.alibi.slopes = part.alibi.slopes * 1.01
        assert (model(ids).logits - before).abs().max() > 1e-4


UNFOLLOWED = [
    ("qk_ln", True),
    ("prefix_lm", True),
    ("alibi", False),
    ("alibi_bias_max", 16),
    ("attn_type", "multiquery_attention"),
]


@pytest.mark.parametrize(("key", "value"), UNFOLLOWED)
def test_a_config_that_transformers_does_not_follow_is_refused(key, value):
    model = tiny("mpt", attn_config={key: value})
    for use in (alibi_of, lambda model: StreamedModel(model, S, W)):
        with pytest.raises(UnsupportedModelError, match=rf"attn_config\.{key} is {value!r}"):
            use(model)


class OtherAttention(MptAttention):
    """A layer of somebody else's."""


def test_what_is_not_known_is_refused():
    sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    with pytest.raises(UnsupportedModelError, match=r"'llama' is none of mpt, bloom"):
        alibi_of(llama)
    model = tiny("mpt")
    model.transformer.build_mpt_alibi_tensor = lambda heads, length: torch.ones(heads, 1, 2)
    with pytest.raises(UnsupportedModelError, match=r"slopes of MptForCausalLM are \[0.0"):
        alibi_of(model)
    model = tiny("mpt")
    model.transformer.blocks[1].attn = OtherAttention(model.config, 1)
    with pytest.raises(UnsupportedModelError, match="1 of the 2 layers"):
        alibi_of(model)


@each_family
def test_what_it_cannot_give_is_refused(family):
    model, ids = tiny(family), tokens(1, 4)
    stream = StreamedModel(model, S, W)
    with lent(model), pytest.raises(ConfigError, match="never holds the attention weights"):
        model(ids, output_attentions=True)
    with torch.no_grad(), pytest.raises(ConfigError, match="never holds the attention weights"):
        stream.model(ids, output_attentions=True)
    own = model(ids, output_attentions=True)
    assert len(own.attentions) == 2


def test_a_mask_of_all_pairs_is_refused():
    model = tiny("mpt")
    with lent(model), pytest.raises(UnsupportedModelError, match="pass a 2-D attention_mask"):
        model(tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4))


def test_a_long_text_never_meets_all_pairs():
    found = printed("""
import torch
from transformers import BloomConfig, BloomModel, MptConfig, MptModel
from longspan.adapters.alibi_attention import alibi_attention
models = [
    MptModel(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=64, max_seq_len=64)),
    BloomModel(BloomConfig(hidden_size=16, n_head=2, n_layer=1, vocab_size=64)),
]
for model in models:
    with torch.no_grad(), alibi_attention(model.eval()):
        model(torch.zeros(1, 512, dtype=torch.int64), use_cache=False)
        before = peak()
        model(torch.zeros(1, 16384, dtype=torch.int64), use_cache=False)
        print(peak() - before)
""")
    assert all(int(growth) < 64e6 for growth in found.split())  # a bool for each pair is 268e6


# A stream, one token at a time, from raw keys and values and the paper's slopes.


def slopes_of(heads):
    below = 2 ** (len(bin(heads)) - 3)
    slopes = [2.0 ** (-8 * head / below) for head in range(1, below + 1)]
    between = [2.0 ** (-8 * head / (2 * below)) for head in range(1, 2 * below, 2)]
    return torch.tensor((slopes + between)[:heads], dtype=torch.float64)


def parts_of(model):
    """Returns what both families have under names of their own: embed, blocks and the last norm."""
    base = model.transformer
    if isinstance(model, MptForCausalLM):
        blocks = [
            (block.norm_1, block.attn.Wqkv, block.attn.out_proj, block.norm_2, block.ffn)
            for block in base.blocks
        ]
        return base.wte, blocks, base.norm_f
    blocks = [
        (
            block.input_layernorm,
            block.self_attention.query_key_value,
            block.self_attention.dense,
            block.post_attention_layernorm,
            block.mlp,
        )
        for block in base.h
    ]
    return nn.Sequential(base.word_embeddings, base.word_embeddings_layernorm), blocks, base.ln_f


def fused(model, heads, x):
    if isinstance(model, MptForCausalLM):
        return x.view(3, heads, -1)
    return x.view(heads, 3, -1).transpose(0, 1)


def streamed_naively(model, row, sinks=S, window=W, slopes=None):
    """Returns the logits [N, V] of one row, of which each token sees the sinks and a window."""
    embed, blocks, last_norm = parts_of(model)
    heads = model.config.num_attention_heads
    slopes = slopes_of(heads) if slopes is None else slopes
    memory = [[] for _ in blocks]
    logits = []
    for at, token in enumerate(row):
        x = embed(token)
        for (norm, read_in, read_out, second_norm, mlp), kept in zip(blocks, memory, strict=True):
            q, k, v = fused(model, heads, read_in(norm(x)))
            kept.append((k, v))
            seen = [pair for i, pair in enumerate(kept) if i < sinks or i > at - window]
            keys, values = (torch.stack(side, dim=1) for side in zip(*seen, strict=True))
            away = torch.arange(len(seen) - 1, -1, -1)  # places in the cache, not in the text
            scores = torch.einsum("hd,hsd->hs", q, keys) / q.shape[-1] ** 0.5
            weights = (scores - slopes[:, None] * away).softmax(-1)
            x = x + read_out(torch.einsum("hs,hsd->hd", weights, values).flatten())
            x = mlp(second_norm(x)[None], x[None])[0]
        logits.append(model.lm_head(last_norm(x)))
    return torch.stack(logits)


N = 30
CHUNKS = [(N,), (1,) * N, (3, 1, 8, 1, 1, 16), (7, 7, 7, 7, 2), (2, W, N - 2 - W), (29, 1)]


@each_family
@pytest.mark.parametrize("heads", [4, 6, 12])
@torch.no_grad()
def test_every_chunking_is_one_token_at_a_time(family, heads):
    model, ids = tiny(family, heads), tokens(1, N)
    expected = streamed_naively(model, ids[0])
    stream = StreamedModel(model, S, W)
    for chunks in CHUNKS:
        cache = stream.new_cache()
        outs = [stream.model(chunk, cache=cache).logits for chunk in ids.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(outs, dim=1)[0], expected, **FLOAT64)
    torch.testing.assert_close(stream.model(ids).logits[0], expected, **FLOAT64)  # without a cache


@each_family
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_padded_batch_is_each_row_alone(family, side):
    model, lengths = tiny(family, heads=6), [21, 9, 14]
    ids, mask = padded(lengths, side)
    stream = StreamedModel(model, S, W)
    cache, outs, start = stream.new_cache(), [], 0
    for chunk in ids.split((8, 1, 12), dim=1):
        seen = mask[:, : start + chunk.shape[1]]
        outs.append(stream.model(chunk, attention_mask=seen, cache=cache).logits)
        start += chunk.shape[1]
    found = torch.cat(outs, dim=1)
    for row in range(len(lengths)):
        real = mask[row].bool()
        expected = streamed_naively(model, ids[row, real])
        torch.testing.assert_close(found[row, real], expected, **FLOAT64)


@torch.no_grad()
def test_a_stream_of_bloom_makes_no_bias_of_all_that_went_by():
    """BLOOM makes one, [B·H, 1, keys], for every key that its cache says a mask would have."""
    stream, made = StreamedModel(tiny("bloom"), S, W), []
    block = stream.model.base_model.h[0]
    block.register_forward_pre_hook(
        lambda block, args, given: made.append(given["alibi"].shape[-1]), with_kwargs=True
    )
    cache = stream.new_cache()
    for chunk in tokens(1, N).split((8, *[1] * 22), dim=1):
        stream.model(chunk, cache=cache)
    assert made == [8] + [1] * 22


@each_family
@pytest.mark.parametrize("window", [W, 40])
@torch.no_grad()
def test_a_stream_generates(family, window):
    model, lengths, new = tiny(family), [11, 6], 9
    ids, mask = padded(lengths, "left")
    stream = StreamedModel(model, S, window)
    cache = stream.new_cache()
    given = dict(attention_mask=mask, max_new_tokens=new, do_sample=False)
    found = stream.model.generate(ids, cache=cache, **given)[:, max(lengths) :]
    for row, start in enumerate(lengths):
        text = ids[row, -start:]
        for token in found[row]:
            expected = streamed_naively(model, text, window=window)[-1].argmax()
            assert token == expected
            text = torch.cat((text, token[None]))
    assert {kept.capacity for kept in cache.caches["sinks"].layers.values()} == {S + window}


@each_family
@torch.no_grad()
def test_a_stream_leaves_the_model_as_it_is(family):
    model, ids = tiny(family), tokens(1, 12)
    logits, own, config = model(ids).logits, attentions(model), model.config.to_dict()
    generation = copy.deepcopy(model.generation_config.to_dict())
    stream = StreamedModel(model, S, W)
    stream.model(ids)
    assert torch.equal(model(ids).logits, logits)
    assert all(a is b for a, b in zip(attentions(model), own, strict=True))
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    assert list(stream.model.state_dict()) == list(model.state_dict())
    shared = zip(stream.model.parameters(), model.parameters(), strict=True)
    assert all(a is b for a, b in shared)


@each_family
@torch.no_grad()
def test_a_model_that_is_lent_attention_can_be_streamed(family):
    model, ids = tiny(family), tokens(1, N)
    expected = model(ids).logits
    with lent(model):
        stream = StreamedModel(model, S, W)
        torch.testing.assert_close(model(ids).logits, expected, **FLOAT32)
    assert torch.equal(model(ids).logits, expected)
    found = stream.model(ids).logits[0]
    torch.testing.assert_close(found, streamed_naively(model, ids[0]), **FLOAT64)


@each_family
@torch.no_grad()
def test_sizes_and_slopes_change_what_a_stream_says(family):
    model, ids = tiny(family), tokens(1, N)
    said = {
        sizes: StreamedModel(model, *sizes).model(ids).logits
        for sizes in [(S, W), (S + 1, W), (S, W + 1), (0, W)]
    }
    first = said.pop((S, W))
    for sizes, other in said.items():
        assert (other - first).abs().max() > 1e-4, sizes
        expected = streamed_naively(model, ids[0], *sizes)
        torch.testing.assert_close(other[0], expected, **FLOAT64)
    steeper = StreamedModel(model, S, W)
    for encoding in steeper.encodings.values():
        encoding.bias.slopes = slopes_of(4) * 2
    found = steeper.model(ids).logits
    assert (found - first).abs().max() > 1e-4
    expected = streamed_naively(model, ids[0], slopes=slopes_of(4) * 2)
    torch.testing.assert_close(found[0], expected, **FLOAT64)
