"""A model that remembers in longspan's caches: its twin over the same weights, turned by them.

The rotary modules hand queries and keys through unturned, and the attention function turns them.
A model that reads position_ids elsewhere (Ministral 3 scales its queries by them) needs them told.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from longspan.adapters.alibi_attention import alibi_of, refuse_weights, stand_in
from longspan.adapters.alibi_modules import STAND_INS, AttentionFunction
from longspan.adapters.config_fields import as_mapping
from longspan.adapters.extended import twin
from longspan.adapters.families import layer_count, layer_types, text_part
from longspan.adapters.lengths import sliding_layers
from longspan.adapters.rope import rope_from_config
from longspan.adapters.ropes import Ropes
from longspan.adapters.rotation import require_family, rotary_modules, table_form
from longspan.adapters.stream_attention import Seat, Unturned, attention, new_tokens
from longspan.adapters.stream_cache import SINKS, SLIDING, StreamCache
from longspan.caches import KeyValueCache, LayerEncoding, SinkCache, WindowCache
from longspan.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "longspan_stream"


class StreamedModel:
    """A twin of a model, in which every layer remembers sinks and a window.

    Layers with a sliding window of their own keep it, without sinks and at true distances. Where
    all do, that window is what `sliding_window` then says, and there are no sinks.

    Args:
        model: a transformers causal language model; it stays as it is.
        num_sink_tokens: first tokens that are never dropped.
        sliding_window: last tokens kept, the newest included.
        seq_len: the length whose table is used throughout, where a rope depends on it (dynamic
            NTK, LongRoPE); left at None, each token uses the table of its own place in the cache.
        original_max_position_embeddings: the trained length, where the config leaves it open.

    Raises:
        UnsupportedModelError: for a family that longspan does not know, saying what is missing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_sink_tokens: int,
        sliding_window: int,
        seq_len: int | None = None,
        original_max_position_embeddings: int | None = None,
    ) -> None:
        SinkCache(num_sink_tokens, sliding_window)  # refuses wrong sizes before anything is made
        self.num_sink_tokens = num_sink_tokens
        self.sliding_window = sliding_window
        self.seq_len = seq_len
        self.original_max_position_embeddings = original_max_position_embeddings
        encodings, self.kinds, self.native_window = _plan(self, model)
        if SINKS not in self.kinds:
            self.num_sink_tokens, self.sliding_window = 0, self.native_window or 1
        self.encodings = dict(enumerate(encodings))
        self.model = _seated(self, model)

    def new_cache(self) -> StreamCache:
        """Returns an empty cache, for this model alone."""
        caches: dict[str, KeyValueCache] = {}
        if SINKS in self.kinds:
            caches[SINKS] = SinkCache(self.num_sink_tokens, self.sliding_window)
        if SLIDING in self.kinds:
            caches[SLIDING] = WindowCache(self.native_window or 1)
        return StreamCache(self, caches, self.kinds)

    def facts(self) -> dict[str, Any]:
        """Returns what must agree for remembered keys to be of use: the model and the sizes."""
        config = self.model.config.get_text_config()
        shapes = [tuple(parameter.shape) for parameter in self.model.parameters()]
        return {
            "model_type": config.model_type,
            "parameters": sum(math.prod(shape) for shape in shapes),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "seq_len": self.seq_len,
            "positions": sorted({repr((e.rope, e.seq_len)) for e in self.encodings.values()}),
            "num_sink_tokens": self.num_sink_tokens,
            "sliding_window": self.sliding_window,
        }


def _plan(
    streamed: StreamedModel, model: PreTrainedModel
) -> tuple[list[LayerEncoding], tuple[str, ...], int | None]:
    """Returns each layer's encoding and cache, and the model's own sliding window."""
    if model.config.model_type in STAND_INS:
        layers = layer_count(as_mapping(model.config))
        return [LayerEncoding(bias=alibi_of(model))] * layers, (SINKS,) * layers, None
    family = require_family(model)
    table_form(model)
    if family.mla:
        raise UnsupportedModelError(
            f"model_type {model.config.model_type!r} has latent attention (MLA): only a part of "
            "each key turns, outside of the attention function. It cannot be streamed yet."
        )
    config = text_part(as_mapping(model.config))
    if config.get("num_kv_shared_layers"):
        raise UnsupportedModelError(
            f"{config['num_kv_shared_layers']} layers of this model read the keys of another layer "
            "(num_kv_shared_layers), which a stream does not do yet."
        )
    ropes, types = _ropes(streamed, model), layer_types(config, family)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"layers of type {', '.join(sorted(unknown))} cannot be streamed; full_attention and "
            "sliding_attention can."
        )
    encodings = []
    for layer in range(len(types)):
        rope = ropes.for_layer(layer)
        by_length = rope is not None and rope.method.depends_on_length
        encodings.append(LayerEncoding(rope, streamed.seq_len if by_length else None))
    given = streamed.original_max_position_embeddings
    slides = sliding_layers(config, ropes, original_max_position_embeddings=given)
    kinds = tuple(SLIDING if slide else SINKS for slide in slides)
    return encodings, kinds, config.get("sliding_window")


def _ropes(streamed: StreamedModel, model: PreTrainedModel) -> Ropes:
    given = streamed.original_max_position_embeddings
    return rope_from_config(model.config, original_max_position_embeddings=given)


def _seated(streamed: StreamedModel, model: PreTrainedModel) -> PreTrainedModel:
    """Returns the twin, its layers seated and calling this module's attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, new_tokens)
    found = twin(model)
    if model.config.model_type in STAND_INS:
        stand_in(found, cast(AttentionFunction, attention), NAME)
    else:
        _hand_through(found, _ropes(streamed, model))
    text = found.config.get_text_config().model_type
    for module in found.modules():
        layer = getattr(module, "layer_idx", None)
        tower = getattr(getattr(module, "config", None), "model_type", text)  # vision has its own
        if isinstance(layer, int) and tower == text:
            kind, encoding = streamed.kinds[layer], streamed.encodings[layer]
            object.__setattr__(module, "seat", Seat(streamed, layer, kind, encoding))
    if found.generation_config is not None:  # MPT's says False: each step would be fed all again
        found.generation_config.use_cache = True
    return found.eval()


def _hand_through(model: PreTrainedModel, ropes: Ropes) -> None:
    """Lets a model's rotary modules turn nothing, and its layers call this module's attention."""
    form = table_form(model)
    for parent, name, _ in rotary_modules(model):
        parent._modules[name] = Unturned(ropes, form)
    model.base_model.register_forward_pre_hook(refuse_weights, with_kwargs=True)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} has its attention written into its layers, where a stream "
            "cannot reach it."
        )
