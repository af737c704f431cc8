"""The learning rate of every step: a linear warm-up, then constant or along a cosine."""

from __future__ import annotations

import math
from typing import Literal, get_args

from longspan.errors import ConfigError

Schedule = Literal["constant", "cosine"]


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    steps: int,
    schedule: Schedule,
    floor: float = 0.0,
) -> float:
    """Returns the learning rate of a step.

    It grows linearly to `peak`, which the last step of the warm-up has, and stays there or falls
    along half a cosine, which would reach `floor` one step after the last.

    Args:
        step: counted from 0.
        peak: the highest rate, > 0.
        warmup_steps: steps of the warm-up, from 0 to `steps`; no step has a rate of 0.
        steps: of the whole training.
        schedule: `constant` or `cosine`.
        floor: where the cosine ends, from 0 to `peak`.

    Raises:
        ConfigError: for a number outside its range or an unknown schedule.

    >>> how = dict(peak=1.0, warmup_steps=4, steps=12, schedule="cosine")
    >>> [learning_rate(step, **how) for step in (0, 1, 3, 4, 8)]
    [0.25, 0.5, 1.0, 1.0, 0.5]
    """
    check_schedule(
        peak=peak, warmup_steps=warmup_steps, steps=steps, schedule=schedule, floor=floor
    )
    if not 0 <= step < steps:
        raise ConfigError(f"step must be from 0 to {steps - 1}, got {step}.")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    gone = (step - warmup_steps) / (steps - warmup_steps)
    return floor + (peak - floor) * (1 + math.cos(math.pi * gone)) / 2


def check_schedule(
    *, peak: float, warmup_steps: int, steps: int, schedule: str, floor: float = 0.0
) -> None:
    """Refuses a schedule that makes no sense; see `learning_rate`."""
    if schedule not in get_args(Schedule):
        raise ConfigError(
            f"schedule must be one of {', '.join(get_args(Schedule))}, got {schedule!r}."
        )
    if not (math.isfinite(peak) and peak > 0):
        raise ConfigError(f"the learning rate must be > 0, got {peak}. Papers use about 2e-5.")
    if steps < 1:
        raise ConfigError(f"steps must be ≥ 1, got {steps}.")
    if not 0 <= warmup_steps <= steps:
        raise ConfigError(
            f"warmup_steps must be from 0 to steps ({steps}), got {warmup_steps}. A longer warm-up "
            "would never reach the learning rate."
        )
    if not 0 <= floor <= peak:
        raise ConfigError(f"floor must be from 0 to the peak {peak}, got {floor}.")
