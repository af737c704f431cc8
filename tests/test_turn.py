"""The rotation's fast paths: the same values and gradients as the formula, however it is run."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch._dynamo.utils import counters

from longspan.errors import ConfigError
from longspan.rotary import turn as turn_module
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rotate import apply_rotation, rotate, rotation_table
from longspan.rotary.turn import choose_impl, compiled_turn, compiler_works, turn, turn_by

# torch's own compiler and transforms warn, when imported, of torch's own deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

THETA = 10_000.0
KINDS = pytest.mark.parametrize(
    ("layout", "dtype", "pairs"),
    [
        ("half", torch.float32, 5),
        ("half", torch.bfloat16, 8),
        ("interleaved", torch.float32, 5),
        ("interleaved", torch.bfloat16, 8),
    ],
)
IMPLS = pytest.mark.parametrize("impl", ["eager", "compiled", "auto"])
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6}  # of values up to 4


def drawn(dtype=torch.float32, shape=(2, 3, 5, 16), pairs=8, rows=False):
    """x and a table for it, as `turn` takes them."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=random).to(dtype)
    positions = torch.randint(
        1, 5000, (shape[0], shape[2]) if rows else shape[2:3], generator=random
    )
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    table = rotation_table(positions, rope_frequencies(2 * pairs, THETA), 1.3, dtype=exact)
    return x, *(part.unsqueeze(-3) for part in table)


@IMPLS
@KINDS
def test_every_impl_gives_the_formula_and_its_gradient(layout, dtype, pairs, impl):
    x, cos, sin = drawn(dtype, pairs=pairs)
    x.requires_grad_()
    weights = torch.randn_like(x)
    turned = turn_by(x, cos, sin, layout, impl)
    (gradient,) = torch.autograd.grad(turned, x, weights)
    exact_x = x.detach().double().requires_grad_()
    exact = turn(exact_x, cos.double(), sin.double(), layout)
    (exact_gradient,) = torch.autograd.grad(exact, exact_x, weights.double())
    for ours, expected in ((turned, exact), (gradient, exact_gradient)):
        assert ours.dtype == dtype
        assert (ours.double() - expected).abs().max().item() < TOLERANCE[dtype]
    assert torch.equal(turned[..., 2 * pairs :], x[..., 2 * pairs :])
    with torch.no_grad():
        assert torch.equal(turn_by(x, cos, sin, layout, impl), turned)


@pytest.mark.parametrize(
    ("layout", "impl"), [("half", "eager"), ("half", "compiled"), ("interleaved", "eager")]
)
def test_gradients_of_both_orders_are_exact(layout, impl):
    x, cos, sin = drawn(torch.float64, (1, 2, 2, 5), pairs=2)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: turn_by(x, cos, sin, layout, impl), (x,))
    assert torch.autograd.gradgradcheck(lambda x: turn_by(x, cos, sin, layout, impl) ** 2, (x,))


def test_the_backward_keeps_the_table_and_not_x():
    x, cos, sin = drawn()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        turn_by(x.requires_grad_(), cos, sin, "half", "eager").sum().backward()
    assert [tuple(each.shape) for each in kept] == [cos.shape, sin.shape]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_learned_frequency_gets_its_gradient(layout):
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    inv_freq = rope_frequencies(4, THETA).requires_grad_()
    positions = torch.arange(1, 4)
    assert torch.autograd.gradcheck(lambda f: rotate(x, positions, f, layout), (inv_freq,))
    with pytest.raises(ConfigError, match="impl='compiled' gives no gradient to cos and sin"):
        rotate(x, positions, inv_freq, layout, impl="compiled")


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_torch_func_transforms_see_the_formula(layout):
    x, cos, sin = drawn(torch.float64)
    expected = turn(x, cos, sin, layout)

    def turned(x, impl="auto"):
        return turn_by(x, cos, sin, layout, impl)

    by_row = torch.func.vmap(lambda row: turned(row[None])[0])(x)
    torch.testing.assert_close(by_row, expected)
    torch.testing.assert_close(torch.func.jvp(turned, (x,), (x,))[1], expected)
    gradient = torch.func.grad(lambda x: turned(x).pow(2).sum())(x)
    torch.testing.assert_close(gradient, 2 * 1.3**2 * x)  # R keeps norms, but for its factor
    with pytest.raises(ConfigError, match=r"cannot run inside torch\.func transforms"):
        torch.func.vmap(lambda row: turned(row[None], "compiled")[0])(x)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [5, 8])
def test_blocks_of_any_size_cover_every_token(layout, dtype, pairs, monkeypatch):
    x, cos, sin = drawn(dtype, pairs=pairs, rows=True)
    # Memory that is not written shows as NaN.
    torch.use_deterministic_algorithms(True)
    try:
        for elements in (1, 2 * 3 * 16 * 2, 10**9):
            monkeypatch.setattr(turn_module, "BLOCK_ELEMENTS", elements)
            turned = turn_by(x, cos, sin, layout, "eager")
            expected = turn(x, cos, sin, layout)
            assert (turned - expected).abs().max().item() < TOLERANCE[dtype]
    finally:
        torch.use_deterministic_algorithms(False)


def test_one_compilation_serves_every_length_batch_and_number_of_heads():
    def run(*shape):
        x, cos, sin = drawn(shape=shape)
        turned = turn_by(x, cos, sin, "half", "compiled")
        torch.testing.assert_close(turned, turn(x, cos, sin, "half"), atol=1e-6, rtol=0)

    run(2, 3, 5, 16)
    before = counters["stats"]["unique_graphs"]
    for shape in ((2, 3, 6, 16), (2, 3, 700, 16), (4, 9, 11, 16), (3, 2, 130, 16)):
        run(*shape)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_case_14_partial_rotary_compiled(layout):
    x = torch.randn(2, 3, 5, 8)
    x[..., 7] = float("inf")
    inv_freq, positions = rope_frequencies(4, THETA), torch.full((5,), 3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def outer(x):
        return rotate(x, positions, inv_freq, layout)

    for turned in (rotate(x, positions, inv_freq, layout, impl="compiled"), outer(x)):
        assert torch.equal(turned[..., 4:], x[..., 4:])
        pairs = ((0, 2), (1, 3)) if layout == "half" else ((0, 1), (2, 3))
        for (first, second), angle in zip(pairs, (3.0, 0.03), strict=True):
            a, b = x[..., first], x[..., second]
            close = functools.partial(torch.testing.assert_close, atol=1e-6, rtol=0)
            close(turned[..., first], a * math.cos(angle) - b * math.sin(angle))
            close(turned[..., second], b * math.cos(angle) + a * math.sin(angle))


def test_the_formula_joins_a_callers_compiled_graph():
    inv_freq = rope_frequencies(16, THETA)

    def scores(q, k, positions):
        return rotate(q, positions, inv_freq) @ rotate(k, positions, inv_freq).mT

    compiled = torch.compile(scores, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        q, k = torch.randn(2, 2, 3, tokens, 16).unbind()
        q.requires_grad_()
        expected = scores(q, k, torch.arange(tokens))
        turned = compiled(q, k, torch.arange(tokens))
        torch.testing.assert_close(turned, expected, atol=1e-5, rtol=0)
        (ours,) = torch.autograd.grad(turned.sum(), q)
        (theirs,) = torch.autograd.grad(expected.sum(), q)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_auto_compiles_only_what_is_large_and_gains(monkeypatch):
    x, *_ = drawn()
    assert choose_impl(x, "half") == "eager"
    monkeypatch.setattr(turn_module, "COMPILED_FROM_ELEMENTS", x.numel())
    assert choose_impl(x, "half") == "compiled"
    assert choose_impl(x, "interleaved") == "eager"
    assert choose_impl(x[..., :-1], "half") == "eager"
    assert choose_impl(x.to("meta"), "half") == "eager"


@pytest.fixture
def broken_compiler(monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("no working C++ compiler found")

    for cache in (compiled_turn, compiler_works):
        cache.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield
    for cache in (compiled_turn, compiler_works):
        cache.cache_clear()


@pytest.mark.usefixtures("broken_compiler")
def test_compiled_by_name_raises_where_torch_cannot_compile():
    x, cos, sin = drawn()
    with pytest.raises(ConfigError, match=r"cannot run here: .*no working C\+\+ compiler.*'eager'"):
        turn_by(x, cos, sin, "half", "compiled")


@pytest.mark.usefixtures("broken_compiler")
def test_auto_is_eager_where_torch_cannot_compile(monkeypatch):
    monkeypatch.setattr(turn_module, "COMPILED_FROM_ELEMENTS", 1)
    x, cos, sin = drawn()
    assert choose_impl(x, "half") == "eager"
    assert torch.equal(turn_by(x, cos, sin, "half", "auto"), turn_by(x, cos, sin, "half", "eager"))


def test_an_unknown_impl_is_refused():
    table = rotation_table(torch.arange(5), rope_frequencies(8, THETA))
    with pytest.raises(ConfigError, match="impl must be 'auto', 'eager' or 'compiled', got 'fast'"):
        apply_rotation(torch.ones(1, 1, 5, 8), table, impl="fast")
