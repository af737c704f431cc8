"""Turns queries and keys by their positions: float64 angles, float32 arithmetic, one cast."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longspan.errors import ConfigError, ShapeError

Layout = Literal["half", "interleaved"]
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
) -> Tensor:
    """Returns x with each pair of channels turned by position · inv_freq.

    Args:
        x: [B, H, T, D], any float dtype; channels from 2·P on pass through bit for bit.
        positions: [T] or [B, T] int64, in tokens; any sign, any size.
        inv_freq: [P], or [B, P] for a table a row; radians per token, with 2·P ≤ D.
        layout: `half` pairs channel i with i + P (Hugging Face, GPT-NeoX), `interleaved` pairs
            2i with 2i + 1 (the paper, GPT-J). It belongs to the weights.
        attention_factor: multiplies cos and sin.

    Returns:
        [B, H, T, D] in the dtype of `x`. Angles are float64, the rotation float32 (float64 for
        a float64 `x`), rounded once at the end.

    Raises:
        ShapeError: if shapes or dtypes do not fit.

    Source: Su et al. 2021 (arXiv:2104.09864) eq. 15 and 34.

    >>> x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    >>> rotate(x, torch.tensor([1]), torch.tensor([1.0, 0.01])).flatten()
    tensor([0.5403, 0.0000, 0.8415, 0.0000])
    >>> rotate(x, torch.tensor([1]), torch.tensor([1.0, 0.01]), layout="interleaved").flatten()
    tensor([0.5403, 0.8415, 0.0000, 0.0000])
    """
    check_positions(positions, x)
    table = rotation_table(positions, inv_freq, attention_factor, dtype=compute_dtype(x))
    return apply_rotation(x, table, layout)


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
        inv_freq: [P] or [B, P] radians per token.
        attention_factor: multiplies both.
        dtype: of the result, float32 or float64.
        phase: `float64` computes angles exactly enough for any position; `hf_float32` rounds
            inv_freq and the angle to float32, as transformers does, for parity with it.

    >>> table = rotation_table(torch.tensor([0, 1]), torch.tensor([1.0]))
    >>> table.cos.flatten()
    tensor([1.0000, 0.5403])
    """
    if phase not in ("float64", "hf_float32"):
        raise ConfigError(f"phase must be 'float64' or 'hf_float32', got {phase!r}.")
    if inv_freq.dim() == 2 and positions.dim() == 1:
        positions = positions.unsqueeze(0)
    rows = inv_freq.unsqueeze(-2)  # [1, P] or [B, 1, P]
    angle_dtype = torch.float64 if phase == "float64" else torch.float32
    # Apple's GPU has no float64, so there the small table is made on the host.
    host = positions.device if positions.device.type != "mps" else torch.device("cpu")
    angles = positions.to(host, angle_dtype).unsqueeze(-1) * rows.to(host, angle_dtype)
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return RotationTable(cos.to(dtype).to(positions.device), sin.to(dtype).to(positions.device))


def apply_rotation(x: Tensor, table: RotationTable, layout: Layout = "half") -> Tensor:
    """Returns x turned by a ready table; see `rotate`.

    Args:
        x: [B, H, T, D].
        table: cos and sin, [T, P] or [B, T, P], float32 (float64 for a float64 `x`).
        layout: `half` or `interleaved`.
    """
    pairs = table.cos.shape[-1]
    check_apply(x, table, layout)
    cos, sin = (part.unsqueeze(-3) for part in table)  # [1, T, P] or [B, 1, T, P]
    turning, resting = x[..., : 2 * pairs], x[..., 2 * pairs :]
    first, second = (part.to(cos.dtype) for part in split_pairs(turning, layout))
    turned = join_pairs(
        (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), layout
    )
    return torch.cat((turned, resting), dim=-1) if resting.shape[-1] else turned


def split_pairs(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Returns views of the first and second channel of every pair, each [..., P]."""
    if layout == "half":
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., 0::2], x[..., 1::2]


def join_pairs(first: Tensor, second: Tensor, layout: Layout) -> Tensor:
    """Returns the pairs' channels back in their places, [..., 2·P]."""
    if layout == "half":
        return torch.cat((first, second), dim=-1)
    return torch.stack((first, second), dim=-1).flatten(-2)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype a rotation of x is computed in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_positions(positions: Tensor, x: Tensor) -> None:
    """Refuses positions that are not int64 or do not fit x's rows and tokens."""
    if positions.dtype != torch.int64:
        raise ShapeError(
            f"positions must be int64, got {positions.dtype}. Lower precision merges positions "
            "(bfloat16 cannot tell 256 from 257)."
        )
    if x.dim() != 4:
        raise ShapeError(f"x must have shape [B, H, T, D], got {tuple(x.shape)}.")
    batch, _, tokens, _ = x.shape
    if tuple(positions.shape) not in {(tokens,), (batch, tokens), (1, tokens)}:
        raise ShapeError(
            f"positions must have shape [T] or [B, T] = ({tokens},) or ({batch}, {tokens}), "
            f"got {tuple(positions.shape)}."
        )


def check_apply(x: Tensor, table: RotationTable, layout: Layout) -> None:
    """Refuses an unknown layout, a dtype that is not float, or more pairs than channels."""
    if layout not in ("half", "interleaved"):
        raise ConfigError(
            f"layout must be 'half' or 'interleaved', got {layout!r}. It belongs to the weights: "
            "Hugging Face's Llama is 'half', GPT-J is 'interleaved'."
        )
    if not x.dtype.is_floating_point:
        raise ShapeError(f"x must have a float dtype, got {x.dtype}.")
    pairs = table.cos.shape[-1]
    if x.dim() != 4 or 2 * pairs > x.shape[-1]:
        raise ShapeError(
            f"x must have shape [B, H, T, D] with D ≥ 2·P = {2 * pairs}, got {tuple(x.shape)}."
        )
    if table.cos.shape[-2] != x.shape[-2] or table.cos.shape[:-2] not in {
        (),
        (1,),
        (x.shape[0],),
    }:
        raise ShapeError(
            f"the table must be [T, P] or [B, T, P] for x of shape {tuple(x.shape)}, "
            f"got {tuple(table.cos.shape)}."
        )
