"""Low-rank adapters through peft: where they go, and what is trained beside them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from longspan.errors import ConfigError, MissingExtra, UnsupportedModelError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# What families call the projections of q, k, v and the output, together or apart.
PROJECTIONS = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "dense"),
        *("query_key_value", "Wqkv", "wqkv", "wo", "W_pack"),
    )
)
ALPHA_OVER_RANK = 2


def add_lora(model: PreTrainedModel, rank: int) -> PeftModel:
    """Returns the model with low-rank adapters on q, k, v and o; nothing else of them is trained.

    The norms and the input embedding are trained whole beside them: LongLoRA found that adapters
    alone do not learn a longer context. A head tied to the embedding stays tied.

    Args:
        model: changed in place.
        rank: of every adapter; its scale is `ALPHA_OVER_RANK`, as in the paper.

    Raises:
        ConfigError: for a rank below 1.
        MissingExtra: without peft.
        UnsupportedModelError: if there are no such projections, or peft would untie the head.

    Source: Hu et al. 2021 (arXiv:2106.09685); Chen et al. 2023 (arXiv:2309.12307) §3.3.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"lora_rank must be a whole number ≥ 1, got {rank!r}. Papers use 8.")
    require_peft()
    from peft import LoraConfig, get_peft_model

    tied = _tied(model)
    config = LoraConfig(
        r=rank,
        lora_alpha=ALPHA_OVER_RANK * rank,
        lora_dropout=0.0,
        target_modules=projections(model),
        modules_to_save=[*norms(model), embedding(model)],
        ensure_weight_tying=tied,
        task_type="CAUSAL_LM",
    )
    with without_peft_warnings():
        adapted: Any = get_peft_model(model, config)
    if tied != _tied(adapted.get_base_model()):
        raise _would_untie(model)
    return adapted


def projections(model: PreTrainedModel) -> list[str]:
    """Returns the names of the linear maps that attention makes q, k, v and its output with.

    Raises:
        UnsupportedModelError: if there are none.
    """
    found = [
        f"{name}.{part}"
        for name, module in model.named_modules()
        if "attention" in type(module).__name__.lower()
        for part, child in module.named_children()
        if part in PROJECTIONS and isinstance(child, nn.Linear)
    ]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention with linear maps called "
            f"{', '.join(sorted(PROJECTIONS))}, so there is nothing to adapt. Train it whole: "
            "leave lora_rank (--lora) out."
        )
    return found


def norms(model: PreTrainedModel) -> list[str]:
    """Returns the names of the model's norms."""
    return [
        name
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and any(True for _ in module.parameters())
    ]


def embedding(model: PreTrainedModel) -> str:
    """Returns the name of the input embedding; refuses one that peft could not keep tied."""
    wanted = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is wanted)
    if _tied(model) and name.rpartition(".")[2] != "embed_tokens":
        raise _would_untie(model)
    return name


def require_peft() -> None:
    """Refuses to go on without peft."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "LoRA needs peft, which is not installed. `pip install 'longspan[train]'`."
        ) from error


@contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Silences what peft says about transformers' newer names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*checkpointing.*deprecated", FutureWarning)
        yield


def _tied(model: PreTrainedModel) -> bool:
    head: Any = model.get_output_embeddings()
    first: Any = model.get_input_embeddings()
    return head is not None and head.weight is first.weight


def _would_untie(model: PreTrainedModel) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} shares its embedding with its head, which peft would separate. "
        "Train it whole: leave lora_rank (--lora) out."
    )
