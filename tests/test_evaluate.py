"""`evaluate` against transformers' own models, on disk, and where it must refuse."""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from longspan.errors import (
    ConfigError,
    InputError,
    NumericalError,
    OutputError,
    UnsupportedModelError,
)
from longspan.tools import measuring
from longspan.tools.cells import weights_digest
from longspan.tools.evaluate import evaluate
from longspan.tools.evaluation import Evaluation, from_json, retrieval_rate, to_json
from longspan.tools.subjects import Applied
from longspan.tools.summary import position_buckets
from longspan.tools.texts import Text
from tiny_models import (
    FAMILIES,
    ROTARY_DIM,
    THETA,
    TRAINED,
    VOCAB,
    ByteTokenizer,
    tiny_model,
    tokens,
)

LENGTH = 3 * TRAINED
FACTOR = 4.0  # not the ratio of lengths, where dynamic NTK would be NTK-aware
# Both sides are float32 and differ in the order of operations; a wrong method differs by 1e-2.
FLOAT32_NLL = 1e-4

# Each method as transformers itself runs it, written by hand.
BY_HAND: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": FACTOR},
    "ntk": {"rope_theta": THETA * FACTOR ** (ROTARY_DIM / (ROTARY_DIM - 2))},
    "dynamic": {"rope_type": "dynamic", "factor": FACTOR},
    "ntk-by-parts": {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": TRAINED,
        "attention_factor": 1.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": TRAINED,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": FACTOR,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}


def reference_nll(family: str, rope: dict[str, Any], row: torch.Tensor) -> torch.Tensor:
    """All logits of a freshly built transformers model, and cross entropy in float64."""
    model = tiny_model(family, rope)
    with torch.no_grad():
        logits = model(row, use_cache=False).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_gives_transformers_own_likelihoods(family: str) -> None:
    row = tokens(LENGTH)
    model = tiny_model(family)
    applied = Applied(
        reach=LENGTH,
        trained_length=TRAINED,
        factor=FACTOR,
        original_max_position_embeddings=None,
        phase="hf_float32",
    )
    expected = {method: reference_nll(family, rope, row) for method, rope in BY_HAND.items()}
    for method, reference in expected.items():
        nll = applied.subject(model, method).token_nll(row).double()
        torch.testing.assert_close(nll, reference, atol=FLOAT32_NLL, rtol=0, msg=f"{method}")
        others = [other for name, other in expected.items() if name != method]
        nearest = min((nll - other).abs().max() for other in others)
        assert nearest > 10 * FLOAT32_NLL, f"{method} cannot be told from another"


def test_a_length_that_is_not_given_is_twice_the_trained_one() -> None:
    found, told = run(length=None, documents=1), run(length=2 * TRAINED, documents=1)
    assert found.protocol == told.protocol
    assert [one.nll for one in found.methods] == [one.nll for one in told.methods]


def test_documents_that_are_not_counted_end_at_some_number() -> None:
    long = [text(70 * 2 * TRAINED)]
    assert run(length=None, methods=["none"], documents=None, texts=long).protocol.documents == 64
    assert run(length=None, methods=["none"], documents=66, texts=long).protocol.documents == 66


def text(characters: int = 5 * LENGTH, seed: int = 0, name: str = "drawn") -> Text:
    drawn = random.Random(seed)
    content = "".join(chr(drawn.randrange(32, 127)) for _ in range(characters))
    return Text(name, content, hashlib.sha256(content.encode()).hexdigest())


def run(model: Any = None, **changed: Any) -> Evaluation:
    given: dict[str, Any] = {"length": LENGTH, "methods": ["none", "yarn"], "documents": 2}
    given |= changed
    texts = given.pop("texts", None) or [text()]
    tokenizer = given.pop("tokenizer", None) or ByteTokenizer()
    return evaluate(model or tiny_model(), tokenizer, texts, **given)


def rows(count: int) -> torch.Tensor:
    ids = torch.tensor([ord(letter) for letter in text().content])
    return ids[: count * LENGTH].view(count, LENGTH)


def naive(count: int, rope: dict[str, Any]) -> torch.Tensor:
    return torch.stack([reference_nll("llama", rope, row[None]) for row in rows(count)])


YARN = {**BY_HAND["yarn"], "factor": LENGTH / TRAINED}


def test_results_are_those_of_the_likelihoods() -> None:
    found = run(phase="hf_float32", bucket=64, name="tiny")
    none, yarn = naive(2, {}), naive(2, YARN)
    result = found.method("yarn")
    assert result.tokens_scored == 2 * (LENGTH - 1)
    assert result.nll == pytest.approx(yarn.mean().item(), abs=FLOAT32_NLL)
    assert result.perplexity == pytest.approx(math.exp(yarn.mean()), rel=FLOAT32_NLL)
    assert [(b.start, b.stop) for b in result.buckets] == [(0, 64), (64, 128), (128, 192)]
    for bucket, part in zip(
        result.buckets, (yarn[:, :63], yarn[:, 63:127], yarn[:, 127:]), strict=True
    ):
        first, second = part.mean(dim=1).tolist()
        reach = 12.7062 * abs(first - second) / 2  # Student, one degree of freedom
        assert bucket.nll == pytest.approx((first + second) / 2, abs=FLOAT32_NLL)
        assert bucket.low == pytest.approx(bucket.nll - reach, abs=1e-2)
        assert bucket.high == pytest.approx(bucket.nll + reach, abs=1e-2)
    difference = result.versus_none
    assert difference is not None
    assert (difference.unit, difference.stop) == ("documents", LENGTH)
    expected = (none - yarn)[:, difference.start - 1 :].mean().item()
    assert difference.mean == pytest.approx(expected, abs=FLOAT32_NLL)
    assert found.method("none").versus_none is None
    assert result.rope_parameters["rope_type"] == "yarn"
    assert result.attention_factor == pytest.approx(0.1 * math.log(3) + 1)
    assert result.factor == 3.0
    assert result.seconds > 0


def test_the_protocol_says_how_it_was_measured() -> None:
    drawn = text()
    protocol = run(name="tiny", passkey=None, bucket=None).protocol
    assert protocol.model == "tiny"
    assert protocol.texts == (("drawn", drawn.sha256),)
    assert (protocol.length, protocol.documents, protocol.trained_length) == (LENGTH, 2, TRAINED)
    assert (protocol.bos, protocol.dtype, protocol.phase) == (False, "float32", "float64")
    assert (protocol.bucket, protocol.window, protocol.stride) == (16, None, None)
    assert dict(protocol.versions)["torch"] == torch.__version__


def test_one_document_has_no_bucket_interval_but_a_difference_by_blocks() -> None:
    found = run(documents=1)
    assert found.methods[0].buckets[0].low is None
    difference = found.method("yarn").versus_none
    assert difference is not None
    assert difference.unit == "23-token blocks"
    assert difference.low < difference.mean < difference.high


def test_without_none_there_is_no_difference() -> None:
    assert run(methods=["yarn"], documents=1).methods[0].versus_none is None


def test_as_many_documents_as_the_texts_hold_none_across_two() -> None:
    found = run(texts=[text(LENGTH + 5), text(2 * LENGTH - 1, seed=1)], documents=None)
    assert found.protocol.documents == 2


def test_bos_starts_every_document_and_is_not_scored() -> None:
    tokenizer = ByteTokenizer(bos_token_id=1)
    found = run(tokenizer=tokenizer, documents=1, methods=["none"], phase="hf_float32")
    row = torch.cat((torch.tensor([[1]]), rows(1)[:, : LENGTH - 1]), dim=1)
    expected = reference_nll("llama", {}, row)
    assert found.protocol.bos
    assert found.methods[0].tokens_scored == LENGTH - 1
    assert found.methods[0].nll == pytest.approx(expected.mean().item(), abs=FLOAT32_NLL)


def test_windows_give_strided_perplexity_under_the_windows_table() -> None:
    window, stride = 96, 32
    found = run(documents=1, methods=["dynamic"], window=window, stride=stride, phase="hf_float32")
    row, total = rows(1), 0.0
    starts = range(0, LENGTH - window + 1, stride)
    for start in starts:
        nll = reference_nll(
            "llama", BY_HAND["dynamic"] | {"factor": 1.0}, row[:, start : start + window]
        )
        total += (nll if start == 0 else nll[-stride:]).sum().item()
    assert (found.protocol.window, found.protocol.stride) == (window, stride)
    assert found.methods[0].tokens_scored == LENGTH - 1
    assert found.methods[0].perplexity == pytest.approx(
        math.exp(total / (LENGTH - 1)), rel=FLOAT32_NLL
    )
    whole = run(documents=1, methods=["dynamic"], phase="hf_float32")
    assert whole.methods[0].nll != pytest.approx(found.methods[0].nll, abs=1e-3)
    with pytest.raises(ConfigError, match="window differs"):
        whole.protocol.require_equal(found.protocol)


def test_factor_and_phase_change_the_likelihoods() -> None:
    usual = run(methods=["linear"], documents=1).methods[0]
    doubled = run(methods=["linear"], documents=1, factor=6.0).methods[0]
    assert usual.rope_parameters["factor"] == pytest.approx(3.0)
    assert doubled.rope_parameters["factor"] == 6.0
    assert abs(doubled.nll - usual.nll) > 1e-3
    short = run(methods=["linear"], documents=1, factor=2.0).methods[0]  # read past its reach
    assert short.rope_parameters["factor"] == 2.0
    rounded = run(methods=["linear"], documents=1, phase="hf_float32").methods[0]
    assert rounded.nll != usual.nll


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model()
    row = rows(1)
    with torch.no_grad():
        before = model(row).logits
        run(model, methods=["none", "dynamic", "yarn"])
        torch.testing.assert_close(model(row).logits, before, rtol=0, atol=0)


def test_passkeys_are_tried_by_method_length_and_depth() -> None:
    length = 6 * TRAINED
    found = run(
        tiny_model(), length=length, documents=1, passkey=((320, length, length + 1), (0.0, 1.0))
    )
    assert [(t.method, t.length, t.depth) for t in found.passkey] == [
        (method, size, depth)
        for method in ("none", "yarn")
        for size in (320, length, length + 1)
        for depth in (0.0, 1.0)
    ]
    statuses = {
        t.length: {x.status for x in found.passkey if x.length == t.length} for t in found.passkey
    }
    assert statuses == {320: {"missed"}, length: {"missed"}, length + 1: {"invalid"}}
    assert all(t.rank in range(1, 11) for t in found.passkey if t.status == "missed")
    assert all(
        t.rank is None and str(length) in t.reason for t in found.passkey if t.length > length
    )


def test_case_27_invalid_trials_are_excluded_from_the_rate() -> None:
    found = run(length=100, documents=1, methods=["none"], passkey=((120,), (0.5,)))
    (trial,) = found.passkey
    assert trial.status == "invalid"
    assert "120 tokens does not fit the limit of 100" in trial.reason
    assert retrieval_rate(found.passkey) is None
    hit = replace(trial, status="found", rank=1, reason="")
    assert retrieval_rate([trial, hit, replace(hit, status="missed")]) == 0.5


def test_passkeys_under_dynamic_ntk_use_one_table_for_the_whole_request() -> None:
    length = 6 * TRAINED
    model = tiny_model()
    given = {"length": length, "documents": 1, "passkey": ((length,), (0.3,))}
    dynamic = run(model, methods=["dynamic"], **given).passkey[0]
    ntk = run(model, methods=["ntk"], **given).passkey[0]  # the same table, fixed
    assert (dynamic.rank, dynamic.status) == (ntk.rank, ntk.status)


def count_forwards(monkeypatch: pytest.MonkeyPatch, stop_after: int = 10**6) -> list[str]:
    made: list[str] = []
    score = measuring.Run.score

    def counted(self: Any, one: Any, row: Any) -> torch.Tensor:
        if len(made) == stop_after:
            raise KeyboardInterrupt
        made.append(one.method)
        return score(self, one, row)

    monkeypatch.setattr(measuring.Run, "score", counted)
    return made


def test_an_interrupted_run_goes_on_from_what_is_done(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(documents=3)
    with monkeypatch.context() as patch:
        count_forwards(patch, stop_after=4)
        with pytest.raises(KeyboardInterrupt):
            run(documents=3, state_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4  # finished cells, nothing half-written
    made = count_forwards(monkeypatch)
    resumed = run(documents=3, state_dir=tmp_path)
    assert made == ["yarn", "yarn"]
    assert [m.nll for m in resumed.methods] == [m.nll for m in whole.methods]
    run(documents=3, state_dir=tmp_path, methods=["none", "yarn", "ntk"])
    assert made[2:] == ["ntk"] * 3  # a method more reuses the others


def test_passkey_trials_are_kept_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "length": 400,
        "documents": 1,
        "methods": ["none"],
        "passkey": ((400,), (0.5,)),
        "state_dir": tmp_path,
    }
    first = run(**given)

    def never(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(measuring.Run, "retrieval", never)
    assert run(**given).passkey == first.passkey


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"phase": "hf_float32"}, "phase"),
        ({"factor": 5.0, "methods": ["yarn"]}, "rope_parameters"),
        ({"bucket": 32}, "bucket"),
        ({"name": "another"}, "model"),
        ({"texts": [text(seed=9)]}, "texts|tokens"),
        ({"documents": 1}, "documents"),
        ({"length": LENGTH + 1}, "length|bucket"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_state_of_another_protocol_is_refused(
    tmp_path: Any, changed: dict[str, Any], named: str
) -> None:
    run(state_dir=tmp_path)
    with pytest.raises(ConfigError, match=rf"under another protocol: ({named}) is .*, now "):
        run(state_dir=tmp_path, **changed)


def test_a_state_of_other_weights_is_refused(tmp_path: Any) -> None:
    run(state_dir=tmp_path, documents=1)
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data += 1e-3
    with pytest.raises(ConfigError, match="protocol: weights is"):
        run(model, state_dir=tmp_path, documents=1)
    assert weights_digest(model) != weights_digest(tiny_model())
    assert weights_digest(tiny_model()) == weights_digest(tiny_model())


def test_a_damaged_cell_is_named(tmp_path: Any) -> None:
    run(state_dir=tmp_path, documents=1)
    (tmp_path / "yarn-document-0000.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match=r"yarn-document-0000\.safetensors is damaged"):
        run(state_dir=tmp_path, documents=1)


def test_a_state_folder_that_cannot_be_written_is_refused_before_any_forward(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_forwards(monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        run(state_dir=tmp_path / "file" / "state")
    assert made == []


def test_a_full_disk_leaves_no_half_written_cell(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if not data:
            return write(self, data)
        write(self, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="No space left on device"):
        run(state_dir=tmp_path, documents=1)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told_of_every_part_and_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    run(progress=lambda *part: told.append(part))
    assert [(done, total) for _, done, total in told] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[2][0] == "yarn, document 1 of 2"


def test_json_gives_the_same_evaluation_back() -> None:
    found = run(length=400, documents=1, passkey=((400, 500), (0.5,)))
    written = to_json(found)
    assert from_json(written) == found
    assert "NaN" not in written
    assert json.loads(written)["protocol"]["length"] == 400


def test_json_refuses_what_is_not_an_evaluation() -> None:
    found = run(documents=1, methods=["none"])
    broken = replace(found, methods=(replace(found.methods[0], nll=math.nan),))
    with pytest.raises(NumericalError, match=r"methods\[0\]\.nll is not a finite number"):
        to_json(broken)
    content = json.loads(to_json(found))
    for change, message in [
        ({"format": "other"}, "its format is 'other'"),
        ({"metods": []}, "unknown key 'metods'. Did you mean 'methods'"),
        ({"methods": 3}, "result.methods must be"),
        ({"protocol": {}}, "result.protocol lacks model"),
    ]:
        with pytest.raises(InputError, match=message):
            from_json(json.dumps({**content, **change}))
    with pytest.raises(InputError, match="not JSON"):
        from_json("{")
    with pytest.raises(InputError, match="its format is None"):
        from_json("[]")


def test_nan_logits_name_the_method_and_the_document() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.down_proj.weight.data[0] = math.nan
    with pytest.raises(NumericalError, match="none-document-0000: the logits at position 0"):
        run(model)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="the model's vocabulary has 100"):
        run(tiny_model(vocab_size=100))


def test_a_text_shorter_than_the_length_is_refused() -> None:
    with pytest.raises(InputError, match=str(LENGTH)):
        run(texts=[text(LENGTH - 1)])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "short": ({"length": TRAINED}, "does not exceed the trained length 64"),
    "short window": (
        {"window": TRAINED, "stride": 8},
        "window 64 does not exceed the trained length",
    ),
    "window alone": ({"window": 100}, "window and stride go together"),
    "window of all": ({"window": LENGTH, "stride": 8}, "window must be below length"),
    "wide stride": ({"window": 100, "stride": 100}, "stride must be from 1"),
    "no method": ({"methods": []}, "methods is empty"),
    "twice": ({"methods": ["linear", "pi"]}, "'linear' is named twice"),
    "unknown": ({"methods": ["yarm"]}, "Did you mean 'yarn'"),
    "longrope": ({"methods": ["none", "longrope"]}, "longrope|LongRoPE|short_factor"),
    "bucket": ({"bucket": 0}, "bucket must be"),
    "factor": ({"factor": 0.5}, "factor must be ≥ 1"),
    "depth": ({"passkey": ((100,), (2.0,))}, "passkey depth must be from 0"),
    "no depths": ({"passkey": ((100,), ())}, "passkey needs lengths and depths"),
    "passkey length": ({"passkey": ((0,), (0.5,))}, "passkey length must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_measure_nothing_are_refused_before_any_forward(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_forwards(monkeypatch)
    changed, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        run(**changed)
    assert made == []


def test_short_texts_are_measured_on_request() -> None:
    found = run(length=40, methods=["none", "yarn"], factor=2.0, allow_short=True)
    assert found.method("yarn").nll != found.method("none").nll
    assert found.protocol.length == 40 < found.protocol.trained_length


def test_a_family_without_a_known_rotation_is_refused() -> None:
    import transformers

    config = transformers.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
    model = transformers.GPTJForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match="gptj"):
        run(model, length=4096, methods=["none"], texts=[text(5000)], documents=1)


@pytest.mark.parametrize("bucket", [1, 5, 7, 100])
def test_buckets_cover_every_target_once(bucket: int) -> None:
    nll = torch.arange(1, 24, dtype=torch.float32).view(1, -1)  # entry i: target i + 1
    buckets = position_buckets(nll, bucket)
    weighed = sum(b.nll * (b.stop - max(b.start, 1)) for b in buckets)
    assert weighed == pytest.approx(nll.sum().item())
    assert buckets[-1].stop == 24


def test_a_model_that_does_not_rotate_is_measured_as_it_stands():
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    model = BloomForCausalLM(config).eval()
    row = tokens(LENGTH)
    text = Text("bytes", bytes(row[0].tolist()).decode("latin-1"), "0" * 64)
    settings: dict[str, Any] = dict(length=LENGTH, documents=1, bucket=8)
    with pytest.raises(ConfigError, match="declares no trained length"):
        evaluate(model, ByteTokenizer(), [text], methods=["none"], **settings)
    settings["original_max_position_embeddings"] = TRAINED
    with pytest.raises(UnsupportedModelError):
        evaluate(model, ByteTokenizer(), [text], methods=["none", "yarn"], **settings)
    found = evaluate(model, ByteTokenizer(), [text], methods=["none"], **settings)
    ids = torch.tensor([ByteTokenizer().encode(text.content)[:LENGTH]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    assert found.methods[0].nll == pytest.approx(expected, abs=1e-5)
    assert found.methods[0].rope_parameters == {}
    assert (found.methods[0].factor, found.methods[0].attention_factor) == (None, 1.0)
