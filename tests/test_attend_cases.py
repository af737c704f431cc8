"""attend: small inputs that broke real tools, by their numbers in the cases."""

from __future__ import annotations

import math

import pytest
import torch

from attend_examples import (
    ENCODINGS,
    D,
    N,
    each_differentiable,
    each_impl,
    example,
    make_tiles_tiny,
    seen_by,
)
from longspan.attention import attend, flex
from longspan.attention.rules import Options, check
from longspan.bias import Alibi, TransformerXLBias
from longspan.errors import ConfigError, ShapeError
from longspan.masks import attention_sinks, causal, sliding_window
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rotate import rotate


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch):
    make_tiles_tiny(monkeypatch)


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


@each_differentiable
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


@each_differentiable
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


def test_case_22_a_block_mask_for_other_lengths_is_refused():
    blocks = flex.block_mask(seen_by(sliding_window(512), 8192))
    q = torch.randn(1, 1, 1024, 8)
    inputs, rules = check(q, q, q, False, Options(mask=sliding_window(512)))
    with pytest.raises(ShapeError, match="8192"):
        flex.flex_attend(inputs, rules, blocks)
    with pytest.raises(ConfigError, match="BlockMask"):
        attend(q, q, q, mask=blocks)
