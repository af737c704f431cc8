"""ALiBi: a penalty that grows linearly with distance, one slope a head."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.bias.base import Bias, ScoreFunction, Split, check_count, distances
from longspan.errors import ConfigError


def alibi_slopes(num_heads: int) -> Tensor:
    """Returns the slopes m_h > 0, [H] float64: each token of distance costs m_h.

    For a power of two, 2^(−8h/n) with h = 1 … n. Otherwise those of the power of two below, then
    every other one of the power above.

    Source: Press et al. 2022 (arXiv:2108.12409) §3 and their published code.

    >>> alibi_slopes(12)[[0, 1, 7, 8]]
    tensor([0.5000, 0.2500, 0.0039, 0.7071], dtype=torch.float64)
    """
    check_count("num_heads", num_heads)
    below = 2 ** (num_heads.bit_length() - 1)
    between = _powers(2 * below)[0::2]
    return torch.cat((_powers(below), between[: num_heads - below]))


class Alibi(Bias):
    """Adds −m_h·(q − k), not scaled by 1/√d; −m_h·|q − k| when bidirectional.

    Args:
        num_heads: heads that this object serves.
        bidirectional: for encoders. The one-sided form would reward keys after the query, so it
            is refused without a causal mask.
        head_offset: the first head it serves and
        total_heads: of how many, where heads are shared out (tensor parallel); all by default.

    Source: Press et al. 2022 (arXiv:2108.12409) §3.

    >>> Alibi(2).scores(torch.zeros(1, 2, 1, 4), torch.tensor([3]), torch.tensor([1, 3]))[0]
    tensor([[-0.1250, -0.0000]])
    """

    far = 0

    def __init__(
        self,
        num_heads: int,
        bidirectional: bool = False,
        *,
        head_offset: int = 0,
        total_heads: int | None = None,
    ) -> None:
        super().__init__(num_heads)
        check_count("head_offset", head_offset, least=0)
        total_heads = num_heads if total_heads is None else total_heads
        check_count("total_heads", total_heads)
        if head_offset + num_heads > total_heads:
            raise ConfigError(
                f"heads {head_offset} to {head_offset + num_heads - 1} are not among "
                f"total_heads={total_heads}. Give the total of all shards."
            )
        self.bidirectional = bidirectional
        self.needs_causal = not bidirectional
        # Not a buffer: no cast can round it.
        self.slopes = alibi_slopes(total_heads)[head_offset : head_offset + num_heads]

    def scores(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Returns −m_h·(q − k), [H, T, S] or [B, H, T, S]; see `Bias.scores`."""
        away = distances(q_pos, k_pos)
        away = (away.abs() if self.bidirectional else away).to(q.dtype)
        return -self._slopes(q)[:, None, None] * away.unsqueeze(-3)

    def split(self, q: Tensor, q_pos: Tensor, k_pos: Tensor, before: bool) -> Split:
        """Returns −m·(q − k) as −m·(q − c) + m·(k − c), c being the query nearest the keys.

        Both terms stay small where the weights are not, which m·k alone does not.
        """
        nearest = (q_pos.amin(-1, True) if before else q_pos.amax(-1, True)).clone()
        toward = self._slopes(q)[:, None] if before else -self._slopes(q)[:, None]
        row = -toward * (q_pos - nearest).to(q.dtype).unsqueeze(-2)
        return Split(row, toward * (k_pos - nearest).to(q.dtype).unsqueeze(-2))

    def score_function(self, device: torch.device) -> ScoreFunction:
        """Returns −m_h·(q − k) for one head, query and key; see `Bias.score_function`."""
        slopes = self.slopes.to(device, torch.float32)

        def score(head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            away = q_pos - k_pos
            return -slopes[head] * (away.abs() if self.bidirectional else away)

        return score

    def _slopes(self, q: Tensor) -> Tensor:
        return self.slopes.to(q.device, q.dtype)

    def extra_repr(self) -> str:
        """Shows the heads and the direction."""
        return f"num_heads={self.num_heads}, bidirectional={self.bidirectional}"


def _powers(num_heads: int) -> Tensor:
    steps = torch.arange(1, num_heads + 1, dtype=torch.float64)
    return 2.0 ** (-8.0 * steps / num_heads)
