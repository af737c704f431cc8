"""`finetune`: train an extended model until it uses what it can now reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.adapters.head import SplitForward
from longspan.tools.cells import weights_digest
from longspan.tools.extend import apply_plan
from longspan.tools.finetune_loop import FineTuneLoop
from longspan.tools.finetune_model import Trainable, accelerator_for
from longspan.tools.finetune_rows import Rows, read_apart
from longspan.tools.finetune_saving import FineTuned
from longspan.tools.finetune_settings import Settings
from longspan.tools.finetune_state import KeptTraining
from longspan.tools.measuring import Progress
from longspan.tools.plan import plan
from longspan.tools.texts import Text
from longspan.training.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def finetune(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[Text],
    *,
    to: int,
    method: str | None = None,
    factor: float | None = None,
    original_max_position_embeddings: int | None = None,
    steps: int = 200,
    length: int | None = None,
    pose: bool = False,
    packing: bool = False,
    lora_rank: int | None = None,
    batch_size: int = 1,
    gradient_accumulation: int = 1,
    learning_rate: float = 2e-5,
    warmup_steps: int | None = None,
    schedule: Schedule = "constant",
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    gradient_checkpointing: bool = False,
    seed: int = 0,
    evaluate_at: Sequence[int] = (),
    evaluation_length: int | None = None,
    evaluation_documents: int = 1,
    bucket: int | None = None,
    name: str | None = None,
    base: str | None = None,
    state_dir: str | Path | None = None,
    save_every: int = 50,
    progress: Progress | None = None,
) -> FineTuned:
    """Returns the model extended to `to` tokens and trained on long text.

    The given model stays as it is: its weights are copied once. AdamW with betas 0.9 and 0.95, as
    the papers have it. Which rows a step reads depends on the seed and the step alone, so several
    processes (`torchrun`, `accelerate launch`) give the losses of one with as many rows a step.

    Args:
        model: a live causal model of a known family, in float32 and eval mode.
        tokenizer: the model's.
        texts: what to train on, whole; held-out documents are cut off their end first.
        to: tokens to read; see `plan`.
        method: see `plan`.
        factor: see `plan`.
        original_max_position_embeddings: see `plan`.
        steps: updates of the weights.
        length: tokens a training row; `to`, or with `pose` the trained length (at most 4,096).
        pose: skip positions, so that rows shorter than `to` train distances up to `to`.
        packing: rows of several texts each, kept apart; else each row is a stretch of one text.
        lora_rank: train adapters of this rank on q, k, v and o, and norms and embedding whole,
            instead of all weights.
        batch_size: rows of one forward of one process.
        gradient_accumulation: forwards of a process before the weights are updated.
        learning_rate: the highest.
        warmup_steps: of the linear warm-up; 20, or a tenth of `steps` where that is less.
        schedule: `constant` after the warm-up, or `cosine` down to 0.
        weight_decay: of AdamW.
        max_grad_norm: the gradient's norm is clipped to it; None or inf never clips.
        gradient_checkpointing: run layers again in the backward pass, to save memory.
        seed: of the rows' order, skips, dropout and the adapters' first weights.
        evaluate_at: numbers of steps done, from 0 to `steps`, when held-out documents are measured.
        evaluation_length: tokens of each; `to` unless given.
        evaluation_documents: how many.
        bucket: tokens a position bucket; a power of two that gives 12 to 24 unless given.
        name: of the model in the protocol; its config's unless given.
        base: what an adapter's base model is loaded by; its config's name, or `name`, unless given.
        state_dir: where the state is kept; an interrupted run goes on from it, bit for bit on CPU.
        save_every: steps from one kept state to the next.
        progress: called before every part, and at the end.

    Raises:
        ConfigError: for settings that do not fit each other, or a state of another training.
        InputError: if the texts are too short, or the tokenizer is not the model's.
        MissingExtra: for adapters without peft.
        NumericalError: if a loss is not finite, naming the step.
        OutputError: if the state cannot be written.
        UnsupportedModelError: for a family longspan cannot extend or train so.

    Source: Chen et al. 2023 (arXiv:2306.15595) §3.1 and Peng et al. 2023 (arXiv:2309.00071) §4.1
        for the settings; see `add_lora` and `skipping_positions` for theirs.
    """
    planned = plan(
        model.config,
        to=to,
        method=method,
        factor=factor,
        original_max_position_embeddings=original_max_position_embeddings,
    )
    settings = Settings(
        steps=steps,
        length=length,
        pose=pose,
        packing=packing,
        lora_rank=lora_rank,
        batch_size=batch_size,
        gradient_accumulation=gradient_accumulation,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        schedule=schedule,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        gradient_checkpointing=gradient_checkpointing,
        seed=seed,
        evaluate_at=tuple(evaluate_at),
        evaluation_length=evaluation_length,
        evaluation_documents=evaluation_documents,
        bucket=bucket,
        save_every=save_every,
    ).resolved(planned, model)
    extended = apply_plan(model, planned)
    read = read_apart(tokenizer, texts, settings, SplitForward(extended), planned.trained_length)
    accelerator = accelerator_for(settings.gradient_accumulation)
    subject = Trainable.of(extended, lora_rank, seed)
    if gradient_checkpointing:
        subject.save_memory()
    named = name or model.config._name_or_path or type(model).__name__
    protocol = settings.protocol(
        planned,
        model=named,
        texts=tuple((text.name, text.sha256) for text in texts),
        rows=len(read.rows),
        bos=read.bos is not None,
        trained_parameters=subject.trained_parameters,
        rows_per_step=batch_size * gradient_accumulation * accelerator.num_processes,
        dtype=str(model.dtype).removeprefix("torch."),
        precision=accelerator.mixed_precision,
    )
    kept = KeptTraining(state_dir, protocol, weights_digest(model))
    result = FineTuneLoop(
        model=subject.model,
        ropes=planned.ropes,
        protocol=protocol,
        rows=Rows(packed=read.rows, to=to if pose else None, seed=seed),
        held_out=read.held_out,
        batch_size=batch_size,
        accelerator=accelerator,
        kept=kept,
        save_every=save_every,
        progress=progress if accelerator.is_main_process else None,
    ).run()
    trained, adapter = subject.finished(planned, base or model.config._name_or_path or named)
    return FineTuned(result=result, model=trained, planned=planned, adapter=adapter)
