"""What a config says, key by key: lengths, sizes, and places that must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from longspan.adapters.families import Family, family_of
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ConfigLike: TypeAlias = "PreTrainedConfig | Mapping[str, Any]"

ROUNDING = 1e-9  # a factor that was a ratio of lengths may fall a bit short of the longer one


def as_mapping(config_or_dict: ConfigLike) -> Mapping[str, Any]:
    """Returns a config object's content as a dict; a mapping as it is."""
    if isinstance(config_or_dict, Mapping):
        return config_or_dict
    content = config_or_dict.to_dict()
    content.setdefault("model_type", config_or_dict.model_type)
    return content


def length_keys(family: Family | None) -> tuple[str, ...]:
    """Returns the root keys that may hold a config's length."""
    return family.length_keys if family else ("max_position_embeddings", "n_positions")


def max_length(config: Mapping[str, Any]) -> int | None:
    """Returns the length a config declares, under its family's name for it; None if it does not."""
    keys = length_keys(family_of(config))
    found = next((config[key] for key in keys if config.get(key) is not None), None)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(f"{keys[0]} must be a positive whole number of tokens, got {found!r}.")
    return found


def size_of(config: Mapping[str, Any], *keys: str) -> int:
    """Returns the first of these keys that the config has, a positive whole number."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        raise ConfigError(f"the config lacks {' or '.join(keys)}, needed for the model's sizes.")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a positive whole number, got {value!r}.")
    return value


def agreed_value(named: Mapping[str, Any]) -> Any:
    """Returns the value in which all places that have one agree, None where none has."""
    found = [(place, value) for place, value in named.items() if value is not None]
    if not found:
        return None
    (first, agreed), *others = found
    for place, value in others:
        if value != agreed:
            raise ConfigError(f"{first} is {agreed}, but {place} is {value}. Keep one.")
    return agreed


def checked_share(share: Any) -> float:
    """Returns the share of a head that turns; refuses one outside (0, 1]."""
    number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not number or not 0 < share <= 1:
        raise ConfigError(f"partial_rotary_factor must be in (0, 1], got {share!r}.")
    return share
