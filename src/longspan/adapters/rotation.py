"""Lends longspan's own rotation to a live model, and reads a live model's rotation back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.adapters.config_fields import as_mapping
from longspan.adapters.families import Family, TableForm, family_of, text_part
from longspan.adapters.ropes import Ropes
from longspan.errors import NumericalError, UnsupportedModelError
from longspan.rotary.rope import Rope
from longspan.rotary.rotate import Phase, RotationTable
from longspan.rotary.scaling.base import SeqLen

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# transformers computes its tables in float32; its YaRN blend is off by 2.5e-6 relative.
FLOAT32_TABLE = 1e-5


class LongspanRotary(nn.Module):
    """Stands in for a model's rotary module: cos and sin from float64 angles, no state.

    Args:
        ropes: the rotation of each layer type.
        form: how the family lays cos and sin out.
        seq_len: the total length each row will reach, where a table depends on it.
        phase: `float64`, or `hf_float32` for transformers' own rounding.
    """

    def __init__(
        self, ropes: Mapping[str, Rope], form: TableForm, seq_len: SeqLen, phase: Phase
    ) -> None:
        super().__init__()
        self.ropes = ropes
        self.form: TableForm = form
        self.seq_len = seq_len
        self.phase: Phase = phase

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, [B, T, rotary_dim] (half of it for `pairs`), in x's dtype."""
        rope = rope_of_type(self.ropes, layer_type)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        table = rope.table(position_ids.to(x.device), self.seq_len, dtype=dtype, phase=self.phase)
        cos, sin = lay_out(table, self.form)
        return cos.to(x.dtype), sin.to(x.dtype)


def rope_of_type(ropes: Mapping[str, Rope], layer_type: str | None) -> Rope:
    """Returns the rope of a layer type; the shared one where there is only one."""
    if layer_type is not None and layer_type in ropes:
        return ropes[layer_type]
    return next(iter(ropes.values()))


def lay_out(table: RotationTable, form: TableForm) -> tuple[Tensor, Tensor]:
    """Returns cos and sin with each pair's value where the family's rotary module puts it."""
    if form == "half":
        return torch.cat((table.cos,) * 2, dim=-1), torch.cat((table.sin,) * 2, dim=-1)
    if form == "interleaved":
        return table.cos.repeat_interleave(2, dim=-1), table.sin.repeat_interleave(2, dim=-1)
    return table.cos, table.sin


@contextmanager
def exact_rotation(
    model: PreTrainedModel, ropes: Ropes, seq_len: SeqLen = None, phase: Phase = "float64"
) -> Iterator[None]:
    """Lets a model rotate by longspan's tables within the block, and restores it after.

    Raises:
        UnsupportedModelError: for a family whose rotary module is not known.
    """
    form = table_form(model)
    replacement = LongspanRotary(ropes, form, seq_len, phase)
    places = rotary_modules(model)
    try:
        for parent, name, _ in places:
            parent._modules[name] = replacement
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def rotary_modules(model: PreTrainedModel) -> list[tuple[nn.Module, str, nn.Module]]:
    """Returns (parent, attribute, module) of every module that turns the text's queries and keys.

    Lent ones among them; a vision tower's own are left out.
    """
    text = text_config(model)
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, LongspanRotary)
        or (
            _has_frequencies(child) and getattr(child, "config", text).model_type == text.model_type
        )
    ]


def _has_frequencies(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def text_config(model: PreTrainedModel) -> Any:
    """Returns the config of a live model's language part."""
    return model.config.get_text_config()


def table_form(model: PreTrainedModel) -> TableForm:
    """Returns how the model's rotary module lays out cos and sin; refuses where it has none."""
    family = require_family(model)
    if family.table is None or not rotary_modules(model):
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} does not rotate through a rotary module that "
            "longspan can stand in for."
        )
    return family.table


def require_family(model: PreTrainedModel) -> Family:
    """Returns the model's family row; refuses an unknown family."""
    family = family_of(text_part(as_mapping(model.config)))
    if family is None:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} is not known to longspan: its pair layout "
            "cannot be read from a config. Its frequencies can be planned, not applied."
        )
    return family


def rebuild_rotation(model: PreTrainedModel, config: Any) -> None:
    """Replaces every rotary module by a fresh one of its own class, built from `config`.

    Raises:
        UnsupportedModelError: within `exact_rotation`, where the model does not have its own.
    """
    for parent, name, child in rotary_modules(model):
        if isinstance(child, LongspanRotary):
            raise UnsupportedModelError(
                "the model rotates by a lent table within exact_rotation. Leave that block first."
            )
        device = next(child.buffers()).device
        fresh: Any = type(child)
        parent._modules[name] = fresh(config=config).to(device)


def prove_rotation(model: PreTrainedModel, ropes: Ropes, seq_len: int) -> None:
    """Reads cos and sin back from the live rotary modules and holds them against the plan.

    The frequencies are compared as numbers and as what the module returns at small positions,
    so a wrong layout, attention factor or layer type cannot pass.

    Raises:
        NumericalError: naming the layer type and the first pair that differs.
    """
    form = table_form(model)
    for _, _, child in rotary_modules(model):
        for layer_type, rope in _served(child, ropes):
            # dynamic modules keep state between calls; a copy is asked
            _prove_one(copy.deepcopy(child), layer_type, rope, form, seq_len)


def _served(child: nn.Module, ropes: Ropes) -> list[tuple[str | None, Rope]]:
    by_type = [name for name, _ in child.named_buffers() if name.endswith("_attention_inv_freq")]
    if by_type:
        kinds = [name.removesuffix("_inv_freq") for name in by_type]
        kinds = [kind for kind in kinds if not kind.endswith("original")]
        return [(kind, rope_of_type(ropes, kind)) for kind in kinds]
    return [(None, ropes[ropes.reaching])]


def _prove_one(
    child: Any, layer_type: str | None, rope: Rope, form: TableForm, seq_len: int
) -> None:
    device = next(child.buffers()).device
    positions = torch.tensor([[0, 1, 2, 3, seq_len - 1]], device=device)
    probe = torch.zeros(1, 1, dtype=torch.float32, device=device)
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    live = child(probe, positions, **kwargs)
    planned = lay_out(rope.table(positions, seq_len), form)
    for found, wanted in zip(live, planned, strict=True):
        # the last position only makes a length-dependent table the long one
        if not torch.allclose(found[:, :-1], wanted[:, :-1], atol=FLOAT32_TABLE, rtol=0):
            _refuse(layer_type, "cos and sin at positions 0 to 3 are not the planned ones")
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    frequencies = getattr(child, name).double()
    wanted = rope.inv_freq(seq_len).to(device)
    off = ((frequencies - wanted).abs() > FLOAT32_TABLE * wanted).nonzero().flatten().tolist()
    if off:
        pair = off[0]
        _refuse(
            layer_type,
            f"pair {pair} turns by {frequencies[pair]:.6g} a token, planned {wanted[pair]:.6g}",
        )


def _refuse(layer_type: str | None, what: str) -> None:
    raise NumericalError(
        f"the live model's rotation ({layer_type or 'all layers'}) is not the planned one: {what}. "
        "Nothing was changed; report this with the model's config.json."
    )
