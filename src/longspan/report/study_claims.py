"""What a study's numbers say, in a sentence a figure; turned numbers turn the sentence."""

from __future__ import annotations

from longspan.report.claims import NOTICEABLE
from longspan.report.study_curves import (
    bucket_span,
    encoding_title,
    joined,
    memory_curves,
    past_buckets,
    scaled_curves,
    trained_bucket,
    whole_curves,
    window_curves,
)
from longspan.report.wording import method_title, number, tokens
from longspan.tools.study_results import StudyCurve, StudyProtocol, StudyResult

VISIBLE = 0.005
"""Nats per token: a smaller difference is not seen in two decimals."""


def study_claims(result: StudyResult) -> list[str]:
    """Returns what each figure says, the most telling first; only of what was measured."""
    told = (position_claim, scaling_claim, window_claim, memory_claim)
    return [claim for tell in told if (claim := tell(result))]


def position_claim(result: StudyResult) -> str:
    """Returns which encodings hold past the trained length and which rise; empty without any.

    One rises if any bucket past the trained length is more than `NOTICEABLE` above the last within.
    """
    length = result.protocol.length
    rises = {
        one.encoding: highest_rise(one, length)
        for one in whole_curves(result)
        if trained_bucket(one, length) and past_buckets(one, length)
    }
    if not rises:
        return ""
    hold = [encoding_title(name) for name, (low, high) in rises.items() if high - low <= NOTICEABLE]
    rising = {name: ends for name, ends in rises.items() if ends[1] - ends[0] > NOTICEABLE}
    said = []
    if hold:
        said.append(f"{joined(hold)} {verb('hold', hold)} to {tokens(result.protocol.reach)}")
    if rising:
        names = [encoding_title(name) for name in rising]
        most = max(rising, key=lambda name: rising[name][1] - rising[name][0])
        low, high = rising[most]
        which = f", {encoding_title(most)} most," if len(names) > 1 else ""
        said.append(
            f"{joined(names)} {verb('rise', names)}{which} from {number(low)} to "
            f"{number(high)} nats"
        )
    return f"Past the trained {tokens(length)} tokens {'; '.join(said)}"


def highest_rise(curve: StudyCurve, length: int) -> tuple[float, float]:
    """Returns the NLL of the last trained bucket and of the highest one past it."""
    trained = trained_bucket(curve, length)
    assert trained is not None
    return trained.nll, max(bucket.nll for bucket in past_buckets(curve, length))


def scaling_claim(result: StudyResult) -> str:
    """Returns where plain RoPE and the best scaling end; empty where no scaling was read.

    A scaling whose interval meets plain RoPE's is named within noise.
    """
    curves = scaled_curves(result)
    if not curves:
        return ""
    protocol = result.protocol
    plain = next((one for one in curves if one.method == "none"), None)
    best = min((one for one in curves if one.method != "none"), key=lambda one: one.buckets[-1].nll)
    lead = plain or best
    where = bucket_span(lead.buckets[-1], protocol)
    claim = (
        f"Past the trained {tokens(protocol.length)} tokens {moves(lead, protocol)} nats at {where}"
    )
    if plain is None:
        return claim
    if best.buckets[-1].nll >= plain.buckets[-1].nll:
        return f"{claim}; no scaling goes lower"
    noise = ", within noise" if intervals_meet(best, plain) else ""
    return f"{claim}; {moves(best, protocol)}{noise}"


def moves(curve: StudyCurve, protocol: StudyProtocol) -> str:
    """Returns where the last bucket went since the last trained one, such as "YaRN rises to 3.2".

    A scaling also changes what is within the trained length, so its own bucket there is compared.
    """
    name = method_title(curve.method)
    last, trained = curve.buckets[-1], trained_bucket(curve, protocol.length)
    if trained is None:
        return f"{name} is at {number(last.nll)}"
    change = last.nll - trained.nll
    word = "stays at" if abs(change) <= NOTICEABLE else "rises to" if change > 0 else "falls to"
    return f"{name} {word} {number(last.nll)}"


def intervals_meet(one: StudyCurve, other: StudyCurve) -> bool:
    """Returns whether the intervals of two last buckets meet; False where one has none."""
    a, b = one.buckets[-1], other.buckets[-1]
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.low <= b.high and b.low <= a.high


def window_claim(result: StudyResult) -> str:
    """Returns which encodings longer windows improve and worsen; empty without two windows.

    One improves or worsens by more than `NOTICEABLE`, in every seed.
    """
    changes = window_changes(result)
    if changes is None:
        return ""
    first, last, found = changes
    said = []
    for word, sign in (("improve", -1), ("worsen", 1)):
        group = {
            name: change
            for name, (change, seeds) in found.items()
            if sign * change > NOTICEABLE and all(sign * one > 0 for one in seeds)
        }
        if group:
            names = [encoding_title(name) for name in group]
            most = max(group, key=lambda name: abs(group[name]))
            which = f", {encoding_title(most)} most," if len(names) > 1 else ""
            said.append(
                f"{joined(names)} {verb(word, names)}{which} by {number(abs(group[most]))} nats"
            )
            found = {name: change for name, change in found.items() if name not in group}
    near = [encoding_title(name) for name, (by, _) in found.items() if abs(by) <= NOTICEABLE]
    split = [encoding_title(name) for name, (by, _) in found.items() if abs(by) > NOTICEABLE]
    if near:
        said.append(f"{joined(near)} {verb('stay', near)} within {NOTICEABLE:g} nats")
    if split:
        said.append(f"{joined(split)} {verb('change', split)}, but not alike in every seed")
    start = f"Read in windows of {tokens(last)} tokens instead of {tokens(first)}"
    return f"{start}, {'; '.join(said)}"


def window_changes(
    result: StudyResult,
) -> tuple[int, int, dict[str, tuple[float, list[float]]]] | None:
    """Returns the shortest and the longest window that all were read in, and what it changes.

    Of each encoding: the difference of the means and of each seed's, above 0 where the longer
    window is worse. None without two windows in common.
    """
    lines = {
        name: {one.window: one for one in line} for name, line in window_curves(result).items()
    }
    common = sorted(set.intersection(*(set(line) for line in lines.values()))) if lines else []
    if len(common) < 2:
        return None
    first, last = common[0], common[-1]
    changes = {
        name: (line[last].nll - line[first].nll, by_seed(line[last], line[first]))
        for name, line in lines.items()
    }
    return first, last, changes


def memory_claim(result: StudyResult) -> str:
    """Returns what the memory of earlier segments changes; empty where none was read with it.

    A model's NLL is lowered or raised only where every seed agrees and two decimals show it.
    """
    pairs = memory_curves(result)
    if not pairs:
        return ""
    lowered, raised, open_ = [], [], []
    for alone, recurrent in pairs:
        changes = by_seed(recurrent, alone)
        mean = recurrent.nll - alone.nll
        name = encoding_title(alone.encoding)
        line = f"{name} from {number(alone.nll)} to {number(recurrent.nll)}"
        if mean <= -VISIBLE and all(change < 0 for change in changes):
            lowered.append(line)
        elif mean >= VISIBLE and all(change > 0 for change in changes):
            raised.append(line)
        else:
            open_.append(name)
    said = [
        f"{word} {joined(lines)} nats"
        for word, lines in (("lowers", lowered), ("raises", raised))
        if lines
    ]
    if open_:
        said.append(f"does not change {joined(open_)} alike in every seed")
    memory = tokens(result.protocol.memory_length)
    return f"Over all positions memory of {memory} tokens {'; '.join(said)}"


def by_seed(one: StudyCurve, other: StudyCurve) -> list[float]:
    """Returns the differences (one − other) of each seed's mean."""
    return [a - b for a, b in zip(one.by_seed, other.by_seed, strict=True)]


def verb(word: str, subjects: list[str]) -> str:
    """Returns a verb that fits how many do it.

    >>> verb("rise", ["RoPE"]), verb("rise", ["RoPE", "T5"])
    ('rises', 'rise')
    """
    return word if len(subjects) > 1 else f"{word}s"
