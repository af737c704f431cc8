"""attend: every encoding × mask × implementation × way of feeding × dtype against one oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from attend_examples import (
    ENCODINGS,
    LOOKS,
    B,
    D,
    Encoding,
    H,
    K,
    Look,
    N,
    contradicts,
    each_impl,
    each_look,
    example,
    make_tiles_tiny,
    positions,
)
from longspan.attention import attend
from longspan.bias import Alibi
from longspan.errors import ConfigError
from longspan.masks import attention_sinks, causal, sliding_window

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}
WAYS = {"whole": (N,), "chunked": (13, N - 13), "step": (N - 1, 1)}
SENSIBLE = [
    pytest.param(encoding, look, id=f"{encoding.name}-{look.name}")
    for encoding, look in itertools.product(ENCODINGS, LOOKS)
    if not contradicts(encoding, look)
]
each_encoding = pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch):
    make_tiles_tiny(monkeypatch)


def refuses(impl: str, encoding: Encoding, dtype: torch.dtype) -> bool:
    """Whether this implementation says that it cannot."""
    if impl == "sdpa":
        return encoding.name == "shaw"
    if impl == "flex":
        return encoding.name in ("shaw", "transformer-xl") or dtype == torch.float64
    return False


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


@pytest.mark.parametrize(("encoding", "look"), SENSIBLE)
@pytest.mark.parametrize("extra", ["", "sinks", "softcap", "lse"])
def test_gradients_are_the_references(encoding, look, extra):
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
