"""The bars attention is held to, against what a run has seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from longspan.report.wording import tokens as written
from results import Results, ratio

OURS = "longspan tiled"


@dataclass(frozen=True)
class Bar:
    """One number that was asked for."""

    what: str
    wanted: float
    at_most: bool
    seen: float | None
    """None where this run did not measure it."""
    unit: str = "×"

    @property
    def met(self) -> bool | None:
        """Whether it is reached; None where it was not measured."""
        if self.seen is None:
            return None
        return self.seen <= self.wanted if self.at_most else self.seen >= self.wanted

    def cells(self) -> tuple[str, str, str, str]:
        """Returns the bar as a row of a table."""
        seen = "not measured" if self.seen is None else f"{self.seen:.2f} {self.unit}"
        verdict = {None: "–", True: "met", False: "NOT MET"}[self.met]
        return (
            self.what,
            f"{'≤' if self.at_most else '≥'} {self.wanted:g} {self.unit}",
            seen,
            verdict,
        )


def bars(found: Results, tokens: int, longest: int) -> list[Bar]:
    """Returns every bar; what is wanted was set for 8192 and 131072 tokens.

    Args:
        found: a run's results.
        tokens: the length of the window and bias settings.
        longest: the last length of the growth.
    """
    return [
        *_window(found, tokens),
        *_growth(found, 2 * tokens, longest),
        *_bias(found, tokens),
        *_training(found, tokens),
    ]


def _window(found: Results, n: int) -> Iterator[Bar]:
    ours = found.ms("window", n, OURS)
    at = f"window, {written(n)}"
    dense = ratio(found.ms("window", n, "sdpa dense mask"), ours)
    yield Bar(f"{at}: SDPA's dense mask ÷ longspan", 8, False, dense)
    yield Bar(
        f"{at}: longspan ÷ compiled Flex",
        1.3,
        True,
        ratio(ours, found.ms("window", n, "flex compiled")),
    )
    local = ratio(found.ms("window", n, "local-attention"), ours)
    yield Bar(f"{at}: local-attention ÷ longspan", 3, False, local)
    both = [found.ms("window", n, name, backward=True) for name in ("sdpa dense mask", OURS)]
    yield Bar(f"{at}: SDPA's dense mask ÷ longspan, with backward", 6, False, ratio(*both))
    half = ratio(found.ms("window", n, OURS, "bfloat16"), ours)
    yield Bar(f"{at}: longspan bf16 ÷ fp32", 1.0, True, half)


def _growth(found: Results, first: int, longest: int) -> Iterator[Bar]:
    wanted = 1.1 * longest / first
    way = f"{written(first)} → {written(longest)}"
    times = [found.ms("window", n, OURS) for n in (longest, first)]
    yield Bar(f"growth {way}: time", wanted, True, ratio(*times))
    peaks = [found.gb(n, OURS) for n in (longest, first)]
    yield Bar(f"growth {way}: memory above inputs", wanted, True, ratio(*peaks))
    yield Bar(f"peak above inputs, {written(longest)}", 2.5, True, peaks[0], "GB")
    with_backward = found.gb(longest // 4, OURS, backward=True)
    what = f"peak above inputs, {written(longest // 4)}, with backward"
    yield Bar(what, 3.0, True, with_backward, "GB")


def _bias(found: Results, n: int) -> Iterator[Bar]:
    plain = found.ms("bias", n, "sdpa causal")
    for name, wanted in (("longspan ALiBi", 1.25), ("longspan T5", 1.3)):
        seen = ratio(found.ms("bias", n, name), plain)
        yield Bar(f"bias, {written(n)}: {name} ÷ SDPA causal", wanted, True, seen)


def _training(found: Results, tokens: int) -> Iterator[Bar]:
    pairs = (("window", "sdpa dense mask", OURS), ("bias", "sdpa dense ALiBi", "longspan ALiBi"))
    for n in (tokens // 4, tokens // 2):
        for setting, dense, ours in pairs:
            both = [found.ms(setting, n, name, backward=True) for name in (dense, ours)]
            what = f"{setting}, {written(n)}: {dense} ÷ {ours}, with backward"
            yield Bar(what, 1.0, False, ratio(*both))
