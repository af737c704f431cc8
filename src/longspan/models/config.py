"""What a decoder is made of, in config.json's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from longspan.bias.base import check_count
from longspan.errors import ConfigError
from longspan.models.encodings import INPUTS, encoding
from longspan.rotary.rope import Rope
from longspan.rotary.scaling import RopeScaling

MODEL_TYPE = "longspan_decoder"
"""Of its config.json."""

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes of a decoder and how each layer knows positions.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
            num_key_value_heads, rms_norm_eps: as in Llama.
        max_position_embeddings: the trained length, in tokens.
        position_encoding: a name from `ENCODINGS` for all layers, or one a layer.
        layer_types: "full_attention" or "sliding_attention" a layer; all full unless given.
        sliding_window: keys that sliding layers see, the query's own included.
        num_sink_tokens: first tokens that sliding layers see beside their window.
        learned_sinks: a learned logit more in each head's softmax, as in gpt-oss.
        memory_length: hidden states a layer remembers from earlier segments (Transformer-XL); 0
            remembers nothing.
        rope_theta, scaling: of layers that rotate.
        tie_word_embeddings: whether the head is the embedding.

    Raises:
        ConfigError: for sizes that do not divide, an unknown encoding, or memory with an encoding
            that counts positions from the start of the input.

    >>> config = DecoderConfig(vocab_size=256, hidden_size=64, intermediate_size=128,
    ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    ...     max_position_embeddings=128, position_encoding=("rope", "none"))
    >>> config.head_dim, config.encodings
    (16, ('rope', 'none'))
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    position_encoding: str | tuple[str, ...] = "rope"
    layer_types: tuple[LayerType, ...] | None = None
    sliding_window: int | None = None
    num_sink_tokens: int = 0
    learned_sinks: bool = False
    memory_length: int = 0
    rope_theta: float = 10_000.0
    scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            check_count(name, getattr(self, name))
        for name in ("memory_length", "num_sink_tokens"):
            check_count(name, getattr(self, name), least=0)
        self._check_heads()
        self._check_layers()
        self._check_windows()
        self._check_positions()

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encoding of every layer."""
        if isinstance(self.position_encoding, str):
            return (self.position_encoding,) * self.num_hidden_layers
        return self.position_encoding

    @property
    def kinds(self) -> tuple[LayerType, ...]:
        """The layer type of every layer."""
        return self.layer_types or ("full_attention",) * self.num_hidden_layers

    @property
    def input_encoding(self) -> str | None:
        """The encoding that is added to the embeddings, if there is one."""
        return next((name for name in self.encodings if name in INPUTS), None)

    @property
    def rope(self) -> Rope | None:
        """The rotation of the layers that rotate, if any does."""
        if "rope" not in self.encodings:
            return None
        return Rope(head_dim=self.head_dim, rope_theta=self.rope_theta, scaling=self.scaling)

    def _check_heads(self) -> None:
        for whole, part in (
            ("hidden_size", "num_attention_heads"),
            ("num_attention_heads", "num_key_value_heads"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ConfigError(
                    f"{whole} must be a multiple of {part}, got {getattr(self, whole)} and "
                    f"{getattr(self, part)}."
                )

    def _check_layers(self) -> None:
        for name, given, singular in (
            ("position_encoding", self.encodings, "name"),
            ("layer_types", self.kinds, "type"),
        ):
            if len(given) != self.num_hidden_layers:
                raise ConfigError(
                    f"{name} must have one {singular} for each of {self.num_hidden_layers} layers, "
                    f"got {len(given)}: {given}."
                )
        for name in self.encodings:
            encoding(name)
        if unknown := set(self.kinds) - set(get_args(LayerType)):
            raise ConfigError(
                f"layer_types may hold {' and '.join(get_args(LayerType))}, got {sorted(unknown)}."
            )

    def _check_windows(self) -> None:
        slides = "sliding_attention" in self.kinds
        if slides != (self.sliding_window is not None):
            raise ConfigError(
                "sliding_window and sliding_attention layers go together, got sliding_window="
                f"{self.sliding_window} and layer_types={self.layer_types}. Give both or neither."
            )
        if self.sliding_window is not None:
            check_count("sliding_window", self.sliding_window)
        if self.num_sink_tokens and not slides:
            raise ConfigError(
                f"num_sink_tokens={self.num_sink_tokens} does nothing in full attention, which "
                "sees every token. Give sliding layers, or leave it out."
            )
        if self.num_sink_tokens and self.memory_length:
            raise ConfigError(
                "num_sink_tokens and memory_length cannot go together: recurrence forgets the "
                "first tokens. Choose one."
            )

    def _check_positions(self) -> None:
        inputs = sorted({name for name in self.encodings if name in INPUTS})
        if len(inputs) > 1:
            raise ConfigError(f"only one encoding can be added to the embeddings, got {inputs}.")
        if self.memory_length and inputs:
            raise ConfigError(
                f"memory_length={self.memory_length} does not fit {inputs[0]!r}, which is added to "
                "the embeddings: remembered states would keep positions of another segment. Use a "
                "relative encoding, such as 'transformer_xl' or 'rope', or memory_length=0."
            )
        _ = self.rope  # refuses a head_dim that cannot turn
        if self.scaling is not None and "rope" not in self.encodings:
            raise ConfigError(
                f"scaling is given, but no layer rotates: position_encoding is "
                f"{self.position_encoding!r}. Leave scaling out, or use 'rope'."
            )
