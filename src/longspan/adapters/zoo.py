"""The models that come with longspan: small ones of one study, alike but for their positions."""

from __future__ import annotations

from pathlib import Path

from longspan.errors import InputError, did_you_mean

PREFIX = "zoo:"
FOLDER = Path(__file__).parent.parent / "zoo"


def zoo_models() -> tuple[str, ...]:
    """Returns the names by which the zoo's models are called.

    >>> "zoo:rope" in zoo_models()
    True
    """
    return tuple(f"{PREFIX}{path.parent.name}" for path in sorted(FOLDER.glob("*/config.json")))


def is_zoo(model: str | Path) -> bool:
    """Returns whether a model's name is meant for the zoo."""
    return isinstance(model, str) and model.startswith(PREFIX)


def zoo_folder(name: str) -> Path:
    """Returns the folder of a zoo model.

    Raises:
        InputError: for an unknown name.
    """
    if name not in zoo_models():
        raise InputError(
            f"the zoo has no {name!r}.{did_you_mean(name, zoo_models())} "
            f"It has {', '.join(zoo_models())}."
        )
    return FOLDER / name.removeprefix(PREFIX)
