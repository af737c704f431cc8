"""The processes that share a measurement: who does which part, and how all get all results.

One process is the plain case, in which nothing of torch.distributed is touched. Several are started
by torchrun, or whatever else sets RANK, WORLD_SIZE and MASTER_ADDR, and talk through gloo. A rank
that ends closes its connections, so those that wait for it are told at once; the time limit is for
a machine that stands still.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from longspan.errors import ConfigError, LongspanError

Item = TypeVar("Item")

PATIENCE = timedelta(hours=2)  # ranks end apart by one part, which may be a long forward on a CPU


@dataclass(frozen=True)
class Ranks:
    """One process among those that run the same command; alone unless told otherwise.

    Every rank must call the same methods in the same order. Leaving the `with` block hangs up, and
    whoever still waits for this rank gets an error.

    Attributes:
        rank: this process, from 0.
        size: how many there are.
        group: of torch.distributed, where there are several.

    >>> Ranks(rank=1, size=3).share(["a", "b", "c", "d", "e"])
    ['b', 'e']
    >>> Ranks().gather([{"nll": torch.ones(2)}])
    [{'nll': tensor([1., 1.])}]
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def from_environment(cls, timeout: timedelta = PATIENCE) -> Ranks:
        """Joins the ranks that torchrun started; alone without them.

        Where torch.distributed runs already, they get a gloo group of their own beside it.

        Args:
            timeout: how long one rank waits for another.

        Raises:
            ConfigError: if RANK, WORLD_SIZE and MASTER_ADDR do not make sense.
            LongspanError: if the others do not come.
        """
        if dist.is_available() and dist.is_initialized():
            with told_of_loss(dist.get_rank(), dist.get_world_size()):
                group = dist.new_group(backend="gloo", timeout=timeout)
            return cls(dist.get_rank(), dist.get_world_size(), group)
        rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if not 0 <= rank < size:
            raise ConfigError(
                f"RANK must be from 0 to WORLD_SIZE − 1, got {rank} of {size}. Start the ranks "
                "with torchrun, or unset both for one process."
            )
        if size == 1:
            return cls()
        if not dist.is_available():
            raise ConfigError(
                f"WORLD_SIZE is {size}, but this torch is built without torch.distributed. "
                "Unset it for one process, or install a torch that has it."
            )
        if "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE is {size}, but MASTER_ADDR does not say where the others meet. Start "
                "the ranks with torchrun, or unset WORLD_SIZE for one process."
            )
        with told_of_loss(rank, size):
            dist.init_process_group("gloo", timeout=timeout)
        return cls(rank, size, dist.group.WORLD)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Returns every size-th item, from this rank's on."""
        return list(items[self.rank :: self.size])

    def gather(self, cells: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Returns what all ranks made of their shares, in the order of the whole.

        Args:
            cells: one for each item of this rank's share, as named tensors.

        Raises:
            LongspanError: if another rank ended, or does not answer.
        """
        if self.group is None:
            return [dict(cell) for cell in cells]
        named = {
            f"{place}/{name}": tensor
            for place, cell in enumerate(cells)
            for name, tensor in cell.items()
        }
        shares = [_by_place(load(data)) for data in self._exchange(save(named))]
        whole = range(sum(map(len, shares)))
        return [shares[item % self.size][item // self.size] for item in whole]

    def barrier(self) -> None:
        """Waits until every rank is here.

        Raises:
            LongspanError: if another rank ended, or does not answer.
        """
        if self.group is not None:
            with told_of_loss(self.rank, self.size):
                dist.barrier(self.group)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Lets one rank after another through the block; none leaves before the last is through."""
        for _ in range(self.rank):
            self.barrier()
        yield
        for _ in range(self.rank, self.size):
            self.barrier()

    def require_equal(self, what: str, value: str) -> None:
        """Refuses ranks that are about to do different work.

        Args:
            what: is compared, in words.
            value: of this rank.

        Raises:
            ConfigError: naming a rank that differs, on every rank.
        """
        own = torch.frombuffer(
            bytearray(hashlib.sha256(value.encode()).digest()), dtype=torch.uint8
        )
        theirs = self.gather([{"digest": own}])
        other = next((r for r in range(self.size) if not theirs[r]["digest"].equal(own)), None)
        if other is not None:
            raise ConfigError(
                f"rank {other} has another {what} than rank {self.rank}. Start every rank with the "
                "same command, the same files and the same versions."
            )

    def _exchange(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with told_of_loss(self.rank, self.size):
            dist.all_gather(lengths, torch.tensor([len(data)]), self.group)
            padded = own.new_zeros(max(map(int, lengths)))
            padded[: len(own)] = own
            found = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(found, padded, self.group)
        return [
            one[: int(length)].numpy().tobytes() for one, length in zip(found, lengths, strict=True)
        ]


def _by_place(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Returns a share's cells, by their place in it."""
    cells: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        place, _, name = key.partition("/")
        cells.setdefault(int(place), {})[name] = tensor
    return cells


def _number(name: str, default: int) -> int:
    written = os.environ.get(name, str(default))
    try:
        return int(written)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {written!r}.") from None


@contextmanager
def told_of_loss(rank: int, size: int) -> Iterator[None]:
    """Turns what torch says of a lost connection into what to do about it; lets the rest through.

    Args:
        rank, size: of this process.

    Raises:
        LongspanError: if another rank ended, or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
            raise
        reason = str(error).rpartition(".cc:")[2].partition("] ")[2] or str(error)
        raise LongspanError(
            f"rank {rank} of {size} lost another rank ({reason.partition('. ')[0]}). It raised its "
            "own error, was killed, or stands still. Run the same command again: it goes on from "
            "what is finished."
        ) from error
