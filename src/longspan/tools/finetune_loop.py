"""The training loop, plain, on Accelerate: the same numbers on one process as on many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from longspan.adapters.ropes import Ropes
from longspan.adapters.rotation import exact_rotation
from longspan.errors import NumericalError
from longspan.metrics.likelihood import check_finite
from longspan.metrics.windows import perplexity
from longspan.rotary.rotate import Phase
from longspan.tools.finetune_results import FineTuning, HeldOut, TrainingProtocol, TrainingStep
from longspan.tools.finetune_rows import Batch, Rows, seed_of
from longspan.tools.finetune_state import KeptTraining
from longspan.tools.measuring import Progress
from longspan.tools.ranks import told_of_loss
from longspan.tools.summary import position_buckets
from longspan.training.loss import CausalLoss
from longspan.training.processes import spread_again, summed
from longspan.training.schedule import Schedule, learning_rate

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


class FineTuneLoop:
    """One training under way.

    Args:
        model: with `requires_grad` where it is to be trained; changed in place.
        ropes: what it rotates by.
        protocol: all settings.
        rows: what it reads.
        held_out: [documents, N] int64 to measure on, or None.
        batch_size: rows of one forward of one process.
        accelerator: knows the processes and the accumulation.
        kept: where the state is kept.
        save_every: steps from one kept state to the next.
        progress: told of every part, and of the end.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        ropes: Ropes,
        protocol: TrainingProtocol,
        rows: Rows,
        held_out: Tensor | None,
        batch_size: int,
        accelerator: Accelerator,
        kept: KeptTraining,
        save_every: int,
        progress: Progress | None,
    ) -> None:
        self.model, self.ropes, self.protocol, self.rows = model, ropes, protocol, rows
        self.held_out, self.batch_size, self.save_every = held_out, batch_size, save_every
        self.accelerator, self.kept, self.progress = accelerator, kept, progress
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=protocol.learning_rate,
            betas=protocol.betas,
            weight_decay=protocol.weight_decay,
        )
        # under the lent rotation, as every forward is: DDP would miss the own one's buffers
        with exact_rotation(model, ropes):
            loss = CausalLoss(model).train()
            self.prepared, self.optimizer = accelerator.prepare(loss, optimizer)
        self.done = 0
        self.curve: list[TrainingStep] = []
        self.evaluations: list[HeldOut] = []
        self.consistent = True

    @property
    def result(self) -> FineTuning:
        """What was measured so far."""
        return FineTuning(
            protocol=self.protocol, curve=tuple(self.curve), evaluations=tuple(self.evaluations)
        )

    def run(self) -> FineTuning:
        """Trains to the end, from the kept state if there is one, and returns what it measured.

        Raises:
            ConfigError: if the processes do not find the same kept state.
            NumericalError: if a loss or a gradient is not a number; the kept state stays as it was.
            LongspanError: if another process of the training ended.
        """
        random = torch.get_rng_state()
        ours = self.accelerator.process_index, self.accelerator.num_processes
        try:
            with told_of_loss(*ours):
                return self._train()
        except KeyboardInterrupt:
            # several processes may have stopped at different steps, and could not save together
            if self.consistent and self.accelerator.num_processes == 1:
                self._keep()
            raise
        finally:
            torch.set_rng_state(random)

    def _train(self) -> FineTuning:
        self._go_on()
        while True:
            self._measure_if_due()
            if self.done == self.protocol.steps:
                self._tell("done")
                return self.result
            self._step()

    def _go_on(self) -> None:
        self.kept.require_shared(self.accelerator)
        self.consistent = False
        found = self.kept.load(self.model, self.optimizer.optimizer)
        self.consistent = True
        if found is not None:
            self.done, result = found
            self.curve, self.evaluations = list(result.curve), list(result.evaluations)

    def _keep(self) -> None:
        self.kept.save(self.model, self.optimizer.optimizer, self.done, self.result)

    def _tell(self, what: str) -> None:
        if self.progress is not None:
            parts = self.protocol.steps + len(self.protocol.evaluate_at)
            self.progress(what, len(self.curve) + len(self.evaluations), parts)

    def _step(self) -> None:
        last = f", loss {self.curve[-1].loss:.3f}" if self.curve else ""
        self._tell(f"training: step {self.done + 1} of {self.protocol.steps}{last}")
        taken = self._update(self.done)
        self.curve.append(taken)
        self.done += 1
        self.consistent = True
        if self.done % self.save_every == 0 or self.done == self.protocol.steps:
            self._keep()

    def _update(self, step: int) -> TrainingStep:
        """Returns step number `step`, after it was taken."""
        begun = time.perf_counter()
        protocol = self.protocol
        rate = learning_rate(
            step,
            peak=protocol.learning_rate,
            warmup_steps=protocol.warmup_steps,
            steps=protocol.steps,
            schedule=cast(Schedule, protocol.schedule),
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._gradients(step)
        norm = self._clipped_norm(step)
        self.consistent = False
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - begun
        return TrainingStep(
            step=step, loss=loss, learning_rate=rate, grad_norm=norm, seconds=seconds
        )

    def _gradients(self, step: int) -> float:
        """Leaves the gradients of a step's mean loss in the parameters, and returns that loss."""
        first, count = step * self.protocol.rows_per_step, self.protocol.rows_per_step
        scored = self.rows.batch(first, count).scored
        # what Accelerate divides by: it averages over processes and accumulated batches
        averaged = count // self.batch_size
        nll = 0.0
        self.optimizer.optimizer.zero_grad()
        for number in self._batches(first):
            batch = self.rows.batch(number, self.batch_size).to(self.accelerator.device)
            torch.manual_seed(seed_of(self.protocol.seed, "dropout", number))
            with self.accelerator.accumulate(self.prepared), self._rotation(batch):
                total = self._losses(batch).sum()
                self.accelerator.backward(total * (averaged / scored))
            nll += total.item()
        loss = summed(nll, self.accelerator.device) / scored
        if not math.isfinite(loss):
            raise self._broken(step, f"the loss of step {step} is {loss}")
        return loss

    def _batches(self, first: int) -> Iterator[int]:
        """Yields the first row of each batch this process reads in a step."""
        together = self.batch_size * self.accelerator.num_processes
        start = first + self.batch_size * self.accelerator.process_index
        return iter(range(start, first + self.protocol.rows_per_step, together))

    def _losses(self, batch: Batch) -> Tensor:
        return self.prepared(
            batch.input_ids, batch.targets, batch.position_ids, batch.attention_mask
        )

    def _rotation(self, batch: Batch) -> AbstractContextManager[None]:
        """Lends the table of each row's own reach, rounded as transformers rounds it."""
        reach = batch.position_ids.max(dim=1).values.cpu() + 1
        phase = cast(Phase, self.protocol.phase[0])
        return exact_rotation(self.model, self.ropes, seq_len=reach, phase=phase)

    def _clipped_norm(self, step: int) -> float:
        limit = self.protocol.max_grad_norm
        trained = [one for one in self.model.parameters() if one.requires_grad]
        found: Any = self.accelerator.clip_grad_norm_(trained, math.inf if limit is None else limit)
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        norm = float(whole)
        if not math.isfinite(norm):
            raise self._broken(step, f"the gradient's norm at step {step} is {norm}")
        return norm

    def _broken(self, step: int, what: str) -> NumericalError:
        return NumericalError(
            f"{what}, after {step} steps that were whole. Nothing was written since the last kept "
            "state. Lower the learning rate, or lengthen the warm-up."
        )

    def _measure_if_due(self) -> None:
        due = self.held_out is not None and self.done in self.protocol.evaluate_at
        if due and all(one.step != self.done for one in self.evaluations):
            self._tell(f"held-out documents after {self.done} steps")
            self.evaluations.append(self._measure())
            self._keep()

    @torch.no_grad()
    def _measure(self) -> HeldOut:
        """Returns the likelihood of the held-out documents, as `evaluate` measures it."""
        begun = time.perf_counter()
        held_out, bucket = cast(Tensor, self.held_out), cast(int, self.protocol.bucket)
        length, phase = held_out.shape[1], cast(Phase, self.protocol.phase[1])
        rows = []
        self.prepared.eval()
        try:
            with exact_rotation(self.model, self.ropes, seq_len=length, phase=phase):
                for row in held_out.to(self.accelerator.device).split(1):
                    positions = torch.arange(length, device=row.device)[None]
                    nll = self.prepared(row, row[:, 1:], positions)[0].cpu()
                    check_finite(nll, self.protocol.dtype)
                    rows.append(nll)
        finally:
            spread_again(self.prepared)
            self.prepared.train()
        nll = torch.stack(rows)
        total = nll.double().sum().item()
        return HeldOut(
            step=self.done,
            nll=total / nll.numel(),
            perplexity=perplexity(total, nll.numel()),
            tokens_scored=nll.numel(),
            buckets=position_buckets(nll, bucket),
            seconds=time.perf_counter() - begun,
        )
