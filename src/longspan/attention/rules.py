"""What attend was asked, checked and completed: the same for every implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from longspan.attention.visibility import Visibility
from longspan.bias.base import Bias
from longspan.errors import ConfigError, ShapeError
from longspan.masks import Mask


class Options(TypedDict, total=False):
    """What `attend` takes beside q, k and v; it explains them."""

    mask: Mask | Visibility | None
    bias: Bias | None
    q_pos: Tensor | None
    k_pos: Tensor | None
    q_doc: Tensor | None
    k_doc: Tensor | None
    scale: float | None
    sink_logits: Tensor | None
    softcap: float | None
    dropout: float


class Inputs(NamedTuple):
    """The tensors that get gradients."""

    q: Tensor
    """[B, H, T, D]"""
    k: Tensor
    """[B, K, S, D]"""
    v: Tensor
    """[B, K, S, Dv]"""
    sink_logits: Tensor | None
    """[H]"""

    @property
    def needs_grad(self) -> bool:
        """True where a backward pass may follow."""
        given = (tensor for tensor in self if tensor is not None)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


@dataclass(frozen=True, eq=False)
class Rules:
    """How queries and keys meet."""

    seen: Visibility
    bias: Bias | None
    scale: float
    softcap: float | None
    dropout: float
    return_lse: bool
    remembered: dict[Any, Any] = field(default_factory=dict)
    """What a tile leaves for the next one that is like it; where only the mask counts, for the
    next call too."""

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The bias's parameters that want a gradient."""
        if self.bias is None or not torch.is_grad_enabled():
            return ()
        return tuple(p for p in self.bias.parameters() if p.requires_grad)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype scores are added up in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check(
    q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: Options
) -> tuple[Inputs, Rules]:
    """Completes what was left out, and refuses what does not fit or contradicts itself.

    Raises:
        ShapeError: for shapes, dtypes, positions or documents that do not fit.
        ConfigError: for an option out of range, or a one-sided bias without a causal mask.
    """
    _check_tensors(q, k, v)
    inputs = Inputs(q, k, v, options.get("sink_logits"))
    _check_sinks(inputs)
    seen, bias = _seen(inputs, options), options.get("bias")
    _check_bias(bias, seen.mask, q.shape[1])
    scale, softcap = options.get("scale"), options.get("softcap")
    _check_positive("scale", scale)
    _check_positive("softcap", softcap)
    dropout = options.get("dropout", 0.0)
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be at least 0 and below 1, got {dropout!r}.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    remembered = seen.found.setdefault(q.dtype, {}) if bias is None else {}
    return inputs, Rules(seen, bias, scale, softcap, dropout, return_lse, remembered)


def _seen(inputs: Inputs, options: Options) -> Visibility:
    """Returns the mask laid over positions, or what was laid before."""
    q, k, mask = inputs.q, inputs.k, options.get("mask")
    sizes = q.shape[0], q.shape[2], k.shape[2]
    placed = {name: options.get(name) for name in ("q_pos", "k_pos", "q_doc", "k_doc")}
    if mask is None or isinstance(mask, Mask):
        return Visibility.of(mask, sizes, device=q.device, **placed)
    if not isinstance(mask, Visibility):
        raise ConfigError(
            f"mask must be a longspan Mask, got {type(mask).__name__}. Masks are made by causal(), "
            "sliding_window(W), … and follow positions, so one fits every length."
        )
    given = [name for name, value in placed.items() if value is not None]
    if given:
        raise ConfigError(f"a Visibility has its positions; leave {', '.join(given)} out.")
    if mask.shape != sizes[1:] or not {len(mask.q_pos), len(mask.k_pos)} <= {1, sizes[0]}:
        raise ShapeError(
            f"the Visibility was laid over T, S = {mask.shape}, and q and k have {sizes[1:]} with "
            f"B = {sizes[0]}. Lay the mask over these, or pass the mask itself."
        )
    return mask


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if any(x.dim() != 4 for x in (q, k, v)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ShapeError(f"q must be [B, H, T, D], k and v [B, K, S, D], got {shapes}.")
    (batch, heads, _, dim), (_, key_heads, keys, _) = q.shape, k.shape
    if k.shape != (batch, key_heads, keys, dim) or v.shape[:3] != k.shape[:3]:
        raise ShapeError(
            f"k must be [B, K, S, D] and v [B, K, S, Dv] with q's B = {batch} and D = {dim}, "
            f"got k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    if key_heads == 0 or heads % key_heads:
        raise ShapeError(f"H must be a multiple of K, got H = {heads}, K = {key_heads}.")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ShapeError(
            f"q, k and v must share one float dtype, got {q.dtype}, {k.dtype}, {v.dtype}."
        )


def _check_sinks(inputs: Inputs) -> None:
    heads, sink_logits = inputs.q.shape[1], inputs.sink_logits
    if sink_logits is not None and tuple(sink_logits.shape) != (heads,):
        raise ShapeError(
            f"sink_logits must be [H] = ({heads},), a logit a query head, "
            f"got {tuple(sink_logits.shape)}."
        )


def _check_bias(bias: Bias | None, mask: Mask | None, heads: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, Bias):
        raise ConfigError(f"bias must be a longspan Bias, got {type(bias).__name__}.")
    if bias.num_heads != heads:
        raise ShapeError(
            f"the bias is for {bias.num_heads} heads, q has {heads}. "
            "Where heads are shared out, build it with this shard's num_heads."
        )
    if bias.needs_causal and (mask is None or not mask.causal):
        raise ConfigError(
            f"{bias!r} has no meaning for keys after the query, and mask={mask!r} may show some. "
            "Use causal() & …, or bidirectional=True."
        )


def _check_positive(name: str, number: float | None) -> None:
    if number is not None and not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{name} must be a finite number above 0, got {number!r}.")
