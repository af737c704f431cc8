"""A plan as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from longspan.tools.pairs import PairEffect
from longspan.tools.plan import Plan


def plan_to_json(model: str, planned: Plan, effects: Sequence[PairEffect]) -> dict[str, Any]:
    """Returns everything a plan says, ready for JSON; an infinite wavelength becomes null."""
    return {
        "model": model,
        "to": planned.to,
        "method": planned.method,
        "factor": planned.factor,
        "trained_length": planned.trained_length,
        "usable_length": planned.usable_length,
        "smallest_factor": planned.smallest_factor,
        "config": dict(planned.changed),
        "remove": list(planned.removed),
        "kv_cache_bytes": planned.kv_cache_bytes,
        "pairs": [pair_to_json(effect) for effect in effects],
        "notes": list(planned.notes),
        "warnings": list(planned.warnings),
    }


def pair_to_json(effect: PairEffect) -> dict[str, Any]:
    """Returns one pair's row."""
    return {
        "pair": effect.pair,
        "wavelength": effect.wavelength if math.isfinite(effect.wavelength) else None,
        "rotations": effect.rotations,
        "completes_a_turn": effect.completes_a_turn,
        "rescale_factors": dict(effect.rescale),
    }
