"""From minutes to steps: a study's budget, timed once and then kept."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
        path = None if folder is None else folder / "budget.json"
        if ranks.rank == 0 and (path is None or not path.exists()):
            steps = self._timed(configs, corpus, ranks.size)
            if path is None:
                return steps
            write_text(path, json.dumps({"minutes": self.minutes, "steps": steps}))
        ranks.barrier()
        try:
            kept = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
            steps, minutes = int(kept["steps"]), float(kept["minutes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged ({error!r}). Delete it to begin anew.") from None
        if minutes != self.minutes:
            raise ConfigError(
                f"{path} is of a study of {minutes:g} minutes ({steps} steps), not "
                f"{self.minutes:g}. Give those again, or name another folder."
            )
        return steps

    def _timed(self, configs: Sequence[DecoderConfig], corpus: Corpus, processes: int) -> int:
        seconds = sum(self._seconds_a_step(config, corpus) for config in configs) * self.seeds
        steps = int(self.minutes * 60 * processes / seconds)
        if steps < 1:
            raise ConfigError(
                f"{self.minutes:g} minutes are too few: one step of all {len(configs)} × "
                f"{self.seeds} models takes {seconds:.1f} s. Give more, or a smaller batch."
            )
        return steps

    def _seconds_a_step(self, config: DecoderConfig, corpus: Corpus) -> float:
        decoder, memory, begun = Decoder(config), None, 0.0
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
            memory = read.memory
        return (time.perf_counter() - begun) / TIMED
