"""Turns queries and keys by their positions: float64 angles, float32 arithmetic, one cast."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longspan.errors import ConfigError, ShapeError
from longspan.rotary.turn import Impl, Layout, turn_by

Phase = Literal["float64", "hf_float32"]


class RotationTable(NamedTuple):
    """cos and sin of every position and pair, times the attention factor: [T, P] or [B, T, P]."""

    cos: Tensor
    sin: Tensor


def rotate(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    layout: Layout = "half",
    attention_factor: float = 1.0,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Returns x with each pair of channels turned by position · inv_freq.

    Args:
        x: [B, H, T, D], any float dtype; channels from 2·P on pass through bit for bit.
        positions: [T] or [B, T] int64, in tokens, of either sign. An angle is right to
            |position|·2⁻⁵² radians: below float32's rounding up to position 2²⁸.
        inv_freq: [P], or [B, P] for a table a row; radians per token, with 2·P ≤ D.
        layout: `half` pairs channel i with i + P (Hugging Face, GPT-NeoX), `interleaved` pairs
            2i with 2i + 1 (the paper, GPT-J). It belongs to the weights.
        attention_factor: multiplies cos and sin.
        impl: see `apply_rotation`.

    Returns:
        [B, H, T, D] in the dtype of `x`. Angles are float64, the rotation float32 (float64 for
        a float64 `x`), rounded once at the end.

    Raises:
        ShapeError: if shapes or dtypes do not fit.
        ConfigError: for an unknown layout, or an `impl` that cannot run here.

    Source: Su et al. 2021 (arXiv:2104.09864) eq. 15 and 34.

    >>> x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    >>> rotate(x, torch.tensor([1]), torch.tensor([1.0, 0.01])).flatten()
    tensor([0.5403, 0.0000, 0.8415, 0.0000])
    >>> rotate(x, torch.tensor([1]), torch.tensor([1.0, 0.01]), layout="interleaved").flatten()
    tensor([0.5403, 0.8415, 0.0000, 0.0000])
    """
    check_positions(positions, x)
    table = rotation_table(positions, inv_freq, attention_factor, dtype=compute_dtype(x))
    return apply_rotation(x, table, layout, impl)


def rerotate(
    keys: Tensor,
    from_positions: Tensor,
    to_positions: Tensor,
    inv_freq: Tensor,
    layout: Layout = "half",
) -> Tensor:
    """Moves rotated keys to new positions without the unrotated keys.

    Rotations compose, so R(to) = R(to − from)·R(from). Each call rounds once to the keys' dtype:
    move from an unrounded original, once, rather than step by step.

    Args:
        keys: [B, K, S, D], already rotated at `from_positions`.
        from_positions, to_positions: [S] or [B, S] int64, in tokens.
        inv_freq: [P] or [B, P] radians per token.
        layout: the layout the keys were rotated in.

    Returns:
        [B, K, S, D] in the dtype of `keys`; an attention factor they carry is kept.

    Raises:
        ShapeError: if shapes or dtypes do not fit.

    Source: Su et al. 2021 (arXiv:2104.09864) §3.4.2; Xiao et al. 2023 (arXiv:2309.17453) §3.2.

    >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> at_five = rotate(x, torch.tensor([5]), torch.ones(1))
    >>> rerotate(at_five, torch.tensor([5]), torch.tensor([1]), torch.ones(1)).flatten()
    tensor([0.5403, 0.8415])
    """
    check_positions(from_positions, keys)
    check_positions(to_positions, keys)
    return rotate(keys, to_positions - from_positions, inv_freq, layout)


def rotation_table(
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    phase: Phase = "float64",
) -> RotationTable:
    """Returns cos and sin of position · inv_freq, times `attention_factor`.

    Args:
        positions: [T] or [B, T] int64.
        inv_freq: [P] or [B, P] radians per token, float64 or float32.
        attention_factor: multiplies both.
        dtype: of the result, float32 or float64.
        phase: `float64` is exact far beyond any context; `hf_float32` rounds inv_freq and the
            angle to float32, as transformers does, for parity with it.

    Raises:
        ShapeError: if shapes or dtypes do not fit.
        ConfigError: for an unknown phase.

    >>> table = rotation_table(torch.tensor([0, 1]), torch.tensor([1.0]))
    >>> table.cos.flatten()
    tensor([1.0000, 0.5403])
    """
    check_table(positions, inv_freq, dtype, phase)
    if inv_freq.dim() == 2 and positions.dim() == 1:
        positions = positions.unsqueeze(0)
    rows = inv_freq.unsqueeze(-2)  # [1, P] or [B, 1, P]
    angle_dtype = torch.float64 if phase == "float64" else torch.float32
    # Apple's GPU has no float64, so there the small table is made on the host.
    host = positions.device if positions.device.type != "mps" else torch.device("cpu")
    angles = positions.to(host, angle_dtype).unsqueeze(-1) * rows.to(host, angle_dtype)
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return RotationTable(cos.to(dtype).to(positions.device), sin.to(dtype).to(positions.device))


def apply_rotation(
    x: Tensor, table: RotationTable, layout: Layout = "half", impl: Impl = "auto"
) -> Tensor:
    """Returns x turned by a ready table; see `rotate`.

    Args:
        x: [B, H, T, D].
        table: cos and sin, [T, P] or [B, T, P], float32 (float64 for a float64 `x`).
        layout: `half` or `interleaved`.
        impl: `eager`, or `compiled`, which raises where torch cannot compile; `auto` runs what
            `longspan.rotary.turn.choose_impl` says. All give the same values and gradients, to
            rounding.
    """
    check_apply(x, table, layout)
    cos, sin = (part.unsqueeze(-3) for part in table)  # [1, T, P] or [B, 1, T, P]
    return turn_by(x, cos, sin, layout, impl)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype a rotation of x is computed in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_positions(positions: Tensor, x: Tensor) -> None:
    """Refuses positions that are not int64 or do not fit x's rows and tokens."""
    check_int64(positions)
    if x.dim() != 4:
        raise ShapeError(f"x must have shape [B, H, T, D], got {tuple(x.shape)}.")
    batch, _, tokens, _ = x.shape
    if positions.shape not in ((tokens,), (batch, tokens), (1, tokens)):
        raise ShapeError(
            f"positions must have shape [T] or [B, T] = ({tokens},) or ({batch}, {tokens}), "
            f"got {tuple(positions.shape)}."
        )


def check_int64(positions: Tensor) -> None:
    """Refuses positions of another dtype."""
    if positions.dtype != torch.int64:
        raise ShapeError(
            f"positions must be int64, got {positions.dtype}. Lower precision merges positions "
            "(bfloat16 cannot tell 256 from 257)."
        )


def check_table(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, phase: Phase) -> None:
    """Refuses what would give a table of the wrong shape or too coarse a one."""
    if phase not in ("float64", "hf_float32"):
        raise ConfigError(f"phase must be 'float64' or 'hf_float32', got {phase!r}.")
    check_int64(positions)
    for name, given in (("inv_freq", inv_freq.dtype), ("the table", dtype)):
        if given not in (torch.float32, torch.float64):
            raise ShapeError(
                f"{name} must be float64 or float32, got {given}. Rounding to 16 bits moves "
                "angles by more than a radian within 4096 tokens; cast after rotating."
            )
    dims = positions.dim(), inv_freq.dim()
    batches = positions.shape[:1] + inv_freq.shape[:1]
    clash = dims == (2, 2) and 1 not in batches and batches[0] != batches[1]
    if not set(dims) <= {1, 2} or clash:
        raise ShapeError(
            "positions [T] or [B, T] and inv_freq [P] or [B, P] must agree in B, got "
            f"{tuple(positions.shape)} and {tuple(inv_freq.shape)}."
        )


def check_apply(x: Tensor, table: RotationTable, layout: Layout) -> None:
    """Refuses an unknown layout, dtypes that lose precision, and shapes that do not fit."""
    if layout not in ("half", "interleaved"):
        raise ConfigError(
            f"layout must be 'half' or 'interleaved', got {layout!r}. It belongs to the weights: "
            "Hugging Face's Llama is 'half', GPT-J is 'interleaved'."
        )
    if not x.dtype.is_floating_point:
        raise ShapeError(f"x must have a float dtype, got {x.dtype}.")
    if table.cos.dtype not in (torch.float64, compute_dtype(x)):
        raise ShapeError(
            f"the table must be {compute_dtype(x)} for x of {x.dtype}, got {table.cos.dtype}."
        )
    shape = table.cos.shape
    if x.dim() != 4 or 2 * shape[-1] > x.shape[-1]:
        raise ShapeError(
            f"x must have shape [B, H, T, D] with D ≥ 2·P = {2 * shape[-1]}, got {tuple(x.shape)}."
        )
    batch, tokens = x.shape[0], x.shape[2]
    if shape[:-1] not in ((tokens,), (1, tokens), (batch, tokens)):
        raise ShapeError(
            f"the table must be [T, P] or [B, T, P] for x of shape {tuple(x.shape)}, "
            f"got {tuple(shape)}."
        )
