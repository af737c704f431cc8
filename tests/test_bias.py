"""Biases: the papers' numbers, transformers' models, and formulas written out naively here."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import nn
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from longspan.attention import attend
from longspan.bias import (
    BIASES,
    Alibi,
    ShawRelative,
    T5Bias,
    TransformerXLBias,
    alibi_slopes,
    t5_bucket,
)
from longspan.bias.base import distances
from longspan.bias.transformer_xl import distinct, sinusoid
from longspan.errors import ConfigError, LongspanError, ShapeError
from longspan.masks import causal

FLOAT32_ROUNDING = 2e-6  # weights below 1, summed in another order
FLOAT64_ROUNDING = 1e-12

torch.manual_seed(0)


# ALiBi


def test_alibi_slopes_of_the_facts():
    assert (-alibi_slopes(8).log2()).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    twelve = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    assert (-alibi_slopes(12).log2()).tolist() == pytest.approx(twelve)
    assert (-alibi_slopes(6).log2()).tolist() == pytest.approx([2, 4, 6, 8, 1, 3])


@pytest.mark.parametrize("num_heads", range(1, 65))
def test_case_15_slopes_are_distinct_and_follow_the_published_rule(num_heads):
    def published(n):  # the authors' code, in plain floats
        def power_of_2(n):
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]

        if math.log2(n).is_integer():
            return power_of_2(n)
        closest = 2 ** math.floor(math.log2(n))
        return power_of_2(closest) + published(2 * closest)[0::2][: n - closest]

    slopes = alibi_slopes(num_heads).tolist()
    assert slopes == pytest.approx(published(num_heads), rel=1e-12)
    assert len(set(slopes)) == num_heads
    assert all(0 < slope < 1 for slope in slopes)


def test_case_15_twelve_heads():
    slopes = alibi_slopes(12).tolist()
    assert slopes[:2] == [0.5, 0.25]
    assert slopes[-4:] == pytest.approx([0.7071, 0.3536, 0.1768, 0.0884], abs=5e-5)


def test_alibi_penalises_distance_and_is_not_scaled():
    bias = Alibi(4).scores(torch.zeros(1, 4, 1, 64), torch.tensor([10]), torch.arange(11))
    assert bias.shape == (4, 1, 11)
    assert bias[0, 0, 10] == 0
    assert bias[0, 0].tolist() == [-0.25 * (10 - j) for j in range(11)]
    both = Alibi(4, bidirectional=True).scores(torch.zeros(1), torch.tensor([5]), torch.arange(11))
    assert torch.equal(both, both.flip(-1))


@pytest.mark.parametrize("total", [8, 12])
def test_alibi_shards_are_the_whole(total):
    positions, q = torch.arange(5), torch.zeros(1)
    shards = [
        Alibi(total // 4, head_offset=at, total_heads=total).scores(q, positions, positions)
        for at in range(0, total, total // 4)
    ]
    assert torch.equal(torch.cat(shards), Alibi(total).scores(q, positions, positions))


@pytest.mark.parametrize("num_heads", [1, 4, 6, 12, 16])
def test_alibi_slopes_are_mpts(num_heads):
    expected = build_mpt_alibi_tensor(num_heads, 9).squeeze()  # [H, S], the last query's row
    ours = Alibi(num_heads).scores(torch.zeros(1), torch.tensor([8]), torch.arange(9))
    torch.testing.assert_close(ours.squeeze(1).reshape(expected.shape), expected)


def attention_weights(q, k, **options):
    """Returns the weights themselves: attention over one-hot values."""
    keys = k.shape[2]
    one_hot = torch.eye(keys, dtype=q.dtype).expand(q.shape[0], k.shape[1], keys, keys)
    return attend(q, k, one_hot, **options)


def products(module: nn.Module) -> list[torch.Tensor]:
    """Returns a list that fills with what the module returns."""
    caught: list[torch.Tensor] = []
    module.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    return caught


@pytest.mark.parametrize("impl", ["reference", "tiled", "sdpa"])
def test_alibi_weights_are_blooms(impl):
    config = transformers.BloomConfig(
        vocab_size=64, hidden_size=48, n_layer=1, n_head=6, initializer_range=0.4
    )
    model = transformers.BloomModel._from_config(config, attn_implementation="eager").eval()
    fused = products(model.h[0].self_attention.query_key_value)
    with torch.no_grad():
        expected = model(torch.randint(64, (2, 40)), output_attentions=True).attentions[0]
    q, k, _ = fused[0].view(2, 40, 6, 3, 8).permute(3, 0, 2, 1, 4)
    ours = attention_weights(q, k, mask=causal(), bias=Alibi(6), impl=impl)
    torch.testing.assert_close(ours, expected, atol=FLOAT32_ROUNDING, rtol=0)


@pytest.mark.parametrize("impl", ["reference", "tiled", "sdpa"])
def test_alibi_weights_are_mpts(impl):
    config = transformers.MptConfig(
        vocab_size=64, d_model=48, n_layers=1, n_heads=6, max_seq_len=64, initializer_range=0.4
    )
    model = transformers.MptModel._from_config(config, attn_implementation="eager").eval()
    fused = products(model.blocks[0].attn.Wqkv)
    with torch.no_grad():
        expected = model(torch.randint(64, (2, 40)), output_attentions=True).attentions[0]
    q, k, _ = (x.unflatten(-1, (6, 8)).transpose(1, 2) for x in fused[0].chunk(3, dim=-1))
    ours = attention_weights(q, k, mask=causal(), bias=Alibi(6), impl=impl)
    torch.testing.assert_close(ours, expected, atol=FLOAT32_ROUNDING, rtol=0)


# T5


def first_distance(bidirectional: bool, ahead: bool = False) -> dict[int, int]:
    """Returns the first distance of each bucket."""
    away = torch.arange(0, 200)
    buckets = t5_bucket(away if ahead else -away, bidirectional=bidirectional).tolist()
    return {bucket: buckets.index(bucket) for bucket in dict.fromkeys(buckets)}


def test_t5_buckets_of_the_facts():
    causal_first = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    found = first_distance(bidirectional=False)
    assert [found[bucket] for bucket in range(32)] == [*range(16), *causal_first]
    past = first_distance(bidirectional=True)
    assert [past[bucket] for bucket in range(8, 16)] == [8, 12, 16, 23, 32, 46, 64, 91]
    ahead = torch.tensor([1, 7, 8, 12, 16, 23, 32, 46, 64, 91])
    expected = [17, 23, 24, 25, 26, 27, 28, 29, 30, 31]
    assert t5_bucket(ahead, bidirectional=True).tolist() == expected


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 50), (64, 1000), (8, 9)])
def test_case_16_buckets_stay_in_range_and_are_transformers(
    bidirectional, num_buckets, max_distance
):
    near = torch.arange(-2000, 2001)
    far = torch.tensor([-(10**6), -(10**5), 10**5, 10**6])
    relative = torch.cat((near, far))
    ours = t5_bucket(relative, bidirectional, num_buckets, max_distance)
    assert int(ours.min()) >= 0
    assert int(ours.max()) < num_buckets
    theirs = T5Attention._relative_position_bucket(
        relative, bidirectional, num_buckets, max_distance
    )
    assert torch.equal(ours, theirs)


def test_case_16_far_and_refused():
    assert t5_bucket(torch.tensor(-1000)) == 31
    assert t5_bucket(torch.tensor(-1000), bidirectional=True) == 15
    for num_buckets, max_distance in [(31, 128), (0, 128), (32, 16), (32, 0)]:
        with pytest.raises(ConfigError):
            t5_bucket(torch.tensor(1), False, num_buckets, max_distance)
    with pytest.raises(ConfigError):
        t5_bucket(torch.tensor(1), True, 32, 8)
    with pytest.raises(ConfigError):
        T5Bias(4, num_buckets=7)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("impl", ["reference", "tiled", "sdpa"])
def test_t5_weights_are_transformers(bidirectional, impl):
    tokens = 300  # beyond max_distance
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, num_heads=4, is_decoder=not bidirectional
    )
    config._attn_implementation = "eager"
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval().double()
    bias = T5Bias(4, bidirectional=bidirectional).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
        bias.table.copy_(layer.relative_attention_bias.weight)
        hidden = torch.randn(2, tokens, 32, dtype=torch.float64)
        hidden_pairs = torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)
        mask = None if bidirectional else hidden_pairs[None, None]
        expected = layer(hidden, mask=mask)[0]
        q, k, v = (
            project(hidden).unflatten(-1, (4, 8)).transpose(1, 2)
            for project in (layer.q, layer.k, layer.v)
        )
        see = None if bidirectional else causal()
        out = attend(q, k, v, mask=see, bias=bias, scale=1.0, impl=impl)
        ours = layer.o(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)  # theirs adds in float32


def test_t5_decoding_needs_no_offset():
    bias, q = T5Bias(2), torch.zeros(1)
    whole = bias.scores(q, torch.arange(200), torch.arange(200))
    step = bias.scores(q, torch.tensor([199]), torch.arange(200))
    assert torch.equal(whole[:, -1:], step)


# Shaw


def test_shaw_is_the_papers_formula():
    heads, dim, reach, queries, keys = 2, 4, 3, 5, 9
    bias = ShawRelative(heads, dim, reach).double()
    q, k, v = (torch.randn(1, heads, n, dim).double() for n in (queries, keys, keys))
    expected = torch.zeros(1, heads, queries, dim).double()
    for h in range(heads):
        for i in range(queries):
            at = keys - queries + i
            a = [min(max(j - at, -reach), reach) + reach for j in range(keys)]
            scores = torch.stack(
                [q[0, h, i] @ (k[0, h, j] + bias.key_table[a[j]]) for j in range(keys)]
            )
            weights = (scores / math.sqrt(dim)).softmax(0)
            expected[0, h, i] = sum(
                weights[j] * (v[0, h, j] + bias.value_table[a[j]]) for j in range(keys)
            )
    for impl in ("reference", "tiled"):
        ours = attend(q, k, v, bias=bias, impl=impl)
        torch.testing.assert_close(ours, expected, atol=FLOAT64_ROUNDING, rtol=0)


def test_shaw_values_are_an_option_that_counts():
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    bias = ShawRelative(2, 4, max_distance=2)
    plain = ShawRelative(2, 4, max_distance=2, with_values=False)
    plain.key_table = bias.key_table
    difference = attend(q, k, v, bias=bias, impl="tiled") - attend(
        q, k, v, bias=plain, impl="tiled"
    )
    assert difference.abs().max() > 1e-3


# Transformer-XL


def naive_transformer_xl(q, k, v, bias, memory):
    """The paper's four terms and the code's relative shift, on one causal segment with memory."""
    queries, keys, dim = q.shape[2], k.shape[2], q.shape[3]
    away = torch.arange(keys - 1, -1, -1).double()  # keys − 1, …, 1, 0
    inverse = 10_000 ** -(torch.arange(0, bias.hidden_size, 2).double() / bias.hidden_size)
    angles = away[:, None] * inverse
    r = torch.cat((angles.sin(), angles.cos()), -1) @ bias.key_relative.weight.T
    r = r.view(keys, bias.num_heads, dim).transpose(0, 1)
    content = (q + bias.u[:, None]) @ k.transpose(-1, -2)
    position = (q + bias.v[:, None]) @ r.transpose(-1, -2)  # column c is distance keys − 1 − c
    padded = torch.cat((position.new_zeros(*position.shape[:3], 1), position), -1)
    shifted = padded.view(*position.shape[:2], keys + 1, queries)[:, :, 1:].reshape_as(position)
    scores = (content + shifted) / math.sqrt(dim)
    future = torch.ones(queries, keys, dtype=torch.bool).triu(1 + memory)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("queries", "memory"), [(3, 2), (6, 0), (1, 5), (40, 17)])
@pytest.mark.parametrize("impl", ["reference", "tiled", "sdpa"])
def test_transformer_xl_is_the_naive_one(queries, memory, impl):
    keys = queries + memory
    bias = TransformerXLBias(2, 4, hidden_size=10).double()
    with torch.no_grad():
        for parameter in bias.parameters():
            parameter.normal_()
    q, k, v = (torch.randn(2, 2, n, 4).double() for n in (queries, keys, keys))
    expected = naive_transformer_xl(q, k, v, bias, memory)
    ours = attend(q, k, v, mask=causal(), bias=bias, impl=impl)
    torch.testing.assert_close(ours, expected, atol=FLOAT64_ROUNDING, rtol=0)


def test_relative_shift_of_the_facts():
    away = distances(torch.arange(2, 5), torch.arange(5))
    met, index = distinct(away)
    seen = [row[: at + 3] for at, row in enumerate(met[index].tolist())]
    assert seen == [[2, 1, 0], [3, 2, 1, 0], [4, 3, 2, 1, 0]]


def test_scattered_positions_meet_each_distance_once():
    away = distances(torch.tensor([0, 10**6]), torch.tensor([0, 5]))
    met, index = distinct(away)
    assert met.tolist() == [-5, 0, 999_995, 10**6]
    assert torch.equal(met[index], away)


def test_sinusoid_has_sines_first():
    table = sinusoid(torch.tensor([0, 3]), 4)
    assert table[0].tolist() == [0, 0, 1, 1]
    expected = [math.sin(3), math.sin(0.03), math.cos(3), math.cos(0.03)]
    assert table[1].tolist() == pytest.approx(expected)


def test_transformer_xl_layers_share_u_and_v():
    first = TransformerXLBias(2, 4)
    second = TransformerXLBias(2, 4, u=first.u, v=first.v)
    assert second.u is first.u
    assert second.v is first.v
    assert second.key_relative.weight is not first.key_relative.weight


# All of them

EXAMPLES = (
    Alibi(2),
    Alibi(2, bidirectional=True),
    T5Bias(2, num_buckets=8, max_distance=20),
    T5Bias(2, num_buckets=8, max_distance=20, bidirectional=True),
    ShawRelative(2, 4, max_distance=5),
    TransformerXLBias(2, 4),
)


def test_every_bias_has_an_example():
    assert {type(bias) for bias in EXAMPLES} == set(BIASES)


@pytest.mark.parametrize("bias", EXAMPLES, ids=repr)
def test_a_tile_is_a_cut_of_the_whole(bias):
    q = torch.randn(1, 2, 30, 4)
    whole = bias.scores(q, torch.arange(30), torch.arange(30))
    tile = bias.scores(q[:, :, 7:12], torch.arange(7, 12), torch.arange(3, 20))
    torch.testing.assert_close(tile, whole[..., 7:12, 3:20], atol=FLOAT32_ROUNDING, rtol=0)
    rows = bias.scores(q.expand(2, -1, -1, -1), torch.arange(30).expand(2, -1), torch.arange(30))
    torch.testing.assert_close(rows, whole.expand_as(rows), atol=FLOAT32_ROUNDING, rtol=0)


SIDES = [(bias, True) for bias in EXAMPLES if bias.far is not None]
SIDES += [(bias, False) for bias, _ in SIDES if not bias.needs_causal]


@pytest.mark.parametrize(("bias", "before"), SIDES, ids=repr)
def test_row_plus_key_is_the_dense_form(bias, before):
    q, near = torch.zeros(1, 2, 6, 4, dtype=torch.float64), torch.arange(100, 106)
    keys = 100 - bias.far - torch.arange(9) if before else 105 + bias.far + torch.arange(9)
    row, key = bias.split(q, near, keys, before)
    dense = bias.scores(q, near, keys)
    key = torch.zeros(2, 9) if key is None else key
    torch.testing.assert_close(row[:, :, None] + key[:, None], dense, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bias", [b for b in EXAMPLES if not b.reads_query], ids=repr)
def test_the_score_function_is_the_dense_form(bias):
    score, positions = bias.score_function(torch.device("cpu")), torch.arange(40)
    q, k = positions[:, None], positions[None, :]
    ours = torch.stack([score(torch.tensor(head), q, k) for head in range(2)])
    torch.testing.assert_close(ours, bias.scores(torch.zeros(1), positions, positions))


@pytest.mark.parametrize("bias", EXAMPLES, ids=repr)
def test_what_a_bias_cannot_do_it_refuses(bias):
    q, positions = torch.zeros(1, 2, 3, 4), torch.arange(3)
    if bias.reads_query:
        with pytest.raises(ConfigError):
            bias.score_function(q.device)
    if bias.far is None:
        with pytest.raises(ConfigError):
            bias.split(q, positions, positions, before=True)
    if not bias.adds_values:
        with pytest.raises(ConfigError):
            bias.values(torch.zeros(1, 2, 3, 3), positions, positions)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: alibi_slopes(0),
        lambda: Alibi(4, head_offset=2),
        lambda: Alibi(4, head_offset=-1, total_heads=8),
        lambda: ShawRelative(2, 4, max_distance=0),
        lambda: TransformerXLBias(2, 4, hidden_size=7),
        lambda: T5Bias(2.0),
    ],
)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(LongspanError):
        wrong()


@pytest.mark.parametrize("bias", [Alibi(2), T5Bias(2)], ids=repr)
def test_a_one_sided_bias_needs_a_causal_mask(bias):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ConfigError, match="causal"):
        attend(q, q, q, bias=bias)
    with pytest.raises(ShapeError, match="heads"):
        attend(q[:, :1], q[:, :1], q[:, :1], mask=causal(), bias=bias)


def test_alibi_keeps_its_slopes_through_any_cast():
    for cast in (torch.bfloat16, torch.float16):
        slopes = Alibi(12).to(cast).slopes
        assert torch.equal(slopes, alibi_slopes(12))
