"""What a study trains: variants of one model, and the sizes they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.errors import ConfigError
from longspan.models import DecoderConfig
from longspan.models.encodings import encoding

REMEMBERS = "transformer_xl"  # remembers by its own habit; others only where asked
WITH, WITHOUT = "+memory", "-memory"


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes that every model of a study has, in config.json's words."""

    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2


@dataclass(frozen=True)
class Variant:
    """One way of knowing positions, with or without memory.

    Attributes:
        name: as asked for.
        encoding: a name from `ENCODINGS`.
        remembers: whether segments are read with the memory of those before.
    """

    name: str
    encoding: str
    remembers: bool

    def config(
        self, sizes: ModelSizes, *, vocabulary: int, length: int, memory_length: int
    ) -> DecoderConfig:
        """Returns the decoder's config."""
        return DecoderConfig(
            vocab_size=vocabulary,
            max_position_embeddings=length,
            position_encoding=self.encoding,
            memory_length=memory_length if self.remembers else 0,
            **vars(sizes),
        )


def variant(name: str) -> Variant:
    """Returns a variant by name: an encoding, "+memory" or "-memory" behind it if not its habit.

    Raises:
        ConfigError: for an unknown encoding, or memory where positions are added to the input.

    >>> variant("transformer_xl").remembers, variant("rope").remembers, variant("rope+memory")
    (True, False, Variant(name='rope+memory', encoding='rope', remembers=True))
    """
    plain = name.removesuffix(WITH if name.endswith(WITH) else WITHOUT)
    one = encoding(plain)
    remembers = name.endswith(WITH) or (plain == REMEMBERS and not name.endswith(WITHOUT))
    if remembers and not one.recurrent:
        raise ConfigError(
            f"{plain!r} adds positions to the embeddings and cannot remember earlier segments. "
            f"Use {plain!r} alone, or a relative encoding such as 'rope{WITH}'."
        )
    if name == REMEMBERS + WITH or (name.endswith(WITHOUT) and plain != REMEMBERS):
        raise ConfigError(f"{name!r} is {plain!r} by its own habit. Call it {plain!r}.")
    return Variant(name, plain, remembers)


def variants(names: Sequence[str]) -> tuple[Variant, ...]:
    """Returns the variants, in order; none at all, or one twice, is refused."""
    if not names:
        raise ConfigError("encodings is empty. Name at least one, such as 'rope' or 'alibi'.")
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"encoding {twice!r} is named twice among {list(names)}. Name it once.")
    return tuple(variant(name) for name in names)
