"""MPT and BLOOM under `attend`: modules stand in for the attention written into their layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from longspan.adapters.alibi_modules import STAND_INS, AlibiAttention, AttentionFunction
from longspan.adapters.attention import SeenKeys, seen_keys
from longspan.attention import Visibility, attend
from longspan.bias import Alibi, alibi_slopes
from longspan.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "longspan_alibi"
FLOAT32_SLOPES = 1e-5  # relative; BLOOM raises a rounded base to the 64th power


@contextmanager
def alibi_attention(model: PreTrainedModel) -> Iterator[None]:
    """Lets MPT or BLOOM use `attend` within the block, and restores its own attention after.

    Nothing of all pairs is built, and MPT reads past its max_seq_len. Padding on either side and
    any of transformers' caches work as before; attention weights do not exist.

    Args:
        model: a transformers model of either family, with or without a head.

    Raises:
        UnsupportedModelError: for another family, or a config that transformers does not follow.

    >>> from transformers import MptConfig, MptForCausalLM
    >>> model = MptForCausalLM(MptConfig(d_model=8, n_heads=2, n_layers=1, vocab_size=8))
    >>> with alibi_attention(model):
    ...     model(torch.arange(8)[None]).logits.shape
    torch.Size([1, 8, 8])
    """
    from transformers.masking_utils import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, alibi_keys)
    config: Any = model.config
    before, places = config._attn_implementation, _places(model)
    hook = stand_in(model, attention, NAME)
    try:
        yield
    finally:
        hook.remove()
        for block, name, own in places:
            own.training = block.get_submodule(name).training
            block._modules[name] = own
        config._attn_implementation = {"": before}


def alibi_keys(batch_size: int, config: Any = None, **asked: Any) -> SeenKeys:
    """Returns who sees whom, by the positions that the family takes distances between.

    MPT counts padding in and BLOOM does not, which is one only where padding comes before or after
    all of a row's tokens.

    Args:
        batch_size: B.
        config: the model's.
        asked: what else `seen_keys` takes.
    """
    make: Any = seen_keys
    seen = make(batch_size, **asked).seen
    if getattr(config, "model_type", None) == "bloom" and bool((seen.k_pos < 0).any()):
        seen = _by_tokens(seen, int(asked["q_offset"]) - int(asked["kv_offset"]))
    return SeenKeys(seen, batch_size)


def _by_tokens(seen: Visibility, before: int) -> Visibility:
    """Returns the same with a row's tokens numbered one after the other, padding left out."""
    present = seen.k_pos >= 0
    number = present.cumsum(-1) - 1
    q_pos = number[:, before : before + seen.shape[0]]
    k_pos = torch.where(present, number, -1)
    return replace(seen, q_pos=q_pos, k_pos=k_pos, first=None, found={})


def attention(
    module: AlibiAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[Tensor, None]:
    """Returns attention's output under the module's bias, [B, T, H, D].

    Args:
        module: whose bias it is.
        query: [B, H, T, D].
        key, value: [B, H, S, D].
        attention_mask: what `alibi_keys` made.
        scaling: of the scores.
        dropout: of the weights.
    """
    if not isinstance(attention_mask, SeenKeys):
        raise UnsupportedModelError(
            f"the layer was handed a mask of {type(attention_mask).__name__}. Within "
            "alibi_attention, pass a 2-D attention_mask, 0 at padding, or none."
        )
    seen = attention_mask.seen
    out = attend(query, key, value, mask=seen, bias=module.alibi, scale=scaling, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


def stand_in(model: Any, attention: AttentionFunction, masks: str) -> RemovableHandle:
    """Puts longspan's modules in the place of a model's attention.

    Args:
        model: of a family in STAND_INS.
        attention: what meets queries, keys and values.
        masks: the name under which the mask function of `attention` is registered.

    Returns:
        The hook that refuses output_attentions, which MPT's layers are not told of.
    """
    alibi, kind = alibi_of(model), STAND_INS[model.config.model_type]
    for block, name, child in _places(model):
        own = child.own if isinstance(child, AlibiAttention) else child
        block._modules[name] = kind(own, alibi, attention)
    model.config._attn_implementation = {"": masks}
    return model.base_model.register_forward_pre_hook(refuse_weights, with_kwargs=True)


def alibi_of(model: Any) -> Alibi:
    """Returns the bias of a model's heads, once the model's own slopes are found to be the same.

    Raises:
        UnsupportedModelError: for another family, or one whose distances cost otherwise.
    """
    config = model.config
    if config.model_type not in STAND_INS:
        raise UnsupportedModelError(
            f"model_type {config.model_type!r} is none of {', '.join(STAND_INS)}, the families "
            "with ALiBi that longspan knows. In layers of your own, pass bias=Alibi(num_heads) "
            "to attend."
        )
    kind, heads = STAND_INS[config.model_type], config.num_attention_heads
    for key, value in kind.followed.items():
        asked = getattr(config.attn_config, key, value)
        if asked != value:
            raise UnsupportedModelError(
                f"attn_config.{key} is {asked!r}, and transformers' {kind.own_class} computes as "
                f"if it were {value!r}. Run the checkpoint by its own code, without longspan."
            )
    known, layers = len(_places(model)), config.num_hidden_layers
    if known != layers:
        raise UnsupportedModelError(
            f"{known} of the {layers} layers of {type(model).__name__} have transformers' own "
            f"{kind.own_class}. Load it without trust_remote_code."
        )
    found = kind.bias_of_two(model.base_model, heads).diff(dim=-1).flatten().double().cpu()
    if not torch.allclose(found, alibi_slopes(heads), rtol=FLOAT32_SLOPES, atol=0):
        raise UnsupportedModelError(
            f"the slopes of {type(model).__name__} are {found.tolist()}, and ALiBi's for {heads} "
            f"heads are {alibi_slopes(heads).tolist()}. Longspan knows no others."
        )
    return Alibi(heads)


def _places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Returns (block, attribute, module) of every layer's attention, stand-ins among them."""
    return [
        (block, name, child)
        for block in model.modules()
        for name, child in block.named_children()
        if isinstance(child, AlibiAttention) or _is_known(child)
    ]


def _is_known(module: nn.Module) -> bool:
    """Whether it is exactly transformers' own; a subclass may compute otherwise."""
    kind = type(module)
    names = {stand_in.own_class for stand_in in STAND_INS.values()}
    return kind.__module__.startswith("transformers.models.") and kind.__name__ in names


def refuse_weights(base: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses output_attentions, as a hook before a model's forward.

    Raises:
        ConfigError: where it is asked for.
    """
    if kwargs.get("output_attentions") or base.config.output_attentions:
        raise ConfigError(
            "longspan never holds the attention weights, so output_attentions=True cannot be "
            "followed. Ask the model itself, outside of alibi_attention and streams."
        )
