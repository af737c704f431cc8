"""What is remembered of the tokens gone by: everything, a window, or sinks and a window."""

from __future__ import annotations

from longspan.caches.cache import FullCache, KeyValueCache, SinkCache, WindowCache
from longspan.caches.encoding import LayerEncoding, Scoring
from longspan.caches.step import Step

__all__ = [
    "FullCache",
    "KeyValueCache",
    "LayerEncoding",
    "Scoring",
    "SinkCache",
    "Step",
    "WindowCache",
]
