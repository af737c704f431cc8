"""Scores and comparisons against means taken by hand, and what is printed and drawn of them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.cli.stream import METHODS as OFFERED
from longspan.errors import ConfigError, InputError
from longspan.metrics.likelihood import token_nll
from longspan.report.figures import save_figure, stream_comparison, stream_score
from longspan.report.progress import shown_text
from longspan.report.stream import (
    comparison_claim,
    print_comparison,
    print_score,
    recompute_claim,
    score_claim,
)
from longspan.tools import stream_compare as tool
from longspan.tools.stream import stream
from longspan.tools.stream_compare import METHODS, compare
from longspan.tools.stream_results import (
    Comparison,
    MethodScore,
    Part,
    Score,
    from_json,
    to_json,
)
from longspan.tools.stream_score import score_text
from longspan.tools.texts import Text
from tiny_families import tiny
from tiny_models import TRAINED, ByteTokenizer, tiny_model, tokens

S, W, N, DENSE, PLACES = 3, 17, 120, 60, 12
KEPT = S + W
DYNAMIC = dict(rope_type="dynamic", factor=2.0)
OWN_TABLE = 5e-5  # the plain model's angles are float32
SAME = 1e-5


def text_of(row: Tensor) -> Text:
    content = "".join(map(chr, row[0].tolist()))
    return Text("drawn", content, hashlib.sha256(content.encode()).hexdigest())


TEXT = text_of(tokens(N))


def comparing(**own: Any) -> Comparison:
    sizes = dict(num_sink_tokens=S, sliding_window=W, chunk_size=16)
    limits = dict(dense_tokens=DENSE, recompute_tokens=PLACES, name="tiny")
    model = own.pop("model", None) or tiny_model()
    tokenizer = own.pop("tokenizer", None) or ByteTokenizer()
    return compare(model, tokenizer, own.pop("text", TEXT), **{**sizes, **limits, **own})


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return comparing(sinks=[0, 1, S])


def scores(found: Comparison) -> dict[str, MethodScore]:
    return {score.method: score for score in found.methods}


def likelihoods(sinks: int, window: int, count: int = N) -> Tensor:
    return stream(tiny_model(), None, sinks, window).score(tokens(N)[:, :count]).nll.double()


def afresh(places: list[int], row: Tensor, bos: bool = False) -> Tensor:
    """Each token after the last KEPT before it, by the model itself, one at a time."""
    model, found = tiny_model(), []
    for place in places:
        context = row[:, place - KEPT : place].clone()
        if bos:
            context = torch.cat((row[:, :1], context[:, 1:]), dim=1)
        with torch.no_grad():
            logits = model(context).logits[0, -1].double()
        found.append(-logits.log_softmax(-1)[row[0, place]])
    return torch.stack(found)


def is_mean(part: Part | None, nll: Tensor, tolerance: float = SAME) -> bool:
    assert part is not None
    assert part.tokens == len(nll)
    assert part.nll == pytest.approx(nll.mean().item(), abs=tolerance)
    return part.perplexity == pytest.approx(math.exp(part.nll))


# --- the comparison


def test_each_method_reads_as_it_says(compared: Comparison) -> None:
    assert [score.method for score in compared.methods] == list(METHODS) == list(OFFERED)
    found = scores(compared)
    assert is_mean(found["streaming"].whole, likelihoods(S, W))
    assert is_mean(found["window"].whole, likelihoods(0, KEPT))
    plain = token_nll(tiny_model(), tokens(N)[:, :DENSE])
    assert is_mean(found["dense"].whole, plain, OWN_TABLE)
    sizes = [(score.num_sink_tokens, score.sliding_window) for score in compared.methods]
    assert sizes == [(S, W), (0, KEPT), (0, KEPT), (0, DENSE)]
    assert len({round(score.whole.nll, 3) for score in compared.methods}) == 4


def places_of(count: int = PLACES) -> list[int]:
    first, last = KEPT + 1, N - 1
    return [round(first + (last - first) * at / (count - 1)) for at in range(count)]


def test_recompute_reads_evenly_spread_contexts_afresh(compared: Comparison) -> None:
    places = places_of()
    assert places[0] == KEPT + 1
    assert places[-1] == N - 1
    wanted = afresh(places, tokens(N))
    assert is_mean(scores(compared)["recompute"].whole, wanted, OWN_TABLE)
    assert scores(compared)["recompute"].blocks == ()


def test_methods_are_compared_on_the_tokens_they_share(compared: Comparison) -> None:
    found, at = scores(compared), torch.tensor(places_of()) - 1
    for name, nll in (("streaming", likelihoods(S, W)), ("window", likelihoods(0, KEPT))):
        assert is_mean(found[name].past, nll[KEPT:])
        assert is_mean(found[name].spread, nll[at])
        assert is_mean(found[name].dense, nll[: DENSE - 1])
    assert found["recompute"].spread == found["recompute"].whole
    assert found["recompute"].past is found["recompute"].dense is None
    assert found["dense"].past is found["dense"].spread is None
    assert found["dense"].dense == found["dense"].whole


def test_until_something_is_dropped_the_stream_is_dense() -> None:
    dense = likelihoods(0, TRAINED, count=KEPT + 1)
    torch.testing.assert_close(likelihoods(S, W)[:KEPT], dense, atol=SAME, rtol=0)
    assert (likelihoods(S, W)[KEPT] - likelihoods(0, TRAINED, count=KEPT + 2)[KEPT]).abs() > 1e-3


def test_blocks_are_means_by_position(compared: Comparison) -> None:
    nll, blocks = likelihoods(S, W), scores(compared)["streaming"].blocks
    assert [(block.start, block.stop) for block in blocks[:2]] == [(1, 8), (8, 16)]
    assert blocks[-1].stop == N
    assert all(is_mean(block, nll[block.start - 1 : block.stop - 1]) for block in blocks)
    assert sum(block.tokens for block in blocks) == N - 1
    assert scores(compared)["dense"].blocks[-1].stop == DENSE


def test_sinks_share_a_cache_of_one_size(compared: Comparison) -> None:
    assert [(s.num_sink_tokens, s.sliding_window) for s in compared.sinks] == [
        (0, KEPT),
        (1, KEPT - 1),
        (S, W),
    ]
    for score in compared.sinks:
        assert score.method == "streaming"
        nll = likelihoods(score.num_sink_tokens, score.sliding_window)
        assert is_mean(score.whole, nll)
        assert is_mean(score.past, nll[KEPT:])


def test_nothing_is_read_twice() -> None:
    told: list[tuple[str, int]] = []

    def announce(what: str, count: int) -> Any:
        told.append((what, count))
        return lambda nll: None

    comparing(methods=["streaming", "window"], sinks=[0, S, 5], announce=announce)
    assert told == [
        (f"streaming, keeping {S} + {W}", N - 1),
        (f"window, keeping 0 + {KEPT}", N - 1),
        (f"streaming, keeping 5 + {KEPT - 5}", N - 1),
    ]


def test_bos_starts_every_context_that_is_read_afresh() -> None:
    found = comparing(tokenizer=ByteTokenizer(bos_token_id=1), methods=["recompute"])
    row = torch.cat((torch.tensor([[1]]), tokens(N)), dim=1)
    first, last = KEPT + 1, N
    places = [round(first + (last - first) * at / (PLACES - 1)) for at in range(PLACES)]
    assert found.protocol.bos
    assert is_mean(found.methods[0].whole, afresh(places, row, bos=True), OWN_TABLE)


def test_more_places_than_tokens_are_every_token_once() -> None:
    found = comparing(methods=["recompute"], recompute_tokens=1000)
    assert found.methods[0].whole.tokens == N - KEPT - 1


def test_dense_that_reaches_the_end_shares_all_tokens() -> None:
    found = comparing(methods=["streaming", "dense"], dense_tokens=10 * N)
    dense = scores(found)["dense"]
    assert dense.whole.tokens == N - 1
    assert dense.past is not None
    assert dense.past.tokens == N - 1 - KEPT


def test_speeds_are_medians_of_steps(compared: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scores(compared)
    assert found["streaming"].tokens_per_second > 0
    assert found["recompute"].tokens_per_second > 0
    assert found["window"].tokens_per_second is None
    clock, steps = iter([0, 9, 9, 10, 10, 12, 12, 17]), []
    monkeypatch.setattr(tool.time, "perf_counter", lambda: next(clock))
    assert tool.steps_per_second(steps.append, 3) == 1 / 2  # the first, of 9 seconds, is left out
    assert steps == [0, 1, 2, 3]


def test_every_method_rotates_by_the_trained_length_that_is_given() -> None:
    closed = dict(DYNAMIC, original_max_position_embeddings=8)
    lengths = dict(max_position_embeddings=TRAINED)
    models = [tiny_model(rope=rope, **lengths) for rope in (DYNAMIC, closed, DYNAMIC)]
    given = [dict(original_max_position_embeddings=size) for size in (8, 8, 16)]
    found = [comparing(model=model, **own) for model, own in zip(models, given, strict=True)]
    for one, same, other in zip(*(each.methods for each in found), strict=True):
        assert one.whole == same.whole
        assert one.whole != other.whole


def test_methods_that_would_all_be_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="keeps to a sliding window of its own"):
        comparing(model=tiny("mistral", sliding_window=11))


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (dict(tokens=KEPT + 1), ConfigError, "21 tokens, and a cache of 20 drops none"),
        (dict(methods=["streming"]), ConfigError, "Did you mean 'streaming'"),
        (dict(sinks=[0, KEPT]), ConfigError, "0 to 19 sinks, got 20"),
        (dict(dense_tokens=KEPT + 1), ConfigError, "dense_tokens must be above 21, got 21"),
        (dict(recompute_tokens=0), ConfigError, "recompute_tokens"),
        (dict(sliding_window=TRAINED), ConfigError, "the model reads 64 tokens"),
        (dict(tokens=N + 1), InputError, "--repeat"),
    ],
)
def test_what_would_show_nothing_is_refused(
    settings: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        comparing(**settings)


def test_the_protocol_says_how_it_was_measured(compared: Comparison) -> None:
    protocol = compared.protocol
    assert protocol.model == "tiny"
    assert protocol.text == ("drawn", TEXT.sha256)
    assert (protocol.tokens, protocol.repeated, protocol.bos) == (N, False, False)
    assert protocol.trained_length == TRAINED
    assert (protocol.num_sink_tokens, protocol.sliding_window, protocol.chunk_size) == (S, W, 16)
    assert protocol.dtype == "float32"
    assert {name for name, _ in protocol.versions} == {"longspan", "torch", "transformers"}
    assert (compared.recompute_tokens, compared.dense_tokens) == (PLACES, DENSE)


def test_json_gives_the_same_result_back(compared: Comparison) -> None:
    assert from_json(Comparison, to_json(compared)) == compared
    with pytest.raises(InputError, match="not a 'longspan stream score 1' result"):
        from_json(Score, to_json(compared))


# --- the score


def scored(**own: Any) -> tuple[Score, Tensor]:
    found = stream(tiny_model(), own.pop("tokenizer", None) or ByteTokenizer(), S, W)
    return score_text(found, own.pop("text", TEXT), name="tiny", **{"chunk_size": 16, **own})


def test_a_score_is_summed_up_by_tenths_and_doublings() -> None:
    text = text_of(tokens(600))
    found, nll = scored(text=text)
    assert is_mean(found.whole, nll.double())
    assert [part.start for part in found.tenths] == [1 + 599 * tenth // 10 for tenth in range(10)]
    assert [(part.start, part.stop) for part in found.octaves] == [(1, 256), (256, 512), (512, 600)]
    for parts in (found.tenths, found.octaves):
        assert parts[-1].stop == 600
        assert all(is_mean(part, nll[part.start - 1 : part.stop - 1].double()) for part in parts)
    assert found.protocol.tokens == 600
    assert from_json(Score, to_json(found)) == found


def test_bos_starts_the_text_and_is_not_scored() -> None:
    found, nll = scored(tokenizer=ByteTokenizer(bos_token_id=1))
    row = torch.cat((torch.tensor([[1]]), tokens(N)), dim=1)
    assert found.protocol.bos
    assert len(nll) == N
    assert torch.equal(nll, stream(tiny_model(), None, S, W).score(row, 16).nll)


def test_a_repeated_text_says_so() -> None:
    found, nll = scored(tokens=300, repeat=True)
    assert found.protocol.repeated
    assert found.protocol.tokens == len(nll) + 1 == 300


def test_memory_and_speed_are_measured_as_the_text_goes_by() -> None:
    found, _ = scored()
    done = [at for at, _ in found.memory]
    assert done == sorted(set(done))
    assert done[-1] == N - 1
    at_tenth = next(size for at, size in found.memory if at >= (N - 1) / 10)
    assert found.resident_at_tenth == at_tenth
    assert found.resident_at_end == found.memory[-1][1] > 10e6
    assert found.tokens_per_second > 0
    assert found.resumed_at == 0


def test_a_resumed_score_keeps_its_measurements(tmp_path: Path) -> None:
    state, told = tmp_path / "state.safetensors", []

    def stop(what: str, count: int) -> Any:
        def seen(nll: Tensor) -> None:
            told.append((what, count))
            if len(nll) >= 60:
                raise InterruptedError

        return seen

    whole, wanted = scored()
    with pytest.raises(InterruptedError):
        scored(announce=stop, state=state, save_every=16)
    assert told[0] == ("streaming", N - 1)
    found, nll = scored(state=state, save_every=16)
    assert torch.equal(nll, wanted)
    assert found.resumed_at == 64
    assert [at for at, _ in found.memory][:3] == [at for at, _ in whole.memory][:3]
    same = ("protocol", "whole", "tenths", "octaves")
    assert all(getattr(found, name) == getattr(whole, name) for name in same)
    rest, _ = scored(state=state)
    assert (rest.tokens_per_second, rest.resumed_at) == (None, N - 1)
    assert rest.resident_at_end == found.resident_at_end


# --- what is printed and drawn


def test_the_table_fits_eighty_columns(
    compared: Comparison, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_comparison(compared)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split() for line in lines if line}
    streaming = scores(compared)["streaming"]
    cells = [f"{part.perplexity:.2f}" for part in (streaming.whole, streaming.past)]
    assert rows["streaming"][1:6] == [str(S), "+", str(W), *cells]
    assert " ".join(rows["method"]) == "method keeps perplexity past same 12 first 60 tokens/s"
    assert rows["recompute"].count("–") == 2
    assert [line.split()[0] for line in lines].count("0") == 1  # a row for no sinks


def test_a_score_is_printed_by_tenths(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = scored(text=text_of(tokens(600)))
    print_score(found)
    out = capsys.readouterr().out
    assert "tiny: 600 tokens of drawn, keeping 3 + 17" in out
    assert f"{found.whole.perplexity:.2f}" in out
    assert out.count("–") == 10
    assert "GB at a tenth of the text" in out
    print_score(dataclasses.replace(found, resumed_at=64))
    assert "tokens/s since 64, where it was resumed" in capsys.readouterr().out
    print_score(
        dataclasses.replace(found, memory=(), resident_at_tenth=None, tokens_per_second=None)
    )
    assert "GB" not in capsys.readouterr().out


def test_claims_are_the_numbers(compared: Comparison) -> None:
    found, found_score = scores(compared), scored()[0]
    assert comparison_claim(compared) == (
        f"Past a cache of 20 tokens: streaming {found['streaming'].past.nll:.2f}, window "
        f"{found['window'].past.nll:.2f} nats per token"
    )
    # recompute scored other tokens than those: it is told beside the others' on its own
    same = (
        f"On the same 12 tokens: streaming {found['streaming'].spread.nll:.2f}, window "
        f"{found['window'].spread.nll:.2f}, recompute {found['recompute'].whole.nll:.2f}"
    )
    assert recompute_claim(compared) == same
    alone = dataclasses.replace(compared, methods=(found["recompute"],))
    assert (
        comparison_claim(alone)
        == f"On the same 12 tokens: recompute {found['recompute'].whole.nll:.2f}"
    )
    assert recompute_claim(dataclasses.replace(compared, methods=())) == ""
    assert score_claim(found_score).startswith(
        f"120 tokens read at perplexity {found_score.whole.perplexity:.2f}, with "
    )


def test_figures_draw_what_was_measured(compared: Comparison, tmp_path: Path) -> None:
    found, _ = scored(text=text_of(tokens(600)))
    figure = stream_score(found)
    high, low = figure.axes[1], figure.axes[0]
    assert high.lines[0].get_ydata().tolist() == [part.perplexity for part in found.octaves]
    assert low.lines[0].get_xdata().tolist() == [at for at, _ in found.memory]
    drawn = stream_comparison(compared)
    lines = [line for line in drawn.axes[0].lines if len(line.get_xdata()) > 1]
    assert lines[0].get_ydata().tolist() == [
        block.nll for block in scores(compared)["streaming"].blocks
    ]
    assert set(lines[2].get_ydata()) == {scores(compared)["recompute"].whole.nll}
    assert "trained" in [text.get_text() for text in drawn.axes[0].texts]
    for name, one in (("score", figure), ("comparison", drawn)):
        assert save_figure(one, tmp_path / f"{name}.png").stat().st_size > 10_000
    bare = dataclasses.replace(found, memory=(), resident_at_tenth=None, resident_at_end=None)
    assert stream_score(bare).axes


def test_a_far_trained_length_is_not_drawn(compared: Comparison) -> None:
    far = dataclasses.replace(compared.protocol, trained_length=100 * N)
    drawn = stream_comparison(dataclasses.replace(compared, protocol=far))
    assert "trained" not in [text.get_text() for text in drawn.axes[0].texts]
    with pytest.raises(ConfigError, match="nothing to draw"):
        stream_comparison(dataclasses.replace(compared, methods=()))


def test_progress_is_a_line_a_tenth_away_from_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown_text() as announce:
        seen = announce("streaming", 100)
        nll = torch.full((100,), 2.0)
        for done in range(0, 101, 5):
            seen(nll[:done])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0].startswith("streaming: 5 of 100 tokens, perplexity 7.39, ")
    assert lines[-1].startswith("streaming: 100 of 100 tokens, perplexity 7.39, ")
    assert "tokens/s" in lines[-1]


def test_progress_is_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with shown_text() as announce:
        announce("streaming", 100)(torch.full((100,), 2.0))
    err = capsys.readouterr().err
    assert "100/100" in err
    assert "perplexity 7.39" in err
