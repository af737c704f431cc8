"""An extended model that is trained: same numbers however it is cut up, kept, merged or resumed."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import longspan
from fresh import printed
from longspan.adapters.adapter_rope import ROPE, SETTINGS, WEIGHTS, AdapterRope, adapter_of
from longspan.adapters.load import load_model, read_config
from longspan.adapters.lora import norms, projections
from longspan.adapters.rope import rope_from_config
from longspan.errors import (
    ConfigError,
    InputError,
    NumericalError,
    OutputError,
    UnsupportedModelError,
)
from longspan.tools.evaluate import evaluate
from longspan.tools.extend import extend
from longspan.tools.finetune import finetune
from longspan.tools.finetune_loop import FineTuneLoop
from longspan.tools.finetune_model import Trainable
from longspan.tools.finetune_results import finetuning_from_json, finetuning_to_json
from longspan.tools.finetune_rows import Rows, hold_out, training_rows
from longspan.tools.finetune_saving import save_finetuned
from longspan.tools.texts import Text
from test_extend import tokenizer as words
from tiny_models import TRAINED, ByteTokenizer, tiny_model, tokens

TO = 2 * TRAINED
EQUAL = 2e-5
SAVED = 1e-5


def text(letters: int = 3000, seed: int = 0, name: str = "text") -> Text:
    content = "".join(random.Random(seed).choices("abcdefgh ", k=letters))
    return Text(name, content, f"sha-{seed}")


TEXTS = [text()]


def tuned(model: Any = None, texts: Any = None, **how: Any) -> Any:
    settings: dict[str, Any] = dict(to=TO, steps=3, learning_rate=1e-3, warmup_steps=0)
    return finetune(model or tiny_model(), ByteTokenizer(), texts or TEXTS, **{**settings, **how})


def losses(found: Any) -> list[float]:
    return [step.loss for step in found.result.curve]


def norms_of(found: Any) -> list[float]:
    return [step.grad_norm for step in found.result.curve]


def weights_hash(model: Any) -> str:
    digest = hashlib.sha256()
    for name, one in sorted(model.named_parameters()):
        digest.update(name.encode() + one.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_a_training_is_that_of_a_naive_loop():
    found = tuned(steps=4, weight_decay=0.1, warmup_steps=2, schedule="cosine")
    rows = training_rows([ByteTokenizer().encode(TEXTS[0].content)], TO, None, packing=False)
    order = Rows(packed=rows, to=None, seed=0)
    model = extend(tiny_model(), to=TO).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    rates = [0.5e-3, 1e-3, 1e-3, 0.5e-3]
    naive = []
    for step, rate in enumerate(rates):
        row = rows.input_ids[order.place(step)][None]
        logits = model(row, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1], row[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        naive.append((loss.item(), float(norm)))
    assert losses(found) == pytest.approx([loss for loss, _ in naive], abs=1e-4)
    curve = found.result.curve
    assert [step.learning_rate for step in curve] == pytest.approx(rates)
    assert [step.grad_norm for step in curve] == pytest.approx([n for _, n in naive], rel=1e-3)
    row = tokens(TO)
    torch.testing.assert_close(
        found.model(row).logits, model.eval()(row).logits, atol=1e-3, rtol=1e-3
    )


def test_the_given_model_stays_and_the_trained_one_reaches_further():
    model, row = tiny_model(), tokens(40)
    before, content = weights_hash(model), model.config.to_dict()
    logits, random_state = model(row).logits, torch.get_rng_state()
    found = tuned(model)
    assert weights_hash(model) == before
    assert model.config.to_dict() == content
    assert torch.equal(model(row).logits, logits)
    assert all(one.requires_grad and one.grad is None for one in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert found.model.config.max_position_embeddings == TO
    assert rope_from_config(found.model.config) == found.planned.ropes
    assert not found.model.training
    assert losses(tuned(steps=12))[-1] < losses(found)[0] - 0.3
    assert longspan.finetune is finetune


CHANGES: list[dict[str, Any]] = [
    {"method": "linear"},
    {"factor": 4.0},
    {"learning_rate": 2e-3},
    {"warmup_steps": 3},
    {"schedule": "cosine"},
    {"weight_decay": 0.5},
    {"max_grad_norm": 0.1},
    {"max_grad_norm": None},
    {"seed": 1},
    {"batch_size": 2},
    {"gradient_accumulation": 2},
    {"pose": True, "length": 32},
    {"pose": True},
    {"lora_rank": 2},
    {"lora_rank": 4},
    {"steps": 2},
    {"evaluate_at": (3,)},  # what is held out is not trained on
]


@pytest.fixture(scope="module")
def plain_hash() -> str:
    return weights_hash(tuned().model)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_option_changes_the_trained_model(change: dict[str, Any], plain_hash: str):
    assert weights_hash(tuned(**change).model) != plain_hash


def test_options_of_the_work_alone_change_nothing_but_it(plain_hash: str):
    assert weights_hash(tuned(save_every=1).model) == plain_hash
    told: list[tuple[str, int, int]] = []
    found = tuned(
        gradient_checkpointing=True, progress=lambda *what: told.append(what), name="mine"
    )
    assert weights_hash(found.model) == plain_hash
    assert not found.model.is_activation_checkpointing
    assert found.result.protocol.model == "mine"
    assert [done for _, done, _ in told] == [0, 1, 2, 3]
    assert told[-1] == ("done", 3, 3)
    assert told[1][0].startswith("training: step 2 of 3, loss ")


def test_gradient_checkpointing_keeps_less(monkeypatch: Any):
    kept = {}
    for checkpointing in (False, True):
        sizes: list[int] = []

        def count(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            tuned(steps=1, gradient_checkpointing=checkpointing)
        kept[checkpointing] = len(sizes)
    assert kept[True] < kept[False] / 1.5


def test_batches_and_accumulation_are_one_step_cut_up():
    whole = tuned(batch_size=4, pose=True, length=32)
    for cut in ({"batch_size": 2, "gradient_accumulation": 2}, {"gradient_accumulation": 4}):
        parts = tuned(pose=True, length=32, **cut)
        assert losses(parts) == pytest.approx(losses(whole), abs=EQUAL)
        assert norms_of(parts) == pytest.approx(norms_of(whole), rel=1e-4)
        assert parts.result.protocol == whole.result.protocol
    packed = [text(90 + 17 * n, n) for n in range(12)]
    whole = tuned(texts=packed, batch_size=2, packing=True)
    parts = tuned(texts=packed, gradient_accumulation=2, packing=True)
    assert losses(parts) == pytest.approx(losses(whole), abs=EQUAL)
    assert norms_of(parts) == pytest.approx(norms_of(whole), rel=1e-4)


def test_under_skipped_positions_every_earlier_token_is_seen():
    found = tuned(pose=True, length=32, method="linear", steps=1, seed=2)
    rows = training_rows([ByteTokenizer().encode(TEXTS[0].content)], 32, None, packing=False)
    batch = Rows(packed=rows, to=TO, seed=2).batch(0, 1)
    assert int((batch.position_ids.diff() > 1).sum()) == 1
    seen = torch.tril(torch.ones(1, 1, 32, 32, dtype=torch.bool))
    model = extend(tiny_model(attn_implementation="eager"), to=TO, method="linear")
    added = torch.zeros(1, 1, 32, 32).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = model(batch.input_ids, position_ids=batch.position_ids, attention_mask=added).logits
    wanted = F.cross_entropy(logits[0, :-1], batch.input_ids[0, 1:])
    assert losses(found)[0] == pytest.approx(wanted.item(), abs=1e-4)


def test_packing_keeps_short_texts_apart():
    short = [text(50 + 6 * n, n) for n in range(12)]
    found = tuned(texts=short, packing=True, steps=1)
    rows = training_rows(
        [ByteTokenizer().encode(one.content) for one in short], TO, None, packing=True
    )
    place = Rows(packed=rows, to=None, seed=0).place(0)
    model = extend(tiny_model(), to=TO)
    total, count = 0.0, 0
    for document in rows.documents[place].unique():
        row = rows.input_ids[place][rows.documents[place] == document][None]
        if row.shape[1] > 1:
            logits = model(row).logits[0, :-1]
            total += F.cross_entropy(logits, row[0, 1:], reduction="sum").item()
            count += row.shape[1] - 1
    assert losses(found)[0] == pytest.approx(total / count, abs=1e-4)
    with pytest.raises(InputError, match="128 tokens"):
        tuned(texts=short)


@pytest.mark.parametrize("longest", [TRAINED, TRAINED + 1])
def test_packed_texts_that_stay_within_the_trained_length_are_refused(longest: int):
    packed = [text(longest, n) for n in range(4)]  # the first begins a row, and is in it whole
    if longest > TRAINED:
        assert len(losses(tuned(texts=packed, packing=True, steps=1))) == 1
        return
    with pytest.raises(ConfigError, match="at most 64 tokens never reach the positions from 64 on"):
        tuned(texts=packed, packing=True)


def test_an_infinite_norm_never_clips_and_is_kept(tmp_path: Path):
    found = tuned(max_grad_norm=float("inf"), steps=2, save_every=1, state_dir=tmp_path)
    assert found.result.protocol.max_grad_norm is None
    unclipped = tuned(max_grad_norm=None, steps=2)
    assert weights_hash(found.model) == weights_hash(unclipped.model)


def test_every_row_comes_once_before_one_comes_again():
    rows = training_rows([list(range(100))], 10, None, packing=False)
    order = [Rows(packed=rows, to=None, seed=3).place(number) for number in range(20)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    batch = Rows(packed=rows, to=50, seed=3).batch(4, 2)
    one = Rows(packed=rows, to=50, seed=3).batch(5, 1)
    assert torch.equal(batch.input_ids[1:], one.input_ids)
    assert torch.equal(batch.position_ids[1:], one.position_ids)


# held-out documents


def test_held_out_documents_are_measured_as_evaluate_measures_them():
    found = tuned(evaluate_at=(0, 2, 3), evaluation_documents=2, evaluation_length=100, bucket=16)
    assert [one.step for one in found.result.evaluations] == [0, 2, 3]
    ids = ByteTokenizer().encode(TEXTS[0].content)
    last = Text("last", "".join(map(chr, ids[-200:])), "")
    for when, model in ((0, extend(tiny_model(), to=TO)), (-1, found.model)):
        measured = evaluate(
            model, ByteTokenizer(), [last], length=100, methods=["none"], bucket=16, documents=2
        ).methods[0]
        own = found.result.evaluations[when]
        assert own.nll == pytest.approx(measured.nll, abs=EQUAL)
        assert own.tokens_scored == measured.tokens_scored == 198
        assert [one.nll for one in own.buckets] == pytest.approx(
            [one.nll for one in measured.buckets], abs=EQUAL
        )
    assert found.result.evaluations[0].nll != found.result.evaluations[1].nll


def test_training_never_sees_what_is_held_out():
    ids = list(range(1000))
    left, held = hold_out([ids, ids[:30]], 40, 3)
    assert held == [ids[880:920], ids[920:960], ids[960:]]
    assert left == [ids[:880], ids[:30]]
    seen = {int(one) for one in training_rows(left, 40, None, packing=False).input_ids.flatten()}
    assert not seen & {one for row in held for one in row}
    with pytest.raises(InputError, match="2 documents of 600 tokens are to be held out"):
        hold_out([ids], 600, 2)


def test_bos_starts_every_row_and_is_never_a_target():
    found = finetune(
        tiny_model(), ByteTokenizer(bos_token_id=2), TEXTS, to=TO, steps=1, evaluate_at=[1]
    )
    assert found.result.protocol.bos
    rows = training_rows([list(range(3, 99))], 10, 2, packing=False)
    assert (rows.input_ids[:, 0] == 2).all()
    assert (rows.input_ids[:, 1:] != 2).all()
    assert found.result.evaluations[0].tokens_scored == TO - 1


# kept and resumed


def stop_at(monkeypatch: Any, step: int, where: str) -> None:
    """Interrupts as a key would: before, within or after the update of a step."""
    method = {"before": "_gradients", "within": "_clipped_norm", "after": "_tell"}[where]
    own = getattr(FineTuneLoop, method)

    def interrupted(self: FineTuneLoop, *arguments: Any) -> Any:
        if self.done == step:
            raise KeyboardInterrupt
        return own(self, *arguments)

    monkeypatch.setattr(FineTuneLoop, method, interrupted)


@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize(
    ("step", "where"), [(0, "before"), (1, "before"), (2, "within"), (3, "after"), (4, "before")]
)
def test_an_interrupted_training_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: Any, step: int, where: str, lora_rank: int | None
):
    how: dict[str, Any] = dict(
        steps=5, pose=True, length=32, lora_rank=lora_rank, evaluate_at=(0, 3, 5), save_every=2
    )
    how["model"] = tiny_model(attention_dropout=0.2)  # the random state matters
    whole = tuned(**how)
    with monkeypatch.context() as patched:
        stop_at(patched, step, where)
        with pytest.raises(KeyboardInterrupt):
            tuned(**how, state_dir=tmp_path)
    again: list[str] = []
    found = tuned(**how, state_dir=tmp_path, progress=lambda what, *_: again.append(what))
    assert weights_hash(found.model) == weights_hash(whole.model)
    assert losses(found) == losses(whole)
    assert [one.buckets for one in found.result.evaluations] == [
        one.buckets for one in whole.result.evaluations
    ]
    trained_again = [what for what in again if what.startswith("training")]
    assert len(trained_again) == 5 - step  # nothing that was done is done again
    assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"]


def test_a_kill_in_mid_update_goes_on_from_the_last_kept_state(tmp_path: Path, monkeypatch: Any):
    whole = tuned(steps=5)
    with monkeypatch.context() as patched:
        own, count = torch.optim.AdamW.step, iter(range(9))

        def killed(self: Any, *arguments: Any, **named: Any) -> Any:
            result = own(self, *arguments, **named)
            if next(count) == 3:
                raise KeyboardInterrupt  # some weights are updated, the step is not counted
            return result

        patched.setattr(torch.optim.AdamW, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            tuned(steps=5, state_dir=tmp_path, save_every=2)
    again: list[str] = []
    found = tuned(steps=5, state_dir=tmp_path, progress=lambda what, *_: again.append(what))
    assert weights_hash(found.model) == weights_hash(whole.model)
    assert again[0].startswith("training: step 3 of 5")


def test_a_state_of_another_training_is_refused(tmp_path: Path):
    tuned(steps=1, state_dir=tmp_path)
    kept = (tmp_path / "training.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"holds 1 steps of another training: seed is 0, now 1"):
        tuned(steps=1, seed=1, state_dir=tmp_path)
    with pytest.raises(ConfigError, match="another training: weights is"):
        tuned(tiny_model(initializer_range=0.2), steps=1, state_dir=tmp_path)
    assert (tmp_path / "training.safetensors").read_bytes() == kept
    (tmp_path / "training.safetensors").write_bytes(kept[:100])
    with pytest.raises(InputError, match="is damaged"):
        tuned(steps=1, state_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        tuned(steps=1, state_dir=tmp_path / "file")


def test_a_probe_that_another_process_took_away_is_no_matter(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr("longspan.tools.finetune_state.write_text", lambda *_: None)
    assert len(losses(tuned(steps=1, state_dir=tmp_path))) == 1


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_number_that_is_none_stops_the_training_and_names_the_step(
    tmp_path: Path, monkeypatch: Any, broken: str
):
    own = FineTuneLoop._losses

    def losing(self: FineTuneLoop, batch: Any) -> torch.Tensor:
        found = own(self, batch)
        if self.done < 3:
            return found
        return found * torch.nan if broken == "loss" else (found * 0).sqrt()

    monkeypatch.setattr(FineTuneLoop, "_losses", losing)
    said = "the loss of step 3 is nan" if broken == "loss" else "the gradient's norm at step 3"
    with pytest.raises(NumericalError, match=said):
        tuned(steps=5, state_dir=tmp_path, save_every=2)
    monkeypatch.undo()
    found = tuned(steps=5, state_dir=tmp_path)
    assert weights_hash(found.model) == weights_hash(tuned(steps=5).model)


# refused before anything runs


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"length": 32}, r"rows of 32 tokens never reach .* length=128, or pose=True"),
        ({"length": 129}, "length must be at most 128"),
        ({"length": TO, "pose": True}, "but length is 128"),
        ({"length": 1, "pose": True}, "length must be ≥ 2"),
        ({"pose": True, "packing": True}, "do not go together"),
        ({"steps": 0}, "steps must be ≥ 1"),
        ({"warmup_steps": 4}, "warmup_steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"gradient_accumulation": 0}, "gradient_accumulation"),
        ({"save_every": 0}, "save_every"),
        ({"learning_rate": -1.0}, "learning rate must be > 0"),
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm must be > 0, got 0\.0\. inf never clips"),
        ({"max_grad_norm": float("-inf")}, "inf never clips"),
        ({"max_grad_norm": float("nan")}, "inf never clips"),
        ({"evaluation_length": 100}, r"evaluation_length=100 is .* Give evaluate_at"),
        ({"evaluation_documents": 2}, r"evaluation_documents=2 is .* Give evaluate_at"),
        ({"bucket": 16}, r"bucket=16 is .* Give evaluate_at"),
        ({"lora_rank": 0}, "lora_rank must be a whole number ≥ 1"),
        ({"evaluate_at": (4,)}, "from 0 to 3"),
        ({"evaluate_at": (-1,)}, "from 0 to 3"),
        ({"evaluate_at": (0,), "evaluation_length": 64}, "above the trained length 64"),
        ({"evaluate_at": (0,), "evaluation_length": 129}, "at most 128"),
        ({"evaluate_at": (0,), "evaluation_documents": 0}, "evaluation_documents"),
        ({"to": 64}, "to must be above 64"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(wrong: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        tuned(**wrong)


def test_weights_too_coarse_to_train_are_refused():
    with pytest.raises(ConfigError, match=r"torch\.bfloat16, in which an update of 2e-5 is"):
        tuned(tiny_model().bfloat16())


def test_attention_that_takes_a_skip_for_a_new_document_is_refused():
    model = tiny_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match="takes a skip in positions for a new document"):
        tuned(model, pose=True, length=32)


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(InputError, match="gives token 104, but the model's vocabulary has 100"):
        tuned(tiny_model(vocab_size=100))


# adapters


FAMILIES_TO_ADAPT = ["llama", "qwen3", "gemma3", "gpt_neox", "cohere"]


@pytest.mark.parametrize("family", FAMILIES_TO_ADAPT)
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_train_projections_norms_and_embedding_and_nothing_else(
    family: str, tied: bool, tmp_path: Path
):
    model = tiny_model(family, tie_word_embeddings=tied)
    if family == "gpt_neox" and tied:
        with pytest.raises(UnsupportedModelError, match="which peft would separate"):
            tuned(model, lora_rank=2, method="linear")
        return
    found = tuned(model, lora_rank=2, method="linear")
    before = dict(model.named_parameters())
    changed = {
        name.rpartition(".")[0]
        for name, one in found.model.named_parameters()
        if not torch.equal(one, before[name])
    }
    own = {*projections(model), *norms(model)}
    own.add(next(name for name, m in model.named_modules() if m is model.get_input_embeddings()))
    assert changed == own
    head, first = found.model.get_output_embeddings(), found.model.get_input_embeddings()
    assert (head.weight is first.weight) == tied
    save_finetuned(found, words(), tmp_path / "out")
    again, _ = load_model(tmp_path / "out")
    row = tokens(TO)
    torch.testing.assert_close(again(row).logits, found.model(row).logits, atol=SAVED, rtol=0)


def test_what_cannot_be_adapted_is_refused(monkeypatch: Any):
    monkeypatch.setattr("longspan.adapters.lora.PROJECTIONS", frozenset({"query"}))
    with pytest.raises(UnsupportedModelError, match="attention with linear maps called query"):
        tuned(lora_rank=2)


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Saves a base, an adapter trained on it at factor 2, and the whole merged model."""
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    words().save_pretrained(tmp_path / "base")
    model, tokenizer = load_model(tmp_path / "base")
    found = tuned(model, lora_rank=2, learning_rate=1e-2, name=str(tmp_path / "base"))
    save_finetuned(found, tokenizer, tmp_path / "adapter", adapter=True)
    save_finetuned(found, tokenizer, tmp_path / "merged")
    return found


def test_case_28_an_adapter_on_the_plain_base_brings_its_scaling(tmp_path: Path, saved: Any):
    row = tokens(TO)
    wanted = saved.model(row).logits
    found, tokenizer = load_model(tmp_path / "adapter")
    torch.testing.assert_close(found(row).logits, wanted, atol=SAVED, rtol=0)
    assert found.config.rope_parameters["factor"] == 2.0
    assert found.config.max_position_embeddings == TO
    assert rope_from_config(found.config) == saved.planned.ropes
    assert len(tokenizer) == len(words())
    plain, _ = load_model(tmp_path / "base")
    assert (plain(row).logits - wanted).abs().max() > 0.1
    assert rope_from_config(read_config(tmp_path / "adapter")) == saved.planned.ropes
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert names == sorted([SETTINGS, WEIGHTS, ROPE, "finetune.json"])


def test_plain_peft_reads_the_adapter_on_an_extended_base(tmp_path: Path, saved: Any):
    from peft import PeftModel

    from longspan.adapters.lora import without_peft_warnings

    base, row = extend(load_model(tmp_path / "base")[0], to=TO), tokens(TO)
    with without_peft_warnings():
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(adapted(row).logits, saved.model(row).logits, atol=EQUAL, rtol=1e-5)


def test_a_base_with_another_scaling_is_refused_one_with_the_same_is_not(
    tmp_path: Path, saved: Any
):
    settings = json.loads((tmp_path / "adapter" / SETTINGS).read_text())
    plain = json.loads((tmp_path / "base" / "config.json").read_text())
    for factor, fits in ((4, False), (2, True)):
        longer = extend(tiny_model(), to=factor * TRAINED)
        longer.config.save_pretrained(tmp_path / "base")
        assert json.loads((tmp_path / "base" / "config.json").read_text()) != plain
        for read in (read_config, load_model):
            if fits:
                read(tmp_path / "adapter")
                continue
            with pytest.raises(ConfigError, match=r"\(yarn, factor 4\), but the adapter was"):
                read(tmp_path / "adapter")
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")


def test_an_adapter_without_its_rope_or_its_base_is_refused(tmp_path: Path, saved: Any):
    folder = tmp_path / "adapter"
    weights = load_file(folder / WEIGHTS)
    save_file(
        {name: one for name, one in weights.items() if "layers.0" not in name}, folder / WEIGHTS
    )
    with pytest.raises(InputError, match="does not fit its base model"):
        load_model(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors"):
        load_model(folder)
    (tmp_path / "base").rename(tmp_path / "gone")
    with pytest.raises(InputError, match=r"needs its base model: .*base_model_name_or_path of"):
        load_model(folder)
    rope = (folder / ROPE).read_text()
    (folder / ROPE).write_text(rope.replace("longspan adapter 1", "else"))
    with pytest.raises(InputError, match="is not of the form"):
        read_config(folder)
    (folder / ROPE).unlink()
    with pytest.raises(InputError, match="holds an adapter without longspan_adapter"):
        load_model(folder)


@pytest.fixture
def adapted() -> Any:
    return Trainable.of(extend(tiny_model(), to=TO), 2, 0).adapted


def named_base(adapted: Any, base: str) -> str:
    rope = AdapterRope(
        method="yarn", factor=2.0, to=TO, config={}, base_method="none", base_factor=1.0
    )
    return adapter_of(adapted, rope, base).settings["base_model_name_or_path"]


def test_an_adapter_names_its_base_so_that_it_is_found(
    tmp_path: Path, monkeypatch: Any, adapted: Any
):
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "zoo:rope", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "x.gguf").touch()
    for own in ("smollm2", "zoo:rope", "org/hub-id"):
        assert named_base(adapted, own) == own
    for place in ("folder", "x.gguf"):
        assert named_base(adapted, place) == str(tmp_path / place)
    assert named_base(adapted, "./smollm2") == str(tmp_path / "smollm2")


@pytest.mark.parametrize(
    ("own", "how", "wanted"),
    [
        ("org/own", {"name": "label"}, "org/own"),
        ("org/own", {"name": "label", "base": "org/base"}, "org/base"),
        ("", {"name": "label"}, "label"),
    ],
)
def test_the_name_in_the_protocol_is_no_base(own: str, how: dict[str, str], wanted: str):
    model = tiny_model()
    model.config._name_or_path = own
    found = tuned(model, lora_rank=2, steps=1, **how)
    assert found.result.protocol.model == "label"
    assert found.adapter.settings["base_model_name_or_path"] == wanted


# results and folders


def test_the_folder_loads_in_plain_transformers_in_a_fresh_process(tmp_path: Path, saved: Any):
    row = tokens(TO)
    script = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "merged")!r})
row = torch.tensor({row.tolist()})
with torch.no_grad():
    logits = model(row).logits
from safetensors.torch import save_file
save_file({{"logits": logits}}, {str(tmp_path / "logits")!r})
import sys
print("longspan" in sys.modules)
"""
    assert printed(script).split() == ["False"]
    logits = load_file(tmp_path / "logits")["logits"]
    torch.testing.assert_close(logits, saved.model(row).logits, atol=SAVED, rtol=0)


def test_a_result_is_read_back_from_its_folder(tmp_path: Path, saved: Any):
    for folder in ("merged", "adapter"):
        written = (tmp_path / folder / "finetune.json").read_text()
        assert finetuning_from_json(written) == saved.result
    found = tuned(evaluate_at=(0, 3), pose=True, length=32, evaluation_documents=2).result
    assert finetuning_from_json(finetuning_to_json(found)) == found
    with pytest.raises(OutputError, match="exists"):
        save_finetuned(saved, words(), tmp_path / "merged")
    save_finetuned(saved, words(), tmp_path / "merged", force=True)
    with pytest.raises(ConfigError, match="there is no adapter"):
        save_finetuned(tuned(steps=1), words(), tmp_path / "other", adapter=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged"]


def test_dynamic_ntk_trains_each_row_under_the_table_of_its_own_reach():
    found = tuned(method="dynamic", pose=True, length=32, steps=6)
    again = tuned(method="dynamic", pose=True, length=32, steps=3)
    assert losses(found)[:3] != losses(tuned(method="ntk", pose=True, length=32, steps=3))
    two = tuned(method="dynamic", pose=True, length=32, steps=3, batch_size=2)
    parts = tuned(method="dynamic", pose=True, length=32, steps=3, gradient_accumulation=2)
    assert losses(two) == pytest.approx(losses(parts), abs=EQUAL)
    assert losses(again) == losses(found)[:3]
