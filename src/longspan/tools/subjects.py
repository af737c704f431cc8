"""The methods to measure, each as a live model, refused before anything is run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longspan.adapters.config_fields import as_mapping, max_length
from longspan.adapters.families import positions_without_rope, text_part
from longspan.adapters.head import SplitForward
from longspan.adapters.lengths import lengths_of
from longspan.adapters.rope import rope_from_config
from longspan.adapters.ropes import Ropes
from longspan.adapters.rotation import exact_rotation, table_form
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.metrics.likelihood import token_nll
from longspan.metrics.windows import check_windows
from longspan.rotary.rotate import Phase
from longspan.rotary.scaling import scaling_for_method
from longspan.rotary.scaling.base import check_factor, check_length
from longspan.tools.extend import extend

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Subject:
    """One method's model, ready to be read with exact rotation.

    Attributes:
        method: its canonical name.
        split: the model, body and head apart.
        ropes: the rotation it runs under; None for a model that knows positions otherwise.
        phase: how angles are computed.
    """

    method: str
    split: SplitForward
    ropes: Ropes | None
    phase: Phase

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """The block of config.json it runs under."""
        if self.ropes is None:
            return {}
        return dict(self.split.model.config.get_text_config().rope_parameters or {})

    @property
    def factor(self) -> float | None:
        """The method's factor in the layers that reach furthest; None for plain RoPE."""
        if self.ropes is None:
            return None
        scaling = self.ropes[self.ropes.reaching].method
        return None if scaling.method == "none" else scaling.factor

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin in the layers that reach furthest."""
        return 1.0 if self.ropes is None else self.ropes[self.ropes.reaching].attention_factor

    def token_nll(self, input_ids: Tensor) -> Tensor:
        """Returns the NLL of all tokens but the first, under the table of this very length."""
        with self.rotating(input_ids.shape[1]):
            return token_nll(self.split, input_ids)

    def rotating(self, seq_len: int) -> AbstractContextManager[None]:
        """Returns a context in which the model rotates by exact tables of this total length."""
        if self.ropes is None:
            return nullcontext()
        return exact_rotation(self.split.model, self.ropes, seq_len=seq_len, phase=self.phase)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """How methods are applied to a model.

    Attributes:
        reach: tokens of one forward.
        trained_length: tokens the checkpoint was trained to read.
        factor: of every method, or None for reach / trained_length.
        original_max_position_embeddings: the trained length, where the config leaves it open.
        phase: how angles are computed.
    """

    reach: int
    trained_length: int
    factor: float | None
    original_max_position_embeddings: int | None
    phase: Phase

    def subject(self, model: PreTrainedModel, method: str) -> Subject:
        """Returns the model under a method; as it stands for "none".

        Raises:
            ConfigError: if the method cannot reach so far, or needs data it does not have.
            UnsupportedModelError: for a family longspan cannot rotate.
        """
        if without_rope(model):
            return self._unrotated(model, method)
        table_form(model)
        to = self.reach if self.factor is None else int(self.trained_length * self.factor)
        if method != "none":
            model = extend(
                model,
                to=to,
                method=method,
                factor=self.factor,
                original_max_position_embeddings=self.original_max_position_embeddings,
            )
        ropes = rope_from_config(
            model.config, original_max_position_embeddings=self.original_max_position_embeddings
        )
        return Subject(method, SplitForward(model), ropes, self.phase)

    def _unrotated(self, model: PreTrainedModel, method: str) -> Subject:
        """Returns a model that knows positions otherwise, as it stands."""
        if method != "none":
            instead = positions_without_rope(text_part(as_mapping(model.config)))
            raise UnsupportedModelError(
                f"{method} scales rotation, and {model.config.model_type!r} has no rope: its "
                f"positions come from {instead}. Give methods=['none'] (--methods none)."
            )
        if self.phase != "float64":
            raise ConfigError(
                f"phase={self.phase!r} is a way to compute rotation, and this model has none. "
                "Leave phase (--phase) out."
            )
        return Subject(method, SplitForward(model), None, self.phase)


def trained_length(
    model: PreTrainedModel, original_max_position_embeddings: int | None = None
) -> int:
    """Returns the tokens a live model was trained to read, before any extension."""
    given = original_max_position_embeddings
    if without_rope(model):
        declared = given or max_length(text_part(as_mapping(model.config)))
        if declared is None:
            raise ConfigError(
                "the config declares no trained length. Give it as "
                "original_max_position_embeddings (--original)."
            )
        return declared
    ropes = rope_from_config(model.config, original_max_position_embeddings=given)
    return lengths_of(model.config, ropes, original_max_position_embeddings=given).trained


def without_rope(model: PreTrainedModel) -> bool:
    """Returns whether the model knows positions by something other than rotation."""
    return positions_without_rope(text_part(as_mapping(model.config))) is not None


def canonical_methods(methods: Sequence[str]) -> list[str]:
    """Returns the methods' canonical names; none at all, or one twice, is refused."""
    names = [scaling_for_method(method).method for method in methods]
    if not names:
        raise ConfigError("methods is empty. Name at least one, such as 'none' or 'yarn'.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"method {twice!r} is named twice among {list(methods)}. Name it once.")
    return names


def check_reach(
    length: int,
    window: int | None,
    stride: int | None,
    *,
    trained_length: int,
    factor: float | None,
    allow_short: bool,
) -> int:
    """Returns the tokens of one forward; refuses lengths that would prove nothing.

    Raises:
        ConfigError: if no forward is longer than the trained length and `allow_short` is false,
            or window and stride do not fit the length.
    """
    check_length("length", length)
    if factor is not None:
        check_factor(factor)
    if (window is None) != (stride is None):
        raise ConfigError(
            f"window and stride go together, got {window} and {stride}. Give both, or neither for "
            "one forward a document."
        )
    if window is not None and stride is not None:
        check_windows(length, window, stride)
        if window >= length:
            raise ConfigError(
                f"window must be below length, got {window} and {length}. Leave window and stride "
                "out for one forward a document."
            )
    reach = length if window is None else window
    if reach <= trained_length and not allow_short:
        raise ConfigError(
            f"{'length' if window is None else 'window'} {reach} does not exceed the trained "
            f"length {trained_length}, so it would say nothing about reading further. Give a "
            "greater one, or allow_short (--allow-short) to measure within the trained length."
        )
    return reach
