"""What scaling does to each rotary pair: how far it turned in training, how far it is slowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longspan.errors import ConfigError
from longspan.rotary.frequencies import rotations, wavelengths
from longspan.rotary.scaling import SCALINGS, RopeScaling
from longspan.tools.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PairEffect:
    """One pair of channels of the layers that reach furthest.

    Attributes:
        pair: its index, from the fastest.
        wavelength: tokens of a full turn, unscaled.
        rotations: full turns within the trained length.
        rescale: by method, what its frequency is divided by.
    """

    pair: int
    wavelength: float
    rotations: float
    rescale: Mapping[str, float]

    @property
    def completes_a_turn(self) -> bool:
        """Whether training showed it every angle."""
        return self.rotations >= 1


def pair_effects(planned: Plan) -> tuple[PairEffect, ...]:
    """Returns every pair's turns in training and what each method would do to it.

    A method that cannot be applied by a factor alone (LongRoPE) is left out.
    """
    rope = planned.ropes[planned.ropes.reaching].with_scaling(None)
    inv_freq = rope.inv_freq()
    tables = {
        method: (inv_freq / rope.with_scaling(scaling).inv_freq(planned.to)).nan_to_num(1.0)
        for method, scaling in comparable_scalings(planned).items()
    }
    turns = rotations(inv_freq, planned.trained_length)
    return tuple(
        PairEffect(
            pair=pair,
            wavelength=wavelength,
            rotations=turns[pair].item(),
            rescale={method: table[pair].item() for method, table in tables.items()},
        )
        for pair, wavelength in enumerate(wavelengths(inv_freq).tolist())
    )


def comparable_scalings(planned: Plan) -> dict[str, RopeScaling]:
    """Returns each method as it would reach the planned length; the planned one as planned."""
    found: dict[str, RopeScaling] = {}
    for scaling in SCALINGS:
        if scaling.method == planned.method:
            found[scaling.method] = planned.ropes[planned.ropes.reaching].method
        elif scaling.method != "none":
            try:
                found[scaling.method] = scaling.for_factor(
                    planned.smallest_factor, planned.trained_length
                )
            except ConfigError:
                continue
    return found
