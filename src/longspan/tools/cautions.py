"""What other readers of a planned config get wrong, and what scaling alone will not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longspan.adapters.families import family_of, layer_types, text_part
from longspan.adapters.lengths import Lengths
from longspan.adapters.ropes import Ropes
from longspan.rotary.scaling import DynamicNTK, NTKAware, NTKByParts, PositionInterpolation, Yarn

# Beyond these factors the published results need fine-tuning: PI gives perplexity 16 at 4×
# (LLaMA-7B), YaRN holds untuned to about 2×.
UNTUNED = {"linear": 1.0, "yarn": 2.0, "ntk": 2.0, "ntk-by-parts": 2.0}


def cautions(config: Mapping[str, Any], ropes: Ropes, lengths: Lengths, to: int) -> tuple[str, ...]:
    """Returns one sentence for each thing to watch with a planned config.

    Args:
        config: the config before the plan.
        ropes: the planned ones.
        lengths: of the config before the plan.
        to: tokens planned for.
    """
    text = text_part(config)
    scaling = ropes[ropes.reaching].method
    return (
        *_by_method(scaling, to, lengths),
        *_by_spelling(text, ropes),
        *_by_training(scaling, to / lengths.trained),
        *_by_family(text, ropes, lengths),
    )


def _by_method(scaling: Any, to: int, lengths: Lengths) -> Iterator[str]:
    if isinstance(scaling, DynamicNTK):
        yield (
            "dynamic: max_position_embeddings stays the trained length, as transformers reads it; "
            f"servers that take their limit from it need theirs set to {to} by hand"
        )
        yield (
            "dynamic: transformers does not recompute a cache when the sequence grows past "
            f"{lengths.trained}, so its keys mix several tables; longspan fixes one table a request"
        )
    if isinstance(scaling, NTKAware):
        yield (
            "ntk: there is no such rope_type, so it is written as a raised rope_theta, which every "
            "reader gets right but none recognises; the longspan block remembers what it was"
        )
    if isinstance(scaling, NTKByParts):
        yield (
            "ntk-by-parts: written as yarn with attention_factor 1.0; a reader that ignores "
            "attention_factor (it is newer than yarn) runs YaRN's temperature instead"
        )
    if isinstance(scaling, Yarn) and not scaling.truncate:
        yield (
            "yarn: truncate=false is read by transformers and gpt-oss's code; a reader "
            "that does not know it rounds the ramp's ends"
        )


def _by_spelling(text: Mapping[str, Any], ropes: Ropes) -> Iterator[str]:
    yield (
        "written as rope_parameters with rope_theta inside (transformers 5); a reader of "
        "rope_scaling and a root rope_theta finds neither and runs plain RoPE from its default base"
    )
    if len(ropes) > 1:
        yield (
            f"only {ropes.reaching} layers are scaled; a reader that applies one rope to all "
            "layers also scales the sliding ones, which never see past their window"
        )
    if text.get("dual_chunk_attention_config"):
        yield (
            "dual_chunk_attention_config extends this model in its own way where a server "
            "supports it; the two do not compose"
        )


def _by_training(scaling: Any, ratio: float) -> Iterator[str]:
    limit = UNTUNED.get(scaling.method)
    if limit is not None and ratio > limit:
        need = "200 to 1000" if isinstance(scaling, PositionInterpolation) else "400 to 600"
        yield (
            f"{scaling.method}: {ratio:g} times the trained length without fine-tuning is past "
            f"what its authors report to hold ({limit:g}×); plan for {need} steps, and evaluate"
        )


def _by_family(text: Mapping[str, Any], ropes: Ropes, lengths: Lengths) -> Iterator[str]:
    kinds = layer_types(text, family_of(text))
    rotating = {kind for kind, key in zip(kinds, ropes.layers, strict=False) if key is not None}
    window = text.get("sliding_window")
    if rotating == {"sliding_attention"} and window and window <= lengths.trained:
        yield (
            f"every layer that rotates slides over {window} tokens, so no rotation beyond the "
            f"trained {lengths.trained} is ever seen: scaling changes what it need not"
        )
    if text.get("model_type") == "phi3" and ropes[ropes.reaching].method.method != "ntk":
        yield (
            "phi3: transformers' own config class loads only longrope and plain rope (ntk); this "
            "can be evaluated in memory, not saved"
        )
