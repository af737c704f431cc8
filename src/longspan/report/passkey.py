"""Passkey trials counted and put in a sentence: an invalid trial is never a miss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from longspan.report.wording import counted, sentence, title_in, tokens
from longspan.tools.evaluation import Evaluation, PasskeyTrial, retrieval_rate


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How many trials found their key, missed it, or were invalid; how many ranked it first."""

    found: int
    missed: int
    invalid: int
    ranked_first: int
    rate: float | None
    """Found among the valid ones, in [0, 1]; None where none is valid."""

    @property
    def valid(self) -> int:
        """The trials that count."""
        return self.found + self.missed

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
        rate=retrieval_rate(trials),
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
    counts = {method: count for method, count in counts.items() if count.valid}
    names = {method: title_in(evaluation, method) for method in counts}
    where = f"{'past' if past else 'within'} the trained {tokens(trained)} tokens"
    return sentence(find_claim(counts, names, where))


def find_claim(counts: dict[str, Tally], names: dict[str, str], where: str) -> str:
    """Returns who finds most keys; `counts` holds only methods with valid trials."""
    rates = {method: count.rate or 0.0 for method, count in counts.items()}
    others = [method for method in counts if method != "none"]
    best = max(others, key=lambda method: rates[method], default=None)
    first = best or "none"
    ending = ""
    if best and "none" not in counts:
        ending = "; no method finds more" if len(counts) > 1 else ""
    elif best and rates[best] > rates["none"]:
        ending = f"; {names['none']} {score(counts['none'])}"
    elif best:
        first = "none"
        lone = len(counts) == 2
        ending = f"; {names[best]} {score(counts[best])}" if lone else "; no method finds more"
    return f"{names[first]} finds {score(counts[first])} keys {where}{ending}"


def score(count: Tally) -> str:
    """Returns such as "4 of 5"."""
    return f"{count.found} of {count.valid}"


def invalid_reasons(evaluation: Evaluation) -> list[str]:
    """Returns the reasons of invalid trials, each once with its count."""
    reasons = [t.reason or "no reason given" for t in evaluation.passkey if t.status == "invalid"]
    return [
        f"{reason} ({counted(reasons.count(reason), 'trial')})" for reason in dict.fromkeys(reasons)
    ]
