"""`evaluate`: what each method does to the likelihood of long documents, on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan._version import __version__
from longspan.errors import ConfigError
from longspan.rotary.rotate import Phase
from longspan.rotary.scaling.base import check_length
from longspan.tools.cells import Cells, weights_digest
from longspan.tools.evaluation import Evaluation, Protocol
from longspan.tools.measuring import Progress, Run, circumstances, digest
from longspan.tools.ranks import Ranks
from longspan.tools.rows import bos_token, read_rows
from longspan.tools.subjects import Applied, canonical_methods, check_reach, trained_length
from longspan.tools.summary import default_bucket
from longspan.tools.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Passkey = tuple[Sequence[int], Sequence[float]]
"""The lengths (tokens) and depths (0 to 1) of hidden keys."""

MOST_DOCUMENTS = 64  # unless more are asked for; intervals are narrow by then


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[Text],
    *,
    length: int | None = None,
    methods: Sequence[str],
    factor: float | None = None,
    documents: int | None = None,
    bucket: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    passkey: Passkey | None = None,
    phase: Phase = "float64",
    allow_short: bool = False,
    original_max_position_embeddings: int | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    state_dir: str | Path | None = None,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Returns the likelihood of long documents under each method, and its passkey retrieval.

    One forward a document and method, on the same target tokens; with `window` and `stride`, one
    a window. Dynamic NTK runs under the table of the document's (or window's) full length.
    Everything is checked, and every method applied, before the first forward. Several ranks share
    the documents and passkeys, and all return the same.

    Args:
        model: a live causal model of a known family, in eval mode; it is not changed.
        tokenizer: the model's.
        texts: what to read; documents are cut from the start of each, without overlap.
        length: tokens a document, BOS included where the tokenizer adds one; twice the trained
            length unless given.
        methods: names of scaling methods; "none" is the checkpoint as it stands.
        factor: of every method; tokens of a forward / trained length unless given.
        documents: how many; as many as the texts hold unless given, but not above 64.
        bucket: tokens a position bucket; a power of two that gives 12 to 24 unless given.
        window: tokens of a forward, where a document is read in windows.
        stride: tokens from one window's start to the next.
        passkey: lengths and depths of hidden keys; a length no forward reaches is invalid.
        phase: `float64` angles, or `hf_float32` for transformers' own rounding.
        allow_short: measure within the trained length too, where no method is needed.
        original_max_position_embeddings: the trained length, where the config leaves it open.
        name: of the model in the protocol; its config's unless given.
        progress: called before every part of this rank, and at the end.
        state_dir: where finished parts are kept; an interrupted run goes on from them.
        ranks: the processes that all call this; this one alone unless given.

    Raises:
        ConfigError: for settings that would measure nothing, a state of another protocol, or ranks
            that were given different ones.
        InputError: if the texts are too short, or the tokenizer is not the model's.
        LongspanError: if another rank is lost.
        NumericalError: if logits are not finite.
        OutputError: if the state cannot be written.
        UnsupportedModelError: for a family longspan cannot rotate.
    """
    names = canonical_methods(methods)
    trials = passkey_trials(passkey)
    trained = trained_length(model, original_max_position_embeddings)
    length = 2 * trained if length is None else length
    reach = check_reach(
        length, window, stride, trained_length=trained, factor=factor, allow_short=allow_short
    )
    bucket = default_bucket(length) if bucket is None else bucket
    check_length("bucket", bucket)
    applied = Applied(
        reach=reach,
        trained_length=trained,
        factor=factor,
        original_max_position_embeddings=original_max_position_embeddings,
        phase=phase,
    )
    subjects = [applied.subject(model, method) for method in names]
    vocab_size = subjects[0].split.vocab_size
    rows = read_rows(tokenizer, texts, length=length, count=documents, vocab_size=vocab_size)
    rows = rows if documents else rows[:MOST_DOCUMENTS]
    bos = bos_token(tokenizer)
    protocol = Protocol(
        model=name or model.config._name_or_path or type(model).__name__,
        texts=tuple((text.name, text.sha256) for text in texts),
        length=length,
        documents=len(rows),
        bos=bos is not None,
        trained_length=trained,
        dtype=str(model.dtype).removeprefix("torch."),
        phase=phase,
        bucket=bucket,
        window=window,
        stride=stride,
        versions=versions(),
    )
    weights = weights_digest(model)
    ranks = ranks or Ranks()
    same = protocol, weights, digest(rows), [circumstances(one) for one in subjects], trials
    ranks.require_equal("protocol", repr(same))
    with ranks.in_turn():  # each tries to write into the folder
        cells = Cells(state_dir, protocol, weights)
    run = Run(
        protocol=protocol,
        rows=rows,
        bos=bos,
        tokenizer=tokenizer,
        reach=reach,
        cells=cells,
        ranks=ranks,
        progress=progress,
    )
    return run.evaluation(subjects, trials)


def passkey_trials(passkey: Passkey | None) -> tuple[tuple[int, float], ...]:
    """Returns every (length, depth) to try; none without `passkey`."""
    if passkey is None:
        return ()
    lengths, depths = passkey
    for length in lengths:
        check_length("a passkey length", length)
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ConfigError(f"a passkey depth must be from 0 (start) to 1 (end), got {depth}.")
    if not lengths or not depths:
        raise ConfigError(f"passkey needs lengths and depths, got {lengths} and {depths}.")
    return tuple((length, float(depth)) for length in lengths for depth in depths)


def versions() -> tuple[tuple[str, str], ...]:
    """Returns the releases that made the numbers."""
    others = tuple((package, version(package)) for package in ("torch", "transformers"))
    return (("longspan", __version__), *others)
