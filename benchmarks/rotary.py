"""Times one rotation of q and k against other libraries, and against copying them.

    python benchmarks/rotary.py --json docs/results/rotary.json

Every contender gets the same q, k and positions, and a ready table where it takes one. They run in
turn within each repeat, so a slow moment of the machine falls on all of them; medians are shown.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import cast, get_args

import click
import torch
from rich.console import Console
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere_rotation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotation

from longspan.files import write_text
from longspan.rotary.frequencies import rope_frequencies
from longspan.rotary.rotate import apply_rotation, rotation_table
from longspan.rotary.turn import Impl, Layout, choose_impl
from timing import say_if_busy, show_table, surroundings, time_in_turn

THETA = 10_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer's q and k, B = 1."""

    heads: int
    kv_heads: int
    tokens: int
    head_dim: int


@dataclass
class Row:
    """One contender's result in one setting."""

    layout: str
    dtype: str
    direction: str
    contender: str
    median_ms: float
    fastest_ms: float
    of_clone: float
    """The median as a multiple of the copy's."""
    over_transformers: float
    """How many times as fast as transformers eager."""
    error: float | None
    """Largest |difference| from the float64 rotation of q; None for the copy."""
    one_rounding: float
    """That of the float64 rotation itself, rounded once to the dtype."""


def contenders(layout: Layout, dtype: torch.dtype, shape: Shape) -> dict[str, Rotation]:
    """Returns every rotation of this layout, by name."""
    positions, inv_freq = torch.arange(shape.tokens), rope_frequencies(shape.head_dim, THETA)
    table = rotation_table(positions, inv_freq)
    theirs = {"half": llama_rotation, "interleaved": cohere_rotation}[layout]
    compiled = torch.compile(theirs)
    cos, sin = (spread(part, layout).to(dtype) for part in table)

    def ours(impl: Impl) -> Rotation:
        return lambda q, k: (
            apply_rotation(q, table, layout, impl),
            apply_rotation(k, table, layout, impl),
        )

    rotations: dict[str, Rotation] = {
        "clone": lambda q, k: (q.clone(), k.clone()),
        "transformers eager": lambda q, k: theirs(q, k, cos, sin),
        "transformers compiled": lambda q, k: compiled(q, k, cos, sin),
        "longspan eager": ours("eager"),
        "longspan compiled": ours("compiled"),
    }
    if layout == "interleaved":
        other = RotaryEmbedding(shape.head_dim, theta=THETA)
        turn = other.rotate_queries_or_keys
        rotations["rotary-embedding-torch"] = lambda q, k: (turn(q), turn(k))
    return rotations


def spread(part: Tensor, layout: Layout) -> Tensor:
    """Returns cos or sin laid out as transformers wants it, [1, T, D]."""
    whole = torch.cat((part, part), -1) if layout == "half" else part.repeat_interleave(2, -1)
    return whole[None]


def forward_and_backward(rotation: Rotation, grads: tuple[Tensor, Tensor]) -> Rotation:
    """Returns the rotation followed by its backward, from given gradients to q's and k's."""

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
            return cast("tuple[Tensor, Tensor]", torch.autograd.grad(rotation(q, k), (q, k), grads))

    return run


def twice(copy: Rotation, grads: tuple[Tensor, Tensor]) -> Rotation:
    """Returns the copy of q and k and of their gradients: the least a backward must write."""
    return lambda q, k: (*copy(q, k), *copy(*grads))[:2]


@torch.no_grad()
def errors(
    rotations: dict[str, Rotation], q: Tensor, k: Tensor, layout: Layout
) -> tuple[dict[str, float | None], float]:
    """Returns each contender's largest distance from the float64 rotation, and one rounding's."""
    q, k = q[:, :4], k[:, :4]
    positions, inv_freq = torch.arange(q.shape[2]), rope_frequencies(q.shape[3], THETA)
    table = rotation_table(positions, inv_freq, dtype=torch.float64)
    exact = apply_rotation(q.double(), table, layout)
    found: dict[str, float | None] = {
        name: (rotation(q, k)[0].double() - exact).abs().max().item()
        for name, rotation in rotations.items()
    }
    found["clone"] = None
    return found, (exact.to(q.dtype).double() - exact).abs().max().item()


def measure(layout: Layout, dtype_name: str, shape: Shape, repeats: int) -> Iterator[Row]:
    """Yields the rows of one layout and dtype, forward and then forward with backward."""
    dtype = DTYPES[dtype_name]
    random = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, heads, shape.tokens, shape.head_dim, generator=random).to(dtype)
        for heads in (shape.heads, shape.kv_heads)
    )
    grads = torch.randn_like(q), torch.randn_like(k)
    forward = contenders(layout, dtype, shape)
    with_backward = {name: forward_and_backward(each, grads) for name, each in forward.items()}
    with_backward["clone"] = twice(forward["clone"], grads)
    found, one_rounding = errors(forward, q, k, layout)
    for direction, rotations in (("forward", forward), ("forward+backward", with_backward)):
        with torch.no_grad():
            calls = {name: partial(rotation, q, k) for name, rotation in rotations.items()}
            times = time_in_turn(calls, repeats, warm_ups=2)
        medians = {name: statistics.median(each) for name, each in times.items()}
        for name, median in medians.items():
            yield Row(
                layout=layout,
                dtype=dtype_name,
                direction=direction,
                contender=name,
                median_ms=median,
                fastest_ms=min(times[name]),
                of_clone=median / medians["clone"],
                over_transformers=medians["transformers eager"] / median,
                error=found[name],
                one_rounding=one_rounding,
            )


def show(rows: list[Row], console: Console) -> None:
    """Prints one table a setting."""
    columns = "", "median ms", "fastest ms", "× clone", "× as fast as HF eager", "error"
    for _, group in groupby(rows, key=lambda row: (row.layout, row.dtype, row.direction)):
        setting = list(group)
        first = setting[0]
        title = f"{first.layout}, {first.dtype}, {first.direction}; "
        title += f"one rounding is {first.one_rounding:.1e}"
        show_table(console, title, columns, (cells(row) for row in setting))


def cells(row: Row) -> tuple[str, ...]:
    """Returns one contender's row of a table."""
    return (
        row.contender,
        f"{row.median_ms:.2f}",
        f"{row.fastest_ms:.2f}",
        f"{row.of_clone:.2f}",
        f"{row.over_transformers:.2f}",
        "" if row.error is None else f"{row.error:.1e}",
    )


def protocol(shape: Shape, repeats: int) -> dict[str, object]:
    """Returns what a reader needs to repeat the measurement."""
    return {
        "shape": asdict(shape),
        "repeats": repeats,
        **surroundings(("torch", "transformers", "rotary-embedding-torch", "longspan")),
        "auto_chooses": {
            layout: choose_impl(torch.empty(1, shape.heads, shape.tokens, shape.head_dim), layout)
            for layout in ("half", "interleaved")
        },
    }


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--repeats", default=30, show_default=True)
@click.option("--heads", default=32, show_default=True)
@click.option("--kv-heads", default=8, show_default=True)
@click.option("--tokens", default=4096, show_default=True)
@click.option("--head-dim", default=128, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(path: Path | None, repeats: int, threads: int, **sizes: int) -> None:
    """Times the rotation of one layer's q and k."""
    torch.set_num_threads(threads)
    shape, console = Shape(**sizes), Console(width=100)
    facts = protocol(shape, repeats)
    console.print(facts)
    say_if_busy(console)
    rows: list[Row] = []
    for layout, dtype in product(get_args(Layout), DTYPES):
        measured = list(measure(layout, dtype, shape, repeats))
        show(measured, console)
        rows += measured
    if path is not None:
        result = {"protocol": facts, "rows": [asdict(row) for row in rows]}
        write_text(path, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
