"""Attention over tiles of queries and only the keys they see; memory linear in the length.

A tile meets its keys in a few parts, merged by log-sum-exp. All of it is one autograd function:
the backward pass makes the weights of every part again, from the log-sum-exp over all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.attention import dense, fused, plan
from longspan.attention.meeting import Gradients, Meeting, finite, give, take
from longspan.attention.merge import merge
from longspan.attention.plan import Group, Part
from longspan.attention.rules import Inputs, Rules, compute_dtype
from longspan.errors import ConfigError

TILE_SCORES = 1 << 23  # scores of one call that a bias or plain products make: 32 MB in float32


def refusal(inputs: Inputs, rules: Rules) -> str | None:
    """Returns why this implementation cannot do what is asked, or None."""
    return "it has no dropout of the weights" if rules.dropout else None


def run(inputs: Inputs, rules: Rules) -> tuple[Tensor, Tensor]:
    """Returns out [B, H, T, Dv] and lse [B, H, T]."""
    width = max(inputs.q.shape[-1], inputs.v.shape[-1])
    q, k, v = (_of_width(x, width) for x in inputs[:3])
    groups = _groups(inputs, rules)
    out, lse = _Attention.apply(rules, groups, q, k, v, inputs.sink_logits, *rules.learned)
    return out[..., : inputs.v.shape[-1]], lse


def _of_width(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _groups(inputs: Inputs, rules: Rules) -> list[Group]:
    sizes, split = plan.SIZES, fused.usable(inputs, rules)
    if rules.bias is not None or not split:
        keys = TILE_SCORES // (inputs.q.shape[0] * inputs.q.shape[1] * sizes.queries)
        sizes = replace(sizes, dense=max(sizes.block, min(sizes.dense, keys)))
    known = "groups", split, sizes, None if rules.bias is None else (rules.bias.far,)
    if known not in rules.seen.found:
        rules.seen.found[known] = plan.plan(rules.seen, rules.bias, split=split, sizes=sizes)
    return rules.seen.found[known]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rules: Rules,
        groups: list[Group],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_logits: Tensor | None,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs(q, k, v, sink_logits)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=compute_dtype(q))
        for group in groups:
            found = _forward(inputs, rules, group)
            out[:, :, group.rows], lse[:, :, group.rows] = found
        ctx.save_for_backward(*inputs, out, lse, *learned)
        ctx.rules, ctx.groups = rules, groups
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (the decorator)
        ctx: Any, *grads: Any
    ) -> tuple[Any, ...]:
        d_out, d_lse = grads
        q, k, v, sink_logits, out, lse, *learned = ctx.saved_tensors
        back = _Backward(Inputs(q, k, v, sink_logits), ctx.rules, tuple(learned), out, lse, d_lse)
        return None, None, *back.gradients(ctx.groups, out * 0 if d_out is None else d_out)


def _forward(inputs: Inputs, rules: Rules, group: Group) -> tuple[Tensor, Tensor]:
    """Returns out [B, H, R, D] and lse [B, H, R] of a group of tiles over all keys."""
    dtype = compute_dtype(inputs.q)
    engine = fused if fused.usable(inputs, rules) else dense
    out = torch.zeros_like(inputs.q[:, :, group.rows], dtype=dtype)
    lse = out.new_full(out.shape[:3], -torch.inf)
    met = group.rows.start  # rows before it have already met keys
    for part in group.parts:
        q, k, v = inputs.q[:, :, part.rows], take(inputs.k, part.runs), take(inputs.v, part.runs)
        found = engine.forward(Meeting(rules, (), part, q, k, v))
        here = slice(part.rows.start - group.rows.start, part.rows.stop - group.rows.start)
        if part.rows.stop <= met:
            found = merge(out[:, :, here], lse[:, :, here], *found)
        out[:, :, here], lse[:, :, here] = found
        met = max(met, part.rows.stop)
    if inputs.sink_logits is not None:  # a key without a value
        sink = inputs.sink_logits.to(dtype)[:, None].expand_as(lse)
        out, lse = merge(out, lse, out.new_zeros(1), sink)
    return out, lse


class _Backward:
    """The backward pass of one call, tile by tile."""

    def __init__(
        self,
        inputs: Inputs,
        rules: Rules,
        learned: tuple[Tensor, ...],
        out: Tensor,
        lse: Tensor,
        d_lse: Tensor | None,
    ) -> None:
        self.inputs, self.rules, self.learned = inputs, rules, learned
        self.out, self.lse = out, lse
        self.d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
        self.fused = fused.usable(inputs, rules)
        self.wide = inputs.k, inputs.v
        splits = rules.bias is not None and rules.bias.far is not None
        if self.fused and (d_lse is not None or (learned and splits)):
            self.wide = fused.widened(inputs.k, 1.0), fused.widened(inputs.v, 1.0)
        with torch.enable_grad():
            now = rules.learned
        if len(now) != len(learned) or any(a is not b for a, b in zip(now, learned, strict=True)):
            raise ConfigError(
                "the bias's parameters were replaced between forward and backward, so gradients "
                "would miss them. Under torch.func use impl='reference' or 'sdpa'."
            )

    def gradients(self, groups: list[Group], d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k, v, the sink logits and what is learned."""
        q, k, v, sink_logits = self.inputs
        dtype = compute_dtype(q)
        d_q = torch.empty_like(q)
        d_k, d_v = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
        d_learned = [torch.zeros_like(p, dtype=dtype) for p in self.learned]
        for group in groups:
            d_group = torch.zeros_like(q[:, :, group.rows], dtype=dtype)
            for part in group.parts:
                gained = self._meet(part, d_out[:, :, part.rows])
                start = part.rows.start - group.rows.start
                d_group[:, :, start : start + gained.q.shape[2]] += gained.q
                give(d_k, part.runs, gained.k)
                give(d_v, part.runs, gained.v)
                for total, gain in zip(d_learned, gained.learned, strict=True):
                    if gain is not None:
                        total += gain
            d_q[:, :, group.rows] = d_group
        d_sinks = None if sink_logits is None else self._sinks(sink_logits, d_out)
        cast = [total.to(p.dtype) for total, p in zip(d_learned, self.learned, strict=True)]
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, *cast

    def _meet(self, part: Part, d_out: Tensor) -> Gradients:
        rows, q = part.rows, self.inputs.q[:, :, part.rows]
        use_fused = self.fused and fused.differentiable(self.rules, part, self.learned)
        keys, values = self.wide if use_fused else (self.inputs.k, self.inputs.v)
        k, v = take(keys, part.runs), take(values, part.runs)
        engine = fused if use_fused else dense
        return engine.backward(
            Meeting(self.rules, self.learned, part, q, k, v),
            d_out,
            self.out[:, :, rows],
            self.lse[:, :, rows],
            self.d_lse[:, :, rows],
        )

    def _sinks(self, sink_logits: Tensor, d_out: Tensor) -> Tensor:
        """Returns the gradient of the sink logits: keys with weight exp(sink − lse), no value."""
        weights = (sink_logits.to(self.lse.dtype)[:, None] - finite(self.lse)).exp()
        even = torch.linalg.vecdot(d_out.to(weights.dtype), self.out.to(weights.dtype)) - self.d_lse
        return -(weights * even).sum((0, 2)).to(sink_logits.dtype)
