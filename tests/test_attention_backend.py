"""attn_implementation="longspan" against transformers' own eager attention, and against itself."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Llama4ForCausalLM,
    Llama4TextConfig,
    ModernBertConfig,
    ModernBertModel,
    StaticCache,
    T5Config,
    T5Model,
)
from transformers.masking_utils import create_causal_mask

from fresh import printed
from longspan.adapters import register
from longspan.adapters.attention import SeenKeys, seen_keys
from longspan.adapters.mask_functions import AskedMask
from longspan.attention import dispatch
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.masks import causal, sliding_window
from tiny_families import OWN, logits, tiny, tokens

W = 16
CLOSE = dict(atol=2e-5, rtol=0)
SLIDES = {
    "mistral": dict(sliding_window=W),
    "qwen2": dict(use_sliding_window=True, sliding_window=W, max_window_layers=1),
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {},
}
ARITHMETIC_ON_MASKS = {"glm_moe_dsa"}


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture(params=["few pairs", "tiles"])
def engine(request, monkeypatch):
    """Few pairs go to sdpa under a small mask; here they also go the way of long texts."""
    if request.param == "tiles":
        monkeypatch.setattr(dispatch, "SMALL_PAIRS", 0)
        assert (
            dispatch.choose_impl(*[torch.zeros(1, 1, 4, 8)] * 3, mask=sliding_window(2)).impl
            == "tiled"
        )


def pair(family: str, **changed):
    """Returns the same model twice: under eager, and under longspan."""
    eager = tiny(family, **{**SLIDES.get(family, {}), **changed})
    if family == "gpt_oss":  # from zero they would be one constant for every head
        for layer in eager.model.layers:
            layer.self_attn.sinks.data.normal_(std=2.0)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("longspan")
    assert ours.config._attn_implementation == "longspan"
    return eager, ours


def padded(lengths, side):
    """Returns token ids [B, N] and their mask, rows of these lengths filled up on one side."""
    ids = tokens(max(lengths), len(lengths))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, (-length if side == "left" else 0) : (None if side == "left" else length)] = 1
    return ids, mask


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("family", sorted(set(OWN) - ARITHMETIC_ON_MASKS))
def test_every_family_gives_the_logits_of_eager(family):
    eager, ours = pair(family)
    row = tokens(3 * W, 2)
    torch.testing.assert_close(logits(ours, row), logits(eager, row), **CLOSE)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("length", [W - 1, W, W + 1, 2 * W, 2 * W + 1])
@pytest.mark.parametrize("family", SLIDES)
def test_case_19_prefill_then_decode_over_the_window_edge_is_the_whole_forward(family, length):
    eager, ours = pair(family)
    row = tokens(length + 4)
    cache = DynamicCache(config=ours.config)
    with torch.no_grad():
        found = [ours(row[:, :length], cache=cache).logits]
        found += [ours(row[:, at : at + 1], cache=cache).logits for at in range(length, length + 4)]
    torch.testing.assert_close(torch.cat(found, 1), logits(eager, row), **CLOSE)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("chunk", [1, 7, W, W + 1])
@pytest.mark.parametrize("family", SLIDES)
def test_chunked_prefill_is_the_whole_forward(family, chunk):
    eager, ours = pair(family)
    row, cache = tokens(3 * W + 2), DynamicCache(config=ours.config)
    with torch.no_grad():
        found = [ours(part, cache=cache).logits for part in row.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(found, 1), logits(eager, row), **CLOSE)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("family", SLIDES)
def test_a_static_cache_is_the_whole_forward(family):
    eager, ours = pair(family)
    row = tokens(2 * W + 3)
    cache = StaticCache(config=ours.config, max_cache_len=3 * W)
    with torch.no_grad():
        found = [ours(part, cache=cache).logits for part in row.split([W + 1, 1, 1, W], dim=1)]
    torch.testing.assert_close(torch.cat(found, 1), logits(eager, row), **CLOSE)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "smollm3", *SLIDES])
def test_a_padded_row_is_the_row_alone(family, side):
    _, ours = pair(family)
    lengths = [5, W + 1, 3 * W]
    ids, mask = padded(lengths, side)
    with torch.no_grad():
        found = ours(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    for row, kept, length in zip(found, mask.bool(), lengths, strict=True):
        alone = logits(ours, ids[lengths.index(length)][kept][None])
        torch.testing.assert_close(row[kept], alone[0], **CLOSE)


@pytest.mark.parametrize("family", SLIDES)
@pytest.mark.parametrize("kind", [None, "static"])
def test_generate_gives_the_tokens_of_eager_for_a_left_padded_batch(family, kind):
    eager, ours = pair(family)
    ids, mask = padded([3, W - 1, 2 * W], "left")
    options = dict(attention_mask=mask, max_new_tokens=W + 2, do_sample=False)
    options |= {} if kind is None else {"cache_implementation": kind}
    found, expected = (model.generate(ids, **options) for model in (ours, eager))
    assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", ["llama", *SLIDES])
def test_packed_position_ids_keep_documents_apart(family, use_cache):
    _, ours = pair(family)
    documents = [tokens(length, seed=length) for length in (W + 3, 5, 2 * W)]
    packed = torch.cat(documents, 1)
    restarted = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    with torch.no_grad():
        found = ours(packed, position_ids=restarted, use_cache=use_cache).logits
    alone = torch.cat([logits(ours, document) for document in documents], 1)
    torch.testing.assert_close(found, alone, **CLOSE)
    assert not torch.allclose(found, logits(ours, packed), atol=1e-2)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("family", ["llama", *SLIDES])
def test_gradients_are_those_of_eager(family):
    eager, ours = pair(family)
    ids, mask = padded([W // 2, 2 * W], "left")
    for model in (eager, ours):
        out = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
        (out * mask[..., None]).square().mean().backward()
    for (name, wanted), found in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("mistral", dict(sliding_window=W // 2)),
        ("gemma2", dict(attn_logit_softcapping=0.5)),
        ("gemma3_text", dict(sliding_window=W // 2)),
    ],
)
def test_the_window_and_the_soft_cap_change_the_logits(family, changed):
    _, ours = pair(family)
    _, other = pair(family, **changed)
    row = tokens(2 * W)
    assert (logits(ours, row) - logits(other, row)).abs().max() > 1e-2


def test_learned_sinks_and_padding_change_the_logits():
    _, ours = pair("gpt_oss")
    row = tokens(2 * W)
    before = logits(ours, row)
    mask = torch.ones_like(row)
    mask[:, :3] = 0
    with torch.no_grad():
        assert (ours(row, attention_mask=mask).logits - before)[:, 3:].abs().max() > 1e-2
        ours.model.layers[0].self_attn.sinks += 3.0
    assert (logits(ours, row) - before).abs().max() > 1e-2


def test_a_token_outside_the_window_has_no_gradient_at_all():
    _, ours = pair("mistral", num_hidden_layers=1)
    embedded = ours.get_input_embeddings()(tokens(3 * W)).detach().requires_grad_()
    ours(inputs_embeds=embedded).logits[:, -1].sum().backward()
    assert embedded.grad[:, : 2 * W].eq(0).all()
    assert embedded.grad[:, 2 * W :].ne(0).any(-1).all()


def test_case_20_rows_of_padding_alone_stay_finite():
    _, ours = pair("mistral")
    ids, mask = padded([2, 3 * W], "left")
    out = ours(ids, attention_mask=mask).logits
    out.square().mean().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)


def test_case_21_a_mask_of_all_text_is_cut_by_kept_positions():
    ids, mask = padded([W + 2, 3 * W], "left")
    _, ours = pair("mistral")
    cache = DynamicCache(config=ours.config)
    at = positions_of(mask)
    with torch.no_grad():
        ours(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=at[:, :-1], cache=cache)
        step = ours(ids[:, -1:], attention_mask=mask, position_ids=at[:, -1:], cache=cache).logits
    assert cache.layers[0].keys.shape[2] == W - 1 < mask.shape[1]
    for row in range(2):
        alone = logits(ours, ids[row][mask[row].bool()][None])
        torch.testing.assert_close(step[row, -1], alone[0, -1], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_callers_own_mask_of_all_pairs_is_followed(dtype):
    eager, ours = pair("llama")
    row = tokens(10, 2)
    visible = torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(0)) < 0.5
    visible = visible.tril() | torch.eye(10, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    added = torch.where(visible, 0.0, lowest)
    given = visible if dtype == torch.bool else added
    with torch.no_grad():
        found = ours(row, attention_mask=given).logits
        expected = eager(row, attention_mask=added).logits
    torch.testing.assert_close(found, expected, **CLOSE)


def test_masks_that_add_numbers_or_differ_by_head_are_refused():
    _, ours = pair("llama")
    with pytest.raises(ConfigError, match="adds numbers other than 0"):
        ours(tokens(4), attention_mask=torch.full((1, 1, 4, 4), -1.0))
    with pytest.raises(ConfigError, match="the same for every head"):
        ours(tokens(4), attention_mask=torch.zeros(1, 2, 4, 4))


@pytest.mark.parametrize(
    "custom",
    [
        dict(or_mask_function=lambda b, h, q, k: (q < 4) & (k < 4)),
        dict(and_mask_function=lambda b, h, q, k: k % 3 != b),
        dict(block_sequence_ids=torch.tensor([[-1] * 3 + [0] * 4 + [-1] * 2 + [1] * 3] * 2)),
    ],
    ids=lambda custom: next(iter(custom)),
)
def test_mask_functions_it_does_not_know_are_asked(custom):
    eager, ours = pair("llama")
    embeds = torch.zeros(2, 12, 32)
    found, expected = (
        create_causal_mask(model.config, embeds, None, None, **custom) for model in (ours, eager)
    )
    assert isinstance(found, SeenKeys)
    assert torch.equal(found.seen.everything().expand(expected.shape), expected == 0)


def test_known_mask_functions_are_read_not_asked():
    from transformers import masking_utils as known

    window = known.sliding_window_causal_mask_function(W)

    def mask(function, queries, keys=None, first=0):
        found = seen_keys(1, queries, keys or queries, mask_function=function, q_offset=first)
        return found.seen.mask

    assert mask(window, 3 * W) == sliding_window(W)
    assert mask(window, W) == causal()  # it hides nothing there
    assert mask(known.causal_mask_function, W) == causal()
    assert mask(known.bidirectional_mask_function, W) is None
    both_ways = known.sliding_window_bidirectional_mask_function(W)
    assert mask(both_ways, 3 * W) == sliding_window(W + 1, ahead=W)
    documents = torch.tensor([[0, 0, 1, 1]])
    packed = known.and_masks(
        known.causal_mask_function, known.packed_sequence_mask_function(documents)
    )
    found = seen_keys(1, 4, 4, mask_function=packed).seen
    assert found.mask == causal()
    assert torch.equal(found.q_doc, documents)
    assert torch.equal(found.k_doc, documents)
    padding = torch.zeros(1, dtype=torch.int64)
    chunked = mask(known.chunked_causal_mask_function(W, padding), W)
    assert "asked(chunked_overlay)" in repr(chunked)


def one_pair(b, h, q, k):
    return torch.ones(()) if q > k else torch.zeros(())


def test_a_function_that_cannot_take_many_pairs_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="one_pair"):
        AskedMask(one_pair, 1)(torch.arange(3), torch.arange(3))


@pytest.mark.parametrize("make", ["bert", "modernbert", "t5", "llama4"])
def test_encoders_relative_biases_and_chunks_are_those_of_eager(make):
    torch.manual_seed(0)
    small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ids, mask = padded([9, 24], "right")
    given = {"input_ids": ids, "attention_mask": mask}
    if make == "bert":
        model = BertModel(BertConfig(**small, intermediate_size=32))
    elif make == "modernbert":
        special = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
        config = ModernBertConfig(**small, intermediate_size=32, local_attention=8, **special)
        model = ModernBertModel(config)
    elif make == "t5":
        model = T5Model(T5Config(vocab_size=64, d_model=32, d_kv=8, num_layers=2, num_heads=4))
        given["decoder_input_ids"] = ids[:, :7]
    else:
        sizes = dict(intermediate_size=32, intermediate_size_mlp=32, num_key_value_heads=2)
        config = Llama4TextConfig(
            **small, **sizes, head_dim=8, num_local_experts=2, attention_chunk_size=8
        )
        config.bos_token_id = config.eos_token_id = None
        model = Llama4ForCausalLM(config)
    model = model.eval()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**given)[0]
        model.set_attn_implementation("longspan")
        found = model(**given)[0]
    kept = mask[:, : expected.shape[1], None].bool()
    torch.testing.assert_close(found * kept, expected * kept, **CLOSE)


def test_what_it_cannot_give_is_refused():
    _, ours = pair("llama")
    with pytest.raises(ConfigError, match="never holds the attention weights"):
        ours.model.layers[0].self_attn(
            torch.zeros(1, 4, 32),
            position_embeddings=ours.model.rotary_emb(torch.zeros(1), torch.arange(4)[None]),
            attention_mask=None,
            output_attentions=True,
        )
    _, sparse = pair("glm_moe_dsa")
    with pytest.raises(UnsupportedModelError, match="works on a mask of all pairs"):
        sparse(tokens(4))


def test_a_model_with_attention_of_its_own_does_not_take_the_name():
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    model = BloomForCausalLM(config)
    model.set_attn_implementation("longspan")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_compiled_is_eager(family):
    _, ours = pair(family)
    row = tokens(2 * W)
    with torch.no_grad():
        compiled = torch.compile(ours.model, backend="eager")(row, use_cache=False)
        eager = ours.model(row, use_cache=False)
    torch.testing.assert_close(compiled.last_hidden_state, eager.last_hidden_state, **CLOSE)


def test_importing_registers_nothing_and_registering_twice_is_harmless():
    found = printed("""
import longspan.adapters as backend
from transformers import AttentionInterface
print("longspan" in AttentionInterface().valid_keys())
backend.register()
backend.register()
print("longspan" in AttentionInterface().valid_keys())
""")
    assert found.split() == ["False", "True"]
    assert "longspan" in AttentionInterface().valid_keys()


def test_a_long_text_through_sliding_layers_never_meets_a_mask_of_all_pairs():
    found = printed("""
import torch
from transformers import MistralConfig, MistralModel
from longspan.adapters import register
register()
config = MistralConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, sliding_window=128)
model = MistralModel._from_config(config, attn_implementation="longspan").eval()
with torch.no_grad():
    model(torch.zeros(1, 512, dtype=torch.int64))
    before = peak()
    model(torch.zeros(1, 32768, dtype=torch.int64), use_cache=False)
    print(peak() - before)
""")
    assert int(found) < 200e6  # a bool for each pair is 1.07e9
