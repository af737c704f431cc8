"""attend(): one operator, several implementations, and which of them it uses."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from longspan.attention import flex, reference, sdpa, tiled
from longspan.attention.rules import Inputs, Options, Rules, check
from longspan.attention.visibility import Visibility
from longspan.bias.base import Bias
from longspan.errors import ConfigError, did_you_mean
from longspan.masks import Mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

IMPLS: dict[str, ModuleType] = {
    "reference": reference,
    "tiled": tiled,
    "sdpa": sdpa,
    "flex": flex,
}
SMALL_PAIRS, SMALL_KEYS = 1 << 18, 1024  # below both, a dense mask costs less than tiling


@dataclass(frozen=True)
class Choice:
    """The implementation that "auto" takes, and why."""

    impl: str
    reason: str


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Visibility | None = None,
    bias: Bias | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    scale: float | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns softmax(scores)·v over the keys that the mask lets each query see.

    The score of a pair is scale·q·k, capped, plus the bias. A query that sees no key gives 0 and
    passes no gradient. Memory is linear in the length except where `impl` says otherwise.

    Args:
        q: [B, H, T, D].
        k, v: [B, K, S, D] and [B, K, S, Dv]; H a multiple of K. Key head j serves query heads
            j·H/K to (j + 1)·H/K − 1.
        mask: who sees whom; None lets all see all, the future too. A `Visibility` is a mask laid
            over positions once, for many calls.
        bias: added to the scores.
        q_pos, k_pos: int64 positions that mask and bias go by, [T] or [B, T], [S] or [B, S]. By
            default keys are at 0 … S − 1 and the queries are the last T of them. They need not be
            rotary positions. A key at a negative position is absent (padding).
        q_doc, k_doc: int64 documents, shaped like positions; tokens of different documents never
            see each other. One is enough where T = S.
        scale: multiplies q·k, and what a bias puts under the same root; 1/√D by default.
        sink_logits: [H], learned sinks: a logit more in each head's softmax, without a value.
        softcap: bounds scores to ±softcap by tanh, before the bias.
        dropout: the share of weights dropped, as in training; only `reference` and `sdpa` do it.
        impl: `reference` (all pairs, the definition), `tiled` (tiles of queries and only the keys
            they see), `sdpa` (torch's, with a dense mask where one is needed), `flex` (compiled)
            or `auto`. One given by name does it or raises.
        return_lse: also return the natural log of each row's softmax denominator, learned sink
            included: [B, H, T], −inf for an empty row.

    Returns:
        [B, H, T, Dv] in q's dtype, or (out, lse).

    Raises:
        ShapeError: for shapes, dtypes or positions that do not fit.
        ConfigError: for an option out of range, or one that the named `impl` does not do.

    >>> import torch
    >>> from longspan.masks import causal
    >>> v = torch.arange(5.0).view(1, 1, 5, 1)
    >>> attend(torch.zeros(1, 1, 2, 1), torch.zeros_like(v), v, mask=causal()).flatten()
    tensor([1.5000, 2.0000])
    """
    options = Options(
        mask=mask,
        bias=bias,
        q_pos=q_pos,
        k_pos=k_pos,
        q_doc=q_doc,
        k_doc=k_doc,
        scale=scale,
        sink_logits=sink_logits,
        softcap=softcap,
        dropout=dropout,
    )
    inputs, rules = check(q, k, v, return_lse, options)
    if impl == "auto":
        impl = _choose(inputs, rules).impl
    if impl not in IMPLS:
        raise ConfigError(
            f"unknown impl {impl!r}.{did_you_mean(impl, IMPLS)} Use auto or {', '.join(IMPLS)}."
        )
    refusal = IMPLS[impl].refusal(inputs, rules)
    if refusal:
        raise ConfigError(f"impl={impl!r} cannot do this: {refusal}. Try another, or 'auto'.")
    out, lse = IMPLS[impl].run(inputs, rules)
    return (out, lse) if return_lse else out


def choose_impl(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[Options]
) -> Choice:
    """Returns what `attend` would take with impl="auto", for the same arguments.

    Raises:
        ShapeError, ConfigError: where `attend` would.

    >>> import torch
    >>> from longspan.masks import causal
    >>> q = torch.zeros(1, 1, 4, 8)
    >>> choose_impl(q, q, q, mask=causal())
    Choice(impl='sdpa', reason='no mask or bias of all pairs has to be built')
    """
    return _choose(*check(q, k, v, return_lse, options))


def _choose(inputs: Inputs, rules: Rules) -> Choice:
    queries, keys = rules.seen.shape
    if sdpa.refusal(inputs, rules) is None:
        if not sdpa.needs_pairs(inputs, rules):
            return Choice("sdpa", "no mask or bias of all pairs has to be built")
        if queries * keys <= SMALL_PAIRS and keys <= SMALL_KEYS:
            return Choice("sdpa", f"{queries}·{keys} pairs are few")
    if rules.dropout:
        raise ConfigError(
            f"dropout={rules.dropout} of {queries}·{keys} weights needs them all in memory, which "
            "'auto' does not do at this length. Name impl='sdpa' or 'reference', or use dropout=0."
        )
    on_gpu = inputs.q.device.type == "cuda"
    if on_gpu and not rules.learned and flex.refusal(inputs, rules) is None:
        return Choice("flex", "hidden blocks are skipped by a compiled kernel")
    return Choice("tiled", "hidden tiles are skipped and nothing of all pairs is built")
