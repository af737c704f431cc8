"""attend: every option counts or is refused, and the choice of an implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attend_examples import (
    ENCODINGS,
    D,
    H,
    N,
    documents,
    each_impl,
    each_look,
    example,
    make_tiles_tiny,
    positions,
)
from longspan.attention import attend, choose_impl, merge
from longspan.bias import Alibi, ShawRelative, T5Bias, TransformerXLBias
from longspan.errors import ConfigError, LongspanError, ShapeError
from longspan.masks import attention_sinks, causal, sliding_window


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch):
    make_tiles_tiny(monkeypatch)


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


@pytest.mark.parametrize("impl", ["tiled", "sdpa", "flex"])
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
