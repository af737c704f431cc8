"""Masks: what each sees, how they combine, and what they say of whole tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fresh import printed
from longspan.errors import ConfigError
from longspan.masks import (
    Mask,
    Span,
    attention_sinks,
    causal,
    prefix,
    sliding_window,
)

# Each mask beside its rule, written as plain arithmetic on one pair.
MASKS = (
    (causal(), lambda q, k: k <= q),
    (sliding_window(4), lambda q, k: 0 <= q - k < 4),
    (sliding_window(4, ahead=2), lambda q, k: -2 <= q - k < 4),
    (sliding_window(1), lambda q, k: q == k),
    (attention_sinks(3), lambda q, k: k < 3),
    (attention_sinks(0), lambda q, k: False),
    (prefix(5), lambda q, k: k < 5),
    (causal() | prefix(5), lambda q, k: k <= q or k < 5),
    (
        causal() & (sliding_window(4) | attention_sinks(2)),
        lambda q, k: k <= q and (q - k < 4 or k < 2),
    ),
    (~sliding_window(4, ahead=4), lambda q, k: not -4 <= q - k < 4),
    (causal() & ~sliding_window(3), lambda q, k: q - k >= 3),
    (~(causal() | prefix(2)), lambda q, k: k > q and k >= 2),
)
each_mask = pytest.mark.parametrize(("mask", "rule"), MASKS, ids=[repr(mask) for mask, _ in MASKS])


@each_mask
def test_each_pair_follows_the_rule(mask, rule):
    seen = mask(torch.arange(-3, 20), torch.arange(25))
    assert seen.dtype == torch.bool
    assert seen.tolist() == [[rule(q, k) for k in range(25)] for q in range(-3, 20)]


@each_mask
def test_positions_may_differ_by_row(mask, rule):
    q_pos, k_pos = torch.tensor([[3, 9], [0, 30]]), torch.tensor([7, 2, 29])
    seen = mask(q_pos, k_pos)
    assert seen.tolist() == [
        [[rule(q, k) for k in (7, 2, 29)] for q in row] for row in [[3, 9], [0, 30]]
    ]


@each_mask
@settings(max_examples=60, deadline=None)
@given(
    q=st.tuples(st.integers(0, 30), st.integers(0, 9)),
    k=st.tuples(st.integers(0, 30), st.integers(0, 9)),
)
def test_a_tile_is_called_all_or_none_only_where_it_is(mask, rule, q, k):
    (q_first, q_more), (k_first, k_more) = q, k
    pairs = [
        rule(i, j)
        for i in range(q_first, q_first + q_more + 1)
        for j in range(k_first, k_first + k_more + 1)
    ]
    answer = mask.tile((q_first, q_first + q_more), (k_first, k_first + k_more))
    if answer == "all":
        assert all(pairs)
    elif answer == "none":
        assert not any(pairs)


@each_mask
def test_tiles_of_one_pair_are_never_undecided(mask, rule):
    for q in range(0, 12):
        for k in range(0, 12):
            assert mask.tile((q, q), (k, k)) == ("all" if rule(q, k) else "none")


@each_mask
def test_causal_and_relative_from_are_true_claims(mask, rule):
    positions = torch.arange(40)
    seen = mask(positions, positions)
    if mask.causal:
        assert not seen.triu(1).any()
    since = mask.relative_from
    moved = mask(positions + 7, positions + 7)
    assert torch.equal(seen[:, since:], moved[:, since:])


def test_a_window_tile_is_skipped_kept_and_met_whole():
    mask = causal() & (sliding_window(512) | attention_sinks(4))
    assert mask.tile((4096, 4223), (1024, 1151)) == "none"
    assert mask.tile((4096, 4223), (3840, 3967)) == "all"
    assert mask.tile((4096, 4223), (3584, 3711)) == "some"
    assert mask.tile((4096, 4223), (0, 3)) == "all"
    assert mask.tile((4096, 4223), (0, 31)) == "some"
    assert mask.tile((4096, 4223), (4224, 4351)) == "none"


def test_causal_survives_only_what_keeps_it():
    assert causal().causal
    assert sliding_window(4).causal
    assert (prefix(4) & causal()).causal
    assert (causal() | sliding_window(4)).causal
    assert not sliding_window(4, ahead=1).causal
    assert not (causal() | prefix(4)).causal
    assert not (~causal()).causal


def test_window_counts_of_the_facts():
    seen = sliding_window(4)(torch.arange(8), torch.arange(8))
    assert seen.sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    seen = sliding_window(1024)(torch.arange(4096), torch.arange(4096))
    assert int(seen.sum()) == 3_670_528


def test_a_mask_of_ones_own_is_right_without_coverage():
    class EvenKeys(Mask):
        def sees(self, q_pos, k_pos):
            return k_pos % 2 == 0

    mask = causal() & EvenKeys()
    assert mask(torch.tensor([3]), torch.arange(5)).tolist() == [[True, False, True, False, False]]
    assert mask.tile((0, 3), (4, 5)) == "none"
    assert mask.tile((4, 5), (0, 3)) == "some"
    assert mask.relative_from is None


def test_masks_compare_by_what_they_say():
    assert causal() & sliding_window(4) == causal() & sliding_window(4)
    assert sliding_window(4) != sliding_window(5)
    assert repr(causal() & ~(prefix(2) | attention_sinks(1))) == (
        "causal() & ~(prefix(2) | attention_sinks(1))"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: sliding_window(0),
        lambda: sliding_window(2.0),
        lambda: sliding_window(True),
        lambda: sliding_window(4, ahead=-1),
        lambda: attention_sinks(-1),
        lambda: prefix("4"),
        lambda: causal() & True,
        lambda: causal() | torch.ones(2, 2),
        lambda: causal() and sliding_window(4),
        lambda: not causal(),
    ],
)
def test_what_is_not_a_mask_is_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()


def test_spans_answer_for_many_tiles_at_once():
    starts = torch.arange(0, 1024, 128)
    q, k = (Span(s, s + 127) for s in (starts[:, None], starts[None, :]))
    found = (causal() & sliding_window(130)).coverage(q, k)
    assert int(found.some.sum()) == 8 + 7 + 6  # the diagonal and the two blocks behind it
    assert int(found.all.sum()) == 0


def test_case_22_a_window_mask_for_65536_tokens_stays_under_1_gb():
    found = printed("""
import torch
from longspan.attention import flex, plan
from longspan.attention.visibility import Visibility
from longspan.masks import attention_sinks, causal, sliding_window
from torch.nn.attention.flex_attention import BlockMask
before = peak()
mask = causal() & (sliding_window(512) | attention_sinks(4))
seen = Visibility.of(mask, (1, 65536, 65536))
assert len(plan.plan(seen, None, split=True, sizes=plan.SIZES)) > 80
assert flex.block_mask(seen).seq_lengths == (65536, 65536)
print(peak() - before)
""")
    assert int(found) < 100e6  # a bool for each pair is 4.3e9
