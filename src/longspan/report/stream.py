"""Streams for the terminal: a score by tenths, methods side by side."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from longspan.report.wording import counted, number, span, tokens
from longspan.tools.stream_results import Comparison, MethodScore, Part, Protocol, Score


def print_score(score: Score) -> None:
    """Prints the perplexity of each tenth and of all, the speed and the memory."""
    table = _table("tokens", "nats per token", "perplexity")
    for part in (*score.tenths, score.whole):
        name = "all" if part is score.whole else span(part.start, part.stop)
        table.add_row(name, number(part.nll), perplexity_text(part))
    _print(heading(score.protocol), table, f"{speed(score)}{resident(score)}")


def print_comparison(comparison: Comparison) -> None:
    """Prints a row a method, then a row a number of sinks."""
    if comparison.methods:
        above, below = heading(comparison.protocol), methods_caption(comparison)
        _print(above, methods_table(comparison), below)
    if comparison.sinks:
        above, below = sinks_heading(comparison.protocol), past_caption(comparison.protocol)
        _print(above, sinks_table(comparison), below)


def methods_table(comparison: Comparison) -> Table:
    """Returns perplexities over the tokens that each pair of methods shares, and decoding speed."""
    shared = shared_parts(comparison)
    table = _table("method", "keeps", "perplexity", *shared, "tokens/s")
    for score in comparison.methods:
        cells = [score.method, keeps(score), perplexity_text(score.whole)]
        cells += [perplexity_text(getattr(score, field)) for field in shared.values()]
        speed = score.tokens_per_second
        table.add_row(*cells, "–" if speed is None else f"{speed:.3g}")
    return table


def shared_parts(comparison: Comparison) -> dict[str, str]:
    """Returns the fields of a method's score that some methods share, by column."""
    found = {"past": "past"}
    for score in comparison.methods:
        if score.method == "recompute":
            found[f"same {score.whole.tokens:,}"] = "spread"
        if score.method == "dense" and score.past is None:
            found[f"first {tokens(score.whole.stop)}"] = "dense"
    return found


def methods_caption(comparison: Comparison) -> str:
    """Returns how to read the columns."""
    said = [past_caption(comparison.protocol)]
    for name, field in shared_parts(comparison).items():
        if field == "spread":
            said.append(f"{name}: the tokens that recompute scored, spread over those.")
        if field == "dense":
            said.append(f"{name}: the tokens that dense read.")
    if any(score.tokens_per_second is not None for score in comparison.methods):
        said.append("tokens/s: one after another with a full cache, on this machine.")
    return "\n".join(said)


def sinks_table(comparison: Comparison) -> Table:
    """Returns the perplexity with each number of sinks, in a cache of one size."""
    table = _table("sinks", "window", "perplexity", "past")
    for score in comparison.sinks:
        sizes = str(score.num_sink_tokens), f"{score.sliding_window:,}"
        table.add_row(*sizes, perplexity_text(score.whole), perplexity_text(score.past))
    return table


def score_claim(score: Score) -> str:
    """Returns what a score says: how well it read how much, in what memory."""
    read = f"{counted(score.protocol.tokens, 'token')} read at perplexity"
    return f"{read} {perplexity_text(score.whole)}{resident(score, ', with ', '')}"


def comparison_claim(comparison: Comparison) -> str:
    """Returns the NLL of the methods that read every token, where something was dropped."""
    said = [
        f"{score.method} {number(score.past.nll)}"
        for score in comparison.methods
        if score.past is not None
    ]
    size = tokens(kept(comparison.protocol))
    if said:
        return f"Past a cache of {size} tokens: {', '.join(said)} nats per token"
    return recompute_claim(comparison) or f"Nothing was read past a cache of {size} tokens"


def recompute_claim(comparison: Comparison) -> str:
    """Returns recompute's NLL and the others' on the same few tokens; empty if it was not run."""
    said = [
        f"{score.method} {number(score.spread.nll)}"
        for score in comparison.methods
        if score.spread is not None
    ]
    few = [score.whole.tokens for score in comparison.methods if score.method == "recompute"]
    return f"On the same {counted(few[0], 'token')}: {', '.join(said)}" if few else ""


def heading(protocol: Protocol) -> str:
    """Returns what was read by what."""
    again = ", repeated" if protocol.repeated else ""
    return (
        f"{protocol.model}: {counted(protocol.tokens, 'token')} of {protocol.text[0]}{again}, "
        f"keeping {protocol.num_sink_tokens} + {protocol.sliding_window:,}"
    )


def sinks_heading(protocol: Protocol) -> str:
    """Returns what was read with several numbers of sinks."""
    read = f"{counted(protocol.tokens, 'token')} of {protocol.text[0]}"
    return f"{protocol.model}: {read}, sinks in a cache of {tokens(kept(protocol))} tokens"


def past_caption(protocol: Protocol) -> str:
    """Returns what "past" is short for."""
    return (
        f"past: the tokens after the first {kept(protocol) + 1:,}; before them nothing is dropped."
    )


def kept(protocol: Protocol) -> int:
    """Returns the tokens in the cache."""
    return protocol.num_sink_tokens + protocol.sliding_window


def keeps(score: MethodScore) -> str:
    """Returns the sizes of a cache, such as "4 + 1,020"."""
    sinks = f"{score.num_sink_tokens} + " if score.num_sink_tokens else ""
    return f"{sinks}{score.sliding_window:,}"


def perplexity_text(part: Part | None) -> str:
    """Returns two decimals, none of a thousand or more; a dash where nothing was read.

    >>> perplexity_text(Part(start=1, stop=3, tokens=2, nll=8.0, perplexity=2980.958))
    '2,981'
    """
    if part is None:
        return "–"
    value = part.perplexity
    if value >= 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def resident(score: Score, start: str = "Resident memory: ", end: str = ".") -> str:
    """Returns the memory at a tenth and at the end; empty where it was not told."""
    if score.resident_at_tenth is None or score.resident_at_end is None:
        return ""
    sizes = score.resident_at_tenth, score.resident_at_end
    tenth, last = (f"{size / 1e9:.2f}\u00a0GB" for size in sizes)  # a space that holds
    return f"{start}{tenth} at a tenth of the text and {last} at its end{end}"


def speed(score: Score) -> str:
    """Returns the tokens a second, and where an earlier run had come to."""
    if score.tokens_per_second is None:
        return ""
    resumed = f" since {tokens(score.resumed_at)}, where it was resumed" if score.resumed_at else ""
    return f"{score.tokens_per_second:,.0f} tokens/s{resumed}. "


def _table(*columns: str) -> Table:
    table = Table(
        box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold"
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    return table


def _print(above: str, table: Table, below: str) -> None:
    console = Console()
    console.print(above, highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    if below.strip():
        console.print(below, highlight=False, markup=False, soft_wrap=True)
