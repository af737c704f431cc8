"""Shaw et al.: a learned vector for each clipped distance, met by the query, added to the value."""

from __future__ import annotations

from torch import Tensor

from longspan.bias.base import Bias, check_count, columns, distances, initial


class ShawRelative(Bias):
    """Adds q·a^K to the score, inside 1/√d, and Σ α·a^V to the output.

    a = table[clip(k − q, −max_distance, max_distance) + max_distance], 2·max_distance + 1 vectors
    for the keys and as many for the values, shared by all heads.

    Args:
        num_heads: query heads.
        head_dim: channels of a head.
        max_distance: tokens past which all distances share a vector, in either direction.
        with_values: False leaves the values alone, as many later uses do.

    Source: Shaw et al. 2018 (arXiv:1803.02155) eq. 3 and 4.

    >>> ShawRelative(num_heads=2, head_dim=4, max_distance=16).key_table.shape
    torch.Size([33, 4])
    """

    inside_scale = True
    reads_query = True

    def __init__(
        self, num_heads: int, head_dim: int, max_distance: int, with_values: bool = True
    ) -> None:
        super().__init__(num_heads)
        check_count("head_dim", head_dim)
        check_count("max_distance", max_distance)
        self.max_distance = max_distance
        self.key_table = initial(2 * max_distance + 1, head_dim)
        self.adds_values = with_values
        self.value_table = initial(2 * max_distance + 1, head_dim) if with_values else None

    def scores(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns q·a^K, [B, H, T, S]; see `Bias.scores`."""
        return columns(q @ self.key_table.to(q.dtype).T, self._index(q_pos, k_pos))

    def values(self, p: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns Σ p·a^V, [B, H, T, D]; see `Bias.values`."""
        if self.value_table is None:
            return super().values(p, q_pos, k_pos)
        index = self._index(q_pos, k_pos).unsqueeze(-3).expand(p.shape)
        mass = p.new_zeros(*p.shape[:3], 2 * self.max_distance + 1).scatter_add(-1, index, p)
        return mass @ self.value_table.to(p.dtype)

    def _index(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        limit = self.max_distance
        return (-distances(q_pos, k_pos)).clamp(-limit, limit) + limit

    def extra_repr(self) -> str:
        """Shows the reach."""
        return f"num_heads={self.num_heads}, max_distance={self.max_distance}"
