"""What any training loop needs: learning rates, kept states, skipped positions, packed rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn

from longspan.adapters import register
from longspan.errors import ConfigError, InputError, OutputError
from longspan.training.loss import CausalLoss
from longspan.training.packing import IGNORED, pack
from longspan.training.pose import skipping_positions
from longspan.training.schedule import learning_rate
from longspan.training.state import load_training, read_notes, save_training
from tiny_models import FAMILIES, tiny_model, tokens

FLOAT32 = 2e-5

# learning rates


def test_the_warmup_grows_evenly_and_ends_at_the_peak():
    how: dict[str, Any] = dict(peak=2e-5, warmup_steps=20, steps=200, schedule="constant")
    rates = [learning_rate(step, **how) for step in range(200)]
    assert rates[:20] == pytest.approx([2e-5 * n / 20 for n in range(1, 21)])
    assert set(rates[19:]) == {2e-5}


def test_the_cosine_falls_from_the_peak_towards_the_floor():
    how: dict[str, Any] = dict(peak=3.0, warmup_steps=2, steps=12, schedule="cosine", floor=1.0)
    rates = [learning_rate(step, **how) for step in range(12)]
    naive = [1 + 2 * 0.5 * (1 + math.cos(math.pi * gone / 10)) for gone in range(10)]
    assert rates == pytest.approx([1.5, 3.0, *naive])
    assert rates[-1] > 1.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": 10}, "step must be from 0 to 9"),
        ({"step": -1}, "step must be from 0 to 9"),
        ({"steps": 0}, "steps must be ≥ 1"),
        ({"warmup_steps": 11}, r"from 0 to steps \(10\), got 11"),
        ({"warmup_steps": -1}, "got -1"),
        ({"peak": 0.0}, "must be > 0, got 0"),
        ({"peak": math.nan}, "must be > 0, got nan"),
        ({"floor": 2.0}, "floor must be from 0 to the peak 1"),
        ({"schedule": "linear"}, "one of constant, cosine, got 'linear'"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(changed: dict[str, Any], said: str):
    how = dict(step=0, peak=1.0, warmup_steps=1, steps=10, schedule="constant")
    with pytest.raises(ConfigError, match=said):
        learning_rate(**{**how, **changed})


# kept states


def trainee() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network with dropout, so that the random state matters, and one frozen weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    trained = [one for one in model.parameters() if one.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, stop: int):
    model, optimizer = trainee()
    train(model, optimizer, stop)
    save_training(tmp_path / "s.safetensors", model, optimizer, stop, {"loss": "1.5"})
    train(model, optimizer, 6 - stop)

    again, its_optimizer = trainee()
    train(again, its_optimizer, 2)  # whatever it was before is replaced
    assert load_training(tmp_path / "s.safetensors", again, its_optimizer) == (
        stop,
        {"loss": "1.5"},
    )
    train(again, its_optimizer, 6 - stop)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_trained_weights_are_kept_and_notes_read_without_them(tmp_path: Path):
    model, optimizer = trainee()
    train(model, optimizer, 1)
    save_training(tmp_path / "s.safetensors", model, optimizer, 1, {"a": "b"})
    kept = load_file(tmp_path / "s.safetensors")
    assert "weight/0.weight" in kept
    assert "weight/0.bias" not in kept
    assert kept["rng"].dtype == torch.uint8
    assert {"optimizer/exp_avg/0.weight", "optimizer/step/2.bias"} <= kept.keys()
    assert read_notes(tmp_path / "s.safetensors") == (1, {"a": "b"})
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_weights_that_are_tied_are_kept_once(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    save_training(tmp_path / "s.safetensors", model, optimizer, 1, {})
    assert load_training(tmp_path / "s.safetensors", model, optimizer) == (1, {})


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def foreign(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path)


def without_random_state(path: Path) -> None:
    kept = load_file(path)
    del kept["rng"]
    metadata = {"format": "longspan training 1", "step": "1", "notes": "{}"}
    save_file(kept, path, metadata=metadata)


def without_step(path: Path) -> None:
    save_file(load_file(path), path, metadata={"format": "longspan training 1"})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (damaged, "is damaged"),
        (foreign, "is not a training state of longspan: its format is None"),
        (without_random_state, "lacks the random state"),
        (without_step, "is damaged"),
        (Path.unlink, "there is no training state"),
    ],
)
def test_a_damaged_or_foreign_state_is_refused(tmp_path: Path, spoil: Any, said: str):
    model, optimizer = trainee()
    path = tmp_path / "s.safetensors"
    save_training(path, model, optimizer, 1, {})
    spoil(path)
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(InputError, match=said):
        load_training(path, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_state_of_another_model_is_refused_and_changes_nothing(tmp_path: Path):
    model, optimizer = trainee()
    train(model, optimizer, 1)
    save_training(tmp_path / "s.safetensors", model, optimizer, 1, {})
    other = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 5))
    other[0].bias.requires_grad_(False)
    before = [one.clone() for one in other.parameters()]
    its_optimizer = torch.optim.AdamW([one for one in other.parameters() if one.requires_grad])
    with pytest.raises(InputError, match=r"2\.\w+ is \[4(, 4)?\], the model has \[5"):
        load_training(tmp_path / "s.safetensors", other, its_optimizer)
    assert all(map(torch.equal, before, other.parameters()))

    model[0].bias.requires_grad_(True)
    its_optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match=r"0\.bias, only the model trains it"):
        load_training(tmp_path / "s.safetensors", model, its_optimizer)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path):
    model, _ = trainee()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="has 4 parameters, the model trains 3"):
        save_training(tmp_path / "s.safetensors", model, optimizer, 1, {})


def test_a_state_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: Any):
    model, optimizer = trainee()
    path = tmp_path / "s.safetensors"
    save_training(path, model, optimizer, 1, {})
    kept = path.read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longspan.training.state.save_file", fails)
    with pytest.raises(OutputError, match="No space left"):
        save_training(path, model, optimizer, 2, {})
    assert path.read_bytes() == kept
    assert [one.name for one in tmp_path.iterdir()] == ["s.safetensors"]


# skipped positions


def test_positions_skip_once_and_stay_below_the_target():
    generator = Generator().manual_seed(0)
    cuts, last = set(), set()
    for _ in range(3000):
        positions = skipping_positions(6, 9, generator)
        assert positions.dtype == torch.int64
        assert positions[0] == 0
        steps = positions.diff()
        jumps = (steps != 1).nonzero().flatten().tolist()
        assert len(jumps) <= 1
        assert (steps >= 1).all()
        cuts |= set(jumps)
        last.add(int(positions[-1]))
    assert cuts == {0, 1, 2, 3, 4}  # every place is cut at some time
    assert last == {5, 6, 7, 8}  # every jump from 0 to the target's end happens


def test_positions_are_those_of_the_generator():
    one = skipping_positions(64, 4096, Generator().manual_seed(3))
    assert torch.equal(one, skipping_positions(64, 4096, Generator().manual_seed(3)))
    assert not torch.equal(one, skipping_positions(64, 4096, Generator().manual_seed(4)))


@pytest.mark.parametrize(("length", "to"), [(1, 8), (8, 8), (9, 8)])
def test_nothing_to_skip_is_refused(length: int, to: int):
    with pytest.raises(ConfigError, match=f"rows of {length} and a target of {to}"):
        skipping_positions(length, to, Generator())


# who sees whom, and the loss


def naive_nll(model: Any, input_ids: Tensor, positions: Tensor) -> Tensor:
    """−ln p of every next token of a tiny Llama, from its weights, in float64 loops by layer."""
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    config = model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    inv_freq = [10_000.0 ** (-2 * i / size) for i in range(size // 2)]
    angles = positions.double()[:, None] * torch.tensor(inv_freq, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def turned(x: Tensor) -> Tensor:  # [T, heads, size]
        low, high = x[..., : size // 2], x[..., size // 2 :]
        c, s = cos[:, None], sin[:, None]
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    x = weights["model.embed_tokens.weight"][input_ids]
    seen = torch.tril(torch.ones(len(x), len(x), dtype=torch.bool))
    for layer in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        h = norm(x, own["input_layernorm.weight"])
        q = turned((h @ own["self_attn.q_proj.weight"].T).view(len(x), heads, size))
        k = turned((h @ own["self_attn.k_proj.weight"].T).view(len(x), groups, size))
        v = (h @ own["self_attn.v_proj.weight"].T).view(len(x), groups, size)
        out = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = q[:, head] @ k[:, group].T / math.sqrt(size)
            out.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, group])
        x = x + torch.cat(out, -1) @ own["self_attn.o_proj.weight"].T
        h = norm(x, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(h @ own["mlp.gate_proj.weight"].T)
        up = h @ own["mlp.up_proj.weight"].T
        x = x + (gate * up) @ own["mlp.down_proj.weight"].T
    logits = norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    return -logits[:-1].log_softmax(-1).gather(1, input_ids[1:, None])[:, 0]


ATTENTIONS = ["eager", "sdpa", "longspan"]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_under_skipped_positions_every_earlier_token_is_seen(attention: str):
    register()
    model = tiny_model(attn_implementation=attention)
    row = tokens(24)
    positions = skipping_positions(24, 200, Generator().manual_seed(1))
    assert int((positions.diff() != 1).sum()) == 1
    naive = naive_nll(model, row[0], positions)
    loss = CausalLoss(model)
    found = loss(row, row[:, 1:], positions[None], torch.ones_like(row))[0]
    torch.testing.assert_close(found.double(), naive, atol=FLOAT32, rtol=0)
    cut = int((positions.diff() != 1).nonzero()) + 1
    alone = loss(row, row[:, 1:], positions[None])[0]  # what transformers makes of it, unasked
    if attention != "longspan":  # which looks for positions that start again
        assert (alone[cut:] - naive[cut:]).abs().max() > 0.01


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3"])
@pytest.mark.parametrize("chunk", [3, 5, 1024])
def test_the_loss_in_chunks_is_the_loss_and_so_is_its_gradient(family: str, chunk: int):
    model, row = tiny_model(family), tokens(16)
    positions = torch.arange(16)[None]
    logits = model(row, use_cache=False).logits[:, :-1].float()
    whole = torch.nn.functional.cross_entropy(logits.transpose(1, 2), row[:, 1:], reduction="none")
    whole.sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    found = CausalLoss(model, chunk)(row, row[:, 1:], positions, torch.ones_like(row))
    torch.testing.assert_close(found, whole, atol=FLOAT32, rtol=0)
    found.sum().backward()
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, gradients[name], atol=1e-3, rtol=1e-4)


def test_all_logits_never_exist_not_even_in_the_backward_pass():
    model = tiny_model(vocab_size=4096)
    row = tokens(64)
    widest = 0

    def kept(tensor: Tensor) -> Tensor:
        nonlocal widest
        if tensor.dim() > 1 and 4096 in tensor.shape and not isinstance(tensor, nn.Parameter):
            widest = max(widest, tensor.numel() // 4096)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        loss = CausalLoss(model, 8)(row, row[:, 1:], torch.arange(64)[None])
    loss.sum().backward()
    assert widest <= 32  # the weights of embedding and head, [4096, 32]; no [64, 4096] logits


# packed rows


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_packed_copies_of_one_document_give_equal_logits(attention: str, family: str):
    register()
    model = tiny_model(family, attn_implementation=attention)
    document = tokens(20)[0].tolist()
    rows = pack([document, tokens(7, seed=5)[0].tolist(), document, document], 67)
    logits = model(rows.input_ids, position_ids=rows.positions, use_cache=False).logits[0]
    alone = model(torch.tensor([document]), use_cache=False).logits[0]
    for start in (0, 27, 47):
        torch.testing.assert_close(logits[start : start + 20], alone, atol=1e-4, rtol=0)
    unaware = model(rows.input_ids, use_cache=False).logits[0]
    assert (unaware[27:47] - alone).abs().max() > 0.01


def test_a_document_goes_on_in_the_next_row_as_one_of_its_own():
    rows = pack([[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]], 4)
    assert rows.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert rows.documents.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert rows.targets().tolist() == [[2, 3, IGNORED], [6, 7, 8]]


def test_documents_that_may_see_each_other_run_on():
    rows = pack([[1, 2], [3, 4]], 4, document_mask=False)
    assert rows.positions.tolist() == [[0, 1, 2, 3]]
    assert rows.targets().tolist() == [[2, 3, 4]]


def test_positions_that_start_again_without_a_mask_are_refused():
    with pytest.raises(ConfigError, match="need document_mask=True"):
        pack([[1, 2], [3, 4]], 4, document_mask=False, restart_positions=True)
    with pytest.raises(ConfigError, match="needs positions that start again"):
        pack([[1, 2], [3, 4]], 4, restart_positions=False)


def test_documents_that_fill_no_row_are_refused():
    with pytest.raises(InputError, match="3 tokens together, less than one row of 4"):
        pack([[1, 2], [3]], 4)
    with pytest.raises(InputError, match="is empty"):
        pack([[1, 2, 3, 4], []], 4)
    with pytest.raises(ConfigError, match="length must be ≥ 2"):
        pack([[1, 2]], 1)


def test_an_ignored_target_costs_nothing():
    model = tiny_model()
    rows = pack([[1, 2, 3, 4], [5, 6, 7, 8]], 8)
    found = CausalLoss(model)(rows.input_ids, rows.targets(), rows.positions)
    assert found[0, 3] == 0
    assert (found[0, [0, 1, 2, 4, 5, 6]] > 0).all()
