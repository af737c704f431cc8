"""Whether the contenders are right on this device, before anyone is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu_peers import SOFTCAP, tables
from longspan.attention import attend, choose_impl
from longspan.attention.rules import Options
from longspan.bias import Alibi, ShawRelative, T5Bias
from longspan.masks import causal
from peers import Peer, inputs, run
from rivals import DIM, HEADS, MASK

TOKENS = 1536  # three windows
# Of the tensor's largest number. In float32 one key too many shows; in bfloat16 it may not.
ALLOWED = {"float32": 1e-4, "bfloat16": 3e-2}
CHECKED = (
    ("window", "float32"),
    ("window", "bfloat16"),
    ("ALiBi", "bfloat16"),
    ("soft cap", "bfloat16"),
)
IMPLS = ("auto", "tiled", "flex")


@dataclass(frozen=True)
class Check:
    """One contender beside the float64 definition."""

    what: str
    contender: str
    dtype: str
    error: float | None
    """Largest |difference| of out and of each gradient, as a share of that tensor's largest
    number; None where the contender cannot do it."""
    refusal: str = ""

    @property
    def off(self) -> bool:
        """True where longspan is wrong, or fails without saying that it cannot do it."""
        if not self.contender.startswith("longspan"):
            return False
        if self.error is None:
            return "cannot do this" not in self.refusal
        return not self.error <= ALLOWED[self.dtype]  # NaN is wrong


@dataclass(frozen=True)
class Chosen:
    """What "auto" takes, and what it should."""

    what: str
    impl: str
    wanted: str
    reason: str

    @property
    def off(self) -> bool:
        """True where it takes another."""
        return self.impl != self.wanted


def checks(device: str) -> Iterator[Check]:
    """Yields every check."""
    found = tables(device)
    for table, dtype in CHECKED:
        for peer in found[table]:
            yield checked(partial(_peer_error, peer, dtype, device), table, peer.name, dtype)
    for what, make in OPTIONS.items():
        for impl in IMPLS:
            error = partial(_option_error, make, impl, device)
            yield checked(error, what, f"longspan {impl}", "float32")


def checked(error: Callable[[], float], what: str, contender: str, dtype: str) -> Check:
    """Returns one check; whatever a contender raises becomes its refusal."""
    try:
        return Check(what, contender, dtype, error())
    except Exception as raised:
        return Check(what, contender, dtype, None, reason(raised))


def reason(raised: Exception) -> str:
    """Returns the first line of what was raised."""
    first = (str(raised).strip() or type(raised).__name__).splitlines()[0]
    return f"{type(raised).__name__}: {first}"


def _peer_error(peer: Peer, dtype: str, device: str) -> float:
    qkv = inputs(TOKENS, dtype, device)
    found = run(peer.ready(qkv[0]), qkv, backward=True)
    return worst(found, _definition(peer.meaning, qkv))


def _definition(meaning: Options, qkv: list[Tensor]) -> list[Tensor]:
    """Returns out and gradients by the reference in float64."""
    exact = partial(attend, impl="reference", **meaning)
    return run(exact, [x.double() for x in qkv], backward=True)


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    """Returns the largest |difference| of any tensor, as a share of its largest number."""
    pairs = zip(found, exact, strict=True)
    shares = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    return max(shares, key=lambda share: (share != share, share))  # NaN first


def _results(make: Callable[[Tensor], Options], impl: str, qkv: list[Tensor]) -> list[Tensor]:
    """Returns out and the gradients of q, k, v and of all that is learned."""
    options = make(qkv[0])
    sinks, bias = options.get("sink_logits"), options.get("bias")
    learned = ([] if sinks is None else [sinks]) + ([] if bias is None else [*bias.parameters()])
    found = run(partial(attend, impl=impl, **options), qkv, backward=True)
    return found + [torch.zeros_like(x) if x.grad is None else x.grad for x in learned]


def _option_error(make: Callable[[Tensor], Options], impl: str, device: str) -> float:
    qkv = inputs(TOKENS, "float32", device)
    exact = _results(make, "reference", [x.double() for x in qkv])
    return worst(_results(make, impl, qkv), exact)


def _sinks(q: Tensor) -> Options:
    sinks = torch.linspace(-1, 2, HEADS).to(q)
    return Options(mask=MASK, sink_logits=sinks.requires_grad_())


def _softcap(q: Tensor) -> Options:
    return Options(mask=MASK, softcap=SOFTCAP)


def _alibi(q: Tensor) -> Options:
    return Options(mask=causal(), bias=Alibi(HEADS))


def _t5(q: Tensor) -> Options:
    torch.manual_seed(0)
    return Options(mask=causal(), bias=T5Bias(HEADS).to(q))


OPTIONS: dict[str, Callable[[Tensor], Options]] = {
    "learned sinks": _sinks,
    "soft cap in a window": _softcap,
    "ALiBi": _alibi,
    "T5 and its table": _t5,
}


def choices(device: str) -> Iterator[Chosen]:
    """Yields what "auto" takes in training, and for T5 at inference."""
    q, k, v = (x.requires_grad_() for x in inputs(TOKENS, "float32", device))
    skipping = "flex" if device == "cuda" else "tiled"
    wanted: dict[str, tuple[Options, str]] = {
        "causal alone": (Options(mask=causal()), "sdpa"),
        "window": (Options(mask=MASK), skipping),
        "Shaw": (Options(mask=causal(), bias=ShawRelative(HEADS, DIM, 64).to(device)), "tiled"),
        **{what: (make(q), skipping) for what, make in OPTIONS.items()},
    }
    wanted["T5 and its table"] = wanted["T5 and its table"][0], "tiled"
    for what, (options, impl) in wanted.items():
        found = choose_impl(q, k, v, **options)
        yield Chosen(what, found.impl, impl, found.reason)
    with torch.no_grad():
        found = choose_impl(q, k, v, **wanted["T5 and its table"][0])
    yield Chosen("T5, not learning", found.impl, skipping, found.reason)
