"""Result dataclasses as JSON and back, strictly: no NaN, no unknown key, no missing one."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from longspan.errors import InputError, NumericalError, did_you_mean

Record = TypeVar("Record")


def record_to_json(record: Any, form: str) -> str:
    """Returns a result dataclass as JSON, with its form under "format".

    Raises:
        NumericalError: if a number is NaN or infinite.
    """
    content = {"format": form, **dataclasses.asdict(record)}
    try:
        return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    except ValueError:
        raise NumericalError(
            f"{not_finite(content)} is not a finite number, and NaN is never written. "
            "Measure again, in float32 if another dtype was used."
        ) from None


def not_finite(value: Any, where: str = "") -> str:
    """Returns the path of the first number that is NaN or infinite, empty if there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else where
    if isinstance(value, Mapping):
        parts = [(f"{where}.{key}" if where else str(key), part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{where}[{place}]", part) for place, part in enumerate(value)]
    else:
        return ""
    return next(filter(None, (not_finite(part, path) for path, part in parts)), "")


def record_from_json(kind: type[Record], text: str, form: str) -> Record:
    """Returns the dataclass that `record_to_json` wrote.

    Raises:
        InputError: if the text is no JSON, of another form, or its keys or types do not fit.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"this is not JSON ({error}).") from None
    found = content.pop("format", None) if isinstance(content, dict) else None
    if found != form:
        raise InputError(f"this is not a {form!r} result; its format is {found!r}.")
    return read(kind, content, "result")


def read(kind: Any, value: Any, where: str) -> Any:
    """Returns `value`, out of JSON, as the type `kind` says; `where` names it in errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return read_dataclass(kind, value, where)
    if origin in (Union, types.UnionType):
        present = [part for part in arguments if part is not type(None)]
        return None if value is None else read(present[0], value, where)
    if origin is tuple and isinstance(value, list):
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            parts = zip(kinds, value, strict=True)
            return tuple(read(k, part, f"{where}[{i}]") for i, (k, part) in enumerate(parts))
    if origin is Literal and value in arguments:
        return value
    if origin is dict and isinstance(value, dict):
        return value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise InputError(f"{where} must be {getattr(kind, '__name__', kind)}, got {value!r}.")


def read_dataclass(kind: Any, value: Any, where: str) -> Any:
    """Returns a dataclass from a JSON object with its fields; those with defaults may miss."""
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object, got {value!r}.")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise InputError(f"{where} has unknown key {key!r}.{did_you_mean(key, fields)}")
    needed = [name for name, field in fields.items() if is_needed(field)]
    missing = [name for name in needed if name not in value]
    if missing:
        raise InputError(f"{where} lacks {', '.join(missing)}.")
    hints = get_type_hints(kind)
    return kind(**{key: read(hints[key], part, f"{where}.{key}") for key, part in value.items()})


def is_needed(field: dataclasses.Field[Any]) -> bool:
    """Returns whether a field has no default."""
    return field.default is field.default_factory is dataclasses.MISSING
