"""The model that is trained: a copy of the extended one, whole or with adapters, and back."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from longspan.adapters.adapter_rope import Adapter, AdapterRope, adapter_of
from longspan.adapters.config_fields import as_mapping
from longspan.adapters.families import text_part
from longspan.adapters.lora import add_lora
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.tools.finetune_rows import seed_of
from longspan.tools.plan import Plan
from longspan.training.processes import on_cpu_only, whole_tensor

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass
class Trainable:
    """A model with `requires_grad` where it is trained.

    Attributes:
        extended: the model before training, kept as it is.
        lora_rank: of adapters, or None.
        seed: that adapters begin from.
        model: the copy that is trained, adapters within it.
        adapted: peft's hold on it, where there are adapters.
    """

    extended: PreTrainedModel
    lora_rank: int | None
    seed: int
    model: PreTrainedModel
    adapted: Any

    @classmethod
    def of(cls, extended: PreTrainedModel, lora_rank: int | None, seed: int) -> Trainable:
        """Returns a copy of the extended model, ready to be trained.

        Raises:
            UnsupportedModelError: if there is nothing to adapt.
        """
        model = copy.deepcopy(extended).requires_grad_(True)
        model.zero_grad()
        adapted = None
        if lora_rank is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(seed, "adapters", 0))
                adapted = add_lora(model, lora_rank)
        return cls(extended, lora_rank, seed, model, adapted)

    @property
    def trained_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(one.numel() for one in self.model.parameters() if one.requires_grad)

    def save_memory(self) -> None:
        """Lets layers run again in the backward pass instead of keeping what they computed.

        Raises:
            UnsupportedModelError: if the model cannot.
        """
        try:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot run its layers again in the backward pass. "
                "Leave gradient_checkpointing out."
            ) from error

    def finished(self, planned: Plan, base: str) -> tuple[PreTrainedModel, Adapter | None]:
        """Returns the trained model with adapters merged, and the adapter apart.

        All processes must call it where the weights are spread over them.

        Args:
            planned: what the model was extended under.
            base: name of the model it was made from, for the adapter.
        """
        self._gather()
        if self.adapted is None:
            return _at_rest(self.model, self.extended), None
        block = text_part(as_mapping(self.extended.config))
        rope = adapter_rope(planned, block)
        adapter = adapter_of(self.adapted, rope, base)
        return _at_rest(self.adapted.merge_and_unload(), self.extended), adapter

    def _gather(self) -> None:
        """Makes the model whole again if FSDP has spread its weights over processes."""
        state = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        if not any(hasattr(one, "full_tensor") for one in state.values()):
            return
        whole = {name: whole_tensor(one.detach()).cpu() for name, one in state.items()}
        fresh = Trainable.of(self.extended, self.lora_rank, self.seed)
        with torch.no_grad():
            for name, one in fresh.model.named_parameters():
                if name in whole:
                    one.copy_(whole[name])
        self.model, self.adapted = fresh.model, fresh.adapted


def adapter_rope(planned: Plan, extended: Any) -> AdapterRope:
    """Returns the block an adapter carries."""
    before = planned.before[planned.before.reaching].method
    keys = ("rope_parameters", "max_position_embeddings", "longspan")
    return AdapterRope(
        method=planned.method,
        factor=planned.factor,
        to=planned.to,
        config={**{key: extended[key] for key in keys if key in extended}, **planned.changed},
        base_method=before.method,
        base_factor=before.factor,
    )


def _at_rest(model: PreTrainedModel, like: PreTrainedModel) -> PreTrainedModel:
    """Returns a trained model as a loaded one is: in eval mode, where the given one is."""
    if model.is_activation_checkpointing:
        model.activation_checkpointing_disable()
    model.zero_grad()
    whole: Any = model
    return whole.to(like.device).requires_grad_(True).eval()


def accelerator_for(gradient_accumulation: int) -> Accelerator:
    """Returns Accelerate's hold on this process, as `accelerate launch` or `torchrun` set it up.

    Raises:
        ConfigError: if it was told to mix in float16, or knows of fewer processes than there are.
    """
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=gradient_accumulation, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, cpu=on_cpu_only())
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != accelerator.num_processes:
        raise ConfigError(
            f"{started} processes were started, but Accelerate knows of "
            f"{accelerator.num_processes}: it was set up before, in another way. Make no "
            "Accelerator of your own first."
        )
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and on_cpu_only():
        raise ConfigError(
            "FSDP was asked for, but Accelerate has it for GPUs only and would copy the weights to "
            "every process instead. Leave --use_fsdp out on CPUs."
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError(
            "mixed_precision='fp16' skips steps whose gradients overflow, so the rows of a step "
            "would be lost. Use 'bf16' or 'no'."
        )
    return accelerator
