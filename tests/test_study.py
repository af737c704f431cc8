"""The study: same rows, same start, same steps; and what is read of the models."""

import json
import math

import pytest
import torch

from longspan.errors import ConfigError, InputError, NumericalError
from longspan.metrics.windows import strided_nll
from longspan.models import Decoder, load_decoder
from longspan.tools import study_training
from longspan.tools.study import study
from longspan.tools.study_budget import Budget
from longspan.tools.study_corpus import EMPTIED_EVERY, cut, train_tokenizer
from longspan.tools.study_plan import ModelSizes, variant, variants
from longspan.tools.study_reading import doubling_buckets, read
from longspan.tools.study_results import from_json, to_json
from longspan.tools.study_training import thinned
from longspan.tools.texts import Text

SIZES = ModelSizes(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SENTENCE = "the whale and the sea and the ship sail far over the deep while men look out"


@pytest.fixture(scope="module")
def text():
    generator = torch.Generator().manual_seed(0)
    words = SENTENCE.split()
    drawn = torch.randint(len(words), (900,), generator=generator)
    return Text("words", " ".join(words[i] for i in drawn), "0" * 64)


def run(text, **changes):
    settings = {
        "encodings": ["rope"],
        "length": 16,
        "reach": 4,
        "seeds": (0,),
        "steps": 4,
        "vocabulary": 256,
        "methods": ("yarn",),
        "batch_size": 2,
        "documents": 3,
        "sizes": SIZES,
        **changes,
    }
    return study([text], **settings)


# --- the rows ---


def corpus(tokens=1000, reach=20):
    return cut([range(tokens)], reach=reach, documents=None)


def test_documents_come_from_the_end_and_training_never_sees_them():
    found = cut([range(1000), range(2000, 2500)], reach=20, documents=None)
    assert found.held_out.shape == (4 + 2, 21)
    assert found.train.tolist() == [*range(900), *range(2000, 2450)]
    assert not set(found.train.tolist()) & set(found.held_out.flatten().tolist())


def test_rows_follow_on_each_other_so_that_memory_fits():
    before = corpus().rows(0, batch_size=3, length=8, seed=0)
    assert before.first
    for step in range(1, 36):
        rows = corpus().rows(step, batch_size=3, length=8, seed=0)
        assert rows.targets[:, :-1].equal(rows.inputs[:, 1:])
        assert not rows.first
        assert rows.inputs[:, 0].equal(before.targets[:, -1])
        before = rows


def test_every_pass_reads_the_whole_text_from_another_start():
    passes = [
        torch.cat(
            [corpus().rows(p * 37 + s, batch_size=3, length=8, seed=0).inputs for s in range(37)]
        )
        for p in range(2)
    ]
    for one in passes:
        assert len(one.unique()) == one.numel() == 3 * 37 * 8
    assert not passes[0].equal(passes[1])
    assert corpus().rows(37, batch_size=3, length=8, seed=0).first


def test_rows_are_a_function_of_step_and_seed():
    one, again, other = (corpus().rows(0, batch_size=3, length=8, seed=s).inputs for s in (1, 1, 3))
    assert one.equal(again)
    assert not one.equal(other)


def test_memory_is_emptied_where_a_training_may_stop():
    long = cut([range(50_000)], reach=20, documents=None)
    firsts = [long.rows(s, batch_size=2, length=8, seed=0).first for s in range(2 * EMPTIED_EVERY)]
    assert [step for step, first in enumerate(firsts) if first] == [0, EMPTIED_EVERY]


def test_texts_too_short_are_refused():
    with pytest.raises(InputError, match="not one document of 200"):
        corpus(reach=200)
    with pytest.raises(ConfigError, match="too few for 100 rows of 16"):
        corpus().rows(0, batch_size=100, length=16, seed=0)


def test_the_tokenizer_reads_any_text_back(text):
    for size in (256, 270):
        tokenizer = train_tokenizer([text], size)
        assert tokenizer.get_vocab_size() == size
        other = "naïve Ωmega\n  tabs\t"
        assert tokenizer.decode(tokenizer.encode(other).ids) == other
    assert len(train_tokenizer([text], 256).encode("Ωx").ids) == 3  # bytes
    with pytest.raises(ConfigError, match="must be ≥ 256"):
        train_tokenizer([text], 255)
    with pytest.raises(InputError, match="give only"):
        train_tokenizer([text], 5000)


# --- variants ---


def test_variants_by_name():
    assert variant("transformer_xl").remembers
    assert not variant("transformer_xl-memory").remembers
    assert variant("alibi+memory").remembers
    config = variant("alibi+memory").config(SIZES, vocabulary=300, length=16, memory_length=8)
    assert (config.position_encoding, config.memory_length, config.vocab_size) == ("alibi", 8, 300)
    assert (
        variant("rope").config(SIZES, vocabulary=300, length=16, memory_length=8).memory_length == 0
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "encodings is empty"),
        (["rope", "rope"], "named twice"),
        (["rpoe"], "Did you mean 'rope'"),
        (["sinusoidal+memory"], "cannot remember"),
        (["rope-memory"], "Call it 'rope'"),
        (["transformer_xl+memory"], "Call it 'transformer_xl'"),
        (["rope-memory+memory"], "unknown position encoding 'rope-memory'"),
    ],
)
def test_variants_that_make_no_sense(names, message):
    with pytest.raises(ConfigError, match=message):
        variants(names)


# --- readings ---


def decoder(name="rope", memory_length=0):
    one = variant(name).config(SIZES, vocabulary=256, length=8, memory_length=memory_length)
    made = Decoder(one, seed=1).eval()
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if not key.endswith("norm.weight"):
                weight.mul_(12)
    return made


def rows(count=2, length=33):
    return torch.randint(256, (count, length), generator=torch.Generator().manual_seed(0))


def naive_nll(made, row, start, place):
    """NLL of the token at `place`, given those from `start` on."""
    with torch.no_grad():
        return -made.logits(row[None, start:place])[0, -1].log_softmax(-1)[row[place]].item()


@pytest.mark.parametrize("name", ["rope", "alibi", "sinusoidal"])
def test_whole_sees_everything_before(name):
    made, found = decoder(name), read(decoder(name), rows(), "whole", 32)
    assert found.shape == (2, 32)
    for place in (1, 7, 32):
        assert found[1, place - 1].item() == pytest.approx(
            naive_nll(made, rows()[1], 0, place), abs=1e-5
        )


def test_segments_see_only_their_own_piece():
    made, found = decoder(), read(decoder(), rows(), "segments", 8)
    for place in (1, 8, 9, 16, 17, 32):
        start = (place - 1) // 8 * 8
        expected = naive_nll(made, rows()[0], start, place)
        assert found[0, place - 1].item() == pytest.approx(expected, abs=1e-5)


def test_windows_score_each_token_once_with_most_of_a_window_before_it():
    made, found = decoder(), read(decoder(), rows(), "window", 16)
    naive = strided_nll(
        lambda row: torch.tensor([naive_nll(made, row[0], 0, p) for p in range(1, row.shape[1])]),
        rows()[:1],
        window=16,
        stride=4,
        bos=False,
    )
    torch.testing.assert_close(found[0], naive, rtol=0, atol=1e-5)


def test_recurrent_equals_whole_where_memory_reaches_back_far_enough():
    made = decoder("transformer_xl", memory_length=32)
    recurrent = read(made, rows(), "recurrent", 8)
    torch.testing.assert_close(
        recurrent, read(made.with_memory(0), rows(), "whole", 32), rtol=0, atol=1e-5
    )
    short = read(decoder("transformer_xl", memory_length=4), rows(), "recurrent", 8)
    assert (short - recurrent)[:, 8:].abs().max() > 1e-3
    alone = read(made.with_memory(0), rows(), "segments", 8)
    torch.testing.assert_close(alone[:, :8], recurrent[:, :8])
    assert (alone - recurrent)[:, 8:].abs().max() > 1e-3


def test_likelihoods_that_are_not_numbers_are_refused():
    made = decoder()
    with torch.no_grad():
        made.norm.weight.fill_(math.nan)
    with pytest.raises(NumericalError, match="not finite under 'rope'"):
        read(made, rows(), "whole", 32)


def test_buckets_double_and_hold_every_target_once():
    nll = torch.arange(1.0, 64.0).expand(3, -1)
    found = doubling_buckets([nll, nll + 2], length=16)
    assert [(b.start, b.stop) for b in found] == [(1, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    assert found[0].nll == pytest.approx(2 + 1)
    assert sum(b.nll * (b.stop - b.start) for b in found) == pytest.approx(
        (nll[0] + 1).sum().item()
    )


# --- whole studies ---


def test_a_study_reads_each_variant_as_it_can_be_read(text):
    result = run(text, encodings=["rope", "learned", "transformer_xl", "sinusoidal"])
    found = {(c.encoding, c.method, c.reading, c.window) for c in result.curves}
    windows = {("none", "window", 16), ("none", "window", 32), ("none", "whole", 64)}
    alone = {("none", "segments", 16)}
    assert found == {
        *(("rope", *key) for key in windows | alone | {("yarn", "whole", 64)}),
        *(("learned", *key) for key in alone),
        *(("transformer_xl", *key) for key in windows | alone | {("none", "recurrent", 16)}),
        *(("sinusoidal", *key) for key in windows | alone),
    }
    assert [m.encoding for m in result.models] == [
        "rope",
        "learned",
        "transformer_xl",
        "sinusoidal",
    ]
    assert result.protocol.tokens == 4 * 2 * 16
    assert from_json(to_json(result)) == result
    assert result.curve("rope", "whole", "yarn").nll != result.curve("rope", "whole").nll


def test_training_learns(text):
    result = run(text, steps=60, learning_rate=1e-2)
    losses = [loss for _, loss in result.models[0].loss]
    assert losses[0] > 5
    assert losses[-1] < 2.9


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 1e-3},
        {"steps": 5},
        {"batch_size": 3},
        {"vocabulary": 260},
        {"seeds": (1,)},
        {"length": 8, "reach": 8},
        {"encodings": ["alibi"]},
        {"sizes": ModelSizes(**{**vars(SIZES), "num_hidden_layers": 1})},
        {"encodings": ["rope+memory"]},
        {"documents": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_setting_changes_the_numbers(text, changes):
    assert run(text, **changes).curves[0].nll != run(text).curves[0].nll


def test_memory_length_changes_what_is_trained(text):
    short, long = (
        run(text, encodings=["transformer_xl"], memory_length=n)
        .curve("transformer_xl", "segments")
        .nll
        for n in (2, 16)
    )
    assert short != long


def test_seeds_are_averaged(text):
    both = run(text, seeds=(0, 1)).curves[0]
    alone = [run(text, seeds=(seed,)).curves[0].nll for seed in (0, 1)]
    assert both.by_seed == pytest.approx(alone, abs=1e-6)
    assert both.nll == pytest.approx(sum(alone) / 2, abs=1e-6)


def weights(folder):
    return dict(load_decoder(folder).named_parameters())


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("encodings", [["rope"], ["transformer_xl"]])
def test_interrupted_anywhere_it_ends_with_the_same_weights(
    text, tmp_path, monkeypatch, stop, encodings
):
    monkeypatch.setattr(study_training, "SAVED_EVERY", 0.0)
    for module in (study_training, study_training.Corpus.__module__):
        target = module if not isinstance(module, str) else __import__(module, fromlist=["x"])
        monkeypatch.setattr(target, "EMPTIED_EVERY", 2)

    def stopping(what, done, parts):
        if done == stop:
            raise KeyboardInterrupt

    settings = {"encodings": encodings, "steps": 6}
    whole = run(text, state_dir=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        run(text, state_dir=tmp_path / "cut", progress=stopping, **settings)
    again = run(text, state_dir=tmp_path / "cut", **settings)
    name = f"{encodings[0]}-0/model"
    first, second = weights(tmp_path / "whole" / name), weights(tmp_path / "cut" / name)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert [c.nll for c in again.curves] == [c.nll for c in whole.curves]
    assert again.models[0].loss == whole.models[0].loss


def test_a_finished_study_is_not_run_again(text, tmp_path, monkeypatch):
    first = run(text, state_dir=tmp_path)
    monkeypatch.setattr(study_training.Training, "_train", None)
    monkeypatch.setattr("longspan.tools.study_run.read", None)
    assert run(text, state_dir=tmp_path) == first


def test_a_state_of_another_study_is_refused(text, tmp_path):
    run(text, state_dir=tmp_path)
    with pytest.raises(ConfigError, match="steps was 4, now 5"):
        run(text, state_dir=tmp_path, steps=5)


def test_a_loss_that_is_not_a_number_ends_the_training(text, tmp_path):
    with pytest.raises(NumericalError, match="smaller learning rate than"):
        run(text, learning_rate=1e30, state_dir=tmp_path)
    assert not (tmp_path / "rope-0" / "model").exists()


def test_minutes_become_steps_once(text, tmp_path, monkeypatch):
    monkeypatch.setattr(Budget, "_seconds_a_step", lambda *_: 1.5)
    result = run(text, steps=None, minutes=0.1, seeds=(0, 1), state_dir=tmp_path)
    assert result.protocol.steps == 2  # 6 s for two models of 1.5 s a step
    monkeypatch.setattr(Budget, "_seconds_a_step", lambda *_: 0.01)
    assert run(text, steps=None, minutes=0.1, seeds=(0, 1), state_dir=tmp_path) == result
    for changed, key in (
        ({"minutes": 0.2}, "minutes was 0.1, now 0.2"),
        ({"batch_size": 3}, "batch_size was 2, now 3"),
        ({"encodings": ["rope", "alibi"]}, "its models was"),
    ):
        settings = {"minutes": 0.1, "seeds": (0, 1), **changed}
        with pytest.raises(ConfigError, match=key):
            run(text, steps=None, state_dir=tmp_path, **settings)
    (tmp_path / "budget.json").write_text(json.dumps({"steps": 3}))
    with pytest.raises(InputError, match="damaged"):
        run(text, steps=None, minutes=0.1, state_dir=tmp_path)


def test_minutes_that_allow_no_step_are_refused(text):
    with pytest.raises(ConfigError, match="too few"):
        run(text, steps=None, minutes=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "either steps or minutes"),
        ({"minutes": 1.0}, "either steps or minutes"),
        ({"steps": None, "minutes": 0.0}, "minutes must be > 0"),
        ({"steps": 0}, "steps must be"),
        ({"reach": 1}, "reach must be ≥ 2"),
        ({"seeds": ()}, "seeds must be"),
        ({"seeds": (1, 1)}, "seeds must be"),
        ({"seeds": (10**14,)}, "seeds must be"),
        ({"length": 1}, "length must be ≥ 2"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"documents": 0}, "documents must be"),
        ({"steps": None, "minutes": math.inf}, "minutes must be > 0 and finite"),
        ({"learning_rate": math.inf}, "learning rate must be > 0"),
        ({"methods": ("yran",)}, "Did you mean 'yarn'"),
        ({"learning_rate": 0.0}, "learning rate must be > 0"),
    ],
)
def test_settings_that_make_no_sense(text, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(text, **changes)


def test_losses_are_noted_at_a_few_places():
    assert thinned([1.0] * 5) == tuple((step, 1.0) for step in range(1, 6))
    found = thinned([float(i) for i in range(100)])
    assert len(found) == 20
    assert found[-1] == (100, sum(range(95, 100)) / 5)


def test_what_cannot_be_read_later_is_refused_before_training(text, monkeypatch):
    monkeypatch.setattr(study_training.Training, "run", None)
    with pytest.raises(ConfigError, match="longrope"):
        run(text, encodings=["alibi", "rope"], methods=("longrope",))
    odd = ModelSizes(**{**vars(SIZES), "hidden_size": 12})  # a head of 3 channels cannot turn
    with pytest.raises(ConfigError, match="even"):
        run(text, encodings=["alibi", "rope"], sizes=odd)


def test_minutes_are_those_of_the_busiest_process(text, monkeypatch):
    monkeypatch.setattr(Budget, "_seconds_a_step", lambda *_: 1.0)
    budget = Budget(minutes=1, batch_size=2, seeds=1)
    assert budget._timed([None] * 3, None, 2) == 30  # one has two of the three models
    assert budget._timed([None], None, 2) == 60


def test_a_refused_study_leaves_the_tokenizer_of_the_one_that_is_kept(text, tmp_path):
    run(text, state_dir=tmp_path)
    kept = (tmp_path / "tokenizer.json").read_text()
    with pytest.raises(ConfigError, match="its text or vocabulary differs"):
        run(text, state_dir=tmp_path, vocabulary=260)
    assert (tmp_path / "tokenizer.json").read_text() == kept
