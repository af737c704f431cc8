"""One scaling method a file; `SCALINGS` is the list of them."""

from __future__ import annotations

from longspan.errors import ConfigError, did_you_mean
from longspan.rotary.scaling.base import RopeScaling
from longspan.rotary.scaling.dynamic import DynamicNTK
from longspan.rotary.scaling.linear import PositionInterpolation
from longspan.rotary.scaling.llama3 import Llama3
from longspan.rotary.scaling.longrope import LongRope
from longspan.rotary.scaling.none import NoScaling
from longspan.rotary.scaling.ntk import NTKAware
from longspan.rotary.scaling.ntk_by_parts import NTKByParts
from longspan.rotary.scaling.yarn import Yarn

SCALINGS: tuple[type[RopeScaling], ...] = (
    NoScaling,
    PositionInterpolation,
    NTKAware,
    DynamicNTK,
    NTKByParts,
    Yarn,
    Llama3,
    LongRope,
)

METHODS: dict[str, type[RopeScaling]] = {scaling.method: scaling for scaling in SCALINGS}

ALIASES = {"pi": "linear", "ntk-aware": "ntk", "ntk_by_parts": "ntk-by-parts", "default": "none"}


def scaling_for_method(method: str) -> type[RopeScaling]:
    """Returns the scaling class of a method's name, such as 'yarn' or its alias 'pi'.

    Raises:
        ConfigError: for a name that is not a method, with the nearest one.

    >>> scaling_for_method("pi").__name__
    'PositionInterpolation'
    """
    name = ALIASES.get(method, method)
    if name not in METHODS:
        raise ConfigError(
            f"unknown method {method!r}.{did_you_mean(method, [*METHODS, *ALIASES])} "
            f"Methods: {', '.join(METHODS)}."
        )
    return METHODS[name]


__all__ = [
    "METHODS",
    "SCALINGS",
    "DynamicNTK",
    "Llama3",
    "LongRope",
    "NTKAware",
    "NTKByParts",
    "NoScaling",
    "PositionInterpolation",
    "RopeScaling",
    "Yarn",
    "scaling_for_method",
]
