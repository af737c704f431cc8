"""attend's tiles: nothing missed, nothing twice, hidden ones skipped, memory linear."""

from __future__ import annotations

import itertools
from copy import deepcopy

import pytest
import torch

from attend_examples import (
    LOOKS,
    TINY,
    H,
    N,
    each_look,
    seen_by,
)
from fresh import printed
from longspan.attention import attend, flex, plan
from longspan.attention.visibility import Run, Visibility
from longspan.bias import Alibi, T5Bias
from longspan.errors import ConfigError, ShapeError
from longspan.masks import attention_sinks, causal, sliding_window


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


def test_a_compiler_that_fails_is_an_error_and_not_a_detour(monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("C++ compile error\nmany lines")

    monkeypatch.setattr(flex, "compiled", lambda *kind: broken)
    q = torch.randn(1, 2, 8, 8)
    with pytest.raises(ConfigError, match=r"C\+\+ compile error Use impl='tiled'"):
        attend(q, q, q, mask=causal(), impl="flex")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of the compiler's own
def test_compiled_kernels_do_not_use_up_torchs_limit_of_recompilations():
    for length in (40, 44, 48):
        q = torch.randn(1, 2, length, 8)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
            found = attend(q, q, q, mask=sliding_window(length - 30), impl="flex")
        expected = attend(q, q, q, mask=sliding_window(length - 30), impl="reference")
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("impl", ["reference", "tiled", "sdpa"])
def test_a_mask_laid_once_serves_many_calls(impl):
    mask = causal() & (sliding_window(5) | attention_sinks(2))
    seen = Visibility.of(mask, (2, 40, 40))
    for seed in range(3):
        q = torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(seed))
        found = attend(q, q, q, mask=seen, impl=impl)
        torch.testing.assert_close(found, attend(q, q, q, mask=mask, impl=impl), rtol=0, atol=0)
    for options in ({"bias": Alibi(2)}, {"scale": 1.0}, {"bias": T5Bias(2)}, {}):
        found = attend(q, q, q, mask=seen, impl=impl, **options)
        torch.testing.assert_close(found, attend(q, q, q, mask=mask, impl=impl, **options))
    if impl != "sdpa":
        capped = attend(q, q, q, mask=seen, impl=impl, softcap=1.0)
        torch.testing.assert_close(capped, attend(q, q, q, mask=mask, impl=impl, softcap=1.0))
    with pytest.raises(ShapeError, match=r"laid over T, S = \(40, 40\), and q and k have \(8, 8\)"):
        attend(q[:, :, :8], q[:, :, :8], q[:, :, :8], mask=seen, impl=impl)
    with pytest.raises(ConfigError, match="leave q_pos out"):
        attend(q, q, q, mask=seen, q_pos=torch.arange(40), impl=impl)


def test_a_plan_made_for_one_bias_is_not_taken_for_another():
    seen = Visibility.of(causal(), (1, 700, 700))
    q = torch.randn(1, 2, 700, 8)
    for bias in (Alibi(2), T5Bias(2), None):  # row + key from the first token on, from 128, never
        found = attend(q, q, q, mask=seen, bias=bias, impl="tiled")
        expected = attend(q, q, q, mask=causal(), bias=bias, impl="reference")
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_mask_that_hides_nothing_of_these_positions_is_known_to():
    assert not Visibility.of(causal(), (1, 1, 8)).hides
    assert not Visibility.of(sliding_window(8), (1, 1, 8)).hides
    assert Visibility.of(sliding_window(7), (1, 1, 8)).hides
    assert Visibility.of(causal(), (1, 2, 8)).hides


def test_tiles_at_the_sinks_are_not_said_to_be_alike():
    seen = seen_by(causal() & (sliding_window(4) | attention_sinks(6)), N)
    at_sinks, later = (slice(8, 12), [Run(4, 12)]), (slice(16, 20), [Run(12, 20)])
    assert not torch.equal(seen.tile(*at_sinks), seen.tile(*later))
    assert seen.likeness(*at_sinks, with_whole=False) is None
    assert seen.likeness(*later, with_whole=False) is not None


# Larger than one tile, at the sizes in use


@pytest.mark.parametrize("bias", [None, Alibi(2), T5Bias(2)], ids=repr)
@pytest.mark.parametrize(
    "mask", [causal(), causal() & (sliding_window(200) | attention_sinks(4))], ids=repr
)
def test_float32_gradients_at_full_size(bias, mask):
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


def test_memory_is_linear_forward_and_backward():
    found = printed("""
import torch
from longspan.attention import attend
from longspan.bias import Alibi, T5Bias
from longspan.errors import ConfigError
from longspan.masks import attention_sinks, causal, sliding_window
torch.set_num_threads(1)

def go(length, mask, bias):
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    attend(q, k, v, mask=mask, bias=bias, impl="tiled").sum().backward()

window = causal() & (sliding_window(256) | attention_sinks(4))
go(1024, window, None), go(1024, causal(), T5Bias(2))
before = peak()
go(32768, window, None), go(8192, causal(), Alibi(2)), go(8192, causal(), T5Bias(2))
print(peak() - before)
""")
    assert int(found) < 150e6  # one float32 for each pair of 8192 tokens and head is 537e6


def test_flex_compiles_and_agrees():
    found = printed("""
import torch
from longspan.attention import attend
from longspan.bias import Alibi
from longspan.errors import ConfigError
from longspan.masks import attention_sinks, causal, sliding_window
asked = dict(mask=causal() & (sliding_window(100) | attention_sinks(4)), bias=Alibi(2))
for length in (300, 200):
    q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
    out, expected = (attend(q, k, v, impl=impl, **asked) for impl in ("flex", "reference"))
    print(float((out - expected).abs().max()))
""")
    assert all(float(error) < 5e-6 for error in found.split())
    assert len(found.split()) == 2


def test_whole_runs_are_not_looked_at():
    seen = seen_by(causal(), 8)
    tile = seen.tile(slice(0, 2), [Run(4, 6, True), Run(0, 2)])
    assert tile.squeeze().tolist() == [[True, True, True, False], [True, True, True, True]]
