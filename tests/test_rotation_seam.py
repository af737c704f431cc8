"""The seam to live models: layouts and table forms, and a rotation lent and restored."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from longspan.adapters.families import FAMILIES
from longspan.adapters.rope import rope_from_config
from longspan.adapters.ropes import Ropes
from longspan.adapters.rotation import (
    LongspanRotary,
    exact_rotation,
    rebuild_rotation,
    rope_of_type,
    rotary_modules,
)
from longspan.errors import ConfigError, UnsupportedModelError
from tiny_families import OWN, SHAPE, THETA, logits, tiny, tiny_config, tokens

# Scores and logits of order 1 to 10 in float32; a wrong layout or table is off by more than SEEN.
FLOAT32 = 5e-5
SEEN = 1e-2
LENGTH = 48


def turned(x: Tensor, inv_freq: Tensor, layout: str, attention_factor: float) -> Tensor:
    """[T, D] turned at positions 0…T−1, pair by pair in float64."""
    turned = x.double().clone()
    pairs = len(inv_freq)
    for pair, speed in enumerate(inv_freq.tolist()):
        first, second = (
            (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + pairs)
        )
        angle = torch.arange(len(x), dtype=torch.float64) * speed
        a, b = x[:, first].double(), x[:, second].double()
        turned[:, first] = (a * angle.cos() - b * angle.sin()) * attention_factor
        turned[:, second] = (a * angle.sin() + b * angle.cos()) * attention_factor
    return turned


class Recorder:
    """Stands in for a module's apply_rotary_pos_emb; keeps queries and keys, [T, D] each."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        result = self.original(*tensors, **options)
        *given, _, _ = tensors
        results = result if isinstance(result, tuple) else (result,)
        # Gemma 4 turns queries and keys one at a time, [B, T, H, D]
        heads_last = options.get("unsqueeze_dim") == 2
        for before, after in zip(given, results, strict=True):
            self.before.append(before[0, :, 0] if heads_last else before[0, 0])
            self.after.append(after[0, :, 0] if heads_last else after[0, 0])
        return result


def scores(queries_and_keys: list[Tensor]) -> list[Tensor]:
    """[T, T] of the first head, one a layer: pairs may be permuted if q and k agree."""
    return [
        q.double() @ k.double().T
        for q, k in zip(queries_and_keys[::2], queries_and_keys[1::2], strict=True)
    ]


@pytest.mark.parametrize("model_type", OWN)
def test_each_family_turns_its_pairs_in_the_layout_of_its_row(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(model_type)
    modeling = sys.modules[type(model).__module__]
    latent = FAMILIES[model_type].mla
    name = "apply_rotary_pos_emb_interleave" if latent else "apply_rotary_pos_emb"
    recorder = Recorder(getattr(modeling, name))
    monkeypatch.setattr(modeling, name, recorder)
    logits(model, tokens(LENGTH))
    ropes = rope_from_config(model.config)
    turning = [rope for rope in map(ropes.for_layer, range(2)) if rope is not None]
    found = scores(recorder.after)
    assert len(found) >= len(turning) > 0
    if model_type != "glm_moe_dsa":  # whose indexer turns its own, between
        assert len(found) == len(turning)
    rope, factor = turning[0], turning[0].attention_factor
    for layer in range(len(turning)) if len(found) == len(turning) else (0,):
        rope, factor = turning[layer], turning[layer].attention_factor
        given = recorder.before[2 * layer : 2 * layer + 2]
        for layout in ("half", "interleaved"):
            (naive,) = scores([turned(x, rope.inv_freq(), layout, factor) for x in given])
            difference = (found[layer] - naive).abs().max()
            assert difference < FLOAT32 if layout == rope.layout else difference > SEEN


def test_a_latent_model_may_be_said_to_pair_halves() -> None:
    config = tiny_config("deepseek_v3", rope_interleave=False)
    assert rope_from_config(config)["full_attention"].layout == "half"
    model = tiny("deepseek_v3", rope_interleave=False)
    row = tokens(LENGTH)
    with exact_rotation(model, rope_from_config(model.config)):
        torch.testing.assert_close(
            logits(model, row),
            logits(tiny("deepseek_v3", rope_interleave=False), row),
            atol=FLOAT32,
            rtol=0,
        )
    assert (logits(model, row) - logits(tiny("deepseek_v3"), row)).abs().max() > SEEN


@pytest.mark.parametrize("model_type", OWN)
def test_the_lent_rotation_gives_the_models_own_logits(model_type: str) -> None:
    model, row = tiny(model_type), tokens(LENGTH, rows=2)
    own, ropes = logits(model, row), rope_from_config(model.config)
    with exact_rotation(model, ropes, phase="hf_float32"):
        rounded = logits(model, row)
    with exact_rotation(model, ropes):
        exact = logits(model, row)
    torch.testing.assert_close(rounded, own, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(exact, own, atol=FLOAT32, rtol=0)
    assert torch.equal(logits(model, row), own)


@pytest.mark.parametrize("model_type", OWN)
def test_another_table_form_gives_other_logits(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, row = tiny(model_type), tokens(LENGTH)
    own, ropes = logits(model, row), rope_from_config(model.config)
    family = FAMILIES[model_type]
    wrong = "interleaved" if family.table == "half" else "half"
    monkeypatch.setitem(FAMILIES, model_type, replace(family, table=wrong))  # type: ignore[arg-type]
    with exact_rotation(model, ropes):
        if family.table == "pairs":
            with pytest.raises(RuntimeError, match="size"):
                logits(model, row)
        else:
            assert (logits(model, row) - own).abs().max() > SEEN


def test_the_hf_phase_rounds_as_transformers_does_far_out() -> None:
    model = tiny("llama", max_position_embeddings=2**20)
    ropes = rope_from_config(model.config)
    far = torch.arange(10**6, 10**6 + 8).unsqueeze(0)
    own = model.model.rotary_emb(torch.zeros(1), far)
    wanted = LongspanRotary(ropes, "half", None, "hf_float32")(torch.zeros(1), far)
    exact = LongspanRotary(ropes, "half", None, "float64")(torch.zeros(1), far)
    for theirs, rounded, right in zip(own, wanted, exact, strict=True):
        # one unit in the last place of an inv_freq is up to 0.06 rad at a million
        assert (theirs - rounded).abs().max() <= 0.07
        assert (rounded - right).abs().max() > 1e-3
    angles = far[0, :, None].double() * ropes["full_attention"].inv_freq()
    torch.testing.assert_close(exact[0][0, :, :8], angles.cos().float(), atol=1e-6, rtol=0)
    double = LongspanRotary(ropes, "half", None, "float64")(torch.zeros(1).double(), far)
    torch.testing.assert_close(double[1][0, :, 8:], angles.sin(), atol=1e-9, rtol=0)


def test_another_rope_gives_other_logits() -> None:
    model, row = tiny("llama"), tokens(LENGTH)
    own = logits(model, row)
    other = rope_from_config(tiny_config("llama", {"rope_type": "linear", "factor": 4.0}))
    with exact_rotation(model, other):
        lent = logits(model, row)
    expected = logits(tiny("llama", {"rope_type": "linear", "factor": 4.0}), row)
    torch.testing.assert_close(lent, expected, atol=FLOAT32, rtol=0)
    assert (lent - own).abs().max() > SEEN


def test_each_layer_type_is_lent_its_own_rope() -> None:
    model, row = tiny("gemma3_text"), tokens(LENGTH)
    ropes = rope_from_config(model.config)
    swapped = Ropes(
        {
            "full_attention": ropes["sliding_attention"],
            "sliding_attention": ropes["full_attention"],
        }
    )
    with exact_rotation(model, swapped):
        assert (logits(model, row) - logits(tiny("gemma3_text"), row)).abs().max() > SEEN
    assert rope_of_type(ropes, "sliding_attention").rope_theta == 100.0
    assert rope_of_type(ropes, None) == ropes[next(iter(ropes))]


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def test_a_dynamic_table_is_that_of_the_declared_length() -> None:
    model, row = tiny("llama", DYNAMIC), tokens(LENGTH)
    ropes = rope_from_config(model.config)
    with exact_rotation(model, ropes, seq_len=160):
        declared = logits(model, row)
    # s = 2 · 160 / 64 − 1 = 4, as NTK-aware: theta · 4^(16 / 14)
    raised = {"rope_type": "default", "rope_theta": THETA * 4 ** (16 / 14)}
    torch.testing.assert_close(declared, logits(tiny("llama", raised), row), atol=FLOAT32, rtol=0)
    assert (declared - logits(model, row)).abs().max() > SEEN


def test_rows_of_one_batch_may_declare_their_own_lengths() -> None:
    model, rows = tiny("llama", DYNAMIC), tokens(LENGTH, rows=2)
    ropes = rope_from_config(model.config)
    with exact_rotation(model, ropes, seq_len=torch.tensor([160, 320])):
        together = logits(model, rows)
    for row, length in ((0, 160), (1, 320)):
        with exact_rotation(model, ropes, seq_len=length):
            alone = logits(model, rows[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], atol=FLOAT32, rtol=0)


def test_a_length_dependent_table_needs_a_length() -> None:
    model = tiny("llama", DYNAMIC)
    lent = exact_rotation(model, rope_from_config(model.config))
    with lent, pytest.raises(ConfigError, match="dynamic needs seq_len"):
        logits(model, tokens(LENGTH))


def test_the_modules_come_back_even_after_an_exception() -> None:
    model, row = tiny("gemma3_text"), tokens(LENGTH)
    modules = [child for _, _, child in rotary_modules(model)]
    own = logits(model, row)
    lent = exact_rotation(model, rope_from_config(model.config))
    with pytest.raises(IndexError), lent:
        logits(model, torch.tensor([[10**6]]))  # no such token
    assert [child for _, _, child in rotary_modules(model)] == modules
    assert torch.equal(logits(model, row), own)


def test_a_rotation_lent_within_another_is_the_inner_one() -> None:
    model, row = tiny("llama"), tokens(LENGTH)
    own = logits(model, row)
    two, four = (
        rope_from_config(tiny_config("llama", {"rope_type": "linear", "factor": factor}))
        for factor in (2.0, 4.0)
    )
    with exact_rotation(model, two):
        outer = logits(model, row)
        with exact_rotation(model, four):
            inner = logits(model, row)
        assert torch.equal(logits(model, row), outer)
    with exact_rotation(model, four):
        assert torch.equal(logits(model, row), inner)
    assert (inner - outer).abs().max() > SEEN
    assert torch.equal(logits(model, row), own)


def test_a_model_is_not_rebuilt_while_its_rotation_is_lent() -> None:
    model = tiny("llama")
    with (
        exact_rotation(model, rope_from_config(model.config)),
        pytest.raises(UnsupportedModelError, match="Leave that block first"),
    ):
        rebuild_rotation(model, model.config)


def test_a_family_without_a_rotary_module_is_refused() -> None:
    sizes = dict(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    config = CONFIG_MAPPING["gptj"](**sizes, bos_token_id=None, eos_token_id=None)
    lent = exact_rotation(AutoModelForCausalLM.from_config(config), rope_from_config(config))
    with (
        pytest.raises(UnsupportedModelError, match="'gptj' does not rotate through a rotary"),
        lent,
    ):
        pass


def test_an_unknown_family_is_refused_though_its_config_is_read() -> None:
    config = CONFIG_MAPPING["arcee"](**SHAPE)
    ropes = rope_from_config(config)
    assert ropes["full_attention"].layout is None
    lent = exact_rotation(AutoModelForCausalLM.from_config(config), ropes)
    with pytest.raises(UnsupportedModelError, match="'arcee' is not known to longspan"), lent:
        pass


def test_a_vision_towers_rotation_is_left_alone() -> None:
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = CONFIG_MAPPING["gemma4"](
        text_config=tiny_config("gemma4_text", pad_token_id=0).to_dict(),
        vision_config=dict(**vision, num_key_value_heads=2, head_dim=8, global_head_dim=8),
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    seeing = model.model.vision_tower.encoder.rotary_emb
    frequencies = seeing.inv_freq.clone()
    assert [name for _, name, _ in rotary_modules(model)] == ["rotary_emb"]
    with exact_rotation(model, rope_from_config(config)):
        assert model.model.vision_tower.encoder.rotary_emb is seeing
    rebuild_rotation(model, config.get_text_config())
    assert model.model.vision_tower.encoder.rotary_emb is seeing
    assert torch.equal(seeing.inv_freq, frequencies)
