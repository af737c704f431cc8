"""The caches against an oracle that keeps raw tokens and places them anew for every query."""

from __future__ import annotations

import math

import pytest
import torch

from longspan.bias import Alibi, ShawRelative, T5Bias
from longspan.caches import FullCache, LayerEncoding, Scoring, SinkCache, WindowCache, cache
from longspan.errors import ConfigError, ShapeError
from longspan.rotary.rope import Rope
from longspan.rotary.rotate import rotate
from longspan.rotary.scaling import DynamicNTK, LongRope, Yarn

B, H, K, D, N = 2, 4, 2, 8, 40
PLAIN = Scoring()
TRAINED = 10
CHUNKS = {
    "whole": [N],
    "one at a time": [1] * N,
    "[37, 3]": [37, 3],
    "sevens": [7] * 5 + [5],
    "mixed": [1, 2, 13, 1, 1, 22],
}
CACHES = {
    "full": (None, FullCache),
    "window 8": ((0, 8), lambda: WindowCache(8)),
    "4 sinks, window 8": ((4, 8), lambda: SinkCache(4, 8)),
    "1 sink, window 1": ((1, 1), lambda: SinkCache(1, 1)),
    "3 sinks, window 64": ((3, 64), lambda: SinkCache(3, 64)),
}


def rope(scaling=None, **changed):
    return Rope(head_dim=D, rope_theta=100.0, scaling=scaling, **changed)


DYNAMIC = DynamicNTK(factor=2.0, original_max_position_embeddings=TRAINED)
LONG = LongRope(
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(1.5, 2.0, 3.0, 4.0),
    original_max_position_embeddings=TRAINED,
    factor=4.0,
)


def t5():
    torch.manual_seed(3)
    bias = T5Bias(H, num_buckets=8, max_distance=16).double()
    bias.requires_grad_(False)
    for parameter in bias.parameters():
        parameter.normal_()
    return LayerEncoding(bias=bias)


ENCODINGS = {
    "half": lambda: LayerEncoding(rope()),
    "interleaved, partial": lambda: LayerEncoding(rope(layout="interleaved", rotary_dim=4)),
    "yarn": lambda: LayerEncoding(rope(Yarn(factor=4.0, original_max_position_embeddings=TRAINED))),
    "dynamic, request": lambda: LayerEncoding(rope(DYNAMIC), seq_len=N),
    "dynamic, step": lambda: LayerEncoding(rope(DYNAMIC)),
    "longrope, step": lambda: LayerEncoding(rope(LONG)),
    "alibi": lambda: LayerEncoding(bias=Alibi(H)),
    "t5": t5,
    "none": LayerEncoding,
}


def example(batch=B, tokens=N):
    random = torch.Generator().manual_seed(0)

    def normal(heads, dim):
        return torch.randn(batch, heads, tokens, dim, generator=random, dtype=torch.float64)

    return normal(H, D), normal(K, D), normal(K, D + 2)


def oracle(q, k, v, sizes, encoding, scoring=PLAIN):
    """One row, one query at a time: every visible key is placed and turned from scratch."""
    rows = []
    for row in range(len(q)):
        outs = []
        for i in range(q.shape[2]):
            kept = list(range(i + 1))
            if sizes is not None:
                kept = [j for j in kept if j < sizes[0] or j > i - sizes[1]]
            outs.append(
                _one_query(q[row, :, i], k[row][:, kept], v[row][:, kept], encoding, scoring)
            )
        rows.append(torch.stack(outs, dim=1))
    return torch.stack(rows)


def _one_query(q, k, v, encoding, scoring):
    count = k.shape[1]  # slots 0 … count − 1, the query at the last
    places = torch.arange(count)
    if encoding.rope is not None:
        found = encoding.rope
        length = encoding.seq_len or count
        inv_freq = found.inv_freq(length if found.method.depends_on_length else None)
        turn = dict(inv_freq=inv_freq, layout=found.layout, attention_factor=found.attention_factor)
        q = rotate(q[None, :, None], places[-1:], **turn)[0, :, 0]
        k = rotate(k[None], places, **turn)[0]
    k, v = (x.repeat_interleave(H // K, dim=0) for x in (k, v))
    scores = (k @ q.unsqueeze(-1)).squeeze(-1)
    scores = scores * (1 / math.sqrt(D) if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if encoding.bias is not None:
        like = torch.zeros(1, H, 1, D, dtype=q.dtype)
        scores = scores + encoding.bias.scores(like, places[-1:], places).view(H, count)
    if scoring.sink_logits is not None:
        scores = torch.cat((scores, scoring.sink_logits[:, None]), dim=-1)
    return (scores.softmax(-1)[:, :count].unsqueeze(1) @ v).squeeze(1)


def fed(kept, q, k, v, encoding, sizes, scoring=PLAIN, present=None, layer=0):
    outs, start = [], 0
    for size in sizes:
        cut = slice(start, start + size)
        here = None if present is None else present[:, cut]
        step = kept.begin(size, here)
        part = q[:, :, cut], k[:, :, cut], v[:, :, cut]
        outs.append(kept.attend(step, layer, *part, encoding, scoring))
        start += size
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", CACHES)
def test_any_chunking_is_the_oracle(name, encoding, chunks):
    sizes, make = CACHES[name]
    q, k, v = example()
    how = ENCODINGS[encoding]()
    found = fed(make(), q, k, v, how, CHUNKS[chunks])
    torch.testing.assert_close(found, oracle(q, k, v, sizes, how), atol=1e-11, rtol=0)


@pytest.mark.parametrize("chunks", ["whole", "one at a time", "mixed"])
@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(scale=0.9),
        Scoring(softcap=1.5),
        Scoring(sink_logits=torch.linspace(-1, 2, H, dtype=torch.float64)),
    ],
    ids=["scale", "softcap", "learned sinks"],
)
def test_scale_soft_cap_and_learned_sinks(scoring, chunks):
    q, k, v = example()
    how = LayerEncoding(rope())
    found = fed(SinkCache(4, 8), q, k, v, how, CHUNKS[chunks], scoring)
    torch.testing.assert_close(found, oracle(q, k, v, (4, 8), how, scoring), atol=1e-11, rtol=0)
    assert not torch.allclose(found, oracle(q, k, v, (4, 8), how), atol=1e-3)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", ["full", "window 8", "4 sinks, window 8"])
def test_a_row_beside_a_longer_one_is_the_row_alone(name, encoding):
    sizes, make = CACHES[name]
    how, lengths, after = ENCODINGS[encoding](), (3, 21), 12
    q, k, v = example(2, max(lengths) + after)
    present = torch.ones(2, max(lengths) + after, dtype=torch.bool)
    present[0, : max(lengths) - min(lengths)] = False
    found = fed(make(), q, k, v, how, [10, 11] + [1] * after, present=present)
    for row in range(2):
        real = present[row]
        alone = [x[row : row + 1][:, :, real] for x in (q, k, v)]
        expected = oracle(*alone, sizes, how)
        torch.testing.assert_close(found[row : row + 1, :, real], expected, atol=1e-11, rtol=0)


def test_case_18_any_feeding_of_100_tokens_keeps_the_same_tokens_in_the_same_slots():
    q, k, v = example(1, 100)
    kept = {}
    for sizes in ([100], [37, 63], [1] * 100):
        sinks = SinkCache(4, 8)
        fed(sinks, q, k, v, LayerEncoding(rope()), sizes)
        assert sinks.seen.tolist() == [100]
        assert sinks.stored.tolist() == [12]
        positions = sinks.slots.positions(sinks.seen - 1, 12)[0]
        assert sorted(positions.tolist()) == [*range(4), *range(92, 100)]
        kept[len(sizes)] = sinks.layers[0].raw, sinks.layers[0].values
        assert torch.equal(sinks.layers[0].raw, k[:, :, positions])
    for raw, values in kept.values():
        assert torch.equal(raw, kept[1][0])
        assert torch.equal(values, kept[1][1])


@pytest.mark.parametrize("tokens", [1, 2])
def test_case_18_prompts_shorter_than_the_sinks_are_plain_attention(tokens):
    q, k, v = example(1, tokens)
    how = LayerEncoding(rope())
    found = fed(SinkCache(4, 8), q, k, v, how, [tokens])
    assert found.isfinite().all()
    torch.testing.assert_close(found, oracle(q, k, v, None, how), atol=1e-11, rtol=0)


@pytest.mark.parametrize("sizes", [[1] * 120, [25] * 4 + [20]])
def test_counting_anew_changes_nothing(monkeypatch, sizes):
    q, k, v = example(1, 120)
    how = LayerEncoding(rope())
    expected = fed(SinkCache(4, 8), q, k, v, how, sizes)
    monkeypatch.setattr(cache, "REBASE", 32)
    sinks = SinkCache(4, 8)
    found = fed(sinks, q, k, v, how, sizes)
    assert sinks.base > 60
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)


def test_sinks_are_turned_for_all_layers_at_once(monkeypatch):
    """Once they are all there: not a call a layer, whose cost would be felt at every token."""
    q, k, v = example(1)
    turned, turn = [], LayerEncoding.turn

    def told(self, x, positions, *args, **kwargs):
        if positions.shape[-1] == 4:
            turned.append(tuple(x.shape))
        return turn(self, x, positions, *args, **kwargs)

    monkeypatch.setattr(LayerEncoding, "turn", told)
    sinks, how, layers = SinkCache(4, 8), LayerEncoding(rope()), 3
    counts = []
    for at in range(N):
        step, part = sinks.begin(1), [x[:, :, at : at + 1] for x in (q, k, v)]
        for layer in range(layers):
            sinks.attend(step, layer, *part, how)
        counts.append(len(turned))
        turned.clear()
    assert counts == [layers] * 4 + [1] * (N - 4)


@pytest.mark.parametrize("padded", [False, True], ids=["alone", "beside a shorter row"])
def test_a_chunk_longer_than_the_ring_writes_each_slot_once(monkeypatch, padded):
    """Where a slot is named twice, index_copy_ and indexing do not say which one wins."""
    sinks, window, written, copy = 2, 5, [], torch.Tensor.index_copy_

    def told(self, dim, index, source):
        written.append(index.tolist())
        return copy(self, dim, index, source)

    monkeypatch.setattr(torch.Tensor, "index_copy_", told)
    q, k, v = example(2 if padded else 1)
    present = torch.ones(len(q), N, dtype=torch.bool)
    present[1:, : N // 2] = False
    kept = SinkCache(sinks, window)
    step = kept.begin(N, present)
    kept.attend(step, 0, q, k, v, LayerEncoding(rope()))
    assert bool(written) != padded
    assert all(len(set(slots)) == len(slots) for slots in written)
    for row, here in enumerate(present):
        positions = step.positions[row][here]
        slots = step.where[row][step.kept[row]].tolist()
        assert len(step.where[row][here].unique()) == len(slots) < len(positions)
        assert sorted(slots) == list(range(sinks + window))
        newest = {}
        for at in positions.tolist():
            newest[at if at < sinks else sinks + (at - sinks) % window] = at
        for slot, at in newest.items():
            token = here.nonzero().flatten()[at]
            assert torch.equal(kept.layers[0].raw[row, :, slot], k[row, :, token])
            assert torch.equal(kept.layers[0].values[row, :, slot], v[row, :, token])


@pytest.mark.parametrize("name", CACHES)
def test_restored_is_saved(name):
    _, make = CACHES[name]
    q, k, v = example()
    how, kept, again = LayerEncoding(rope()), make(), make()
    fed(kept, q[:, :, :30], k[:, :, :30], v[:, :, :30], how, [29, 1])
    fed(again, -q[:, :, :20], -k[:, :, :20], v[:, :, :20], how, [18, 1, 1])  # to be forgotten
    again.restore({key: x.clone() for key, x in kept.state().items()}, {0: how})
    rest, sizes = [x[:, :, 30:] for x in (q, k, v)], [1, 3] + [1] * 6
    assert torch.equal(fed(again, *rest, how, sizes), fed(kept, *rest, how, sizes))


@pytest.mark.parametrize("sizes", [[5] * 8, [1] * N, [9] + [1] * 20 + [6, 1, 1, 3]])
def test_layers_share_a_step_and_keep_their_own_keys(sizes):
    q, k, v = example()
    shared, partial = LayerEncoding(rope()), LayerEncoding(rope(layout="interleaved", rotary_dim=4))
    longer = LayerEncoding(rope(DYNAMIC), seq_len=N)
    how = [shared, LayerEncoding(bias=Alibi(H)), shared, LayerEncoding(), partial, longer, shared]
    kept, at = SinkCache(4, 8), 0
    outs = [[] for _ in how]
    for size in sizes:
        step = kept.begin(size)
        for layer in range(len(how)):
            part = (x[:, :, at : at + size] * (layer + 1) for x in (q, k, v))
            outs[layer].append(kept.attend(step, layer, *part, how[layer]))
        at += size
    assert at == N
    for layer in range(len(how)):
        scaled = [x * (layer + 1) for x in (q, k, v)]
        expected = oracle(*scaled, (4, 8), how[layer])
        torch.testing.assert_close(torch.cat(outs[layer], 2), expected, atol=1e-11, rtol=0)


def test_buffers_of_a_window_are_allocated_once():
    q, k, v = example()
    kept = SinkCache(4, 8)
    places = set()
    for at in range(N):
        part = (x[:, :, at : at + 1] for x in (q, k, v))
        kept.attend(kept.begin(1), 0, *part, LayerEncoding(rope()))
        layer = kept.layers[0]
        places.add((layer.raw.data_ptr(), layer.keys.data_ptr(), layer.values.data_ptr()))
    assert len(places) == 1
    assert kept.layers[0].capacity == 12


@pytest.mark.parametrize("seen", [0, 3, 10, 11, 12, 30])
def test_a_chunk_meets_the_window_oldest_first(seen):
    """Hidden tiles are skipped only where keys side by side are so in the text."""
    sinks = SinkCache(4, 7)
    sinks.begin(seen)
    order, positions = sinks.begin(5).old
    kept = [j for j in range(seen) if j >= max(4, seen - 7)]
    assert [j for j in positions[0].tolist() if j >= 0] == kept
    assert sorted(order.tolist()) == list(range(4, 11))


def test_every_size_changes_the_output():
    q, k, v = example()
    how = LayerEncoding(rope())
    outs = [fed(SinkCache(*sizes), q, k, v, how, [N]) for sizes in ((4, 8), (3, 8), (4, 7))]
    assert not torch.allclose(outs[0], outs[1], atol=1e-3)
    assert not torch.allclose(outs[0], outs[2], atol=1e-3)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"sliding_window must be a whole number of tokens ≥ 1"):
        SinkCache(4, 0)
    with pytest.raises(ConfigError, match=r"num_sink_tokens .* ≥ 0, got -1"):
        SinkCache(-1, 8)
    with pytest.raises(ConfigError, match="ShawRelative needs the query"):
        LayerEncoding(bias=ShawRelative(H, D, 4))
    with pytest.raises(ConfigError, match="no layout"):
        LayerEncoding(rope(layout=None))
    q, k, v = example()
    kept = SinkCache(4, 8)
    fed(kept, q, k, v, LayerEncoding(rope()), [N])
    with pytest.raises(ShapeError, match="holds 2 rows"):
        kept.attend(
            kept.begin(1), 0, q[:1, :, :1], k[:1, :, :1], v[:1, :, :1], LayerEncoding(rope())
        )
    with pytest.raises(ConfigError, match=r"12 slots.* = 15"):
        SinkCache(4, 11).restore(kept.state(), {0: LayerEncoding(rope())})
