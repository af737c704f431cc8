"""One small model of a study, trained; interrupted, it goes on from its last state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.errors import ConfigError, NumericalError
from longspan.models import Decoder, DecoderConfig, Memory, load_decoder, save_decoder
from longspan.tools.study_corpus import EMPTIED_EVERY, Corpus
from longspan.tools.study_results import StudyProtocol, TrainedModel
from longspan.training.schedule import learning_rate
from longspan.training.state import load_training, save_training

BETAS = (0.9, 0.95)
LARGEST_GRADIENT = 1.0
SAVED_EVERY = 60.0  # seconds, at the next step whose memory is empty
NOTED = 20  # losses in a result


@dataclass(kw_only=True)
class Training:
    """A training under way.

    Attributes:
        name: of the variant.
        config: of the model.
        seed: of its weights and of its order of text.
        protocol: how all models are trained.
        corpus: what they read.
        folder: where it is kept; None keeps nothing.
    """

    name: str
    config: DecoderConfig
    seed: int
    protocol: StudyProtocol
    corpus: Corpus
    folder: Path | None

    def run(self, told: Callable[[int], None]) -> tuple[Decoder, TrainedModel]:
        """Returns the trained model, in eval mode, from its folder if it is finished.

        Args:
            told: gets the steps done.

        Raises:
            NumericalError: if a loss is not finite.
            InputError: if what is kept is damaged.
            ConfigError: if what is kept was trained otherwise.
        """
        finished = None if self.folder is None else self.folder / "model"
        if finished is not None and finished.exists():
            told(self.protocol.steps)
            return load_decoder(finished), self._read_facts(finished)
        decoder, model = self._train(told)
        if finished is not None:
            self._keep(decoder, model, finished)
        return decoder, model

    def _train(self, told: Callable[[int], None]) -> tuple[Decoder, TrainedModel]:
        protocol, decoder = self.protocol, Decoder(self.config, self.seed).train()
        optimizer = torch.optim.AdamW(
            decoder.parameters(), betas=BETAS, weight_decay=protocol.weight_decay
        )
        start, losses, before = self._resumed(decoder, optimizer)
        memory: Memory | None = None
        begun = saved = time.perf_counter()
        for step in range(start, protocol.steps):
            now = time.perf_counter()
            if step % EMPTIED_EVERY == 0 and step > start and now - saved > SAVED_EVERY:
                self._save(decoder, optimizer, step, losses, before + now - begun)
                saved = now
            told(step)
            for group in optimizer.param_groups:
                group["lr"] = self._rate(step)
            loss, memory = self._step(decoder, step, memory)
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), LARGEST_GRADIENT)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(self._checked(loss, step))
        told(protocol.steps)
        model = TrainedModel(
            encoding=self.name,
            seed=self.seed,
            parameters=sum(weight.numel() for weight in decoder.parameters()),
            loss=thinned(losses),
            seconds=before + time.perf_counter() - begun,
        )
        return decoder.eval(), model

    def _step(
        self, decoder: Decoder, step: int, memory: Memory | None
    ) -> tuple[Tensor, Memory | None]:
        protocol = self.protocol
        rows = self.corpus.rows(
            step, batch_size=protocol.batch_size, length=protocol.length, seed=self.seed
        )
        read = decoder(rows.inputs, memory=None if rows.first else memory)
        logits = decoder.head(read.hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten())
        loss.backward()
        return loss.detach(), read.memory

    def _rate(self, step: int) -> float:
        protocol = self.protocol
        return learning_rate(
            step,
            peak=protocol.learning_rate,
            warmup_steps=protocol.warmup_steps,
            steps=protocol.steps,
            schedule="cosine",
            floor=protocol.learning_rate / 10,
        )

    def _checked(self, loss: Tensor, step: int) -> float:
        value = loss.item()
        if value != value or value in (float("inf"), float("-inf")):
            raise NumericalError(
                f"the loss of {self.name!r}, seed {self.seed}, is {value} at step {step}. Give a "
                f"smaller learning rate than {self.protocol.learning_rate}."
            )
        return value

    # What is kept: the state of an unfinished training, or the model of a finished one.

    @property
    def _facts(self) -> str:
        own = {"encoding": self.name, "seed": self.seed, "protocol": vars(self.protocol)}
        return json.dumps(own, sort_keys=True, default=list)

    def _save(
        self,
        decoder: Decoder,
        optimizer: torch.optim.Optimizer,
        step: int,
        losses: list[float],
        seconds: float,
    ) -> None:
        if self.folder is not None:
            notes = {"facts": self._facts, "losses": json.dumps(losses), "seconds": str(seconds)}
            save_training(self.folder / "training.safetensors", decoder, optimizer, step, notes)

    def _resumed(
        self, decoder: Decoder, optimizer: torch.optim.Optimizer
    ) -> tuple[int, list[float], float]:
        path = None if self.folder is None else self.folder / "training.safetensors"
        if path is None or not path.exists():
            return 0, [], 0.0
        step, notes = load_training(path, decoder, optimizer)
        self._check_facts(notes["facts"], path)
        return step, json.loads(notes["losses"]), float(notes["seconds"])

    def _keep(self, decoder: Decoder, model: TrainedModel, finished: Path) -> None:
        facts = {"facts": self._facts, "model": vars(model)}
        save_decoder(decoder, finished, beside={"training.json": json.dumps(facts, indent=2)})
        (finished.parent / "training.safetensors").unlink(missing_ok=True)

    def _read_facts(self, finished: Path) -> TrainedModel:
        path = finished / "training.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        self._check_facts(found["facts"], path)
        model = found["model"]
        model["loss"] = tuple((step, loss) for step, loss in model["loss"])
        return TrainedModel(**model)

    def _check_facts(self, found: str, path: Path) -> None:
        if found != self._facts:
            raise ConfigError(
                f"{path} was trained otherwise than is asked now: "
                f"{difference(found, self._facts)}. Name another folder, or delete this one."
            )


def difference(found: str, wanted: str) -> str:
    """Returns the first setting in which two JSON objects differ, with both values."""
    theirs, ours = (
        {**json.loads(text), **json.loads(text)["protocol"]} for text in (found, wanted)
    )
    for key in sorted((theirs.keys() | ours.keys()) - {"protocol"}):
        if theirs.get(key) != ours.get(key):
            return f"{key} was {theirs.get(key)!r}, now {ours.get(key)!r}"
    return "in its form"


def thinned(losses: list[float]) -> tuple[tuple[int, float], ...]:
    """Returns (step, mean loss since the one before) at up to `NOTED` places, the last included.

    >>> thinned([4.0, 3.0])
    ((1, 4.0), (2, 3.0))
    """
    count = min(NOTED, len(losses))
    stops = [len(losses) * place // count for place in range(count + 1)] if count else []
    return tuple(
        (stop, sum(losses[start:stop]) / (stop - start)) for start, stop in pairwise(stops)
    )
