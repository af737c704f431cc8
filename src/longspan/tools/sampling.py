"""How the next token is drawn: transformers' own logits processors, and a generator of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ConfigError

REMEMBERED = 1024  # written tokens that a repetition penalty looks back at


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; by default the likeliest is taken.

    Attributes:
        temperature: above 0; None takes the likeliest token.
        top_k: only so many of the likeliest.
        top_p: only the likeliest that together have this probability.
        min_p: only those with this share of the likeliest one's probability.
        repetition_penalty: above 1 makes tokens of the last 1024 written less likely.
        seed: of the draws.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def chooser(self, generator: torch.Generator | None) -> Chooser:
        """Returns what draws tokens, going on with a generator unless a seed is given.

        Raises:
            ConfigError: for a number out of range.
        """
        if self.seed is not None or generator is None:
            generator = torch.Generator()
            if self.seed is None:
                generator.seed()
            else:
                generator.manual_seed(self.seed)
        return Chooser(self._processors(), self.temperature is not None, generator)

    def _processors(self) -> list[Any]:
        from transformers import (
            MinPLogitsWarper,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        asked = [
            ("repetition_penalty", RepetitionPenaltyLogitsProcessor),
            ("temperature", TemperatureLogitsWarper),
            ("top_k", TopKLogitsWarper),
            ("top_p", TopPLogitsWarper),
            ("min_p", MinPLogitsWarper),
        ]
        narrows = [name for name, _ in asked[2:] if getattr(self, name) is not None]
        if narrows and self.temperature is None:
            raise ConfigError(
                f"{', '.join(narrows)} narrow a draw, and without a temperature nothing is drawn. "
                "Give temperature=1.0 with them."
            )
        made = []
        for name, processor in asked:
            value = getattr(self, name)
            if value is None:
                continue
            try:
                made.append(processor(value))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{name} cannot be {value!r}: {error}") from error
        return made


class Chooser:
    """Draws one token after another."""

    def __init__(self, processors: list[Any], draws: bool, generator: torch.Generator) -> None:
        self.processors, self.draws, self.generator = processors, draws, generator
        self.written: deque[int] = deque(maxlen=REMEMBERED)

    def __call__(self, logits: Tensor) -> int:
        """Returns the next token for logits [V]."""
        scores = logits.cpu().unsqueeze(0)
        seen = torch.tensor([list(self.written)], dtype=torch.int64)
        for processor in self.processors:
            scores = processor(seen, scores)
        if self.draws:
            weights = scores.softmax(-1)
            token = int(torch.multinomial(weights, 1, generator=self.generator))
        else:
            token = int(scores.argmax())
        self.written.append(token)
        return token
