"""A fine-tuned model, and the folder it is written to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.adapters.adapter_rope import Adapter
from longspan.errors import ConfigError
from longspan.files import whole_folder, write_text
from longspan.tools.extend import save_extended
from longspan.tools.finetune_results import FineTuning, finetuning_to_json
from longspan.tools.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RESULT = "finetune.json"


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned model, and how it came about.

    Attributes:
        result: protocol, loss curve and evaluations.
        model: the trained model, adapters merged, in eval mode, where the given one was.
        planned: the plan it was extended under.
        adapter: the adapter apart, where one was trained.
    """

    result: FineTuning
    model: PreTrainedModel
    planned: Plan
    adapter: Adapter | None


def save_finetuned(
    tuned: FineTuned,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    adapter: bool = False,
    force: bool = False,
) -> None:
    """Writes a fine-tuned model as a folder that plain transformers loads, whole or not at all.

    With `adapter`, writes only that, in peft's format with the rope it carries. Either has the
    result in it, as finetune.json.

    Args:
        tuned: what `finetune` returned.
        tokenizer: its tokenizer; changed only on disk.
        path: the folder to make.
        adapter: write the adapter instead of the whole model.
        force: whether an existing folder is replaced.

    Raises:
        ConfigError: if there is no adapter.
        OutputError: if the folder exists, or cannot be written.
        UnsupportedModelError: if transformers would not load it as planned.
    """
    if adapter and tuned.adapter is None:
        raise ConfigError("all weights were trained, so there is no adapter. Give lora_rank.")
    with whole_folder(path, force=force) as temporary:
        if adapter and tuned.adapter is not None:
            tuned.adapter.save(temporary)
        else:
            save_extended(tuned.model, tokenizer, tuned.planned, temporary, force=True)
        write_text(temporary / RESULT, finetuning_to_json(tuned.result))
