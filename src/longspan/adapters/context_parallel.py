"""One sequence over several ranks: each holds a slice of it, and attends to the keys of all.

Everything but attention goes token by token, so a slice needs only its positions to be told. Keys
and values of all slices are gathered in every layer, once; their gradients are summed and go back
the same way. Who sees whom is a matter of positions, so slices may lie in any order.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from longspan.adapters.attention import SeenKeys, attention
from longspan.adapters.gathering import from_all, gathered
from longspan.adapters.mask_functions import NO_LIMIT, MaskFunction, read_mask_function
from longspan.adapters.slices import check_group, check_model, refusal, refuse_unshifted_labels
from longspan.attention import Visibility
from longspan.errors import ConfigError, LongspanError, ShapeError, UnsupportedModelError
from longspan.masks import causal, sliding_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Order = Literal["zigzag", "contiguous"]
"""`zigzag` gives rank r the chunks r and 2·size − 1 − r, so that under a causal mask all ranks have
as much to do; `contiguous` gives it the r-th part, and the last rank the most."""

_numbers = count()


def shard_positions(length: int, rank: int, size: int, order: Order = "zigzag") -> Tensor:
    """Returns the positions of the tokens that a rank holds, [length / size] int64.

    Args:
        length: tokens of the whole sequence.
        rank, size: which slice, and of how many.
        order: how the slices lie.

    Raises:
        ConfigError: for a rank or order that does not exist.
        ShapeError: if the slices would not be of one size.

    >>> shard_positions(8, 0, 2).tolist(), shard_positions(8, 1, 2).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank must be from 0 to size − 1, got {rank} of {size}.")
    if order not in ("zigzag", "contiguous"):
        raise ConfigError(f"order must be 'zigzag' or 'contiguous', got {order!r}.")
    chunks = 2 * size if order == "zigzag" else size
    if length < 1 or length % chunks:
        raise ShapeError(
            f"{order} slices for {size} ranks need a multiple of {chunks} tokens, got {length}. "
            "Append some at the end, which no token before them sees, and leave them out of the "
            "loss."
        )
    parts = torch.arange(length).chunk(chunks)
    return torch.cat((parts[rank], parts[-1 - rank])) if order == "zigzag" else parts[rank]


def shard_sequence(
    input_ids: Tensor, rank: int, size: int, order: Order = "zigzag"
) -> tuple[Tensor, Tensor]:
    """Returns a rank's slice of a sequence, [B, N / size], and its position_ids, [1, N / size].

    Targets are cut the same way, after they are shifted.

    Args:
        input_ids: [B, N], the same on every rank.
        rank, size, order: as `shard_positions` takes them.
    """
    positions = shard_positions(input_ids.shape[1], rank, size, order).to(input_ids.device)
    return input_ids[:, positions], positions[None]


@contextmanager
def context_parallel(model: PreTrainedModel, group: Any = None) -> Iterator[None]:
    """Lets a model read one slice a rank of one sequence within the block, as if it were whole.

    Every rank calls the model at the same time, on its own slice and with its position_ids:

        ids, position_ids = shard_sequence(input_ids, rank, size)
        with context_parallel(model):
            logits = model(ids, position_ids=position_ids).logits  # of this slice
            loss(logits, targets of this slice).backward()

    Gradients of parameters are those of a rank's own tokens; their sum over ranks is the
    sequence's. Call `backward` within the block. Each layer holds the keys and values of the whole
    sequence for as long as it attends, and until its backward pass.

    Args:
        model: a transformers model of a known family, the same weights on every rank.
        group: of torch.distributed; all processes unless given.

    Raises:
        ConfigError: without torch.distributed, or within the block for key-value caches, padding,
            missing or repeated positions, and labels that are not shifted yet.
        UnsupportedModelError: for a model that mixes tokens elsewhere, or whose rotation depends on
            a length that a slice does not know.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    check_group(group)
    check_model(model)
    lent, before = _Lent(group), str(model.config._attn_implementation)
    name = f"longspan_slice_{next(_numbers)}"
    AttentionInterface.register(name, torch.compiler.disable(lent.attention))
    AttentionMaskInterface.register(name, torch.compiler.disable(lent.seen_keys))
    hooks = [
        model.base_model.register_forward_pre_hook(lent.before_body, with_kwargs=True),
        model.register_forward_pre_hook(refuse_unshifted_labels, with_kwargs=True),
    ]
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise UnsupportedModelError(
                f"{type(model).__name__} has its attention written into its layers, where keys of "
                "other ranks cannot reach it."
            )
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


class SlicedKeys(SeenKeys):
    """Who of this slice sees whom of the whole sequence, or why that cannot be said."""

    def __init__(self, seen: Visibility, batch: int, refused: str | None) -> None:
        super().__init__(seen, batch)
        self.refused = refused


class _Lent:
    """What one model is lent: the mask and attention functions, and the positions of a forward."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.q_pos = self.k_pos = torch.empty(0, dtype=torch.int64)

    def before_body(
        self, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Learns where this slice lies and where all others do; refuses what cannot be cut up."""
        names = list(inspect.signature(type(body).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        self._agree(refusal(tokens, given), tokens)
        self.q_pos = given["position_ids"][0].long()
        self.k_pos = torch.cat(from_all(self.q_pos, self.group))
        if not self.k_pos.sort().values.equal(torch.arange(len(self.k_pos)).to(self.k_pos)):
            raise ConfigError(
                f"position_ids of all ranks must be 0 … {len(self.k_pos) - 1}, each once. Cut the "
                "sequence with shard_sequence(input_ids, rank, size), the same order on every rank."
            )
        return (), {**given, "attention_mask": None, "use_cache": False}

    def _agree(self, refused: ConfigError | None, tokens: Tensor | None) -> None:
        """Raises on every rank what is wrong on one, so that none is left waiting."""
        device = torch.device("cpu") if tokens is None else tokens.device
        shape = (0, 0) if tokens is None else tokens.shape[:2]
        facts = torch.tensor([refused is not None, *shape], dtype=torch.int64, device=device)
        everyones = torch.stack(from_all(facts, self.group))
        if refused is not None:
            raise refused
        refusing = everyones[:, 0].nonzero().flatten().tolist()
        if refusing:
            raise LongspanError(f"rank {refusing[0]} refused its slice; its own error says why.")
        if bool((everyones != facts).any()):
            raise ShapeError(
                f"the slices of all ranks must be of one shape, got {everyones[:, 1:].tolist()}. "
                "Cut the sequence with shard_sequence(input_ids, rank, size)."
            )

    def seen_keys(
        self,
        batch_size: int,
        mask_function: MaskFunction,
        local_size: int | None = None,
        **_: Any,
    ) -> SlicedKeys:
        """Returns who sees whom, as transformers' mask interface asks for it.

        The jumps of a zigzag slice look like packed documents to transformers; they are none.
        """
        mask = read_mask_function(mask_function, batch_size, NO_LIMIT).mask
        ordinary = [causal()] + ([sliding_window(local_size)] if local_size else [])
        refused = None
        if mask not in ordinary:
            refused = f"slices of a sequence go with causal masks and windows; this is {mask!r}."
        sizes = batch_size, len(self.q_pos), len(self.k_pos)
        seen = Visibility.of(mask, sizes, q_pos=self.q_pos, k_pos=self.k_pos)
        return SlicedKeys(seen, batch_size, refused)

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        """Returns attention's output [B, T, H, Dv] of this slice over the keys of all."""
        if not isinstance(mask, SlicedKeys) or mask.refused:
            why = getattr(mask, "refused", f"it was handed a mask of {type(mask).__name__}.")
            raise UnsupportedModelError(f"{type(module).__name__} cannot read slices: {why}")
        key, value = gathered(key, value, self.group)
        return cast(Any, attention)(module, query, key, value, mask, **given)
