"""How the next token is drawn: transformers' logits processors, and a generator of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longspan.adapters.logits import processors
from longspan.errors import ConfigError, NumericalError

REMEMBERED = 1024  # written tokens that a repetition penalty looks back at


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; by default the likeliest is taken.

    The narrowings are transformers' own, in its order.

    Attributes:
        temperature: above 0; None takes the likeliest token.
        top_k: only so many of the likeliest.
        top_p: only the likeliest that together have this probability.
        min_p: only those with this share of the likeliest one's probability.
        repetition_penalty: above 1 makes tokens of the last 1024 written less likely.
        seed: of the draws.

    Raises:
        ConfigError: for a number out of range, or a narrowing where nothing is drawn.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high, remedy in (
            ("temperature", 0, None, "Leave it out to take the likeliest token."),
            ("top_k", 0, None, "Leave it out to draw from all tokens."),
            ("top_p", 0, 1, "Leave it out to draw from all tokens."),
            ("min_p", 0, 1, "Leave it out to draw from all tokens."),
            ("repetition_penalty", 0, None, "1.3 is a common one."),
        ):
            value = getattr(self, name)
            if value is None or (value > low and (high is None or value <= high)):
                continue
            bounds = f"above {low}" + ("" if high is None else f" and at most {high}")
            raise ConfigError(f"{name} must be {bounds}, got {value!r}. {remedy}")
        of_draws = ("top_k", "top_p", "min_p", "seed")
        idle = [name for name in of_draws if getattr(self, name) is not None]
        if idle and self.temperature is None:
            raise ConfigError(
                f"{', '.join(idle)}: of a draw, and without a temperature nothing is drawn. Give "
                "temperature=1.0 too, or leave it out."
            )

    def chooser(self, generator: torch.Generator | None, written: deque[int]) -> Chooser:
        """Returns what draws tokens, going on with a generator unless a seed is given.

        Args:
            generator: of the draws before.
            written: tokens that are penalised; what is drawn is added.
        """
        if self.seed is not None or generator is None:
            generator = torch.Generator()
            if self.seed is None:
                generator.seed()
            else:
                generator.manual_seed(self.seed)
        return Chooser(self, generator, written)

    def scores(self, logits: Tensor, written: Collection[int]) -> Tensor:
        """Returns the logits [V] that a token is drawn by; −∞ for those that are out.

        >>> Sampling(temperature=0.5, top_k=2).scores(torch.tensor([1.0, 3.0, 2.0]), ())
        tensor([-inf, 6., 4.])
        """
        seen, scores = torch.tensor([list(written)], dtype=torch.int64), logits.unsqueeze(0)
        for processor in self._processors:
            scores = processor(seen, scores)
        return scores[0]

    @cached_property
    def _processors(self) -> list[Any]:
        own = asdict(self)
        del own["seed"]
        return processors(**own)


class Chooser:
    """Draws one token after another."""

    def __init__(self, sampling: Sampling, generator: torch.Generator, written: deque[int]) -> None:
        self.sampling, self.generator, self.written = sampling, generator, written

    def __call__(self, logits: Tensor) -> int:
        """Returns the next token for logits [V].

        Raises:
            NumericalError: if a logit is not a number; argmax would choose it.
        """
        if logits.isnan().any():
            raise NumericalError(
                f"{int(logits.isnan().sum())} of {len(logits)} logits are NaN. Use float32, or "
                "check the checkpoint for damage."
            )
        scores = self.sampling.scores(logits.cpu(), self.written)
        if self.sampling.temperature is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        self.written.append(token)
        return token
