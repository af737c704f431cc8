"""torch's scaled_dot_product_attention over all pairs: exact, and quickest where T·S is small."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.attention.rules import Inputs, Rules, compute_dtype
from longspan.attention.visibility import Run
from longspan.masks import causal


def refusal(inputs: Inputs, rules: Rules) -> str | None:
    """Returns why this implementation cannot do what is asked, or None."""
    if rules.return_lse:
        return "it has no log-sum-exp"
    if rules.softcap is not None:
        return "it has no soft cap"
    if rules.bias is not None and rules.bias.adds_values:
        return f"{type(rules.bias).__name__} adds to the values"
    if not rules.seen.shape[1]:
        return "it needs at least one key"
    return None


def needs_pairs(inputs: Inputs, rules: Rules) -> bool:
    """Returns whether a tensor of all T·S pairs has to be built for it."""
    plain = rules.bias is None and inputs.sink_logits is None and not rules.dropout
    return not plain or (rules.seen.hides and not _is_causal(rules))


def run(inputs: Inputs, rules: Rules) -> tuple[Tensor, None]:
    """Returns out [B, H, T, Dv]; there is no lse."""
    q, k, v, sink_logits = inputs
    content = q if rules.bias is None else rules.bias.content_query(q)
    added, is_causal = None, False
    if needs_pairs(inputs, rules):
        added = _remembered(inputs, rules)
    else:
        is_causal = rules.seen.hides
    if sink_logits is not None:  # one more key and value of zeros, with the logit as its bias
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    out = F.scaled_dot_product_attention(
        content,
        k,
        v,
        attn_mask=added,
        dropout_p=rules.dropout,
        is_causal=is_causal,
        scale=rules.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return out, None


def _is_causal(rules: Rules) -> bool:
    seen = rules.seen
    square = seen.shape[0] == seen.shape[1] and seen.first is not None
    aligned = square and seen.first is not None and seen.first[0] == seen.first[1] >= 0
    return aligned and seen.q_doc is None and seen.mask == causal()


def _remembered(inputs: Inputs, rules: Rules) -> Tensor:
    if rules.bias is not None or inputs.sink_logits is not None:
        return _added(inputs, rules)
    if "added" not in rules.remembered:
        rules.remembered["added"] = _added(inputs, rules)
    return rules.remembered["added"]


def _added(inputs: Inputs, rules: Rules) -> Tensor:
    """Returns what is added to every score, [1 or B, 1 or H, T, S], and a column for the sinks."""
    q, seen, bias = inputs.q.to(compute_dtype(inputs.q)), rules.seen, rules.bias
    added = q.new_zeros((1, 1, *seen.shape))
    if bias is not None:
        queries, keys = seen.shape
        scores = bias.scores(q, *seen.positions(slice(0, queries), [Run(0, keys)]))
        added = added + (scores * rules.scale if bias.inside_scale else scores)
    if seen.hides:
        added = added.masked_fill(~seen.everything(), -torch.inf)
    if inputs.sink_logits is None:
        return added
    sink = inputs.sink_logits.to(q.dtype)[:, None, None]
    batch, heads, queries, keys = torch.broadcast_shapes(added.shape, (1, q.shape[1], 1, 1))
    column = sink.expand(batch, heads, queries, 1)
    return torch.cat((added.expand(batch, heads, queries, keys), column), dim=-1)
