"""Studies as `study` would return them, for the tests of what is drawn from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longspan.tools.evaluation import Bucket
from longspan.tools.study_results import (
    Reading,
    StudyCurve,
    StudyProtocol,
    StudyResult,
    TrainedModel,
)

LENGTH, REACH = 256, 4096
EDGES = (1, 64, 128, 256, 512, 1024, 2048, 4097)

# Invented, but such as the literature has them.
WHOLE = {
    "rope": (3.72, 3.31, 3.15, 3.24, 3.62, 4.10, 4.51),
    "alibi": (3.73, 3.32, 3.16, 3.09, 3.07, 3.06, 3.06),
    "t5": (3.72, 3.31, 3.15, 3.09, 3.11, 3.14, 3.17),
    "transformer_xl": (3.73, 3.32, 3.17, 3.11, 3.14, 3.18, 3.23),
    "sinusoidal": (3.80, 3.40, 3.26, 4.90, 6.10, 6.70, 7.02),
    "none": (3.81, 3.42, 3.28, 3.37, 4.30, 5.20, 5.81),
}
SCALED = {
    "linear": (4.90, 4.52, 4.41, 4.35, 4.40, 4.43, 4.52),
    "ntk": (3.80, 3.40, 3.25, 3.20, 3.24, 3.30, 3.62),
    "yarn": (3.78, 3.37, 3.21, 3.17, 3.19, 3.23, 3.31),
}
WINDOWS = {  # at 256, 512, 1024, 2048 tokens; read whole they are the mean of `WHOLE`
    "rope": (3.12, 3.25, 3.60, 4.05),
    "alibi": (3.13, 3.09, 3.07, 3.06),
    "t5": (3.12, 3.09, 3.10, 3.12),
    "transformer_xl": (3.14, 3.11, 3.12, 3.15),
    "sinusoidal": (3.23, 4.70, 5.80, 6.50),
    "none": (3.25, 3.40, 4.20, 5.10),
}
ALONE = (3.73, 3.32, 3.17, 3.33, 3.34, 3.33, 3.34)
RECURRENT = (3.73, 3.32, 3.17, 3.13, 3.12, 3.12, 3.11)

PROTOCOL = StudyProtocol(
    texts=(("python-docs", "ab12" * 16), ("novel.txt", "cd34" * 16)),
    vocabulary=512,
    length=LENGTH,
    reach=REACH,
    documents=24,
    memory_length=256,
    steps=2000,
    batch_size=8,
    learning_rate=2e-3,
    warmup_steps=100,
    weight_decay=0.1,
    train_tokens=4_000_000,
    hidden_size=128,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=352,
    seeds=(0, 1),
    versions=(("longspan", "0.1.0"), ("torch", "2.13.0")),
)


def curve(
    encoding: str,
    values: Sequence[float],
    reading: Reading = "whole",
    *,
    method: str = "none",
    window: int | None = None,
    half: float | None = 0.05,
    spread: float = 0.02,
    seeds: int = 2,
    nll: float | None = None,
) -> StudyCurve:
    """Returns a curve of NLL by bucket, ± `half`; the seeds' means are `spread` apart.

    Its mean is the one of the buckets by their width, unless given.
    """
    buckets = tuple(
        Bucket(
            start=start,
            stop=stop,
            nll=value,
            low=None if half is None else value - half,
            high=None if half is None else value + half,
        )
        for value, start, stop in zip(values, EDGES, EDGES[1:], strict=False)
    )
    width = buckets[-1].stop - 1
    mean = sum(b.nll * (b.stop - b.start) for b in buckets) / width if nll is None else nll
    steps = [0.0] if seeds == 1 else [2 * at / (seeds - 1) - 1 for at in range(seeds)]
    return StudyCurve(
        encoding=encoding,
        method=method,
        reading=reading,
        window=window or (REACH if reading == "whole" else LENGTH),
        nll=mean,
        by_seed=tuple(mean + step * spread / 2 for step in steps),
        buckets=buckets,
        seconds=12.25,
    )


def study_of(
    *,
    whole: Mapping[str, Sequence[float]] | None = None,
    scaled: Mapping[str, Sequence[float]] | None = None,
    windows: Mapping[str, Sequence[float]] | None = None,
    memory: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    alone: Mapping[str, Sequence[float]] | None = None,
    half: float | None = 0.05,
    spread: float = 0.02,
    **protocol: Any,
) -> StudyResult:
    """Returns a study of these readings: NLL by bucket, or of `windows` the mean by window."""
    made = replace(PROTOCOL, **protocol)
    same: Any = {"half": half, "spread": spread, "seeds": len(made.seeds)}
    curves = [curve(name, values, **same) for name, values in (whole or {}).items()]
    curves += [
        curve("rope", values, method=method, **same) for method, values in (scaled or {}).items()
    ]
    for name, means in (windows or {}).items():
        for power, mean in enumerate(means):
            values = (mean,) * 7
            curves.append(curve(name, values, "window", window=LENGTH * 2**power, **same))
    for name, (segments, recurrent) in (memory or {}).items():
        curves.append(curve(name, segments, "segments", **same))
        curves.append(curve(name, recurrent, "recurrent", **same))
    curves += [curve(name, values, "segments", **same) for name, values in (alone or {}).items()]
    models = tuple(
        TrainedModel(
            encoding=name,
            seed=seed,
            parameters=1_234_567,
            loss=((100, 4.5), (made.steps, 3.05 + seed / 100)),
            seconds=61.5,
        )
        for name in dict.fromkeys(one.encoding for one in curves)
        for seed in made.seeds
    )
    return StudyResult(protocol=made, models=models, curves=tuple(curves))


def full_study(**protocol: Any) -> StudyResult:
    """Returns a study with every figure, learned positions among them."""
    return study_of(
        whole=WHOLE,
        scaled=SCALED,
        windows=WINDOWS,
        memory={"transformer_xl": (ALONE, RECURRENT)},
        alone={"learned": ALONE, "rope": ALONE},
        **protocol,
    )
