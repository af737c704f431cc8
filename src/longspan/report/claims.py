"""What the NLL data say, in one sentence each: a figure's title and the page's headline.

A sentence is computed from the numbers alone: turn the data around and the claim turns around.
"""

from __future__ import annotations

from longspan.report.buckets import check_measured, past_trained, within_trained
from longspan.report.wording import number, result_title, sentence, span, title_in, tokens
from longspan.tools.evaluation import Evaluation, MethodResult, PairedDifference, Protocol

NOTICEABLE = 0.05
"""Nats per token, about 5 % of perplexity: a smaller change between buckets is "stays"."""


def nll_claim(evaluation: Evaluation) -> str:
    """Returns what happens to NLL past the trained length, to plain RoPE and the best method.

    A method "rises" or "falls" if its last bucket differs by more than `NOTICEABLE` from its last
    one within the trained length. A lead over plain RoPE whose interval holds 0 is named noise.

    Raises:
        ConfigError: if the evaluation holds no method or no buckets.
    """
    check_measured(evaluation)
    protocol = evaluation.protocol
    length, trained = protocol.length, protocol.trained_length
    if protocol.window is not None:
        start = f"read in windows of {tokens(protocol.window)} tokens, trained to {tokens(trained)}"
        return sentence(f"{start}: {overall(evaluation)}")
    if length <= trained:
        start = f"all {tokens(length)} tokens lie within the trained {tokens(trained)}"
        return sentence(f"{start}: {overall(evaluation)}")
    if not past_trained(evaluation.methods[0], protocol):
        start = f"no bucket of positions lies wholly past the trained {tokens(trained)} tokens"
        return sentence(f"{start}: overall {overall(evaluation)}")
    return f"Past the trained {tokens(trained)} tokens {past_claim(evaluation)}"


def past_claim(evaluation: Evaluation) -> str:
    """Returns the part of the claim about the last bucket, past the trained length."""
    protocol = evaluation.protocol
    plain, best = plain_result(evaluation), best_result(evaluation)
    lead = plain or best or evaluation.methods[0]
    last = lead.buckets[-1]
    claim = f"{moves(lead, protocol)} nats at {span(last.start, last.stop)}"
    if plain is None:
        return f"{claim}, the lowest" if len(evaluation.methods) > 1 else claim
    if best is None:
        return claim
    if best.buckets[-1].nll < plain.buckets[-1].nll:
        noise = best.versus_none is not None and verdict(best.versus_none) == "noise"
        return f"{claim}; {moves(best, protocol)}{', within noise' if noise else ''}"
    if len(evaluation.methods) > 2:
        return f"{claim}; no method goes lower"
    return f"{claim}; {result_title(best)} does not go lower"


def moves(result: MethodResult, protocol: Protocol) -> str:
    """Returns where the method's last bucket went since its last trained one.

    Such as "YaRN rises to 3.67", or "YaRN is at 3.67" where no bucket is within the trained length.
    """
    last, within = result.buckets[-1], within_trained(result, protocol)
    verb = "is at"
    if within:
        change = last.nll - within[-1].nll
        verb = "stays at" if abs(change) <= NOTICEABLE else "rises to" if change > 0 else "falls to"
    return f"{result_title(result)} {verb} {number(last.nll)}"


def overall(evaluation: Evaluation) -> str:
    """Returns the NLL over all positions of plain RoPE and of the best other method."""
    others = [result for result in evaluation.methods if result.method != "none"]
    best = min(others, key=lambda result: result.nll, default=None)
    named = [result for result in (plain_result(evaluation), best) if result is not None]
    parts = [f"{result_title(result)} {number(result.nll)}" for result in named]
    return f"{', '.join(parts)} nats per token"


def plain_result(evaluation: Evaluation) -> MethodResult | None:
    """Returns the result of the checkpoint as it stands, if it was measured."""
    return next((result for result in evaluation.methods if result.method == "none"), None)


def best_result(evaluation: Evaluation) -> MethodResult | None:
    """Returns the method, other than plain RoPE, with the lowest NLL in the last bucket."""
    others = [result for result in evaluation.methods if result.method != "none"]
    return min(others, key=lambda result: result.buckets[-1].nll, default=None)


def verdict(difference: PairedDifference) -> str:
    """Returns "better", "worse", or "noise" where the 95 % interval holds 0.

    >>> verdict(PairedDifference(baseline="none", start=0, stop=8, mean=0.1, low=-0.1, high=0.3,
    ...                          unit="documents"))
    'noise'
    """
    if difference.low > 0:
        return "better"
    return "worse" if difference.high < 0 else "noise"


def difference_claim(evaluation: Evaluation) -> str:
    """Returns the best method's paired difference in words; empty where none was measured."""
    best = best_result(evaluation)
    if best is None or best.versus_none is None:
        return ""
    paired = best.versus_none
    who, baseline = result_title(best), title_in(evaluation, paired.baseline)
    where = f"On the same tokens at {span(paired.start, paired.stop)}"
    word = verdict(paired)
    if word == "noise":
        return (
            f"{where} {who} cannot be told from {baseline}: the 95 % interval of their difference, "
            f"{number(paired.low)} to {number(paired.high)} nats over {paired.unit}, holds 0."
        )
    low, high = sorted((abs(paired.low), abs(paired.high)))
    return (
        f"{where} {who} is {word} than {baseline} by {number(abs(paired.mean))} nats "
        f"(95 % interval {number(low)} to {number(high)} over {paired.unit})."
    )
