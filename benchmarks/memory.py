"""Prints how much memory one attention call under the window needs beside q, k and v.

    python benchmarks/memory.py "longspan tiled" --tokens 32768 --backward

Its masks are counted. Each contender is measured in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import torch

from bars import OURS
from peers import WINDOWED, inputs, run
from results import DIRECTIONS, Peak
from timing import number_of_child, peak_of

OTHERS = ("sdpa dense mask", "transformers sdpa", "flex compiled", "local-attention")


def peaks(tokens: int, lengths: list[int], threads: int) -> Iterator[Peak]:
    """Yields peaks of memory: ours along the lengths, then everyone's at one.

    Args:
        tokens: half the length of everyone's forward, and the length of their backward.
        lengths: of ours; the backward is at a quarter of the last.
        threads: of each process.
    """
    wanted = [(OURS, length, False) for length in lengths]
    wanted += [(name, 2 * tokens, False) for name in OTHERS]
    wanted += [(OURS, lengths[-1] // 4, True)]
    wanted += [(name, tokens, True) for name in (OURS, *OTHERS) if name != "flex compiled"]
    for name, length, backward in dict.fromkeys(wanted):
        arguments = [name, "--tokens", str(length), "--threads", str(threads)]
        arguments += ["--backward"] if backward else []
        peak = number_of_child(__file__, *arguments)
        yield Peak(name, length, DIRECTIONS[backward], peak)


@click.command()
@click.argument("contender", type=click.Choice([peer.name for peer in WINDOWED]))
@click.option("--tokens", default=8192, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--backward", is_flag=True, help="Forward and backward.")
def main(contender: str, tokens: int, threads: int, backward: bool) -> None:
    """Prints the peak of one call of CONTENDER in MB, in float32."""
    torch.set_num_threads(threads)
    peer = next(peer for peer in WINDOWED if peer.name == contender)
    qkv = inputs(tokens, "float32")

    def once() -> None:
        run(peer.ready(qkv[0]), qkv, backward)

    once()  # loads and compiles what it needs
    click.echo(peak_of(once))


if __name__ == "__main__":
    main()
