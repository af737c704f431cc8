"""rotate and rerotate: golden rotations, algebra, precision, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import ConfigError, ShapeError
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rotate import (
    RotationTable,
    apply_rotation,
    rerotate,
    rotate,
    rotation_table,
)

THETA = 10_000.0
BOTH_LAYOUTS = pytest.mark.parametrize("layout", ["half", "interleaved"])
# One rounding to each dtype of a value near 1, half a unit in the last place.
ROUNDING = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


# A processor's vector and scalar instructions may round the same product differently.
FLOAT32_ROUNDING = dict(atol=1e-6, rtol=0)


def naive_rotation(x, positions, inv_freq, layout, attention_factor=1.0):
    """Every pair by Python's own sine and cosine, in float64."""
    out = x.double().clone()
    pairs = inv_freq.shape[-1]
    positions = positions.expand(x.shape[0], -1)
    inv_freq = inv_freq.expand(x.shape[0], -1)
    for b in range(x.shape[0]):
        for t in range(x.shape[2]):
            for i in range(pairs):
                first, second = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
                angle = positions[b, t].item() * inv_freq[b, i].item()
                cos, sin = math.cos(angle) * attention_factor, math.sin(angle) * attention_factor
                p, q = x[b, :, t, first].double(), x[b, :, t, second].double()
                out[b, :, t, first] = p * cos - q * sin
                out[b, :, t, second] = q * cos + p * sin
    return out


def test_golden_first_basis_vector_at_position_one():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    inv_freq = rope_frequencies(4, THETA)
    for layout, golden in (
        ("half", [0.540302, 0.0, 0.841471, 0.0]),
        ("interleaved", [0.540302, 0.841471, 0.0, 0.0]),
    ):
        turned = rotate(x, torch.tensor([1]), inv_freq, layout).flatten()
        assert turned.tolist() == pytest.approx(golden, abs=5e-7)


@BOTH_LAYOUTS
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 4), st.integers(0, 3)),
    by_row=st.tuples(st.booleans(), st.booleans()),
    attention_factor=st.floats(0.5, 2.0),
    seed=st.integers(0, 99),
)
def test_rotation_is_the_naive_one(layout, shape, by_row, attention_factor, seed):
    batch, heads, tokens, pairs, resting = shape
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, tokens, 2 * pairs + resting, generator=random).double()
    rows = [(batch,) if given else () for given in by_row]
    positions = torch.randint(-999, 999, (*rows[0], tokens), generator=random)
    inv_freq = torch.rand(*rows[1], pairs, generator=random).double()
    turned = rotate(x, positions, inv_freq, layout, attention_factor)
    expected = naive_rotation(x, positions, inv_freq, layout, attention_factor)
    torch.testing.assert_close(turned, expected, atol=1e-12, rtol=0)


def test_the_layouts_are_one_rotation_of_permuted_channels():
    x = torch.randn(2, 3, 5, 8)
    perm = [0, 2, 4, 6, 1, 3, 5, 7]
    inv_freq, positions = rope_frequencies(8, THETA), torch.arange(1, 6)
    interleaved = rotate(x, positions, inv_freq, "interleaved")[..., perm]
    half = rotate(x[..., perm], positions, inv_freq, "half")
    torch.testing.assert_close(interleaved, half, **FLOAT32_ROUNDING)
    assert not torch.allclose(half, rotate(x, positions, inv_freq, "half")[..., perm])


@BOTH_LAYOUTS
@settings(max_examples=50, deadline=None)
@given(a=st.integers(-(2**20), 2**20), b=st.integers(-(2**20), 2**20))
def test_rotations_compose_keep_norms_and_see_only_distances(layout, a, b):
    x, y = torch.randn(2, 1, 2, 1, 8, dtype=torch.float64, generator=torch.Generator())
    inv_freq = rope_frequencies(8, THETA)

    def at(position, v):
        return rotate(v, torch.tensor([position]), inv_freq, layout)

    close = dict(atol=1e-8, rtol=0)  # 2^21 rounded to 2^-53, twice
    torch.testing.assert_close(at(a, at(b, x)), at(a + b, x), **close)
    torch.testing.assert_close(at(-a, at(a, x)), x, **close)
    torch.testing.assert_close(at(a, x).norm(dim=-1), x.norm(dim=-1), **close)
    score = (at(a, x) * at(b, y)).sum(-1)
    torch.testing.assert_close(score, (at(a - b, x) * at(0, y)).sum(-1), **close)


@BOTH_LAYOUTS
def test_rerotate_moves_keys_as_if_rotated_there(layout):
    keys = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    inv_freq = rope_frequencies(8, THETA)
    start, target = torch.arange(90, 95), torch.stack((torch.arange(5), torch.arange(-3, 2)))
    kept = rotate(keys, start, inv_freq, layout, attention_factor=1.2)
    moved = rerotate(kept, start, target, inv_freq, layout)
    expected = rotate(keys, target, inv_freq, layout, attention_factor=1.2)
    torch.testing.assert_close(moved, expected, atol=1e-12, rtol=0)
    assert not torch.allclose(moved, kept)


def test_case_01_bf16_neighbouring_positions_differ():
    x = torch.randn(1, 2, 1, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    inv_freq = rope_frequencies(128, THETA)
    turned = {p: rotate(x, torch.tensor([p]), inv_freq) for p in (256, 257, 32767)}
    assert not torch.equal(turned[256], turned[257])
    exact = naive_rotation(x, torch.tensor([32767]), inv_freq, "half")
    assert torch.equal(turned[32767], exact.bfloat16())


@pytest.mark.parametrize("position", [10**6, -(10**6), 2**28, 2**40, -(2**40)])
def test_huge_positions_are_right_to_their_own_float64_rounding(position):
    inv_freq = torch.tensor([1.0, 0.375], dtype=torch.float64)  # exact, so the angle is too
    x = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    turned = rotate(x, torch.tensor([position]), inv_freq)
    assert turned.flatten()[0].item() == pytest.approx(math.cos(position), abs=1e-15)
    assert turned.flatten()[2].item() == pytest.approx(math.sin(position), abs=1e-15)
    cos = rotation_table(torch.tensor([position]), inv_freq).cos[0, 1].item()
    assert cos == pytest.approx(math.cos(position * 0.375), abs=ROUNDING[torch.float32])


@BOTH_LAYOUTS
@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_dtype_is_rounded_once_from_the_exact_rotation(layout, dtype):
    x = torch.randn(2, 3, 6, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    inv_freq, positions = rope_frequencies(8, THETA), torch.arange(1000, 1006)
    turned = rotate(x, positions, inv_freq, layout)
    exact = naive_rotation(x, positions, inv_freq, layout)
    assert turned.dtype == dtype
    # float32 arithmetic adds a little before the one cast.
    allowed = ROUNDING[dtype] * exact.abs() + 3 * ROUNDING[torch.float32] * x.double().abs().max()
    if dtype == torch.float64:
        allowed = torch.full_like(exact, 1e-12)
    assert ((turned.double() - exact).abs() <= allowed).all()
    assert torch.equal(turned[..., 8:], x[..., 8:])


@BOTH_LAYOUTS
def test_case_14_partial_rotary_passes_the_rest_through_bit_for_bit(layout):
    x = torch.randn(1, 2, 1, 8)
    x[..., 7] = float("inf")
    turned = rotate(x, torch.tensor([3]), rope_frequencies(4, THETA), layout)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    pairs = ((0, 2), (1, 3)) if layout == "half" else ((0, 1), (2, 3))
    for (first, second), angle in zip(pairs, (3.0, 0.03), strict=True):
        a, b = x[..., first], x[..., second]
        torch.testing.assert_close(turned[..., first], a * math.cos(angle) - b * math.sin(angle))
        torch.testing.assert_close(turned[..., second], b * math.cos(angle) + a * math.sin(angle))


@BOTH_LAYOUTS
def test_rows_with_their_own_positions_and_frequencies_equal_each_alone(layout):
    x = torch.randn(3, 2, 4, 8)
    positions = torch.randint(-50, 5000, (3, 4))
    inv_freq = torch.rand(3, 4, dtype=torch.float64)
    together = rotate(x, positions, inv_freq, layout)
    for row in range(3):
        alone = rotate(x[[row]], positions[row], inv_freq[row], layout)
        torch.testing.assert_close(together[[row]], alone, **FLOAT32_ROUNDING)
    shared = rotate(x, positions[:1], inv_freq[0], layout)
    assert torch.equal(shared, rotate(x, positions[0], inv_freq[0], layout))


@BOTH_LAYOUTS
def test_any_strides_give_the_same_rotation(layout):
    inv_freq, positions = rope_frequencies(8, THETA), torch.arange(5)
    x = torch.randn(2, 3, 5, 8)
    expected = rotate(x, positions, inv_freq, layout)
    odd = torch.randn(2, 3, 5, 9)
    odd[..., 1:] = x
    strided = torch.randn(2, 3, 5, 16)
    strided[..., ::2] = x
    for same in (x.transpose(1, 2).contiguous().transpose(1, 2), odd[..., 1:], strided[..., ::2]):
        assert not same.is_contiguous()
        turned = rotate(same, positions, inv_freq, layout)
        torch.testing.assert_close(turned, expected, **FLOAT32_ROUNDING)
    expanded = rotate(x[:1, :1].expand(2, 3, 5, 8), positions, inv_freq, layout)
    expected = expected[:1, :1].expand(2, 3, 5, 8)
    torch.testing.assert_close(expanded, expected, **FLOAT32_ROUNDING)


@BOTH_LAYOUTS
def test_no_tokens_and_no_rows_give_empty_rotations(layout):
    inv_freq = rope_frequencies(8, THETA)
    for shape in ((1, 2, 0, 8), (0, 2, 3, 8)):
        x = torch.empty(shape)
        assert rotate(x, torch.arange(shape[2]), inv_freq, layout).shape == shape


def test_the_input_is_left_as_it_was():
    x = torch.randn(1, 2, 3, 8)
    before = x.clone()
    turned = rotate(x, torch.zeros(3, dtype=torch.int64), rope_frequencies(8, THETA))
    assert torch.equal(turned, x)
    turned.fill_(0)
    assert torch.equal(x, before)


def drift(dtype, steps):
    """Relative error of keys moved back by 1000 positions in `steps` equal moves."""
    inv_freq = rope_frequencies(128, THETA)
    random = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 16, 128, dtype=torch.float64, generator=random)
    here = torch.full((16,), 1000)
    moved = rotate(keys, here, inv_freq)
    if steps > 1:
        moved = moved.to(dtype)
    for step in range(1, steps + 1):
        target = torch.full((16,), 1000 - 1000 * step // steps)
        moved = rerotate(moved.double(), here, target, inv_freq).to(dtype)
        here = target
    return ((moved.double() - keys).norm() / keys.norm()).item()


@pytest.mark.parametrize(
    ("dtype", "stepwise", "once"),
    [
        (torch.float32, 8e-7, 2.5e-8),
        (torch.float16, 0.06, 2e-4),
        (torch.bfloat16, 0.53, 1.6e-3),
    ],
)
def test_moving_a_key_a_thousand_times_spoils_it_and_once_does_not(dtype, stepwise, once):
    assert drift(dtype, steps=1) == pytest.approx(once, rel=0.2)
    assert drift(dtype, steps=1000) == pytest.approx(stepwise, rel=0.3)


@pytest.mark.parametrize(
    ("end", "float32_phase"), [(2**12, 2.3e-4), (2**17, 7.7e-3), (2**20, 6e-2)]
)
def test_a_float32_phase_errs_more_and_more_and_ours_does_not(end, float32_phase):
    positions, inv_freq = torch.arange(end - 4096, end), rope_frequencies(128, THETA)
    exact = torch.cos(positions.double()[:, None] * inv_freq)

    def error(phase):
        table = rotation_table(positions, inv_freq, phase=phase)
        return (table.cos.double() - exact).abs().max().item()

    assert error("hf_float32") == pytest.approx(float32_phase, rel=0.05)
    assert error("float64") <= ROUNDING[torch.float32]


def test_frequencies_rounded_to_bfloat16_would_be_radians_off_at_4095():
    inv_freq = rope_frequencies(128, THETA)
    rounded, exact = (torch.cos(4095 * each) for each in (inv_freq.bfloat16().double(), inv_freq))
    assert (rounded - exact).abs().max().item() == pytest.approx(1.68, abs=0.01)
    with pytest.raises(ShapeError, match=r"float64 or float32, got torch\.bfloat16"):
        rotation_table(torch.tensor([4095]), inv_freq.bfloat16())


X, POSITIONS, INV_FREQ = torch.ones(2, 3, 5, 8), torch.arange(5), rope_frequencies(8, THETA)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": torch.arange(5.0)}, "positions must be int64, got torch.float32"),
        ({"positions": torch.arange(5).int()}, "positions must be int64, got torch.int32"),
        ({"positions": torch.arange(4)}, r"positions must have shape .* \(5,\) or \(2, 5\)"),
        ({"positions": torch.zeros(3, 5).long()}, r"got \(3, 5\)"),
        ({"positions": torch.zeros(2, 1, 5).long()}, r"got \(2, 1, 5\)"),
        ({"positions": torch.tensor(3)}, r"got \(\)"),
        ({"x": torch.ones(3, 5, 8)}, r"x must have shape \[B, H, T, D\], got \(3, 5, 8\)"),
        ({"x": torch.ones(2, 3, 5, 6)}, r"D ≥ 2·P = 8, got \(2, 3, 5, 6\)"),
        ({"x": torch.ones(2, 3, 5, 8).long()}, "x must have a float dtype, got torch.int64"),
        ({"inv_freq": torch.ones(3, 4)}, r"the table must be \[T, P\] or \[B, T, P\]"),
        ({"inv_freq": torch.ones(3, 4), "positions": torch.zeros(2, 5).long()}, "agree in B"),
        ({"inv_freq": torch.ones(2, 1, 4)}, r"inv_freq \[P\] or \[B, P\] must agree"),
        ({"inv_freq": torch.tensor(1.0)}, r"inv_freq \[P\] or \[B, P\] must agree"),
        ({"inv_freq": INV_FREQ.half()}, "inv_freq must be float64 or float32"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    given = {"x": X, "positions": POSITIONS, "inv_freq": INV_FREQ, **changed}
    with pytest.raises(ShapeError, match=message):
        rotate(**given)


def test_keys_moved_between_misfitting_positions_are_refused():
    with pytest.raises(ShapeError, match="positions must be int64"):
        rerotate(X, POSITIONS, POSITIONS.float(), INV_FREQ)
    with pytest.raises(ShapeError, match="positions must have shape"):
        rerotate(X, POSITIONS[:4], POSITIONS, INV_FREQ)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ConfigError, match="layout must be 'half' or 'interleaved', got 'neox'"):
        rotate(X, POSITIONS, INV_FREQ, layout="neox")


def test_a_table_too_coarse_or_of_another_shape_is_refused():
    table = rotation_table(POSITIONS, INV_FREQ)
    with pytest.raises(ShapeError, match=r"must be torch\.float64 for x of torch\.float64"):
        apply_rotation(X.double(), table)
    with pytest.raises(ShapeError, match=r"must be torch\.float32 for x of torch\.bfloat16"):
        apply_rotation(X.bfloat16(), RotationTable(*(part.bfloat16() for part in table)))
    with pytest.raises(ShapeError, match="the table must be float64 or float32"):
        rotation_table(POSITIONS, INV_FREQ, dtype=torch.float16)
    with pytest.raises(ShapeError, match=r"the table must be \[T, P\] or \[B, T, P\]"):
        apply_rotation(X[:, :, :4], table)
