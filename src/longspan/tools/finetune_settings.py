"""The settings of a fine-tuning, checked together before anything is run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from longspan.bias.base import check_count
from longspan.errors import ConfigError
from longspan.rotary.scaling.base import check_length
from longspan.tools.evaluate import versions
from longspan.tools.finetune_results import TrainingProtocol
from longspan.tools.plan import Plan
from longspan.tools.summary import default_bucket
from longspan.training.schedule import Schedule, check_schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BETAS = (0.9, 0.95)
WARMUP_STEPS = 20
LONGEST_POSE_ROW = 4096


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the caller of `finetune` set; see there. `Resolved` has what is left open filled in."""

    steps: int
    length: int | None
    pose: bool
    packing: bool
    lora_rank: int | None
    batch_size: int
    gradient_accumulation: int
    learning_rate: float
    warmup_steps: int | None
    schedule: Schedule
    weight_decay: float
    max_grad_norm: float | None
    gradient_checkpointing: bool
    seed: int
    evaluate_at: tuple[int, ...]
    evaluation_length: int | None
    evaluation_documents: int
    bucket: int | None
    save_every: int

    def resolved(self, planned: Plan, model: PreTrainedModel) -> Resolved:
        """Returns the settings with every default filled in; refuses those that do not fit.

        Raises:
            ConfigError: naming the setting.
        """
        for name in ("batch_size", "gradient_accumulation", "save_every"):
            check_count(name, getattr(self, name))
        warmup = self.warmup_steps
        if warmup is None:
            warmup = min(WARMUP_STEPS, self.steps // 10)
        length = self.length
        if length is None:
            short = min(planned.trained_length, LONGEST_POSE_ROW)
            length = short if self.pose else planned.to
        _check_rows(length, planned.to, pose=self.pose, packing=self.packing)
        check_schedule(
            peak=self.learning_rate,
            warmup_steps=warmup,
            steps=self.steps,
            schedule=self.schedule,
        )
        _check_optimizer(self.weight_decay, self.max_grad_norm)
        _check_model(model, pose=self.pose)
        filled = {"warmup_steps": warmup, "length": length, **self._held_out(planned)}
        if self.max_grad_norm == math.inf:
            filled["max_grad_norm"] = None  # JSON has no infinity
        return Resolved(**{**asdict(self), **filled})

    def _held_out(self, planned: Plan) -> dict[str, Any]:
        """Returns the settings of the evaluations, none of them where nothing is evaluated."""
        at = tuple(sorted(set(self.evaluate_at)))
        if not at:
            self._refuse_evaluation()
            nothing = {"evaluation_length": None, "evaluation_documents": 0, "bucket": None}
            return {"evaluate_at": (), **nothing}
        if at[0] < 0 or at[-1] > self.steps:
            raise ConfigError(
                f"evaluate_at counts steps done, from 0 to {self.steps}, got {list(at)}."
            )
        length = planned.to if self.evaluation_length is None else self.evaluation_length
        check_length("evaluation_length", length)
        if not planned.trained_length < length <= planned.to:
            raise ConfigError(
                f"evaluation_length must be above the trained length {planned.trained_length} and "
                f"at most {planned.to}, which the model is extended to, got {length}."
            )
        check_count("evaluation_documents", self.evaluation_documents)
        bucket = default_bucket(length) if self.bucket is None else self.bucket
        check_length("bucket", bucket)
        return {"evaluate_at": at, "evaluation_length": length, "bucket": bucket}

    def _refuse_evaluation(self) -> None:
        """Refuses settings of evaluations where there is none."""
        unset = {"evaluation_length": None, "evaluation_documents": 1, "bucket": None}
        for name, default in unset.items():
            value = getattr(self, name)
            if value != default:
                raise ConfigError(
                    f"{name}={value} is a setting of evaluations, but nothing says when there is "
                    f"one. Give evaluate_at (--evaluate-at), or leave {name} out."
                )


@dataclass(frozen=True, kw_only=True)
class Resolved(Settings):
    """Settings with every default filled in."""

    length: int
    warmup_steps: int

    def protocol(self, planned: Plan, **found: Any) -> TrainingProtocol:
        """Returns the protocol of a training; `found` are the fields that are no settings."""
        mine = asdict(self)
        for name in ("batch_size", "gradient_accumulation", "save_every"):
            del mine[name]
        return TrainingProtocol(
            method=planned.method,
            factor=planned.factor,
            to=planned.to,
            rope_parameters=dict(planned.changed["rope_parameters"]),
            trained_length=planned.trained_length,
            betas=BETAS,
            versions=(*versions(), *_trainers(self.lora_rank)),
            **mine,
            **found,
        )


def _trainers(lora_rank: int | None) -> tuple[tuple[str, str], ...]:
    packages = ("accelerate",) if lora_rank is None else ("accelerate", "peft")
    return tuple((package, version(package)) for package in packages)


def _check_rows(length: int, to: int, *, pose: bool, packing: bool) -> None:
    check_length("length", length)
    if pose and packing:
        raise ConfigError(
            "pose and packing do not go together: packed documents are told apart by positions "
            "that start again, and skipped positions would blur that. Choose one."
        )
    if length > to:
        raise ConfigError(f"length must be at most {to}, which is extended to, got {length}.")
    if length < to and not pose:
        raise ConfigError(
            f"rows of {length} tokens never reach the positions up to {to} that are to be learnt. "
            f"Give length={to}, or pose=True (--pose) to skip positions."
        )
    if pose and length == to:
        raise ConfigError(
            f"pose skips positions in rows shorter than {to}, but length is {length}. Leave pose "
            "out, or give a smaller length."
        )
    if length < 2:
        raise ConfigError(f"length must be ≥ 2 tokens a row, got {length}.")


def _check_optimizer(weight_decay: float, max_grad_norm: float | None) -> None:
    if not 0 <= weight_decay < 1:
        raise ConfigError(f"weight_decay must be from 0 to below 1, got {weight_decay}.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm must be > 0, got {max_grad_norm}. inf never clips.")


def _check_model(model: PreTrainedModel, *, pose: bool) -> None:
    if model.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"the weights are {model.dtype}, in which an update of 2e-5 is rounded away. Load the "
            "model in float32; for speed, let Accelerate mix: accelerate launch "
            "--mixed_precision bf16."
        )
    if pose and "flash" in str(model.config._attn_implementation):
        raise ConfigError(
            f"attn_implementation={model.config._attn_implementation!r} takes a skip in positions "
            "for a new document. Load the model with 'sdpa'."
        )
