"""torch's compiled FlexAttention, with a block mask read off the mask's own structure.

Compiling takes seconds, once for each kind of mask, bias and shape. On a CPU it has no backward
pass and no log-sum-exp, and this file refuses both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.attention.reference import cap
from longspan.attention.rules import Inputs, Rules
from longspan.attention.visibility import Visibility
from longspan.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries and keys of a block, the kernels' own
KEYS_AT_ONCE = 32  # of the CPU kernel


def refusal(inputs: Inputs, rules: Rules) -> str | None:
    """Returns why this implementation cannot do what is asked, or None."""
    on_cpu = inputs.q.device.type == "cpu"
    bias = rules.bias
    if rules.dropout:
        return "it has no dropout of the weights"
    if bias is not None and bias.reads_query:
        return f"{type(bias).__name__} reads the query, and its score function cannot"
    if on_cpu and (inputs.needs_grad or rules.learned):
        return "on a CPU it has no backward pass (use torch.no_grad() for inference)"
    if on_cpu and (rules.return_lse or inputs.sink_logits is not None):
        return "on a CPU it has no log-sum-exp, which learned sinks need too"
    if on_cpu and inputs.q.dtype == torch.float64:
        return "on a CPU it has no float64"
    if not rules.seen.shape[1]:
        return "it needs at least one key"
    return None


def run(inputs: Inputs, rules: Rules) -> tuple[Tensor, Tensor | None]:
    """Returns out [B, H, T, Dv] and, where it was asked for, lse [B, H, T]."""
    if inputs.q.device.type == "cpu":
        inputs, rules = _filled_up(inputs, rules)
    blocks = block_mask(rules.seen) if rules.seen.hides else None
    return flex_attend(inputs, rules, blocks)


def _filled_up(inputs: Inputs, rules: Rules) -> tuple[Inputs, Rules]:
    """Returns the call with absent keys added up to a multiple of 32.

    torch 2.13's kernel for the CPU reads past the keys where 8 are left over: wrong numbers, NaN.
    """
    seen, missing = rules.seen, -rules.seen.shape[1] % KEYS_AT_ONCE
    if not missing:
        return inputs, rules
    k, v = (F.pad(x, (0, 0, 0, missing)) for x in (inputs.k, inputs.v))
    k_pos = F.pad(seen.k_pos, (0, missing), value=-1)
    k_doc = None if seen.k_doc is None else F.pad(seen.k_doc, (0, missing))
    seen = replace(seen, k_pos=k_pos, k_doc=k_doc, first=None, found={})
    return inputs._replace(k=k, v=v), replace(rules, seen=seen, remembered={})


def flex_attend(inputs: Inputs, rules: Rules, blocks: BlockMask | None) -> tuple[Tensor, Any]:
    """Returns attention under a block mask that is already built.

    Raises:
        ShapeError: if the block mask was built for other lengths.
        ConfigError: if the compiler fails.
    """
    q, k, v, sink_logits = inputs
    if blocks is not None and tuple(blocks.seq_lengths) != rules.seen.shape:
        raise ShapeError(
            f"the block mask was built for T, S = {tuple(blocks.seq_lengths)}, and q and k have "
            f"{rules.seen.shape}. Build one for these lengths."
        )
    wants_lse = rules.return_lse or sink_logits is not None
    from torch._dynamo.exc import FailOnRecompileLimitHit

    kernel = compiled(*_kind(inputs, rules))
    try:
        found = kernel(
            q,
            k,
            v,
            score_mod=score_function(rules, q.device),
            block_mask=blocks,
            scale=rules.scale,
            enable_gqa=k.shape[1] != q.shape[1],
            return_lse=wants_lse,
        )
    except (RuntimeError, FailOnRecompileLimitHit) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"FlexAttention failed for {rules.seen.mask!r} at T, S = {rules.seen.shape}: {reason} "
            "Use impl='tiled'."
        ) from error
    if not wants_lse:
        return found, None
    out, lse = found
    if sink_logits is not None:
        sink = sink_logits.to(lse.dtype)[:, None]
        out, lse = out * (lse - sink).sigmoid().unsqueeze(-1).to(out.dtype), lse.logaddexp(sink)
    return out, lse


def _kind(inputs: Inputs, rules: Rules) -> tuple[Any, ...]:
    """Returns whether lengths are fixed, and what a kernel is compiled for beside lengths."""
    q, seen, bias = inputs.q, rules.seen, rules.bias
    # On a CPU the compiler writes code that does not build once it takes lengths as variables.
    fixed = q.device.type == "cpu"
    sizes = (q.shape, inputs.k.shape, inputs.v.shape) if fixed else (q.shape[-1],)
    rows = len(seen.q_pos) > 1, len(seen.k_pos) > 1, seen.q_doc is not None, seen.hides
    scores = rules.softcap, type(bias).__name__, inputs.sink_logits is None, rules.return_lse
    return fixed, q.dtype, inputs.needs_grad, repr(seen.mask), sizes, rows, scores


@lru_cache(maxsize=256)
def compiled(fixed: bool, *kind: Any) -> Callable[..., Any]:
    """Returns a kernel compiled for one kind of call; it raises where it cannot compile.

    Args:
        fixed: lengths are compiled in.
        kind: torch gives up after eight recompilations of a code object, so each has its own.
    """
    from torch.nn.attention.flex_attention import flex_attention  # slow to import

    def kernel(*tensors: Any, **options: Any) -> Any:
        return flex_attention(*tensors, **options)

    name = f"flex_{abs(hash(kind))}"
    own = FunctionType(
        kernel.__code__.replace(co_name=name), kernel.__globals__, name, closure=kernel.__closure__
    )
    return torch.compile(own, fullgraph=True, dynamic=False if fixed else None)


def block_mask(seen: Visibility) -> BlockMask:
    """Returns the block mask of a visibility, from spans of positions: T·S/128² cells, no pair.

    Args:
        seen: who sees whom.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = seen.shape
    grid = seen.grid(BLOCK, BLOCK)
    rows, columns = (torch.arange(span.low.shape[1], device=span.low.device) for span in grid[1:3])
    found = grid.coverage(rows.unsqueeze(1), columns.unsqueeze(0))
    whole = found.all.clone()
    # Blocks that stick out past the last token must look at every pair.
    whole[queries // BLOCK :] = False
    whole[:, keys // BLOCK :] = False
    return BlockMask.from_kv_blocks(
        *_listed(found.some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_function(seen),
        seq_lengths=(queries, keys),
    )


def _listed(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's count of true cells and their indices, [1, 1, n] and [1, 1, n, m]."""
    order = cells.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return cells.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def mask_function(seen: Visibility) -> Callable[..., Tensor]:
    """Returns the visibility as a function of batch row, head, query and key index."""
    q_row, k_row = _row(seen.q_pos), _row(seen.k_pos)
    mask, q_doc, k_doc = seen.mask, seen.q_doc, seen.k_doc

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_pos, k_pos = q_row(b, q), k_row(b, k)
        found = k_pos >= 0
        if mask is not None:
            found = found & mask.sees(q_pos, k_pos)
        if q_doc is not None and k_doc is not None:
            found = found & (_row(q_doc)(b, q) == _row(k_doc)(b, k))
        return found

    return visible


def score_function(rules: Rules, device: torch.device) -> Callable[..., Tensor] | None:
    """Returns what the soft cap and the bias make of a score; None where they do nothing."""
    bias = None if rules.bias is None else rules.bias.score_function(device)
    softcap = rules.softcap
    if bias is None and softcap is None:
        return None
    q_row, k_row = _row(rules.seen.q_pos), _row(rules.seen.k_pos)

    def score(product: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        capped = cap(product, softcap)
        return capped if bias is None else capped + bias(h, q_row(b, q), k_row(b, k))

    return score


def _row(rows: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns how to look up a number by batch row and index; one row may serve all."""
    if len(rows) == 1:
        row = rows[0]
        return lambda b, at: row[at]
    return lambda b, at: rows[b, at]
