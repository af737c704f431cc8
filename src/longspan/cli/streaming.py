"""What the runs of `longspan stream` begin with: a stream over a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longspan.adapters.load import load_model, read_config
from longspan.errors import ConfigError
from longspan.files import refuse_existing, write_text
from longspan.tools.stream import Stream, stream
from longspan.tools.stream_reach import check_fits, default_window


def open_stream(
    model: str,
    *,
    num_sink_tokens: int,
    sliding_window: int | None,
    seq_len: int | None,
    original: int | None,
    force: bool,
    dtype: str,
    trust_remote_code: bool,
    pinned: Callable[[Any], int] = lambda tokenizer: 0,
    load: Path | None = None,
    save: Path | None = None,
) -> Stream:
    """Returns a stream over a checkpoint; what can be refused is refused before it is loaded.

    Args:
        model: see `load_model`.
        num_sink_tokens, sliding_window, seq_len, original: see `stream`.
        force: whether `save` may be there already.
        dtype, trust_remote_code: see `load_model`.
        pinned: from the tokenizer to the first tokens that must not be dropped.
        load, save: where a stream is taken up from, and will be kept.
    """
    if save is not None:
        refuse_existing(save, force=force)
        require_writable(save.parent)
    lengths = {"seq_len": seq_len, "original_max_position_embeddings": original}
    config = read_config(model)
    window = sliding_window or default_window(config, num_sink_tokens, original)
    check_fits(config, num_sink_tokens, window, **lengths)
    loaded, tokenizer = load_model(
        model, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    sinks = max(num_sink_tokens, pinned(tokenizer))
    opened = stream(loaded, tokenizer, sinks, sliding_window, **lengths)
    if opened.num_sink_tokens < sinks and pinned(tokenizer):
        raise ConfigError(
            f"every layer of {model} keeps to its own window of {opened.sliding_window:,} tokens, "
            "so nothing can be pinned. Leave --pin-prompt out."
        )
    if load is not None:
        opened.load(load)
    return opened


def require_writable(folder: Path) -> None:
    """Refuses a place that cannot be written to, before the work is done."""
    probe = folder / ".writable"
    write_text(probe, "")
    probe.unlink()
