"""MPT and BLOOM: modules that stand in for their attention, which is written into their layers.

A module has the weights of the one it stands in for, under the same names, and hands queries, keys
and values to one attention function: `attend`, or a stream's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from longspan.adapters.attention import SeenKeys, seen_keys
from longspan.attention import Visibility, attend
from longspan.bias import Alibi, alibi_slopes
from longspan.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "longspan_alibi"
FLOAT32_SLOPES = 1e-5  # relative; BLOOM raises a rounded base to the 64th power

AttentionFunction = Callable[..., tuple[Tensor, None]]
"""As transformers calls one: module, query, key, value, attention_mask, scaling=, dropout=."""


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


class AlibiAttention(nn.Module, ABC):
    """Stands in for a layer's own attention, over the same weights.

    Args:
        own: the module it stands in for.
        alibi: the model's bias.
        attention: what meets queries, keys and values.
    """

    own_class: ClassVar[str]
    """The module of transformers whose place it takes."""
    followed: ClassVar[Mapping[str, Any]] = {}
    """The one value that transformers follows of each of these keys of attn_config."""

    def __init__(self, own: nn.Module, alibi: Alibi, attention: AttentionFunction) -> None:
        super().__init__()
        for name, child in own.named_children():
            setattr(self, name, child)
        self.own: Any
        object.__setattr__(self, "own", own)  # for its numbers; as a child it would save twice
        self.layer_idx = self.own.layer_idx
        self.alibi, self.attention = alibi, attention
        self.train(own.training)

    @staticmethod
    @abstractmethod
    def bias_of_two(base: Any, num_heads: int) -> Tensor:
        """Returns what the model adds to the scores of two keys, [H, 1, 2]."""

    def read(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        attention_mask: Any,
        cache: Any,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        """Returns what all heads read, [B, T, H·D].

        Args:
            heads: q, k and v of the new tokens, [B, H, T, D] each.
            attention_mask: what the mask function of `attention` made.
            cache: any of transformers', or None.
            scaling: of the scores.
            dropout: of the weights, in training.
        """
        q, k, v = heads
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        dropout = dropout if self.training else 0.0
        out, _ = self.attention(self, q, k, v, attention_mask, scaling=scaling, dropout=dropout)
        return out.flatten(2)


class MptAlibiAttention(AlibiAttention):
    """MPT's attention: q, k and v one after the other in Wqkv, clipped where the config says so."""

    own_class = "MptAttention"
    followed: ClassVar[Mapping[str, Any]] = {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_type": "multihead_attention",
        "prefix_lm": False,
        "qk_ln": False,
    }
    Wqkv: nn.Module
    out_proj: nn.Module

    @staticmethod
    def bias_of_two(base: Any, num_heads: int) -> Tensor:
        """Returns what the model adds to the scores of two keys, [H, 1, 2]."""
        return base.build_mpt_alibi_tensor(num_heads, 2)

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor | None = None,
        cache: Any = None,
        attention_mask: Any = None,
    ) -> tuple[Tensor, None]:
        """Returns what the layer adds, [B, T, H·D], as MPT's block asks for it."""
        fused, clip = self.Wqkv(hidden_states), self.own.clip_qkv
        if clip:
            fused = fused.clamp(min=-clip, max=clip)
        q, k, v = fused.unflatten(-1, (3, self.alibi.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scaling, dropout = self.own.softmax_scale, self.own.attn_dropout_p
        return self.out_proj(self.read((q, k, v), attention_mask, cache, scaling, dropout)), None


class BloomAlibiAttention(AlibiAttention):
    """BLOOM's attention: each head's q, k and v side by side, the residual added within."""

    own_class = "BloomAttention"
    query_key_value: nn.Module
    dense: nn.Linear

    @staticmethod
    def bias_of_two(base: Any, num_heads: int) -> Tensor:
        """Returns what the model adds to the scores of two keys, [H, 1, 2]."""
        present = torch.ones(1, 2, dtype=torch.int64)
        return base.build_alibi_tensor(present, num_heads, torch.float32)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor | None = None,
        attention_mask: Any = None,
        layer_past: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Returns the residual and what the layer adds to it, as BLOOM's block asks for it."""
        fused = self.query_key_value(hidden_states)
        q, k, v = fused.unflatten(-1, (self.alibi.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        scaling, dropout = self.own.inv_norm_factor, self.own.attention_dropout.p
        out = self._joined(self.read((q, k, v), attention_mask, layer_past, scaling, dropout))
        return residual + F.dropout(out, self.own.hidden_dropout, self.training), None

    def _joined(self, read: Tensor) -> Tensor:
        """Returns the heads joined; `slow_but_exact` adds up the ranks' shares, without a bias."""
        ranks = self.own.pretraining_tp
        if ranks == 1 or not self.own.slow_but_exact:
            return self.dense(read)
        shares = zip(read.chunk(ranks, -1), self.dense.weight.chunk(ranks, -1), strict=True)
        return torch.stack([F.linear(share, weight) for share, weight in shares]).sum(0)


STAND_INS: Mapping[str, type[AlibiAttention]] = {
    "mpt": MptAlibiAttention,
    "bloom": BloomAlibiAttention,
}


class AlibiKeys(SeenKeys):
    """Who sees whom in one forward of MPT or BLOOM."""

    def to(self, device: Any) -> AlibiKeys:
        """Returns itself; MPT asks any mask to become bools."""
        return self


def alibi_keys(batch_size: int, config: Any = None, **asked: Any) -> AlibiKeys:
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
    return AlibiKeys(seen, batch_size)


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
    if not isinstance(attention_mask, AlibiKeys):
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
    return model.base_model.register_forward_pre_hook(_refuse_weights, with_kwargs=True)


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


def _refuse_weights(base: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("output_attentions") or base.config.output_attentions:
        raise ConfigError(
            "longspan never holds the attention weights, so output_attentions=True cannot be "
            "followed. Ask the model itself, outside of alibi_attention and streams."
        )
