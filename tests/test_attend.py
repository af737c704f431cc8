"""attend: every encoding × mask × implementation × way of feeding × dtype against one oracle."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.attention import IMPLS, attend, choose_impl, flex, merge, plan
from longspan.attention.rules import Options, check
from longspan.attention.visibility import Run, Visibility
from longspan.bias import Alibi, Bias, ShawRelative, T5Bias, TransformerXLBias
from longspan.errors import ConfigError, LongspanError, ShapeError
from longspan.masks import Mask, attention_sinks, causal, prefix, sliding_window
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rotate import rotate

B, H, K, N, D = 2, 4, 2, 37, 8
TINY = plan.Sizes(
    queries=5, tiles=2, block=4, fine=2, dense=11, whole=7
)  # so that N has many tiles
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}
NO_GRADIENT = ("flex",)  # on a CPU


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch):
    monkeypatch.setattr(plan, "SIZES", TINY)


@pytest.fixture(autouse=True)
def uncompiled_flex(monkeypatch):
    """Runs flex's own arithmetic without its compiler; one test below compiles it."""
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "compiled", lambda: torch_flex.flex_attention)


@dataclass(frozen=True)
class Encoding:
    """A way a position enters: a rotation of q and k, or a bias."""

    name: str
    bias: Callable[[], Bias | None] = lambda: None
    rotates: bool = False


@dataclass(frozen=True)
class Look:
    """Who sees whom: a mask, and what else `attend` is told of N tokens, by position."""

    name: str
    mask: Mask | None
    placed: dict[str, Tensor] = field(default_factory=dict)

    def options(self, queries: slice, keys: slice) -> dict[str, Any]:
        """Returns attend's options for some queries and keys."""
        cut = {"q": queries, "k": keys}
        placed = {name: given[..., cut[name[0]]] for name, given in self.placed.items()}
        return {"mask": self.mask, **placed}


positions = torch.arange(N)
padded = positions.expand(B, N).clone()
padded[1, :12] = -1  # longer than the window, so that rows see nothing
shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(3))
documents = torch.tensor([0] * 9 + [4] * 17 + [7] * (N - 26))

ENCODINGS = (
    Encoding("none"),
    Encoding("rope", rotates=True),
    Encoding("alibi", lambda: Alibi(H)),
    Encoding("alibi-both", lambda: Alibi(H, bidirectional=True)),
    Encoding("t5", lambda: T5Bias(H, num_buckets=8, max_distance=16)),
    Encoding("t5-both", lambda: T5Bias(H, num_buckets=8, max_distance=16, bidirectional=True)),
    Encoding("shaw", lambda: ShawRelative(H, D, max_distance=5)),
    Encoding("transformer-xl", lambda: TransformerXLBias(H, D)),
)
LOOKS = (
    Look("all", None),
    Look("causal", causal()),
    Look("window", sliding_window(7)),
    Look("window-and-sinks", causal() & (sliding_window(5) | attention_sinks(3))),
    Look("window-both", sliding_window(6, ahead=4)),
    Look("prefix", causal() | prefix(9)),
    Look("all-but-near", ~sliding_window(6, ahead=4)),
    Look("padding", sliding_window(7), {"q_pos": positions, "k_pos": padded}),
    Look("documents", causal(), {"q_doc": documents, "k_doc": documents}),
    Look("scattered", sliding_window(7), {"q_pos": shuffled * 2, "k_pos": shuffled * 2}),
)
WAYS = {"whole": (N,), "chunked": (13, N - 13), "step": (N - 1, 1)}

each_encoding = pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
each_look = pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.name)
each_impl = pytest.mark.parametrize("impl", IMPLS)
each_fast = pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "reference"])
differentiable = pytest.mark.parametrize("impl", [i for i in IMPLS if i not in NO_GRADIENT])


def contradicts(encoding: Encoding, look: Look) -> bool:
    """Whether the encoding has no meaning under this mask, so that everyone refuses it."""
    bias = encoding.bias()
    return bias is not None and bias.needs_causal and (look.mask is None or not look.mask.causal)


def refuses(impl: str, encoding: Encoding, dtype: torch.dtype) -> bool:
    """Whether this implementation says that it cannot."""
    if impl == "sdpa":
        return encoding.name == "shaw"
    if impl == "flex":
        return encoding.name in ("shaw", "transformer-xl") or dtype == torch.float64
    return False


def example(encoding: Encoding, dtype: torch.dtype = torch.float64):
    """Returns q, k, v and the bias, large enough that a wrong one shows."""
    random = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k, v = normal(B, H, N, D), normal(B, K, N, D), normal(B, K, N, D)
    if encoding.rotates:
        inv_freq = rope_frequencies(D, 10_000.0)
        q, k = rotate(q, positions, inv_freq), rotate(k, positions, inv_freq)
    bias = encoding.bias()
    if bias is not None:
        bias = bias.double()
        for parameter in bias.parameters():
            parameter.data = normal(*parameter.shape)
    return q.to(dtype), k.to(dtype), v.to(dtype), bias


def fed(lengths, look: Look, q, k, v, **options) -> Tensor:
    """Returns attention fed so many queries at a time; later keys are not there yet, if causal."""
    causes = look.mask is not None and look.mask.causal and "q_pos" not in look.placed
    outputs, start = [], 0
    for length in lengths:
        queries, keys = slice(start, start + length), slice(0, start + length if causes else N)
        placed = look.options(queries, keys)
        if not causes:
            placed.setdefault("q_pos", positions[queries])
        cached = k[:, :, keys], v[:, :, keys]
        outputs.append(attend(q[:, :, queries], *cached, **placed, **options))
        start += length
    return torch.cat(outputs, dim=2)


@each_encoding
@each_look
@each_impl
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@torch.no_grad()
def test_the_oracle(encoding, look, impl, way, dtype):
    q, k, v, bias = example(encoding, dtype)
    whole = slice(0, N)
    if contradicts(encoding, look) or refuses(impl, encoding, dtype):
        with pytest.raises(ConfigError):
            attend(q, k, v, bias=bias, impl=impl, **look.options(whole, whole))
        return
    expected = attend(
        q.double(),
        k.double(),
        v.double(),
        bias=bias,
        impl="reference",
        **look.options(whole, whole),
    )
    out = fed(WAYS[way], look, q, k, v, bias=bias, impl=impl)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@each_encoding
@each_look
@pytest.mark.parametrize("extra", ["", "sinks", "softcap", "lse"])
def test_gradients_are_the_references(encoding, look, extra):
    if contradicts(encoding, look):
        return
    q, k, v, bias = example(encoding)
    sinks = torch.linspace(-1, 2, H, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    leaves += [] if bias is None else list(bias.parameters())
    options = look.options(slice(0, N), slice(0, N))
    options |= {"sinks": {"sink_logits": sinks}, "softcap": {"softcap": 2.0}}.get(extra, {})
    random = torch.Generator().manual_seed(5)
    d_out = torch.randn(B, H, N, D, generator=random, dtype=torch.float64)
    d_lse = torch.randn(B, H, N, generator=random, dtype=torch.float64)

    def results(impl):
        if extra != "lse":
            out = attend(q, k, v, bias=bias, impl=impl, **options)
            loss = (out * d_out).sum()
        else:
            out, lse = attend(q, k, v, bias=bias, impl=impl, return_lse=True, **options)
            loss = (out * d_out).sum() + (lse.masked_fill(lse == -torch.inf, 0) * d_lse).sum()
            out = torch.cat((out, lse.unsqueeze(-1)), dim=-1)
        return [out, *torch.autograd.grad(loss, leaves, allow_unused=True)]

    expected = results("reference")
    tried = ["tiled"]
    if extra in ("", "sinks") and encoding.name != "shaw":
        tried.append("sdpa")
    for impl in tried:
        torch.testing.assert_close(results(impl), expected, atol=1e-10, rtol=0)


# The oracle itself


def loop(q, k, v, rule, scale, slopes=None, softcap=None, sink_logits=None):
    """Attention pair by pair, in plain Python; rule(b, i, j) and slopes(h, i, j) are given."""
    out, lse = torch.zeros(*q.shape[:3], v.shape[-1]).double(), torch.zeros(q.shape[:3]).double()
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        key_head = h // (q.shape[1] // k.shape[1])
        scores = {}
        for j in range(k.shape[2]):
            if rule(b, i, j):
                score = scale * sum(
                    x * y
                    for x, y in zip(q[b, h, i].tolist(), k[b, key_head, j].tolist(), strict=True)
                )
                if softcap:
                    score = softcap * math.tanh(score / softcap)
                scores[j] = score + (slopes(h, i, j) if slopes else 0)
        total = sum(map(math.exp, scores.values()))
        total += math.exp(sink_logits[h]) if sink_logits is not None else 0
        lse[b, h, i] = math.log(total) if total else -math.inf
        for j, score in scores.items():
            out[b, h, i] += math.exp(score) / total * v[b, key_head, j]
    return out, lse


@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_reference_is_a_loop(queries, with_sinks):
    keys, heads = 9, 4
    q = torch.randn(2, heads, queries, 3).double()
    k, v = torch.randn(2, 2, keys, 3).double(), torch.randn(2, 2, keys, 5).double()
    k_pos = torch.arange(keys).repeat(2, 1)
    k_pos[1, :4] = -1
    q_doc, k_doc = torch.ones(queries).long(), torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 2])
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).double() if with_sinks else None
    first = keys - queries

    def rule(b, i, j):
        present = not (b == 1 and j < 4)
        return present and int(k_doc[j]) == 1 and 0 <= first + i - j < 3

    expected = loop(
        q, k, v, rule, 0.7, lambda h, i, j: -(2.0 ** -(2 * (h + 1))) * (first + i - j), 1.5, sinks
    )
    found = attend(
        q,
        k,
        v,
        mask=sliding_window(3),
        bias=Alibi(4),
        k_pos=k_pos,
        q_doc=q_doc,
        k_doc=k_doc,
        scale=0.7,
        softcap=1.5,
        sink_logits=sinks,
        impl="reference",
        return_lse=True,
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if not e.rotates], ids=lambda e: e.name)
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_gradients_are_finite_differences(impl, encoding, softcap):
    bias = encoding.bias()
    if bias is not None:
        bias = bias.double()
    random = torch.Generator().manual_seed(1)
    shapes = (1, H, 4, D), (1, K, 11, D), (1, K, 11, D), (H,)
    q, k, v, sinks = (
        torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes
    )
    learned = [] if bias is None else list(bias.parameters())
    mask = causal() & (sliding_window(4) | attention_sinks(2))

    def function(q, k, v, sinks, *_learned):
        return attend(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            sink_logits=sinks,
            softcap=softcap,
            impl=impl,
            return_lse=True,
        )

    assert torch.autograd.gradcheck(
        function, (q, k, v, sinks, *learned), fast_mode=True, check_batched_grad=False
    )


def test_a_second_derivative_is_refused_not_wrong():
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    out = attend(q, q, q, mask=causal(), impl="tiled")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# Numbers one can check by hand


@each_impl
def test_bottom_right_alignment_of_the_facts(impl):
    v = torch.arange(5.0).view(1, 1, 5, 1)
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 5, 1)
    out = attend(q, k, v, mask=causal(), impl=impl)
    assert out.flatten().tolist() == pytest.approx([1.5, 2.0])


@pytest.mark.parametrize("impl", ["reference", "tiled", "sdpa"])
def test_a_learned_sink_takes_its_share(impl):
    q, v = torch.zeros(1, 1, 1, 8), torch.eye(8)[:2].view(1, 1, 2, 8)
    out = attend(q, torch.zeros_like(v), v, sink_logits=torch.zeros(1), impl=impl)
    assert out.flatten()[:3].tolist() == pytest.approx([1 / 3, 1 / 3, 0])


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_the_sink_is_a_sigmoid_of_the_log_sum_exp(impl):
    q, k, v, _ = example(ENCODINGS[0])
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0]).double()
    plain, lse = attend(q, k, v, mask=causal(), impl=impl, return_lse=True)
    out, total = attend(q, k, v, mask=causal(), sink_logits=sinks, impl=impl, return_lse=True)
    share = (lse - sinks[:, None]).sigmoid()
    torch.testing.assert_close(out, plain * share.unsqueeze(-1))
    torch.testing.assert_close(total, lse.logaddexp(sinks[:, None]))


# Every option changes something, on every implementation that takes it

CHANGES: dict[str, dict[str, Any]] = {
    "window": {"mask": sliding_window(6)},
    "attention sinks": {"mask": causal() & (sliding_window(7) | attention_sinks(2))},
    "ahead": {"mask": sliding_window(7, ahead=1)},
    "alibi": {"bias": Alibi(H)},
    "t5": {"bias": T5Bias(H)},
    "padding": {"k_pos": torch.where(positions < N - 3, positions, -1)},
    "query positions": {"q_pos": positions + 2},
    "documents": {"q_doc": documents, "k_doc": documents},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 1.0},
    "learned sink": {"sink_logits": torch.zeros(H)},
    "dropout": {"dropout": 0.5},
    "shaw": {"bias": ShawRelative(H, D, max_distance=3)},
    "transformer-xl": {"bias": TransformerXLBias(H, D)},
}
CANNOT = {
    "reference": set(),
    "tiled": {"dropout"},
    "sdpa": {"softcap", "shaw"},
    "flex": {"learned sink", "dropout", "shaw", "transformer-xl"},
}


@each_impl
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_every_option_changes_the_output_or_is_refused(impl, change):
    q, k, v, _ = example(ENCODINGS[0], torch.float32)
    plain = attend(q, k, v, mask=sliding_window(7), impl=impl)
    options = {"mask": sliding_window(7), **CHANGES[change]}
    if change in CANNOT[impl]:
        with pytest.raises(ConfigError, match=impl):
            attend(q, k, v, impl=impl, **options)
    else:
        assert (attend(q, k, v, impl=impl, **options) - plain).abs().max() > 1e-3


@differentiable
def test_the_gradient_from_outside_the_window_is_exactly_0(impl):
    q, k, v, _ = example(ENCODINGS[0])
    k.requires_grad_()
    v.requires_grad_()
    out = attend(q, k, v, mask=causal() & (sliding_window(5) | attention_sinks(2)), impl=impl)
    at = 20
    outside = torch.ones(N, dtype=torch.bool)
    outside[[0, 1, *range(at - 4, at + 1)]] = False
    for grad in torch.autograd.grad(out[:, :, at].square().sum(), (k, v)):
        assert (grad[:, :, outside] == 0).all()
        assert (grad[:, :, ~outside] != 0).any(-1).all()


# Cases


@pytest.mark.parametrize("path", ["plain", "packed", "compiled", "cached"])
def test_case_14_partial_rotation_leaves_the_rest_bit_for_bit(path):
    x, inv_freq = torch.randn(2, 1, 4, 8), rope_frequencies(4, 10_000.0)
    turn, at, row = rotate, torch.arange(4), 3
    if path == "packed":
        at = torch.tensor([[0, 1, 0, 3], [2, 0, 1, 3]])
    elif path == "compiled":
        turn = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    elif path == "cached":
        x, at, row = x[:, :, 3:], torch.tensor([3]), 0
    turned = turn(x, at, inv_freq)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    for pair, angle in ((0, 3.0), (1, 0.03)):
        a, b = x[0, 0, row, [pair, pair + 2]].tolist()
        expected = [
            math.cos(angle) * a - math.sin(angle) * b,
            math.cos(angle) * b + math.sin(angle) * a,
        ]
        assert turned[0, 0, row, [pair, pair + 2]].tolist() == pytest.approx(expected, rel=1e-5)


@each_impl
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
@torch.no_grad()
def test_case_19_window_at_every_edge_prefill_then_decode(impl, length):
    window = 16
    q, k, v = (torch.randn(1, 2, length + 3, D) for _ in range(3))
    whole = attend(q, k, v, mask=sliding_window(window), impl="reference")
    outputs = [
        attend(*(x[:, :, :length] for x in (q, k, v)), mask=sliding_window(window), impl=impl)
    ]
    for at in range(length, length + 3):
        kept = slice(max(0, at - window + 1), at + 1)  # the cache keeps only the window
        outputs.append(
            attend(
                q[:, :, at : at + 1],
                k[:, :, kept],
                v[:, :, kept],
                mask=sliding_window(window),
                q_pos=torch.tensor([at]),
                k_pos=torch.arange(length + 3)[kept],
                impl=impl,
            )
        )
    torch.testing.assert_close(torch.cat(outputs, 2), whole, atol=2e-6, rtol=0)


@differentiable
@pytest.mark.parametrize("bias", [None, Alibi(2), TransformerXLBias(2, D)], ids=repr)
def test_case_20_rows_that_see_no_key_are_0_with_finite_gradients(impl, bias):
    q, k, v = (torch.randn(2, 2, 20, D, requires_grad=True) for _ in range(3))
    k_pos = torch.arange(20).repeat(2, 1)
    k_pos[1, :12] = -1
    out = attend(q, k, v, mask=sliding_window(4), bias=bias, k_pos=k_pos, impl=impl)
    assert (out[1, :, :12] == 0).all()
    assert (out[1, :, 12:] != 0).any(-1).all()
    grads = torch.autograd.grad(out.square().sum() + out.sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[1, :, :12] == 0).all() for grad in grads)


@each_impl
@torch.no_grad()
def test_case_20_a_call_where_nobody_sees_anything(impl):
    q = torch.randn(1, 2, 6, D)
    absent = torch.full((6,), -1)
    out = attend(q, q, q, mask=causal(), k_pos=absent, q_pos=torch.arange(6), impl=impl)
    assert (out == 0).all()


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_case_20_the_log_sum_exp_of_nothing_is_minus_infinity(impl):
    q = torch.randn(1, 2, 6, D)
    hidden = {"k_pos": torch.full((6,), -1), "q_pos": torch.arange(6)}
    _, lse = attend(q, q, q, impl=impl, return_lse=True, **hidden)
    assert (lse == -torch.inf).all()
    _, lse = attend(
        q, q, q, sink_logits=torch.tensor([2.0, 3.0]), impl=impl, return_lse=True, **hidden
    )
    assert lse[0, :, 0].tolist() == [2, 3]


@each_impl
@torch.no_grad()
def test_case_21_a_mask_meets_a_bounded_cache_by_kept_positions(impl):
    q, k, v, _ = example(ENCODINGS[0], torch.float32)
    mask = causal() & (sliding_window(8) | attention_sinks(3))
    whole = attend(q, k, v, mask=mask, impl="reference")
    ring = torch.tensor([32, 33, 34, 35, 36, 29, 30, 31])  # written round, so out of order
    kept = torch.cat((torch.arange(3), ring))
    out = attend(
        q[:, :, 36:],
        k[:, :, kept],
        v[:, :, kept],
        mask=mask,
        q_pos=torch.tensor([36]),
        k_pos=kept,
        impl=impl,
    )
    torch.testing.assert_close(out, whole[:, :, 36:], atol=2e-6, rtol=0)


def seen_by(mask: Mask | None, length: int, **placed: Tensor) -> Visibility:
    q = torch.empty(B, H, length, D)
    names = ("q_pos", "k_pos", "q_doc", "k_doc")
    return Visibility.of(q, q, mask, *(placed.get(name) for name in names))


def test_case_22_a_block_mask_for_other_lengths_is_refused():
    blocks = flex.block_mask(seen_by(sliding_window(512), 8192))
    q = torch.randn(1, 1, 1024, 8)
    inputs, rules = check(q, q, q, False, Options(mask=sliding_window(512)))
    with pytest.raises(ShapeError, match="8192"):
        flex.flex_attend(inputs, rules, blocks)
    with pytest.raises(ConfigError, match="BlockMask"):
        attend(q, q, q, mask=blocks)


# The plan: nothing missed, nothing twice, hidden tiles skipped


@each_look
@pytest.mark.parametrize(
    "bias", [None, Alibi(H, bidirectional=True), T5Bias(H, 8, 16, True)], ids=repr
)
@pytest.mark.parametrize("split", [False, True])
def test_a_plan_meets_every_visible_pair_once(look, bias, split):
    seen = seen_by(look.mask, N, **look.placed)
    visible = seen.everything()[:, 0]
    met = torch.zeros(N, N, dtype=torch.long)
    for group in plan.plan(seen, bias, split=split, sizes=TINY):
        for part in group.parts:
            for run in part.runs:
                here = visible[:, part.rows, run.start : run.stop]
                assert here.all() or not run.whole
                met[part.rows, run.start : run.stop] += 1
    assert int(met.max()) <= 1
    assert (met[visible.any(0)] == 1).all()


def test_a_window_plan_grows_with_the_length_alone():
    def work(length):
        mask = causal() & (sliding_window(512) | attention_sinks(4))
        groups = plan.plan(seen_by(mask, length), None, split=True, sizes=plan.Sizes())
        parts = [part for group in groups for part in group.parts]
        keys = [sum(run.stop - run.start for run in part.runs) for part in parts]
        return sum(
            count * (part.rows.stop - part.rows.start)
            for count, part in zip(keys, parts, strict=True)
        )

    assert work(32768) < 2.1 * work(16384)
    assert work(16384) < 16384 * (512 + plan.Sizes().queries + 4 * plan.Sizes().block)


@each_look
def test_block_masks_cover_what_is_seen(look):
    length = 3 * flex.BLOCK + 40
    stretch = torch.arange(length) * (N - 1) // (length - 1)
    placed = {name: given[..., stretch] for name, given in look.placed.items()}
    seen = seen_by(look.mask, length, **placed)
    visible = seen.everything()[:, 0]
    blocks = flex.block_mask(seen)

    def listed(counts, order):
        return [
            set(row[:count].tolist()) for count, row in zip(counts[0, 0], order[0, 0], strict=True)
        ]

    partly = listed(blocks.kv_num_blocks, blocks.kv_indices)
    whole = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    for i, j in itertools.product(range(4), range(4)):
        tile = visible[:, i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        assert not (j in partly[i] and j in whole[i])
        assert j in partly[i] or j in whole[i] or not tile.any()
        assert j not in whole[i] or (tile.all() and tile.shape[1:] == (128, 128))


@pytest.mark.parametrize("name", ["causal", "window", "window-and-sinks", "prefix", "all-but-near"])
def test_tiles_said_to_be_alike_hide_the_same_pairs(name):
    (look,) = (look for look in LOOKS if look.name == name)
    seen, known, repeated = seen_by(look.mask, N), {}, 0
    for group in plan.plan(seen, None, split=True, sizes=TINY):
        for part in group.parts:
            like = seen.likeness(part.rows, part.runs, with_whole=False)
            if like is None:
                continue
            tile = seen.tile(part.rows, part.runs)
            repeated += like in known
            assert torch.equal(known.setdefault(like, tile), tile)
    assert repeated


# Larger than one tile, at the sizes in use


@pytest.mark.parametrize("bias", [None, Alibi(2), T5Bias(2)], ids=repr)
@pytest.mark.parametrize(
    "mask", [causal(), causal() & (sliding_window(200) | attention_sinks(4))], ids=repr
)
def test_float32_gradients_at_full_size(monkeypatch, bias, mask):
    monkeypatch.setattr(plan, "SIZES", plan.Sizes())
    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 1200, 16, generator=random) for _ in range(3))

    def results(impl, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        ours = None if bias is None else deepcopy(bias).to(dtype)
        out = attend(*leaves, mask=mask, bias=ours, impl=impl)
        leaves += [] if ours is None else list(ours.parameters())
        return [out.detach(), *torch.autograd.grad(out.square().mean(), leaves)]

    exact = results("reference", torch.float64)
    for ours, theirs in zip(results("tiled", torch.float32), exact, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, atol=1e-5 * float(theirs.abs().max()), rtol=0
        )


def printed(script: str) -> str:
    """Returns what a fresh interpreter prints."""
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_memory_is_linear_forward_and_backward():
    found = printed("""
import resource, torch
from longspan.attention import attend
from longspan.bias import Alibi, T5Bias
from longspan.masks import attention_sinks, causal, sliding_window
torch.set_num_threads(1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def go(length, mask, bias):
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    attend(q, k, v, mask=mask, bias=bias, impl="tiled").sum().backward()

window = causal() & (sliding_window(256) | attention_sinks(4))
go(1024, window, None), go(1024, causal(), T5Bias(2))
before = peak()
go(32768, window, None), go(8192, causal(), Alibi(2)), go(8192, causal(), T5Bias(2))
print(peak() - before)
""")
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(found) * unit < 150e6  # one float32 for each pair of 8192 tokens and head is 537e6


def test_flex_compiles_and_agrees():
    found = printed("""
import torch
from longspan.attention import attend
from longspan.bias import Alibi
from longspan.masks import attention_sinks, causal, sliding_window
q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
asked = dict(mask=causal() & (sliding_window(100) | attention_sinks(4)), bias=Alibi(2))
out, expected = (attend(q, k, v, impl=impl, **asked) for impl in ("flex", "reference"))
print(float((out - expected).abs().max()))
""")
    assert float(found) < 5e-6


# Choosing


def choice(length: int = 4096, **options: Any) -> str:
    q = torch.empty(1, H, length, D)
    return choose_impl(q, q, q, **options).impl


def test_auto_says_what_it_chose():
    assert choice(mask=causal()) == "sdpa"
    assert choice() == "sdpa"
    assert choice(mask=sliding_window(512)) == "tiled"
    assert choice(mask=causal(), bias=Alibi(H)) == "tiled"
    assert choice(mask=causal(), q_doc=torch.zeros(4096).long()) == "tiled"
    assert choice(mask=causal(), sink_logits=torch.zeros(H)) == "tiled"
    assert choice(mask=causal(), return_lse=True) == "tiled"
    assert choice(128, mask=sliding_window(16)) == "sdpa"
    assert choice(128, mask=sliding_window(16), softcap=30.0) == "tiled"
    assert choice(128, mask=causal(), dropout=0.1) == "sdpa"
    with pytest.raises(ConfigError, match="dropout"):
        choice(mask=causal(), dropout=0.1)
    q = torch.empty(1, H, 8, D)
    chosen = choose_impl(q, torch.empty(1, H, 9000, D), torch.empty(1, H, 9000, D), mask=causal())
    assert "tiles" in chosen.reason


@each_look
def test_auto_is_right_whatever_it_chose(look):
    q, k, v, _ = example(ENCODINGS[0])
    options = look.options(slice(0, N), slice(0, N))
    torch.testing.assert_close(
        attend(q, k, v, **options), attend(q, k, v, impl="reference", **options)
    )


def test_flex_refuses_backward_by_name():
    q = torch.randn(1, 2, 8, D, requires_grad=True)
    with pytest.raises(ConfigError, match="backward"):
        attend(q, q, q, mask=causal(), impl="flex")
    with pytest.raises(ConfigError, match="backward"):
        attend(q.detach(), q.detach(), q.detach(), mask=causal(), bias=T5Bias(2), impl="flex")


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_dropout_keeps_the_mean(impl):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, D) for _ in range(3))
    plain = attend(q, k, v, mask=causal(), impl=impl)
    runs = [attend(q, k, v, mask=causal(), dropout=0.25, impl=impl) for _ in range(2000)]
    torch.testing.assert_close(torch.stack(runs).mean(0), plain, atol=0.1, rtol=0)


# Merging


def test_merged_halves_are_the_whole_with_gradients():
    q, k, v, _ = example(ENCODINGS[0])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    near, far = sliding_window(6), causal() & ~sliding_window(6)
    parts = [attend(q, k, v, mask=mask, impl="tiled", return_lse=True) for mask in (near, far)]
    joined, lse = merge(*parts[0], *parts[1])
    whole, expected = attend(q, k, v, mask=causal(), impl="reference", return_lse=True)
    torch.testing.assert_close((joined, lse), (whole, expected))
    ours, theirs = (torch.autograd.grad(out.square().sum(), leaves) for out in (joined, whole))
    torch.testing.assert_close(ours, theirs)


def test_merging_nothing_with_nothing_has_a_gradient():
    lse = torch.full((1, 1, 2), -torch.inf, requires_grad=True)
    out = torch.zeros(1, 1, 2, 4, requires_grad=True)
    joined, total = merge(out, lse, out, lse)
    assert (joined == 0).all()
    assert (total == -torch.inf).all()
    grads = torch.autograd.grad(
        joined.sum() + total.masked_fill(total == -torch.inf, 0).sum(), (out, lse)
    )
    assert all(grad.isfinite().all() for grad in grads)


# Shapes


@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_no_key_at_all_is_an_empty_row(impl):
    q, none = torch.randn(1, 2, 3, D), torch.randn(1, 2, 0, D)
    out, lse = attend(q, none, none, impl=impl, return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    with pytest.raises(ConfigError, match="key"):
        attend(q, none, none, impl="sdpa")


@pytest.mark.parametrize("impl", ["reference", "tiled", "sdpa"])
def test_no_query_at_all_is_an_empty_output(impl):
    q, k = torch.randn(1, 2, 0, D), torch.randn(1, 2, 3, D)
    assert attend(q, k, k, mask=causal(), impl=impl).shape == (1, 2, 0, D)


@each_fast
@pytest.mark.parametrize("dim", [3, 16])
@torch.no_grad()
def test_values_may_be_narrower_or_wider(impl, dim):
    q, k, v = torch.randn(1, 2, 9, D), torch.randn(1, 2, 9, D), torch.randn(1, 2, 9, dim)
    if impl == "flex" and dim == 3:
        v = torch.randn(1, 2, 9, 4)
    out = attend(q, k, v, mask=sliding_window(4), impl=impl)
    expected = attend(q, k, v, mask=sliding_window(4), impl="reference")
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)


def test_layout_in_memory_does_not_matter():
    q, k, v, _ = example(ENCODINGS[0])
    expected = attend(q, k, v, mask=causal(), impl="tiled")
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attend(*moved, mask=causal(), impl="tiled"), expected)
    turned = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    torch.testing.assert_close(attend(*turned, mask=causal(), impl="tiled"), expected)


Q = torch.randn(2, 4, 5, 8)
WRONG: tuple[tuple[dict[str, Any], type[LongspanError]], ...] = (
    ({"q": Q[0]}, ShapeError),
    ({"k": torch.randn(2, 3, 5, 8)}, ShapeError),
    ({"k": torch.randn(1, 4, 5, 8)}, ShapeError),
    ({"k": torch.randn(2, 4, 5, 4)}, ShapeError),
    ({"v": torch.randn(2, 4, 6, 8)}, ShapeError),
    ({"q": Q.long()}, ShapeError),
    ({"k": Q.double()}, ShapeError),
    ({"q_pos": torch.arange(5.0)}, ShapeError),
    ({"q_pos": torch.arange(4)}, ShapeError),
    ({"k_pos": torch.zeros(3, 5).long()}, ShapeError),
    ({"q": Q[:, :, :3], "q_doc": torch.zeros(3).long()}, ShapeError),
    ({"k_doc": torch.zeros(5).long()}, ShapeError),
    ({"sink_logits": torch.zeros(5)}, ShapeError),
    ({"mask": torch.ones(5, 5, dtype=torch.bool)}, ConfigError),
    ({"bias": torch.zeros(4, 5, 5)}, ConfigError),
    ({"bias": Alibi(8), "mask": causal()}, ShapeError),
    ({"scale": 0.0}, ConfigError),
    ({"softcap": -1.0}, ConfigError),
    ({"dropout": 1.0}, ConfigError),
    ({"impl": "tile"}, ConfigError),
)


@pytest.mark.parametrize(("wrong", "error"), WRONG, ids=[", ".join(w) for w, _ in WRONG])
def test_what_does_not_fit_is_refused(wrong, error):
    with pytest.raises(error):
        attend(**{"q": Q, "k": Q, "v": Q, **wrong})


def test_a_misspelt_impl_gets_a_suggestion():
    with pytest.raises(ConfigError, match="'tiled'"):
        attend(Q, Q, Q, impl="tild")


def test_replaced_parameters_are_refused_not_forgotten():
    bias = T5Bias(4)
    tables = {"table": torch.randn(32, 4).requires_grad_() * 1}

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = bias

        def forward(self, x):
            return attend(x, x, x, mask=causal(), bias=self.bias, impl="tiled")

    out = torch.func.functional_call(Layer(), {"bias.table": tables["table"]}, (Q,))
    with pytest.raises(ConfigError, match="replaced"):
        out.sum().backward()


def test_whole_runs_are_not_looked_at():
    seen = seen_by(causal(), 8)
    tile = seen.tile(slice(0, 2), [Run(4, 6, True), Run(0, 2)])
    assert tile.squeeze().tolist() == [[True, True, True, False], [True, True, True, True]]
