"""What the report says in words and in the terminal: claims that turn with the data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from longspan.errors import ConfigError
from longspan.report.claims import difference_claim, nll_claim, verdict
from longspan.report.passkey import passkey_claim, tally
from longspan.report.tables import (
    evaluation_heading,
    evaluation_table,
    factor_text,
    passkey_table,
)
from longspan.report.wording import span, tokens
from report_examples import EIGHT, PLAIN, TWO, YARN, evaluation, trials


def test_claim_of_the_measured_data() -> None:
    assert nll_claim(evaluation(TWO)) == (
        "Past the trained 8k tokens plain RoPE rises to 3.67 nats at 10k–12k; YaRN falls to 3.16"
    )


def test_claim_turns_when_the_data_are_turned() -> None:
    assert nll_claim(evaluation({"none": YARN, "yarn": PLAIN})) == (
        "Past the trained 8k tokens plain RoPE falls to 3.16 nats at 10k–12k; "
        "YaRN does not go lower"
    )


@pytest.mark.parametrize(
    ("last", "verb"),
    [(3.39, "falls to"), (3.41, "stays at"), (3.49, "stays at"), (3.51, "rises to")],
)
def test_only_a_noticeable_change_is_a_movement(last: float, verb: str) -> None:
    claim = nll_claim(evaluation({"none": (*PLAIN[:-1], last)}))  # the last trained one is 3.45
    assert claim == f"Past the trained 8k tokens plain RoPE {verb} {last:.2f} nats at 10k–12k"


def test_the_best_method_is_named_and_a_worse_field_is_said_so() -> None:
    assert "; YaRN falls to 3.16" in nll_claim(evaluation(EIGHT))
    best_dynamic = {**EIGHT, "dynamic": (*EIGHT["dynamic"][:-1], 3.01)}
    assert "; Dynamic NTK falls to 3.01" in nll_claim(evaluation(best_dynamic))
    all_worse = {method: [value + (method != "none") for value in PLAIN] for method in EIGHT}
    assert nll_claim(evaluation(all_worse)).endswith("at 10k–12k; no method goes lower")


def test_a_lead_within_its_interval_is_named_noise() -> None:
    close = evaluation({"none": PLAIN, "yarn": (*PLAIN[:-1], PLAIN[-1] - 0.05)})
    assert nll_claim(close).endswith("YaRN rises to 3.62, within noise")
    clear = evaluation({"none": PLAIN, "yarn": (*PLAIN[:-1], PLAIN[-1] - 0.15)})
    assert nll_claim(clear).endswith("YaRN rises to 3.52")


def test_claims_without_plain_rope() -> None:
    one = {"yarn": YARN}
    assert nll_claim(evaluation(one)).endswith("tokens YaRN falls to 3.16 nats at 10k–12k")
    two = {"linear": EIGHT["linear"], "yarn": YARN}
    assert nll_claim(evaluation(two)).endswith("YaRN falls to 3.16 nats at 10k–12k, the lowest")


def test_a_checkpoint_that_is_scaled_already_is_not_called_plain() -> None:
    scaled = evaluation(TWO, rope_parameters={"none": {"rope_type": "llama3", "factor": 8.0}})
    assert "tokens the checkpoint rises to 3.67" in nll_claim(scaled)
    assert "is better than the checkpoint by" in difference_claim(scaled)
    nested = {"full_attention": {"rope_type": "linear"}, "sliding_attention": {}}
    gemma = evaluation(TWO, rope_parameters={"none": nested})
    assert "the checkpoint rises" in nll_claim(gemma)
    plain = {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}
    assert "plain RoPE rises" in nll_claim(evaluation(TWO, rope_parameters={"none": plain}))


def test_nothing_is_claimed_past_the_trained_length_where_nothing_was_measured() -> None:
    within = evaluation({"none": PLAIN[:2]}, length=4096)
    assert nll_claim(within) == (
        "All 4k tokens lie within the trained 8k: plain RoPE 3.21 nats per token"
    )
    straddling = evaluation({"none": (3.4,), "yarn": (3.3,)}, bucket=12_288)
    assert nll_claim(straddling) == (
        "No bucket of positions lies wholly past the trained 8k tokens: "
        "overall plain RoPE 3.40, YaRN 3.30 nats per token"
    )


def test_a_straddling_bucket_is_no_reference() -> None:
    rows = {"none": (3.4, 3.9, 3.7)}  # 0–6k, 6k–12k straddles 8k, 12k–18k
    claim = nll_claim(evaluation(rows, bucket=6144, length=18_432))
    assert claim == "Past the trained 8k tokens plain RoPE rises to 3.70 nats at 12k–18k"
    alone = nll_claim(evaluation({"none": (3.9, 3.7)}, bucket=12_288, length=24_576))
    assert "plain RoPE is at 3.70 nats" in alone


def test_positions_in_windows_are_not_taken_for_reading_positions() -> None:
    claim = nll_claim(evaluation(TWO, window=4096, stride=512))
    assert claim == (
        "Read in windows of 4k tokens, trained to 8k: plain RoPE 3.35, YaRN 3.28 nats per token"
    )


def test_difference_in_words() -> None:
    assert difference_claim(evaluation(TWO)) == (
        "On the same tokens at 10k–12k YaRN is better than plain RoPE by 0.51 nats "
        "(95 % interval 0.42 to 0.60 over 256-token blocks)."
    )
    turned = difference_claim(evaluation({"none": YARN, "yarn": PLAIN}, documents=4))
    assert "YaRN is worse than plain RoPE by 0.51 nats" in turned
    assert "(95 % interval 0.42 to 0.60 over documents)" in turned
    same = difference_claim(evaluation({"none": PLAIN, "yarn": PLAIN}))
    assert "cannot be told from plain RoPE" in same
    assert "−0.09 to 0.09 nats" in same
    assert difference_claim(evaluation({"none": PLAIN})) == ""


@pytest.mark.parametrize(
    ("mean", "word"), [(0.1, "better"), (0.08, "noise"), (-0.08, "noise"), (-0.1, "worse")]
)
def test_verdict_is_the_interval_against_zero(mean: float, word: str) -> None:
    paired = evaluation({"none": (3.0 + mean,), "yarn": (3.0,)}).method("yarn").versus_none
    assert paired is not None
    assert verdict(paired) == word


@pytest.mark.parametrize(
    ("found", "claim"),
    [
        ({"none": {4096: 5, 12_288: 1}, "yarn": {4096: 5, 12_288: 4}},
         "YaRN finds 4 of 5 keys past the trained 8k tokens; plain RoPE 1 of 5"),
        ({"none": {4096: 5, 12_288: 4}, "yarn": {4096: 5, 12_288: 1}},
         "Plain RoPE finds 4 of 5 keys past the trained 8k tokens; YaRN 1 of 5"),
        ({"none": {12_288: 2}, "yarn": {12_288: 2}, "ntk": {12_288: 0}},
         "Plain RoPE finds 2 of 5 keys past the trained 8k tokens; no method finds more"),
        ({"ntk": {12_288: 0}, "yarn": {12_288: 2}},
         "YaRN finds 2 of 5 keys past the trained 8k tokens; no method finds more"),
        ({"yarn": {12_288: 0}}, "YaRN finds 0 of 5 keys past the trained 8k tokens"),
        ({"none": {12_288: 0}}, "Plain RoPE finds 0 of 5 keys past the trained 8k tokens"),
        ({"yarn": {4096: 3, 16_384: 0}}, "YaRN finds 3 of 5 keys within the trained 8k tokens"),
        ({"yarn": {16_384: 5}}, "No passkey prompt fitted: all 5 trials are invalid"),
        ({"none": {16_384: 5}, "yarn": {12_288: 3}},
         "YaRN finds 3 of 5 keys past the trained 8k tokens"),
    ],
)  # fmt: skip
def test_passkey_claim(found: dict[str, dict[int, int]], claim: str) -> None:
    assert passkey_claim(evaluation(TWO, passkey=trials(found))) == claim


def test_no_trials_make_no_claim() -> None:
    assert passkey_claim(evaluation(TWO)) == ""


def test_invalid_trials_are_no_misses() -> None:
    counts = tally(trials({"yarn": {4096: 3, 16_384: 0}}))
    assert (counts.found, counts.missed, counts.invalid) == (3, 2, 5)
    assert counts.rate == pytest.approx(0.6)
    assert counts.ranked_first == 3
    nothing = tally(trials({"yarn": {16_384: 5}}))
    assert nothing.rate is None
    assert nothing.fraction == "–"


@pytest.mark.parametrize(
    ("count", "text"),
    [(1024, "1k"), (12_288, "12k"), (1536, "1.5k"), (1_048_576, "1M"), (1_572_864, "1.5M"),
     (40_960, "40k"), (10_000, "10,000"), (1025, "1,025"), (0, "0"), (1_048_577, "1,048,577")],
)  # fmt: skip
def test_token_counts_are_short_only_where_exact(count: int, text: str) -> None:
    assert tokens(count) == text
    assert span(0, count) == f"0–{text}"


def test_an_empty_evaluation_is_refused() -> None:
    made = evaluation(TWO)
    empty, bare = replace(made, methods=()), replace(made.methods[1], buckets=())
    with pytest.raises(ConfigError, match="holds no method"):
        nll_claim(empty)
    with pytest.raises(ConfigError, match="'yarn' holds no position buckets"):
        evaluation_table(replace(made, methods=(made.methods[0], bare)))


def printed(*tables: object, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables:
        console.print(table)
    console.file.close()
    return console.export_text()


def test_tables_are_whole_at_80_columns() -> None:
    grid = trials({method: dict.fromkeys((2048, 4096, 8192, 12288, 16384), 3) for method in EIGHT})
    made = evaluation(EIGHT, documents=8, half=0.1, passkey=grid)
    text = printed(evaluation_heading(made), evaluation_table(made), passkey_table(made))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    (yarn, passkeys) = [line for line in text.splitlines() if line.startswith("yarn")]
    assert yarn.split() == [
        "yarn", "2", "3.28", "3.37", "3.48", "3.45", "3.16", "+0.51", "[+0.42,", "+0.60]", "41",
    ]  # fmt: skip
    assert passkeys.split() == ["yarn", "3/5", "3/5", "3/5", "3/5", "–", "12/20", "12/20", "5"]
    assert "95 % interval over documents" in " ".join(text.split())
    assert "Invalid, and no misses: " in text


def test_table_shows_the_telling_buckets() -> None:
    rows = {"none": [3.0 + i / 100 for i in range(24)]}
    header = printed(evaluation_table(evaluation(rows, bucket=1024, length=24_576))).splitlines()[0]
    assert header.split() == ["method", "×", "all", "0–1k", "7k–8k", "8k–9k", "23k–24k", "s"]


def test_table_of_one_bucket() -> None:
    table = evaluation_table(evaluation({"none": (3.2,)}, bucket=4096, length=4096))
    assert printed(table).splitlines()[1].split() == ["none", "–", "3.20", "3.20", "41"]


def test_factors_of_several_kinds_of_layer() -> None:
    nested = {"full_attention": {"factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    made = evaluation(TWO, rope_parameters={"yarn": nested})
    assert printed(evaluation_table(made)).splitlines()[2].split()[:2] == ["yarn", "8"]


def test_markup_in_names_is_printed_as_it_is() -> None:
    made = evaluation({"[bold]x[/bold]": PLAIN}, model="[red]m[/red]")
    text = printed(evaluation_heading(made), evaluation_table(made))
    assert "[bold]x[/bold]" in text
    assert "[red]m[/red]" in text


def test_many_passkey_lengths_keep_the_shortest_and_longest() -> None:
    lengths = {1024 * n: 5 for n in range(1, 13)}
    made = evaluation(TWO, passkey=trials({"none": lengths}))
    header = printed(passkey_table(made)).splitlines()[1].split()
    assert header == [
        "method", "1k", "2k", "3k", "10k", "11k", "12k", "all", "ranked", "first", "invalid",
    ]  # fmt: skip


def test_reports_need_neither_transformers_nor_pyplot() -> None:
    code = (
        "import sys, longspan.report.page, longspan.report.tables\n"
        "print([m for m in ('transformers', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_ntk_shows_its_factor_though_config_json_has_no_key_for_it():
    plain = {"rope_type": "default", "rope_theta": 211_000.0}
    (none, ntk) = evaluation(TWO, rope_parameters={"yarn": plain}).methods
    assert factor_text(none) == factor_text(ntk) == "–"
    assert factor_text(replace(ntk, factor=2.0)) == "2"
