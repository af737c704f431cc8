"""One layer kind's rotation, complete: frequencies, scaling, layout, temperature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from longspan.errors import ConfigError
from longspan.rotary.frequencies import check_rope_theta, check_rotary_dim
from longspan.rotary.rotate import (
    Layout,
    Phase,
    RotationTable,
    apply_rotation,
    check_positions,
    compute_dtype,
    rotation_table,
)
from longspan.rotary.scaling.base import RopeScaling, SeqLen, check_number
from longspan.rotary.scaling.none import NoScaling

Frequencies = Literal["default", "proportional"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How the heads of one kind of layer are rotated.

    Attributes:
        head_dim: channels of a head that rotation may touch (for MLA, its rotary part alone).
        rope_theta: the frequency base.
        rotary_dim: channels that turn, from the first; all of `head_dim` unless given.
        layout: `half` or `interleaved`; None where the weights' layout is not known, so that
            frequencies can be read but nothing rotated.
        frequencies: `default` spreads the exponents over `rotary_dim`. `proportional` (Gemma 4)
            spreads them over `head_dim`, keeps the first rotary_dim / 2 pairs, lets the others
            rest at frequency 0, and pairs channels across the full head.
        scaling: the scaling method; plain RoPE unless given.
        softmax_scale_multiplier: MLA models multiply the softmax scale by it, beside the
            attention factor; 1 elsewhere.

    >>> Rope(head_dim=8, rotary_dim=4, rope_theta=10_000.0, frequencies="proportional").inv_freq()
    tensor([1.0000, 0.1000, 0.0000, 0.0000], dtype=torch.float64)
    """

    head_dim: int
    rope_theta: float
    rotary_dim: int | None = None
    layout: Layout | None = "half"
    frequencies: Frequencies = "default"
    scaling: RopeScaling | None = None
    softmax_scale_multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_rope_theta(self.rope_theta)
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        if self.scaling is None:
            object.__setattr__(self, "scaling", NoScaling())
        check_rotary_dim(self.turning)
        check_number("softmax_scale_multiplier", self.softmax_scale_multiplier, above=0)
        if self.turning > self.head_dim:
            raise ConfigError(
                f"rotary_dim must be ≤ head_dim, got {self.turning} > {self.head_dim}."
            )
        if self.frequencies not in ("default", "proportional"):
            raise ConfigError(
                f"frequencies must be 'default' or 'proportional', got {self.frequencies!r}."
            )
        if self.layout not in ("half", "interleaved", None):
            raise ConfigError(f"layout must be 'half', 'interleaved' or None, got {self.layout!r}.")

    @property
    def turning(self) -> int:
        """The channels that turn, rotary_dim as a number."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def method(self) -> RopeScaling:
        """The scaling, plain RoPE included."""
        return NoScaling() if self.scaling is None else self.scaling

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin, so the logits' by its square."""
        return self.method.attention_factor

    def inv_freq(self, seq_len: SeqLen = None) -> Tensor:
        """Returns the frequencies of every pair, [P] or [B, P] float64, radians per token.

        Without `seq_len`, a table that depends on the length is that of a short text: LongRoPE's
        short one, dynamic NTK's unscaled one.
        """
        if seq_len is None and self.method.depends_on_length:
            seq_len = 1
        if self.frequencies == "default":
            return self.method.inv_freq(self.turning, self.rope_theta, seq_len)
        inv_freq = self.method.inv_freq(self.head_dim, self.rope_theta, seq_len).clone()
        inv_freq[..., self.turning // 2 :] = 0
        return inv_freq

    def table(
        self,
        positions: Tensor,
        seq_len: SeqLen = None,
        *,
        dtype: torch.dtype = torch.float32,
        phase: Phase = "float64",
    ) -> RotationTable:
        """Returns cos and sin at `positions`, [T] or [B, T] int64; see `rotation_table`.

        Raises:
            ConfigError: if the table depends on the length and `seq_len` is None.
        """
        if seq_len is None and self.method.depends_on_length:
            raise ConfigError(
                f"{self.method.method} needs seq_len to rotate: the total length each row will "
                "reach, fixed before the first token."
            )
        inv_freq = self.inv_freq(seq_len).to(positions.device)
        return rotation_table(positions, inv_freq, self.attention_factor, dtype=dtype, phase=phase)

    def with_scaling(self, scaling: RopeScaling | None) -> Rope:
        """Returns the same rotation under another scaling."""
        return replace(self, scaling=scaling)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys; holds no buffers that a cast or a meta device could spoil.

    >>> rotary = RotaryEmbedding(Rope(head_dim=2, rope_theta=10_000.0))
    >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> rotary(q, q, torch.tensor([1]))[0].flatten()
    tensor([0.5403, 0.8415])
    """

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        if rope.layout is None:
            raise ConfigError(
                "this rope has no layout: its weights' pairing is not known. "
                "Set layout='half' or 'interleaved'."
            )
        self.rope = rope
        self.layout: Layout = rope.layout

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor, seq_len: SeqLen = None
    ) -> tuple[Tensor, Tensor]:
        """Returns q and k turned by their positions.

        Args:
            q: [B, H, T, D].
            k: [B, K, T, D].
            positions: [T] or [B, T] int64.
            seq_len: the total length, int or [B]; needed where the table depends on it.
        """
        check_positions(positions, q)
        check_positions(positions, k)
        table = self.rope.table(positions, seq_len, dtype=compute_dtype(q))
        return apply_rotation(q, table, self.layout), apply_rotation(k, table, self.layout)

    def extra_repr(self) -> str:
        """Shows the rope it rotates by."""
        return repr(self.rope)
