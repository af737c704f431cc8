"""A study under way: its models trained and read one by one, each kept once it is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from longspan.models import Decoder
from longspan.rotary.scaling import scaling_for_method
from longspan.tools.cells import Cells, weights_digest
from longspan.tools.measuring import Likelihoods, Progress
from longspan.tools.ranks import Ranks
from longspan.tools.study_corpus import Corpus
from longspan.tools.study_plan import Variant
from longspan.tools.study_reading import doubling_buckets, read
from longspan.tools.study_results import (
    Reading,
    StudyCurve,
    StudyProtocol,
    StudyResult,
    TrainedModel,
)
from longspan.tools.study_training import Training


@dataclass(kw_only=True)
class Study:
    """A study under way, all of it checked."""

    protocol: StudyProtocol
    variants: Sequence[Variant]
    methods: Sequence[str]
    corpus: Corpus
    trainings: dict[tuple[str, int], Training]
    folder: Path | None
    progress: Progress | None
    ranks: Ranks

    def result(self) -> StudyResult:
        """Trains and reads what is not there yet, and returns the whole."""
        own = self.ranks.share(list(self.trainings))
        measured = {place: self._measure(place, done) for done, place in enumerate(own)}
        if self.ranks.size > 1:  # the others' are in the folder once all are done
            self.ranks.barrier()
            self.progress = None
            measured = {place: self._measure(place, 0) for place in self.trainings}
        found: dict[tuple[str, str, Reading, int], list[Likelihoods]] = {}
        for place in self.trainings:
            for key, likelihoods in measured[place][1].items():
                found.setdefault((place[0], *key), []).append(likelihoods)
        return StudyResult(
            protocol=self.protocol,
            models=tuple(measured[place][0] for place in self.trainings),
            curves=tuple(self._curve(key, parts) for key, parts in found.items()),
        )

    def _measure(
        self, place: tuple[str, int], done: int
    ) -> tuple[TrainedModel, dict[tuple[str, Reading, int], Likelihoods]]:
        """Returns a trained model and all its readings, as far as they are kept from the folder."""
        name, seed = place
        training = self.trainings[place]
        decoder, model = training.run(self._told(f"{name}, seed {seed}", done))
        own = next(one for one in self.variants if one.name == name)
        return model, {key: self._read(decoder, key, training) for key in self._readings(own)}

    def _readings(self, own: Variant) -> list[tuple[str, Reading, int]]:
        """Returns (method, reading, window) of everything a variant is read under."""
        length, reach = self.protocol.length, self.protocol.reach
        found: list[tuple[str, Reading, int]] = [("none", "segments", length)]
        if own.remembers:
            found.append(("none", "recurrent", length))
        if own.encoding != "learned":  # it has no position past the trained ones
            found.append(("none", "whole", reach))
            window = length
            while window < reach:
                found.append(("none", "window", window))
                window *= 2
        if own.encoding == "rope" and not own.remembers:
            found.extend((method, "whole", reach) for method in self.methods)
        return found

    def _read(
        self, decoder: Decoder, key: tuple[str, Reading, int], training: Training
    ) -> Likelihoods:
        """Returns one model's likelihoods and the seconds they took, kept if there is a folder."""
        method, reading, window = key
        cells = Cells(
            None if self.folder is None else self.folder / "readings",
            self.protocol,
            weights_digest(decoder),
        )
        cell = f"{training.name}-{training.seed}-{method}-{reading}-{window}"
        kept = cells.load(cell, {"method": method})
        if kept is None:
            ready = self._prepared(decoder, method, reading)
            begun = time.perf_counter()
            nll = read(ready, self.corpus.held_out, reading, window)
            seconds = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            kept = {"nll": nll, "seconds": seconds}
            cells.save(cell, kept, {"method": method})
        return Likelihoods(kept["nll"], kept["seconds"].item())

    def _prepared(self, decoder: Decoder, method: str, reading: Reading) -> Decoder:
        if method != "none":
            factor = self.protocol.reach / self.protocol.length
            scaling = scaling_for_method(method).for_factor(factor, self.protocol.length)
            decoder = decoder.with_scaling(scaling)
        return decoder if reading == "recurrent" else decoder.with_memory(0)

    def _curve(self, key: tuple[str, str, Reading, int], parts: list[Likelihoods]) -> StudyCurve:
        name, method, reading, window = key
        by_seed = [part.nll for part in parts]
        means = tuple(nll.double().mean().item() for nll in by_seed)
        return StudyCurve(
            encoding=name,
            method=method,
            reading=reading,
            window=window,
            nll=sum(means) / len(means),
            by_seed=means,
            buckets=doubling_buckets(by_seed, self.protocol.length),
            seconds=sum(part.seconds for part in parts),
        )

    def _told(self, what: str, done: int) -> Callable[[int], None]:
        steps = self.protocol.steps
        parts = steps * len(self.ranks.share(list(self.trainings)))

        def told(step: int) -> None:
            if self.progress is not None:
                doing = "reading" if step == steps else f"step {step:,} of {steps:,}"
                self.progress(f"{what}: {doing}", done * steps + step, parts)

        return told
