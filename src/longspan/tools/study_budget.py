"""From minutes to steps: a study's budget, timed once and then kept."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from longspan.errors import ConfigError, InputError
from longspan.files import write_text
from longspan.models import Decoder, DecoderConfig
from longspan.tools.ranks import Ranks
from longspan.tools.study_corpus import Corpus

TIMED, WARM = 3, 1  # steps


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long all trainings of a study may take together.

    Attributes:
        minutes: on this machine.
        batch_size: rows a step.
        seeds: models of each config.
    """

    minutes: float
    batch_size: int
    seeds: int

    def steps(
        self, configs: Sequence[DecoderConfig], corpus: Corpus, folder: Path | None, ranks: Ranks
    ) -> int:
        """Returns the steps every model may take, as timed here or when the study began.

        Raises:
            ConfigError: if not one step fits.
            InputError: if what is kept is damaged.
        """
        if folder is None:
            return self._timed(configs, corpus, ranks.size)
        path, asked = folder / "budget.json", self._asked(configs, corpus, ranks.size)
        if ranks.rank == 0 and not path.exists():
            steps = self._timed(configs, corpus, ranks.size)
            write_text(path, json.dumps({"steps": steps, "asked": asked}, indent=2) + "\n")
        ranks.barrier()
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            steps, before = int(kept["steps"]), dict(kept["asked"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged ({error!r}). Delete it to begin anew.") from None
        for key, value in asked.items():
            if before.get(key) != value:
                raise ConfigError(
                    f"{path} is of another study, of {steps} steps: its {key} was "
                    f"{before.get(key)}, now {value}. Give those again, or name another folder."
                )
        return steps

    def _asked(
        self, configs: Sequence[DecoderConfig], corpus: Corpus, processes: int
    ) -> dict[str, Any]:
        """Returns what the steps depend on, as JSON has it."""
        return {
            "minutes": self.minutes,
            "batch_size": self.batch_size,
            "seeds": self.seeds,
            "train_tokens": len(corpus.train),
            "processes": processes,
            "models": [repr(config) for config in configs],
        }

    def _timed(self, configs: Sequence[DecoderConfig], corpus: Corpus, processes: int) -> int:
        each = [self._seconds_a_step(config, corpus) for config in configs]
        trainings = [seconds for seconds in each for _ in range(self.seeds)]  # as a study has them
        seconds = max(sum(Ranks(rank, processes).share(trainings)) for rank in range(processes))
        steps = int(self.minutes * 60 / seconds)
        if steps < 1:
            raise ConfigError(
                f"{self.minutes:g} minutes are too few: one step of all {len(configs)} × "
                f"{self.seeds} models takes {seconds:.1f} s. Give more, or a smaller batch."
            )
        return steps

    def _seconds_a_step(self, config: DecoderConfig, corpus: Corpus) -> float:
        decoder, memory, begun = Decoder(config), None, 0.0
        optimizer = torch.optim.AdamW(decoder.parameters())
        for step in range(WARM + TIMED):
            if step == WARM:
                begun = time.perf_counter()
            rows = corpus.rows(
                step,
                batch_size=self.batch_size,
                length=config.max_position_embeddings,
                seed=0,
            )
            read = decoder(rows.inputs, memory=memory)
            logits = decoder.head(read.hidden)
            F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            memory = read.memory
        return (time.perf_counter() - begun) / TIMED
