"""What attention.py finds: times and peaks of memory, and how they are looked up."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspan.files import write_text

DIRECTIONS = ("forward", "forward+backward")


@dataclass(frozen=True)
class Row:
    """One contender in one setting."""

    setting: str
    tokens: int
    direction: str
    contender: str
    dtype: str
    median_ms: float
    fastest_ms: float
    of_first: float
    """The median as a multiple of the setting's first contender's."""
    error: float
    """Largest |difference| from the float64 definition, over the last queries."""


@dataclass(frozen=True)
class Peak:
    """What one call and its masks need beyond q, k and v."""

    contender: str
    tokens: int
    direction: str
    peak_mb: float


@dataclass(frozen=True)
class Results:
    """All of a run."""

    protocol: dict[str, Any]
    rows: list[Row]
    peaks: list[Peak]

    def ms(
        self,
        setting: str,
        tokens: int,
        contender: str,
        dtype: str = "float32",
        backward: bool = False,
    ) -> float | None:
        """Returns a median, or None where it was not measured."""
        wanted = setting, tokens, DIRECTIONS[backward], contender, dtype
        for row in self.rows:
            if (row.setting, row.tokens, row.direction, row.contender, row.dtype) == wanted:
                return row.median_ms
        return None

    def gb(self, tokens: int, contender: str, backward: bool = False) -> float | None:
        """Returns a peak in GB, or None where it was not measured."""
        for peak in self.peaks:
            wanted = tokens, contender, DIRECTIONS[backward]
            if (peak.tokens, peak.contender, peak.direction) == wanted:
                return peak.peak_mb / 1e3
        return None

    def write(self, path: Path, **more: Any) -> None:
        """Writes everything as JSON."""
        write_text(path, json.dumps({**asdict(self), **more}, indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Results:
        """Reads what `write` wrote, but for `more`."""
        found = json.loads(path.read_text(encoding="utf-8"))
        rows, peaks = ([*found[name]] for name in ("rows", "peaks"))
        return Results(
            found["protocol"], [Row(**row) for row in rows], [Peak(**peak) for peak in peaks]
        )


def ratio(a: float | None, b: float | None) -> float | None:
    """Returns a / b, or None where either was not measured."""
    return None if a is None or b is None else a / b
