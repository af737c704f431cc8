"""Times context parallel attention against torch's ring attention on CUDA GPUs, correctness first.

    torchrun --nproc-per-node 2 benchmarks/gpu_ring.py --json ring.json

One causal sequence [1, 8, N, 64] lies over all GPUs in zigzag order. longspan gathers keys and
values once and attends by explicit positions; torch sends them round and merges. Without two GPUs
it exits with 2, and with 1 where longspan is wrong. Times are medians between CUDA events of rank
0, each contender by itself: torch's replaces scaled_dot_product_attention, which longspan calls.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from gpu_checks import ALLOWED, reason, worst
from longspan.adapters.context_parallel import shard_positions
from longspan.adapters.gathering import gathered
from longspan.attention import attend
from longspan.files import write_text
from longspan.masks import causal
from peers import doublings, inputs, run
from results import DIRECTIONS
from rivals import Attention
from timing import on_gpu, on_host, show_table, surroundings, time_in_turn

CHECKED = 2048  # tokens
REPEATS, WARM_UPS = 7, 2


@dataclass(frozen=True)
class Row:
    """One contender on one sequence; `error` is the share of a tensor's largest number."""

    contender: str
    tokens: int
    dtype: str
    backward: bool
    median_ms: float | None = None
    error: float | None = None
    refusal: str = ""

    @property
    def off(self) -> bool:
        """True where longspan is wrong, or does not run."""
        wrong = self.error is not None and not self.error <= ALLOWED[self.dtype]  # NaN is wrong
        return self.contender == "longspan" and bool(wrong or self.refusal)


def positions(tokens: int, device: str) -> list[Tensor]:
    """Returns where the tokens of every rank are."""
    size = dist.get_world_size()
    return [shard_positions(tokens, rank, size).to(device) for rank in range(size)]


@contextmanager
def gathering(whole: list[Tensor]) -> Iterator[tuple[Attention, list[Tensor]]]:
    """Yields longspan's attention, and this rank's q, k and v."""
    slices = positions(whole[0].shape[2], whole[0].device.type)
    mine = slices[dist.get_rank()]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = gathered(k, v)
        return attend(q, k, v, mask=causal(), q_pos=mine, k_pos=torch.cat(slices))

    yield attention, [x[:, :, mine].contiguous() for x in whole]


@contextmanager
def ring(whole: list[Tensor]) -> Iterator[tuple[Attention, list[Tensor]]]:
    """Yields torch's attention, which goes round the ranks within the block, and its q, k and v."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    mesh = init_device_mesh(whole[0].device.type, (dist.get_world_size(),))
    slices = [x.clone() for x in whole]  # cut in place
    engines = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with context_parallel(mesh, buffers=slices, buffer_seq_dims=[2] * 3), sdpa_kernel(engines):
        yield attention, slices


CONTENDERS = {"longspan": gathering, "torch ring": ring}
Measure = Callable[[Attention, list[Tensor]], dict[str, float]]


def row(name: str, tokens: int, dtype: str, backward: bool, device: str, measure: Measure) -> Row:
    """Returns what is measured of one contender, or why it is not."""
    try:
        with CONTENDERS[name](inputs(tokens, dtype, device)) as (attention, own):
            return Row(name, tokens, dtype, backward, **measure(attention, own))
    except Exception as raised:  # one contender's trouble is not the other's
        return Row(name, tokens, dtype, backward, refusal=reason(raised))


def checks(device: str) -> list[Row]:
    """Returns how far each contender is from the float64 definition, gradients included."""
    mine = positions(CHECKED, device)[dist.get_rank()]
    found = []
    for dtype in ALLOWED:
        whole = [x.double() for x in inputs(CHECKED, dtype, device)]
        wanted = [x[:, :, mine] for x in run(defined, whole, backward=True)]
        measure = partial(error, wanted)
        found += [row(name, CHECKED, dtype, True, device, measure) for name in CONTENDERS]
    return found


def defined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns attention over the whole sequence, by its definition."""
    return attend(q, k, v, mask=causal(), impl="reference")


def error(wanted: list[Tensor], attention: Attention, own: list[Tensor]) -> dict[str, float]:
    """Returns the largest error on any rank."""
    share = torch.tensor(worst(run(attention, own, True), wanted), device=own[0].device)
    dist.all_reduce(share, op=dist.ReduceOp.MAX)
    return {"error": share.item()}


def times(tokens: int, backward: bool, device: str) -> list[Row]:
    """Returns how long each contender takes in bfloat16."""

    def median(attention: Attention, own: list[Tensor]) -> dict[str, float]:
        calls = {"": lambda: run(attention, own, backward)}
        dist.barrier()
        found = time_in_turn(calls, REPEATS, WARM_UPS, on_gpu if device == "cuda" else on_host)
        return {"median_ms": statistics.median(found[""])}

    return [row(name, tokens, "bfloat16", backward, device, median) for name in CONTENDERS]


def cells(one: Row) -> tuple[str, ...]:
    """Returns one row of the table."""
    error = "" if one.error is None else f"{one.error:.1e}"
    ms = "" if one.median_ms is None else f"{one.median_ms:.2f}"
    what = f"{one.tokens} tokens, {one.dtype}, {DIRECTIONS[one.backward]}"
    return what, one.contender, error, ms, "OFF" if one.off else "refused" * bool(one.refusal)


def require_ranks(device: str) -> None:
    """Ends with 2 where there are not two ranks, each with a GPU of its own."""
    size, gpus = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.device_count()
    if device == "cuda" and gpus < max(2, size):
        click.echo(f"This benchmark needs two CUDA GPUs, one a rank; torch finds {gpus}.", err=True)
        sys.exit(2)
    if size < 2:
        click.echo("Start it as torchrun --nproc-per-node 2 benchmarks/gpu_ring.py.", err=True)
        sys.exit(2)


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--shortest", default=8192, show_default=True, help="Tokens of the whole sequence.")
@click.option("--longest", default=131072, show_default=True, help="Tokens of the whole sequence.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
def main(path: Path | None, shortest: int, longest: int, device: str) -> None:
    """Times attention over one sequence that lies on several GPUs."""
    require_ranks(device)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    first = dist.get_rank() == 0
    console = Console(width=120, quiet=not first)
    rows = checks(device)
    for tokens in doublings(shortest, longest):
        for backward in (False, True):
            rows += times(tokens, backward, device)
    columns = "one causal sequence", "", "error", "median ms", ""
    show_table(console, f"over {dist.get_world_size()} ranks", columns, map(cells, rows))
    for refusal in dict.fromkeys(f"{one.contender}: {one.refusal}" for one in rows if one.refusal):
        console.print(refusal, markup=False, highlight=False)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    facts = {"device": name, "ranks": dist.get_world_size(), **surroundings(["torch", "longspan"])}
    if path is not None and first:
        content = {"protocol": facts, "rows": [asdict(one) for one in rows]}
        write_text(path, json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()
    sys.exit(1 if any(one.off for one in rows) else 0)


if __name__ == "__main__":
    main()
