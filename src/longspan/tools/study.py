"""`study`: small models that differ only in how they know positions, trained and read alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from longspan.bias.base import check_count
from longspan.errors import ConfigError
from longspan.files import write_text
from longspan.rotary.scaling import scaling_for_method
from longspan.rotary.scaling.base import check_length
from longspan.tools.evaluate import versions
from longspan.tools.measuring import Progress
from longspan.tools.ranks import Ranks
from longspan.tools.study_budget import Budget
from longspan.tools.study_corpus import cut, train_tokenizer
from longspan.tools.study_plan import ModelSizes, Variant, variants
from longspan.tools.study_results import StudyProtocol, StudyResult
from longspan.tools.study_run import Study
from longspan.tools.study_training import Training
from longspan.tools.texts import Text
from longspan.training.schedule import check_schedule

WARMUP_SHARE = 0.05
WEIGHT_DECAY = 0.1


def study(
    texts: Sequence[Text],
    *,
    encodings: Sequence[str],
    length: int = 256,
    reach: int = 16,
    seeds: Sequence[int] = (0, 1),
    steps: int | None = None,
    minutes: float | None = None,
    vocabulary: int = 512,
    methods: Sequence[str] = ("linear", "ntk", "yarn"),
    batch_size: int = 8,
    learning_rate: float = 2e-3,
    memory_length: int | None = None,
    documents: int | None = None,
    sizes: ModelSizes | None = None,
    state_dir: str | Path | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> StudyResult:
    """Returns how models that differ only in their position encoding read beyond their training.

    Weights that two models share start equal under one seed, every step reads the same rows, and
    all take the same number of steps. Each is then read on documents that none was trained on, to
    `reach` times the trained length: whole, in windows and in segments, with memory where it has
    one, and the RoPE models under each scaling method too.

    Args:
        texts: to train on, except their last tenths, which are held out.
        encodings: names from `longspan.models.ENCODINGS`; "transformer_xl" remembers earlier
            segments, others with "+memory" behind; "transformer_xl-memory" does not.
        length: tokens of a training row.
        reach: how many times that a held-out document has, 2 or more.
        seeds: one model of each encoding a seed.
        steps: of training a model.
        minutes: instead: how long all trainings may take here, from the time of their first steps.
        vocabulary: of the tokenizer trained on the texts; 256 is bytes.
        methods: rope scalings to read the RoPE models under, at reach · length tokens.
        batch_size: rows a step.
        learning_rate: at its peak.
        memory_length: tokens remembered; `length` unless given.
        documents: held-out documents at most.
        sizes: of every model.
        state_dir: where trained models, readings and the tokenizer are kept; an interrupted study
            goes on from them.
        progress: called with what is done, training steps done, and of how many.
        ranks: processes that share the models among them, through `state_dir`.

    Raises:
        ConfigError: for settings that do not fit, or a state of another study.
        InputError: if the texts are too short.
        NumericalError: if a loss or likelihood is not finite.
        OutputError: if the state cannot be written.
    """
    chosen = variants(encodings)
    _check(length, reach, seeds, steps, minutes)
    scalings = _scalings(methods, chosen, reach, length)
    for name, count in (("batch_size", batch_size), ("documents", documents)):
        if count is not None:
            check_count(name, count)
    folder, ranks = None if state_dir is None else Path(state_dir), ranks or Ranks()
    if folder is None and ranks.size > 1:
        raise ConfigError(f"{ranks.size} processes share a study through state_dir. Give one.")
    sizes = sizes or ModelSizes()
    remembered = length if memory_length is None else memory_length
    configs = [
        one.config(sizes, vocabulary=vocabulary, length=length, memory_length=remembered)
        for one in chosen
    ]
    tokenizer = train_tokenizer(texts, vocabulary)
    encoded = [tokenizer.encode(text.content).ids for text in texts]
    corpus = cut(encoded, reach=reach * length, documents=documents)
    corpus.rows(0, batch_size=batch_size, length=length, seed=0)
    if steps is None:
        budget = Budget(minutes=minutes or 0, batch_size=batch_size, seeds=len(seeds))
        steps = budget.steps(configs, corpus, folder, ranks)
    warmup_steps = max(1, round(steps * WARMUP_SHARE))
    check_schedule(peak=learning_rate, warmup_steps=warmup_steps, steps=steps, schedule="cosine")
    protocol = StudyProtocol(
        texts=tuple((text.name, text.sha256) for text in texts),
        vocabulary=vocabulary,
        length=length,
        reach=reach * length,
        documents=len(corpus.held_out),
        memory_length=remembered,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=WEIGHT_DECAY,
        train_tokens=len(corpus.train),
        seeds=tuple(seeds),
        versions=versions(),
        **vars(sizes),
    )
    if folder is not None and ranks.rank == 0:
        keep_tokenizer(folder / "tokenizer.json", tokenizer.to_str())
    trainings = {
        (one.name, seed): Training(
            name=one.name,
            config=config,
            seed=seed,
            protocol=protocol,
            corpus=corpus,
            folder=None if folder is None else folder / f"{one.name}-{seed}",
        )
        for one, config in zip(chosen, configs, strict=True)
        for seed in seeds
    }
    return Study(
        protocol=protocol,
        variants=chosen,
        methods=scalings,
        corpus=corpus,
        trainings=trainings,
        folder=folder,
        progress=progress,
        ranks=ranks,
    ).result()


def keep_tokenizer(path: Path, content: str) -> None:
    """Writes the tokenizer, or refuses a folder whose models were trained with another.

    Raises:
        ConfigError: if another is there.
        OutputError: if it cannot be written.
    """
    if not path.exists():
        write_text(path, content)
    elif path.read_text(encoding="utf-8") != content:
        raise ConfigError(
            f"{path} is of another study: its text or vocabulary differs. Give those again, or "
            "name another folder."
        )


def _scalings(
    methods: Sequence[str], chosen: Sequence[Variant], reach: int, length: int
) -> list[str]:
    """Returns the canonical names of the methods to read RoPE models under, each one that can."""
    if not any(one.encoding == "rope" and not one.remembers for one in chosen):
        return []
    names = [scaling_for_method(method).method for method in methods]
    for name in names:
        scaling_for_method(name).for_factor(reach, length)
    return [name for name in dict.fromkeys(names) if name != "none"]


def _check(
    length: int,
    reach: int,
    seeds: Sequence[int],
    steps: int | None,
    minutes: float | None,
) -> None:
    check_length("length", length)
    if length < 2:
        raise ConfigError(f"length must be ≥ 2, a token and one before it, got {length}.")
    if reach < 2:
        raise ConfigError(
            f"reach must be ≥ 2 times the length, got {reach}, or nothing is read beyond it."
        )
    if not seeds or len(set(seeds)) != len(seeds) or not all(0 <= s < 2**32 for s in seeds):
        raise ConfigError(
            f"seeds must be one or more, each once, from 0 to 2³² − 1, got {list(seeds)}."
        )
    if (steps is None) == (minutes is None):
        raise ConfigError(f"give either steps or minutes, got steps={steps} and minutes={minutes}.")
    if steps is not None:
        check_length("steps", steps)
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"minutes must be > 0 and finite, got {minutes}.")
