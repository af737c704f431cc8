"""What `finetune` returns beside the model: losses and evaluations, under their protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longspan.tools.evaluation import Bucket
from longspan.tools.records import record_from_json, record_to_json

FORM = "longspan fine-tuning 1"


@dataclass(frozen=True, kw_only=True)
class TrainingProtocol:
    """How a model was fine-tuned; a training goes on only under an equal one.

    Attributes:
        model: name or path as the user gave it.
        texts: (name, sha256) of each source text.
        method: the scaling method.
        factor: its factor.
        to: tokens to read.
        rope_parameters: the block of config.json trained under.
        trained_length: tokens the checkpoint was trained to read before.
        length: tokens a training row, BOS included where there is one.
        rows: how many different rows there are to train on.
        bos: whether BOS starts every document: a row, or with packing a text; never a target.
        pose: whether positions skip, up to `to`.
        packing: whether rows hold several documents, kept apart.
        lora_rank: of adapters on q, k, v and o; None where all weights are trained.
        trained_parameters: how many numbers are trained.
        steps: updates of the weights.
        rows_per_step: of all processes together.
        learning_rate: the highest.
        warmup_steps: steps of the linear warm-up.
        schedule: "constant" or "cosine".
        weight_decay: of AdamW, on every trained parameter.
        max_grad_norm: what the gradient's norm is clipped to, None for no clipping.
        betas: of AdamW.
        gradient_checkpointing: whether layers were run again in the backward pass.
        seed: of the rows' order, the skips and the dropout.
        evaluate_at: steps done when the held-out documents were measured.
        evaluation_length: tokens of each; None where nothing is measured.
        evaluation_documents: how many, from the end of the texts; never trained on.
        bucket: positions a bucket of an evaluation; None where nothing is measured.
        dtype: of the weights.
        precision: of the arithmetic, "no" unless Accelerate was told to mix.
        phase: how angles were computed in training, and in evaluations.
        versions: of longspan, torch, transformers and accelerate (and peft).
    """

    model: str
    texts: tuple[tuple[str, str], ...]
    method: str
    factor: float
    to: int
    rope_parameters: dict[str, Any]
    trained_length: int
    length: int
    rows: int
    bos: bool
    pose: bool
    packing: bool
    lora_rank: int | None
    trained_parameters: int
    steps: int
    rows_per_step: int
    learning_rate: float
    warmup_steps: int
    schedule: str
    weight_decay: float
    max_grad_norm: float | None
    betas: tuple[float, float]
    gradient_checkpointing: bool
    seed: int
    evaluate_at: tuple[int, ...]
    evaluation_length: int | None
    evaluation_documents: int
    bucket: int | None
    dtype: str
    precision: str
    phase: tuple[str, str] = ("hf_float32", "float64")
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One update of the weights.

    Attributes:
        step: counted from 0.
        loss: mean NLL before the update, nats per target, over the rows of all processes.
        learning_rate: of this update.
        grad_norm: of all gradients together, before clipping.
        seconds: that it took.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out documents, measured after so many steps.

    Attributes:
        step: steps done; 0 is the extended model before any training.
        nll: mean over all targets, nats per token.
        perplexity: exp(nll).
        tokens_scored: over all documents.
        buckets: NLL by target position.
        seconds: of all forwards.
    """

    step: int
    nll: float
    perplexity: float
    tokens_scored: int
    buckets: tuple[Bucket, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Everything one run of `finetune` measured."""

    protocol: TrainingProtocol
    curve: tuple[TrainingStep, ...]
    evaluations: tuple[HeldOut, ...] = field(default=())


def finetuning_to_json(result: FineTuning) -> str:
    """Returns the result as JSON.

    Raises:
        NumericalError: if a number is NaN or infinite.
    """
    return record_to_json(result, FORM)


def finetuning_from_json(text: str) -> FineTuning:
    """Returns the result that `finetuning_to_json` wrote.

    Raises:
        InputError: if the text is not one.
    """
    return record_from_json(FineTuning, text, FORM)
