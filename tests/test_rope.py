"""Rope and RotaryEmbedding: one layer kind's rotation, complete."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformers

from longspan.errors import ConfigError, ShapeError
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rope import Rope, RotaryEmbedding
from longspan.rotary.rotate import rotate, rotation_table
from longspan.rotary.scaling import (
    DynamicNTK,
    Llama3,
    LongRope,
    NTKByParts,
    PositionInterpolation,
    Yarn,
)

TRAINED = 64
PLAIN = Rope(head_dim=8, rope_theta=10_000.0)
DYNAMIC = Rope(
    head_dim=8,
    rope_theta=10_000.0,
    scaling=DynamicNTK(factor=2.0, original_max_position_embeddings=TRAINED),
)
LONG = Rope(
    head_dim=8,
    rope_theta=10_000.0,
    scaling=LongRope(
        short_factor=[1.0] * 4,
        long_factor=[1.0, 2.0, 3.0, 4.0],
        factor=4.0,
        original_max_position_embeddings=TRAINED,
    ),
)
STATIC = [
    None,
    PositionInterpolation(factor=4.0),
    NTKByParts(factor=4.0, original_max_position_embeddings=TRAINED),
    Yarn(factor=4.0, original_max_position_embeddings=TRAINED),
    Llama3(
        factor=4.0, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=TRAINED
    ),
]


def table(rope, start, tokens, seq_len=None, **options):
    return torch.cat(rope.table(torch.arange(start, start + tokens), seq_len, **options), dim=-1)


@pytest.mark.parametrize("rope", [PLAIN, dataclasses.replace(PLAIN, scaling=STATIC[3])])
def test_case_02_a_rope_remembers_no_earlier_call(rope):
    first = table(rope, 0, 5)
    second = table(rope, 7, 5)
    third = table(rope, 0, 5)
    assert torch.equal(first, third)
    assert torch.equal(second, table(dataclasses.replace(rope), 7, 5))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_case_02_a_longer_row_leaves_no_trace_on_a_shorter_one(rope):
    short = table(rope, 0, 5, seq_len=5)
    grown = table(rope, 0, 5, seq_len=10 * TRAINED)
    assert not torch.equal(short, grown)
    assert torch.equal(short, table(rope, 0, 5, seq_len=5))


@pytest.mark.parametrize("scaling", STATIC)
def test_case_03_static_tables_of_neighbouring_lengths_share_their_prefix(scaling):
    rope = dataclasses.replace(PLAIN, scaling=scaling)
    for threshold in (TRAINED, 4 * TRAINED):
        longest = table(rope, 0, threshold + 1)
        for tokens in (threshold - 1, threshold):
            assert torch.equal(table(rope, 0, tokens), longest[:tokens])
            assert torch.equal(table(rope, 0, tokens, seq_len=tokens), longest[:tokens])


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_case_03_length_dependent_tables_change_right_after_the_trained_length(rope):
    before, at, after = (table(rope, 0, 5, seq_len=TRAINED + n) for n in (-1, 0, 1))
    assert torch.equal(before, at)
    assert not torch.equal(at, after)


def test_case_12_dynamic_is_not_frozen_at_the_longest_length():
    for seq_len in (1, TRAINED):
        assert torch.equal(DYNAMIC.inv_freq(seq_len), PLAIN.inv_freq())
        assert torch.equal(table(DYNAMIC, 0, 5, seq_len), table(PLAIN, 0, 5))
    assert torch.equal(DYNAMIC.inv_freq(), PLAIN.inv_freq())


def test_case_13_positions_around_and_far_past_the_trained_length():
    positions = [63, 64, 65, 10**6, *range(60, 70)]
    cos, sin = PLAIN.table(torch.tensor(positions), dtype=torch.float64)
    for row, position in enumerate(positions):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            # pow and math.cos differ in the last bit of the angle.
            assert cos[row, pair].item() == pytest.approx(math.cos(angle), abs=1e-9)
            assert sin[row, pair].item() == pytest.approx(math.sin(angle), abs=1e-9)


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_a_table_that_depends_on_the_length_asks_for_it(rope):
    with pytest.raises(ConfigError, match="needs seq_len to rotate: the total length"):
        rope.table(torch.arange(3))
    assert torch.equal(rope.inv_freq(), rope.inv_freq(TRAINED))


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_rows_of_unlike_lengths_equal_each_row_alone(rope):
    lengths = [10, TRAINED, TRAINED + 1, 5 * TRAINED]
    positions = torch.arange(6)
    together = rope.table(positions, torch.tensor(lengths))
    assert together.cos.shape == (4, 6, 4)
    for row, seq_len in enumerate(lengths):
        alone = rope.table(positions, seq_len)
        assert torch.equal(together.cos[row], alone.cos)
        assert torch.equal(together.sin[row], alone.sin)


def test_the_attention_factor_multiplies_cos_and_sin():
    scaling = Yarn(factor=4.0, original_max_position_embeddings=TRAINED)
    sharp = dataclasses.replace(PLAIN, scaling=scaling)
    plain = PLAIN.with_scaling(STATIC[2])  # the same ramp, factor 1
    for with_factor, without in zip(
        sharp.table(torch.arange(9), dtype=torch.float64),
        plain.table(torch.arange(9), dtype=torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(with_factor, without * (0.1 * math.log(4) + 1))


def test_proportional_spreads_over_the_head_and_pairs_across_it():
    rope = Rope(head_dim=8, rotary_dim=4, rope_theta=10_000.0, frequencies="proportional")
    assert rope.inv_freq().tolist() == pytest.approx([1.0, 0.1, 0.0, 0.0], abs=1e-15)
    x = torch.arange(1.0, 9.0).view(1, 1, 1, 8)
    turned, _ = RotaryEmbedding(rope)(x, x, torch.tensor([3]))
    expected = x.clone().double().flatten()
    for first, angle in ((0, 3.0), (1, 0.3)):
        a, b = expected[first].item(), expected[first + 4].item()
        expected[first] = a * math.cos(angle) - b * math.sin(angle)
        expected[first + 4] = b * math.cos(angle) + a * math.sin(angle)
    torch.testing.assert_close(turned.flatten().double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(turned[..., [2, 3, 6, 7]], x[..., [2, 3, 6, 7]])


def test_partial_default_frequencies_spread_over_the_rotary_dim():
    rope = Rope(head_dim=8, rotary_dim=4, rope_theta=10_000.0)
    assert torch.equal(rope.inv_freq(), rope_frequencies(4, 10_000.0))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_module_rotates_queries_and_keys_by_its_rope(layout):
    rope = Rope(head_dim=8, rope_theta=10_000.0, layout=layout, scaling=STATIC[3])
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    positions = torch.stack((torch.arange(5), torch.arange(60, 65)))
    for x, turned in zip((q, k), RotaryEmbedding(rope)(q, k, positions), strict=True):
        expected = rotate(x, positions, rope.inv_freq(), layout, rope.attention_factor)
        assert torch.equal(turned, expected)


def test_the_module_holds_nothing_that_a_cast_or_the_meta_device_could_spoil():
    with torch.device("meta"):
        rotary = RotaryEmbedding(PLAIN)
    x = torch.randn(1, 1, 3, 8)
    expected, _ = rotary(x, x, torch.arange(3))
    assert not rotary.state_dict()
    assert not list(rotary.buffers())
    for changed in (rotary.half(), rotary.to(torch.bfloat16), rotary.to_empty(device="cpu")):
        assert torch.equal(changed(x, x, torch.arange(3))[0], expected)
    assert repr(PLAIN) in repr(rotary)


def test_the_module_takes_a_length_a_row():
    x = torch.randn(2, 1, 5, 8)
    lengths = torch.tensor([5, 5 * TRAINED])
    together, _ = RotaryEmbedding(DYNAMIC)(x, x, torch.arange(5), lengths)
    for row, seq_len in enumerate(lengths.tolist()):
        alone, _ = RotaryEmbedding(DYNAMIC)(x[[row]], x[[row]], torch.arange(5), seq_len)
        assert torch.equal(together[[row]], alone)


def test_a_rope_without_a_layout_is_read_but_not_rotated_by():
    rope = dataclasses.replace(PLAIN, layout=None)
    assert torch.equal(rope.inv_freq(), PLAIN.inv_freq())
    with pytest.raises(ConfigError, match="has no layout"):
        RotaryEmbedding(rope)


def test_a_rope_is_a_frozen_hashable_value():
    assert Rope(head_dim=8, rope_theta=10_000.0, rotary_dim=8) == PLAIN
    assert len({PLAIN, dataclasses.replace(PLAIN), DYNAMIC}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.rope_theta = 1.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rotary_dim": 10}, "rotary_dim must be ≤ head_dim, got 10 > 8"),
        ({"rotary_dim": 3}, "rotary_dim must be even"),
        ({"rope_theta": 1.0}, "rope_theta must be a finite number above 1"),
        ({"frequencies": "partial"}, "frequencies must be 'default' or 'proportional'"),
        ({"layout": "neox"}, "layout must be 'half', 'interleaved' or None"),
        ({"softmax_scale_multiplier": 0}, "softmax_scale_multiplier must be above 0"),
    ],
)
def test_settings_that_make_no_rotation_are_refused(changed, message):
    given = {"head_dim": 8, "rope_theta": 10_000.0, **changed}
    with pytest.raises(ConfigError, match=message):
        Rope(**given)


def test_positions_that_are_not_int64_are_refused():
    for wrong in (torch.arange(3.0), torch.arange(3, dtype=torch.int32)):
        with pytest.raises(ShapeError, match="positions must be int64"):
            PLAIN.table(wrong)


def llama_rotary(head_dim):
    config = transformers.LlamaConfig(
        head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1
    )
    return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("start", [0, 4000, 130_000])
def test_hf_float32_phase_equals_transformers(start):
    module = llama_rotary(128)
    positions = torch.arange(start, start + 64)
    cos, sin = (part[0, :, :64] for part in module(torch.zeros(1), positions[None]))
    table = rotation_table(positions, module.inv_freq, phase="hf_float32")
    torch.testing.assert_close(table.cos, cos, atol=1e-6, rtol=0)
    torch.testing.assert_close(table.sin, sin, atol=1e-6, rtol=0)
    # From our own frequencies: theirs differ from them by up to one float32 rounding.
    table = Rope(head_dim=128, rope_theta=10_000.0).table(positions, phase="hf_float32")
    tolerance = 1e-6 + 2**-23 * positions[-1].item()
    torch.testing.assert_close(table.cos, cos, atol=tolerance, rtol=0)
    torch.testing.assert_close(table.sin, sin, atol=tolerance, rtol=0)


def test_hf_float32_phase_is_not_the_exact_one():
    rope = Rope(head_dim=128, rope_theta=10_000.0)
    exact, theirs = table(rope, 4000, 64), table(rope, 4000, 64, phase="hf_float32")
    assert 1e-5 < (exact - theirs).abs().max().item() < 1e-3
    with pytest.raises(ConfigError, match="phase must be 'float64' or 'hf_float32'"):
        table(rope, 0, 4, phase="float32")
