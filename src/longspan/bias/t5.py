"""T5: a learned number a head for each bucket of distances."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from longspan.bias.base import Bias, ScoreFunction, Split, check_count, distances, initial
from longspan.errors import ConfigError


def t5_bucket(
    relative_position: Tensor,
    bidirectional: bool = False,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Tensor:
    """Returns the bucket of each relative position, key − query, int64 of the same shape.

    Half the buckets hold one distance each, the others grow geometrically up to `max_distance`,
    past which all share the last. Bidirectional: the second half of all buckets is for keys after
    the query. The bounds are found in whole numbers, so no rounded logarithm decides a bucket.

    Raises:
        ConfigError: for an odd number of buckets, fewer than 2 a direction, or a `max_distance`
            not above the distances that have a bucket of their own.

    Source: Raffel et al. 2020 (arXiv:1910.10683) §2.1 and the published code.

    >>> t5_bucket(torch.tensor([5, 0, -15, -16, -18, -19, -1000]))
    tensor([ 0,  0, 15, 16, 16, 17, 31])
    """
    bounds = _bounds(bidirectional, num_buckets, max_distance)
    first = torch.tensor(bounds, device=relative_position.device)
    if not bidirectional:
        return torch.bucketize((-relative_position).clamp_min(0), first, right=True)
    ahead = (relative_position > 0) * (num_buckets // 2)
    return ahead + torch.bucketize(relative_position.abs(), first, right=True)


class T5Bias(Bias):
    """Adds table[bucket(k − q), h]; T5 itself then uses no 1/√d: attend(..., scale=1.0).

    One object serves all layers, as in T5. Positions are true ones, so a decoding step needs no
    offset.

    Args:
        num_heads: heads, the columns of the table.
        num_buckets: rows of the table.
        max_distance: tokens from which all distances share a bucket.
        bidirectional: for encoders.

    Source: Raffel et al. 2020 (arXiv:1910.10683) §2.1.

    >>> T5Bias(2).table.shape
    torch.Size([32, 2])
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(num_heads)
        self.far = self.last_bound = _bounds(bidirectional, num_buckets, max_distance)[-1]
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bidirectional = bidirectional
        self.needs_causal = not bidirectional
        self.table = initial(num_buckets, num_heads)

    def by_distance(self) -> Tensor:
        """Returns the number of every key − query up to the last bound, [2·bound + 1, H]."""
        nearer = torch.arange(-self.last_bound, self.last_bound + 1, device=self.table.device)
        sizes = self.bidirectional, self.num_buckets, self.max_distance
        return self.table[t5_bucket(nearer, *sizes)]

    def scores(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns table[bucket(k − q)], [H, T, S] or [B, H, T, S]; see `Bias.scores`."""
        bound = self.last_bound
        row = (-distances(q_pos, k_pos)).clamp(-bound, bound) + bound
        picked = self.by_distance().to(q.dtype).T.index_select(1, row.flatten())
        return picked.unflatten(1, row.shape).movedim(0, -3)

    def split(self, q: Tensor, q_pos: Tensor, k_pos: Tensor, before: bool) -> Split:
        """Returns the last bucket's number for every row: past its bound distance is not seen."""
        last = self.by_distance()[0 if before else -1].to(q.dtype)
        return Split(last[:, None].expand(-1, q_pos.shape[-1]), None)

    def score_function(self, device: torch.device) -> ScoreFunction:
        """Returns table[bucket(k − q), h] for one head, query and key."""
        numbers, bound = self.by_distance().float().to(device), self.last_bound

        def score(head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return numbers[(k_pos - q_pos).clamp(-bound, bound) + bound, head]

        return score

    def extra_repr(self) -> str:
        """Shows the arguments."""
        return (
            f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, "
            f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        )


@lru_cache
def _bounds(bidirectional: bool, num_buckets: int, max_distance: int) -> list[int]:
    """Returns the first distance of every bucket of one direction but the first."""
    check_count("num_buckets", num_buckets)
    check_count("max_distance", max_distance)
    buckets = num_buckets // 2 if bidirectional else num_buckets
    if num_buckets % 2 or buckets < 2:
        raise ConfigError(
            f"num_buckets must be even and at least {4 if bidirectional else 2}, got "
            f"{num_buckets}. T5 uses 32."
        )
    exact = buckets // 2
    if max_distance <= exact:
        raise ConfigError(
            f"max_distance must be above the {exact} distances that have their own bucket, "
            f"got {max_distance}. T5 uses 128."
        )
    return list(range(1, exact)) + [
        _first_at_least(exact, max_distance, step, buckets - exact)
        for step in range(buckets - exact)
    ]


def _first_at_least(exact: int, max_distance: int, step: int, steps: int) -> int:
    """Returns the least whole n with n ≥ exact·(max_distance / exact)^(step / steps)."""
    # Both sides to the power `steps`, so that only whole numbers are compared.
    goal = exact ** (steps - step) * max_distance**step
    nearby = int(exact * (max_distance / exact) ** (step / steps))
    return next(n for n in range(max(nearby - 1, exact), nearby + 3) if n**steps >= goal)
