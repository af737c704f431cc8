"""Passkey trials counted and put in a sentence: an invalid trial is never a miss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from longspan.report.wording import method_title, sentence, tokens
from longspan.tools.evaluation import Evaluation, PasskeyTrial


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How many trials found their key, missed it, or were invalid; how many ranked it first."""

    found: int
    missed: int
    invalid: int
    ranked_first: int

    @property
    def valid(self) -> int:
        """The trials that count."""
        return self.found + self.missed

    @property
    def rate(self) -> float:
        """Found among the valid ones, in [0, 1]; NaN where none is valid."""
        return self.found / self.valid if self.valid else float("nan")

    @property
    def fraction(self) -> str:
        """The rate in whole numbers, such as "4/5", or "–" where no trial is valid."""
        return f"{self.found}/{self.valid}" if self.valid else "–"


def tally(trials: Iterable[PasskeyTrial]) -> Tally:
    """Returns the counts of some trials.

    >>> trial = PasskeyTrial(method="none", length=64, depth=0.5, status="found", rank=1,
    ...                      candidates=10)
    >>> tally([trial]).fraction
    '1/1'
    """
    trials = list(trials)
    statuses = [trial.status for trial in trials]
    return Tally(
        found=statuses.count("found"),
        missed=statuses.count("missed"),
        invalid=statuses.count("invalid"),
        ranked_first=sum(trial.rank == 1 for trial in trials if trial.status != "invalid"),
    )


def passkey_methods(evaluation: Evaluation) -> list[str]:
    """Returns the methods that were given passkey trials, in the order they ran."""
    return list(dict.fromkeys(trial.method for trial in evaluation.passkey))


def passkey_lengths(evaluation: Evaluation) -> list[int]:
    """Returns the prompt lengths that were tried, shortest first."""
    return sorted({trial.length for trial in evaluation.passkey})


def trials_of(evaluation: Evaluation, method: str, length: int | None = None) -> list[PasskeyTrial]:
    """Returns one method's trials, of one length if given."""
    return [
        trial
        for trial in evaluation.passkey
        if trial.method == method and length in (None, trial.length)
    ]


def passkey_claim(evaluation: Evaluation) -> str:
    """Returns how often the best method and plain RoPE find the key; empty without trials.

    Only prompts longer than the trained length count, where there are valid ones.
    """
    if not evaluation.passkey:
        return ""
    valid = [trial for trial in evaluation.passkey if trial.status != "invalid"]
    if not valid:
        return f"No passkey prompt fitted: all {len(evaluation.passkey)} trials are invalid"
    trained = evaluation.protocol.trained_length
    past = [trial for trial in valid if trial.length > trained]
    counts = {
        method: tally(trial for trial in past or valid if trial.method == method)
        for method in passkey_methods(evaluation)
    }
    where = f"{'past' if past else 'within'} the trained {tokens(trained)} tokens"
    return sentence(find_claim({m: count for m, count in counts.items() if count.valid}, where))


def find_claim(counts: dict[str, Tally], where: str) -> str:
    """Returns who finds most keys; `counts` holds only methods with valid trials."""
    best = max(
        (method for method in counts if method != "none"),
        key=lambda method: counts[method].rate,
        default="none",
    )
    if best == "none":
        return finds("none", counts, f" keys {where}")
    if "none" not in counts:
        return finds(best, counts, f" keys {where}") + "; no method finds more" * (len(counts) > 1)
    first, second = "none", best
    if counts[best].rate > counts["none"].rate:
        first, second = best, "none"
    elif len(counts) > 2:
        return finds("none", counts, f" keys {where}; no method finds more")
    other = counts[second]
    claim = finds(first, counts, f" keys {where}")
    return f"{claim}; {method_title(second)} {other.found} of {other.valid}"


def finds(method: str, counts: dict[str, Tally], rest: str) -> str:
    """Returns a sentence about one method, such as "YaRN finds 4 of 5 keys"."""
    return f"{method_title(method)} finds {counts[method].found} of {counts[method].valid}{rest}"
