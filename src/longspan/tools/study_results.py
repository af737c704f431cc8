"""What `study` returns: small models that differ only in how they know positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.errors import ConfigError
from longspan.tools.evaluation import Bucket
from longspan.tools.records import record_from_json, record_to_json

FORM = "longspan study 1"

Reading = Literal["whole", "window", "segments", "recurrent"]
"""How held-out documents are read.

whole: one forward a document, far beyond the trained length.
window: windows of `window` tokens, each a quarter further than the last; only new tokens count.
segments: pieces of the trained length, each on its own: no token sees the piece before.
recurrent: the same pieces, each with the memory that the ones before left.
"""


@dataclass(frozen=True, kw_only=True)
class StudyProtocol:
    """How the models were trained and read; all of them alike.

    Attributes:
        texts: (name, sha256) of each source text.
        vocabulary: tokens the tokenizer knows; 256 is bytes.
        length: tokens of a training row, the trained length.
        reach: tokens of a held-out document, a multiple of the length.
        documents: held-out documents, from the end of the texts.
        memory_length: tokens remembered where an encoding remembers.
        steps, batch_size: of training; steps · batch_size · length tokens a model.
        learning_rate, warmup_steps, weight_decay: of AdamW, with a cosine schedule.
        train_tokens: tokens of the training text, read in turn.
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
            intermediate_size: of every model.
        seeds: of weights and of the order of the text.
        versions: of longspan, torch and transformers.
    """

    texts: tuple[tuple[str, str], ...]
    vocabulary: int
    length: int
    reach: int
    documents: int
    memory_length: int
    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    train_tokens: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    seeds: tuple[int, ...]
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens each model was trained on."""
        return self.steps * self.batch_size * self.length


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """One model's training.

    Attributes:
        encoding: as asked for: a name from `ENCODINGS`, with "+memory" or "-memory" behind it
            where that is not the encoding's own habit.
        seed: of its weights and its order of text.
        parameters: how many it has.
        loss: (step, mean training loss since the one before, nats per token).
        seconds: of training, in all its parts.
    """

    encoding: str
    seed: int
    parameters: int
    loss: tuple[tuple[int, float], ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StudyCurve:
    """The likelihood of the held-out documents, all seeds together.

    Attributes:
        encoding: of the model.
        method: rope scaling it was read under; "none" elsewhere.
        reading: how it was read.
        window: tokens of one forward.
        nll: mean over documents and seeds of all scored targets, nats per token.
        by_seed: the mean of each seed, in the protocol's order.
        buckets: by target position in the document, each twice as wide as the one before; the
            interval is over documents (their mean over seeds).
        seconds: of reading, all seeds.
    """

    encoding: str
    method: str
    reading: Reading
    window: int
    nll: float
    by_seed: tuple[float, ...]
    buckets: tuple[Bucket, ...]
    seconds: float

    @property
    def name(self) -> str:
        """What a legend calls it."""
        return self.encoding if self.method == "none" else f"{self.encoding} · {self.method}"


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Everything one study measured."""

    protocol: StudyProtocol
    models: tuple[TrainedModel, ...]
    curves: tuple[StudyCurve, ...]

    def curve(
        self, encoding: str, reading: Reading, method: str = "none", window: int | None = None
    ) -> StudyCurve:
        """Returns one curve; the first of its windows unless given.

        Raises:
            ConfigError: if it was not measured.
        """
        for one in self.curves:
            named = (one.encoding, one.reading, one.method) == (encoding, reading, method)
            if named and window in (None, one.window):
                return one
        raise ConfigError(
            f"no reading {reading!r} of {encoding!r} under {method!r}; measured: "
            f"{sorted({(one.encoding, one.reading, one.method) for one in self.curves})}."
        )


def to_json(result: StudyResult) -> str:
    """Returns the study as JSON.

    Raises:
        NumericalError: if a number is NaN or infinite.
    """
    return record_to_json(result, FORM)


def from_json(text: str) -> StudyResult:
    """Returns the study that `to_json` wrote.

    Raises:
        InputError: if the text is not one.
    """
    return record_from_json(StudyResult, text, FORM)
