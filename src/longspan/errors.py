"""Every error longspan raises on purpose, so one `except` can catch them all.

LongspanError
├── ConfigError            a setting or config.json key is wrong, missing, unknown or contradictory
├── ShapeError             a tensor's shape or dtype does not fit
├── UnsupportedModelError  this model family, or this use of it, is not handled
├── InputError             a text, file or download is missing, too short or damaged
├── OutputError            the result could not be written, or would overwrite one
├── NumericalError         the numbers went wrong (NaN logits, frequencies not as planned)
└── MissingExtra           an optional package is needed

A message says what is wrong, the value, what is allowed and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LongspanError(Exception):
    """The base of every error longspan raises on purpose."""


class ConfigError(LongspanError, ValueError):
    """A setting is wrong, missing, unknown or contradictory."""


class ShapeError(LongspanError, ValueError):
    """A tensor's shape or dtype does not fit."""


class UnsupportedModelError(LongspanError):
    """This family of models, or this use of it, is not handled."""


class InputError(LongspanError):
    """A text, file or download is missing, too short or damaged."""


class OutputError(LongspanError):
    """A result could not be written, or would overwrite an existing one."""


class NumericalError(LongspanError):
    """The numbers went wrong: NaN logits, or frequencies that are not the planned ones."""


class MissingExtra(LongspanError, ImportError):
    """An optional package is needed."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the closest known word, or an empty string.

    >>> did_you_mean("beta_fsat", ["beta_fast", "beta_slow"])
    " Did you mean 'beta_fast'?"
    >>> did_you_mean("banana", ["yarn"])
    ''
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
