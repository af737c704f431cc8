"""longspan: longer context for real checkpoints.

Names load when first used, so importing longspan changes nothing and pulls in no transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan._version import __version__

if TYPE_CHECKING:
    from longspan.adapters.context_parallel import context_parallel, shard_sequence
    from longspan.adapters.load import load_model
    from longspan.adapters.rope import rope_from_config
    from longspan.adapters.rope_writing import rope_to_config
    from longspan.attention import attend
    from longspan.bias import (
        Alibi,
        ShawRelative,
        T5Bias,
        TransformerXLBias,
        alibi_slopes,
        t5_bucket,
    )
    from longspan.caches import FullCache, SinkCache, WindowCache
    from longspan.errors import LongspanError
    from longspan.masks import attention_sinks, causal, sliding_window
    from longspan.rotary.frequencies import rope_frequencies
    from longspan.rotary.rope import Rope, RotaryEmbedding
    from longspan.rotary.rotate import rerotate, rotate
    from longspan.rotary.scaling import (
        SCALINGS,
        DynamicNTK,
        Llama3,
        LongRope,
        NoScaling,
        NTKAware,
        NTKByParts,
        PositionInterpolation,
        RopeScaling,
        Yarn,
    )
    from longspan.tools.evaluate import evaluate
    from longspan.tools.extend import extend
    from longspan.tools.finetune import finetune
    from longspan.tools.plan import plan
    from longspan.tools.sampling import Sampling
    from longspan.tools.sinks import sinks
    from longspan.tools.stream import stream
    from longspan.tools.study import study

_SCALING = "longspan.rotary.scaling"
_HOME = {
    "Alibi": "longspan.bias",
    "DynamicNTK": _SCALING,
    "FullCache": "longspan.caches",
    "Llama3": _SCALING,
    "LongRope": _SCALING,
    "LongspanError": "longspan.errors",
    "NTKAware": _SCALING,
    "NTKByParts": _SCALING,
    "NoScaling": _SCALING,
    "PositionInterpolation": _SCALING,
    "Rope": "longspan.rotary.rope",
    "RopeScaling": _SCALING,
    "RotaryEmbedding": "longspan.rotary.rope",
    "SCALINGS": _SCALING,
    "Sampling": "longspan.tools.sampling",
    "ShawRelative": "longspan.bias",
    "SinkCache": "longspan.caches",
    "T5Bias": "longspan.bias",
    "TransformerXLBias": "longspan.bias",
    "WindowCache": "longspan.caches",
    "Yarn": _SCALING,
    "alibi_slopes": "longspan.bias",
    "attend": "longspan.attention",
    "attention_sinks": "longspan.masks",
    "causal": "longspan.masks",
    "context_parallel": "longspan.adapters.context_parallel",
    "evaluate": "longspan.tools.evaluate",
    "extend": "longspan.tools.extend",
    "finetune": "longspan.tools.finetune",
    "load_model": "longspan.adapters.load",
    "plan": "longspan.tools.plan",
    "rerotate": "longspan.rotary.rotate",
    "rope_frequencies": "longspan.rotary.frequencies",
    "rope_from_config": "longspan.adapters.rope",
    "rope_to_config": "longspan.adapters.rope_writing",
    "rotate": "longspan.rotary.rotate",
    "shard_sequence": "longspan.adapters.context_parallel",
    "sinks": "longspan.tools.sinks",
    "sliding_window": "longspan.masks",
    "stream": "longspan.tools.stream",
    "study": "longspan.tools.study",
    "t5_bucket": "longspan.bias",
}

__all__ = [
    "SCALINGS",
    "Alibi",
    "DynamicNTK",
    "FullCache",
    "Llama3",
    "LongRope",
    "LongspanError",
    "NTKAware",
    "NTKByParts",
    "NoScaling",
    "PositionInterpolation",
    "Rope",
    "RopeScaling",
    "RotaryEmbedding",
    "Sampling",
    "ShawRelative",
    "SinkCache",
    "T5Bias",
    "TransformerXLBias",
    "WindowCache",
    "Yarn",
    "__version__",
    "alibi_slopes",
    "attend",
    "attention_sinks",
    "causal",
    "context_parallel",
    "evaluate",
    "extend",
    "finetune",
    "load_model",
    "plan",
    "rerotate",
    "rope_frequencies",
    "rope_from_config",
    "rope_to_config",
    "rotate",
    "shard_sequence",
    "sinks",
    "sliding_window",
    "stream",
    "study",
    "t5_bucket",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
