"""The rotation's arithmetic: one formula, run in lean blocks or through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from longspan.errors import ConfigError

Layout = Literal["half", "interleaved"]
Impl = Literal["auto", "eager", "compiled"]

# Compiling takes seconds, so "auto" compiles only where one eager call takes tens of milliseconds.
COMPILED_FROM_ELEMENTS = 2**24
# Temporaries of this many elements stay in a CPU's cache.
BLOCK_ELEMENTS = 2**20


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Returns x with its pairs (a, b) turned to (a·cos − b·sin, b·cos + a·sin).

    The specification: differentiable in every argument, and what torch.compile traces.

    Args:
        x: [B, H, T, D].
        cos, sin: [1, T, P] or [B, 1, T, P] with 2·P ≤ D; their dtype is the arithmetic's.
        layout: `half` or `interleaved`.
    """
    pairs = cos.shape[-1]
    turning, resting = x[..., : 2 * pairs], x[..., 2 * pairs :]
    first, second = (part.to(cos.dtype) for part in split_pairs(turning, layout))
    turned = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    # One concatenation for the half layout: it compiles to a single pass over x.
    parts = turned if layout == "half" else (torch.stack(turned, dim=-1).flatten(-2),)
    return torch.cat((*parts, resting) if resting.shape[-1] else parts, dim=-1)


def turn_whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `turn` of heads that turn whole, in the half layout, in a quarter of its calls.

    Args:
        x: [B, H, T, D].
        cos, sin: [1 or B, 1, T, D], a value a channel: cos twice, and −sin before sin.
    """
    exact = x.to(cos.dtype)
    return torch.addcmul(exact * cos, exact.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def turn_by(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, impl: Impl) -> Tensor:
    """Returns `turn` run by `impl`, with a backward as fast as the forward.

    Inside a caller's own torch.compile the formula joins the caller's graph, whatever `impl`.

    Raises:
        ConfigError: for an unknown `impl`, or 'compiled' where it cannot be done.
    """
    if impl not in RUN:
        raise ConfigError(f"impl must be 'auto', 'eager' or 'compiled', got {impl!r}.")
    if torch.compiler.is_compiling():
        return turn(x, cos, sin, layout)
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if learned or torch._C._are_functorch_transforms_active():
        if impl == "compiled":
            raise ConfigError(
                "impl='compiled' gives no gradient to cos and sin, and cannot run inside "
                "torch.func transforms. Use impl='eager' or 'auto'."
            )
        return turn(x, cos, sin, layout)
    return Turn.apply(x, cos, sin, layout, impl)


def choose_impl(x: Tensor, layout: Layout) -> Literal["eager", "compiled"]:
    """Returns what "auto" runs for x: compiled where x is large and it is faster, else eager.

    On a CPU the interleaved layout stays eager: complex products outrun the compiled strides.
    """
    faster = x.device.type == "cuda" or (x.device.type == "cpu" and layout == "half")
    if faster and x.numel() >= COMPILED_FROM_ELEMENTS and compiler_works(x.device.type):
        return "compiled"
    return "eager"


class Turn(torch.autograd.Function):
    """A rotation is linear and its transpose turns back: so the gradient is turned by −angle."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, impl: Impl
    ) -> Tensor:
        """Returns the turned x; keeps only the table for the backward."""
        ctx.save_for_backward(cos, sin)
        ctx.layout, ctx.impl = layout, impl
        return RUN[impl](x, cos, sin, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Returns the gradient of x; it can be differentiated again."""
        cos, sin = ctx.saved_tensors
        return Turn.apply(grads[0], cos, -sin, ctx.layout, ctx.impl), None, None, None, None


def turn_auto(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Returns `turn` by `choose_impl`; eager too where torch cannot compile this very input."""
    if choose_impl(x, layout) == "compiled":
        try:
            return turn_compiled(x, cos, sin, layout)
        except ConfigError:
            pass
    return turn_eager(x, cos, sin, layout)


def turn_eager(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Returns `turn` without autograd and without temporaries larger than a cache."""
    pairs, exact = cos.shape[-1], x.dtype == cos.dtype
    if layout == "interleaved" and exact and x.shape[-1] == 2 * pairs:
        return turn_complex(x, cos, sin)
    out = torch.empty_like(x)
    out[..., 2 * pairs :] = x[..., 2 * pairs :]
    step = max(1, x.shape[-2]) if exact else block_tokens(x)
    for start in range(0, x.shape[-2], step):
        rows = slice(start, start + step)
        block, target = x[..., rows, : 2 * pairs].to(cos.dtype), out[..., rows, : 2 * pairs]
        c, s = cos[..., rows, :], sin[..., rows, :]
        if layout == "interleaved":
            target.copy_(turn_complex(block, c, s))
        elif exact:
            turn_halves(block, c, s, out=target)
        else:
            target.copy_(turn_halves(block, c, s, out=torch.empty_like(block)))
    return out


def block_tokens(x: Tensor) -> int:
    """Returns the tokens of one block: a cache's worth on a CPU, all of them elsewhere."""
    if x.device.type != "cpu":
        return max(1, x.shape[-2])
    return max(1, BLOCK_ELEMENTS // max(1, x[..., :1, :].numel()))


def turn_halves(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Writes the turned halves into `out` and returns it; all four are of one dtype."""
    (first, second), (to_first, to_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return out


def turn_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns interleaved pairs as (a + bi)·(cos + i·sin), for x in the dtype of `cos`."""
    odd = any(stride % 2 for stride in (*x.stride()[:-1], x.storage_offset()))
    if odd or x.stride(-1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def turn_compiled(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Returns `turn` through torch.compile, or raises: it never runs anything else.

    Raises:
        ConfigError: if torch cannot compile here.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    # What torch.compile specialises on; every other size is symbolic.
    singles = tuple(size == 1 for size in (*x.shape, *cos.shape))
    compiled = compiled_turn(layout, x.dtype, x.is_contiguous(), singles)
    try:
        return compiled(x.detach(), cos.detach(), sin.detach(), layout)
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        reason = " ".join(str(error).partition("\n\n")[0].split()).rstrip(".")
        raise ConfigError(
            f"impl='compiled' cannot run here: {reason}. On a CPU it needs a C++ compiler such as "
            "g++ (CXX names it). Use impl='eager' or 'auto'."
        ) from error


@cache
def compiled_turn(
    layout: Layout, dtype: torch.dtype, contiguous: bool, singles: tuple[bool, ...]
) -> Callable[..., Tensor]:
    """Returns `turn` compiled for one kind of input, at any length, batch and number of heads."""
    # torch gives up after eight recompilations of a code object, so each kind has its own.
    name = f"turn_{layout}"
    own = FunctionType(turn.__code__.replace(co_name=name), turn.__globals__, name)
    return torch.compile(own, dynamic=True, fullgraph=True)


@cache
def compiler_works(device_type: str) -> bool:
    """Says whether torch.compile works for this kind of device, by trying it once."""
    x = torch.zeros(2, 3, 5, 8, device=device_type)
    try:
        Turn.apply(x, x[:1, 0, :, :4], x[:1, 0, :, :4], "half", "compiled")
    except ConfigError:
        return False
    return True


def split_pairs(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Returns views of the first and second channel of every pair, each [..., P]."""
    if layout == "half":
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., 0::2], x[..., 1::2]


RUN: dict[str, Callable[[Tensor, Tensor, Tensor, Layout], Tensor]] = {
    "auto": turn_auto,
    "eager": turn_eager,
    "compiled": turn_compiled,
}
