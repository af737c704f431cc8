"""What transformers hands from a model to its layers in place of a mask of all pairs."""

from __future__ import annotations

from typing import Any

from torch.nn.attention.flex_attention import BlockMask

from longspan.errors import UnsupportedModelError


class PassedMask(BlockMask):
    """A BlockMask by name alone: beside a tensor of all pairs, nothing else is let through."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.sizes = shape

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """B, 1, T, S, as a mask of all pairs would have."""
        batch, queries, keys = self.sizes
        return batch, 1, queries, keys

    def to(self, *_: Any, **__: Any) -> PassedMask:
        """Returns itself; MPT asks any mask to become bools."""
        return self

    def __getitem__(self, index: object) -> Any:
        """Refuses to be cut up as a tensor of all pairs, as sparse attention does."""
        raise UnsupportedModelError(
            "this model works on a mask of all pairs, which longspan's attention never builds. "
            "Load it with attn_implementation='sdpa' or 'eager'."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.shape}"

    __str__ = __repr__
