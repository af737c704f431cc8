"""One evaluation under way: parts measured one by one, each kept as soon as it is finished."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.adapters.prompt import ReadPrompt
from longspan.errors import NumericalError
from longspan.metrics.passkey import (
    CANDIDATES,
    PasskeyPrompt,
    Retrieval,
    build_prompt,
    retrieve,
)
from longspan.metrics.windows import perplexity, strided_nll
from longspan.tools.cells import Cells
from longspan.tools.evaluation import Evaluation, MethodResult, PasskeyTrial, Protocol
from longspan.tools.ranks import Ranks
from longspan.tools.subjects import Subject
from longspan.tools.summary import position_buckets, versus

Progress = Callable[[str, int, int], None]
"""Gets what is measured next, how many parts are done, and of how many."""

Cell = dict[str, Tensor]
"""What is kept of a part."""


class Part(NamedTuple):
    """A document under one method, or a passkey trial: measured, and kept, by itself."""

    name: str
    """Of its cell."""
    what: str
    """It is, in words."""
    own: dict[str, Any]
    """The circumstances of this part alone."""
    measure: Callable[[], Cell]


class Trial(NamedTuple):
    """A key hidden from one method, at a depth of a length in tokens."""

    one: Subject
    length: int
    depth: float
    prompt: PasskeyPrompt | str
    """What is asked, or in words why nothing can be."""

    @property
    def name(self) -> str:
        """The name of its cell."""
        return f"{self.one.method}-passkey-{self.length}-{self.depth:.4f}"


@dataclass(frozen=True)
class Likelihoods:
    """One method's NLL of every target, [documents, N − 1] float32, and the seconds it took."""

    nll: Tensor
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """What an evaluation needs, all of it checked.

    Attributes:
        protocol: what it will carry.
        rows: [documents, N] int64 tokens.
        bos: the token that starts every row, or None.
        tokenizer: for passkeys.
        reach: tokens of the longest forward.
        cells: where finished parts are kept.
        ranks: the processes that share the parts.
        progress: told of this rank's parts.
    """

    protocol: Protocol
    rows: Tensor
    bos: int | None
    tokenizer: Any
    reach: int
    cells: Cells
    ranks: Ranks
    progress: Progress | None

    def evaluation(
        self, subjects: Sequence[Subject], trials: Sequence[tuple[int, float]]
    ) -> Evaluation:
        """Measures what is not yet measured, and returns the whole, on every rank."""
        documents = {one.method: self.documents(one) for one in subjects}
        prompts = [(*trial, self.prompt(*trial)) for trial in trials]
        asked = [Trial(one, *prompt) for one in subjects for prompt in prompts]
        keys = [
            self.key(trial, trial.prompt) for trial in asked if not isinstance(trial.prompt, str)
        ]
        cells = self.measured([*chain.from_iterable(documents.values()), *keys])
        likelihoods = {
            method: together([cells[part.name] for part in parts])
            for method, parts in documents.items()
        }
        baseline = likelihoods.get("none")
        return Evaluation(
            protocol=self.protocol,
            methods=tuple(self.result(one, likelihoods[one.method], baseline) for one in subjects),
            passkey=tuple(outcome(trial, cells) for trial in asked),
        )

    def measured(self, parts: Sequence[Part]) -> dict[str, Cell]:
        """Measures this rank's share of the parts, and returns the cells of all by name."""
        mine = self.ranks.share(parts)
        cells = []
        for done, part in enumerate(mine):
            self.tell(part.what, done, len(mine))
            cells.append(self.kept(part))
        whole = self.ranks.gather(cells)
        self.tell("done", len(mine), len(mine))
        return {part.name: cell for part, cell in zip(parts, whole, strict=True)}

    def tell(self, what: str, done: int, parts: int) -> None:
        """Tells the progress callback, if there is one."""
        if self.progress is not None:
            self.progress(what, done, parts)

    def documents(self, one: Subject) -> list[Part]:
        """Returns the parts of one method's likelihoods."""
        return [self.document(one, index) for index in range(len(self.rows))]

    def document(self, one: Subject, index: int) -> Part:
        """Returns the measurement of a document's NLL and seconds."""
        row = self.rows[index : index + 1]

        def measure() -> Cell:
            begun = time.perf_counter()
            nll = self.score(one, row)
            seconds = time.perf_counter() - begun
            return {"nll": nll, "seconds": torch.tensor(seconds, dtype=torch.float64)}

        what = f"{one.method}, document {index + 1} of {len(self.rows)}"
        own = {**circumstances(one), "tokens": digest(row)}
        return Part(f"{one.method}-document-{index:04d}", what, own, measure)

    def score(self, one: Subject, row: Tensor) -> Tensor:
        """Returns a document's NLL, read whole or in windows."""
        window, stride = self.protocol.window, self.protocol.stride
        if window is None or stride is None:
            return one.token_nll(row)
        bos = self.bos is not None
        return strided_nll(one.token_nll, row, window=window, stride=stride, bos=bos)

    def prompt(self, length: int, depth: float) -> PasskeyPrompt | str:
        """Returns what every method is asked in one trial, or why it is invalid."""
        return build_prompt(
            self.tokenizer, length=length, depth=depth, limit=self.reach, bos=self.bos
        )

    def key(self, trial: Trial, prompt: PasskeyPrompt) -> Part:
        """Returns the measurement of whether a trial's key is found, and its rank."""
        one, length, depth, _ = trial

        def measure() -> Cell:
            got = self.retrieval(one, prompt, length)
            return {"found": torch.tensor(got.found), "rank": torch.tensor(got.rank)}

        what = f"{one.method}, key at {depth:.0%} of {length} tokens"
        own = {**circumstances(one), "tokens": digest(torch.tensor(prompt.tokens))}
        return Part(trial.name, what, own, measure)

    def retrieval(self, one: Subject, prompt: PasskeyPrompt, length: int) -> Retrieval:
        """Returns a trial's outcome, under one table fixed for prompt and answer."""
        tokens = torch.tensor([prompt.tokens], dtype=torch.int64)
        with one.rotating(length):
            return retrieve(ReadPrompt(one.split, tokens), self.tokenizer, prompt)

    def kept(self, part: Part) -> Cell:
        """Returns a finished part from its cell, or measures it and keeps it."""
        found = self.cells.load(part.name, part.own)
        if found is None:
            try:
                found = part.measure()
            except NumericalError as error:
                raise NumericalError(f"{part.name}: {error}") from None
            self.cells.save(part.name, found, part.own)
        return found

    def result(
        self, one: Subject, measured: Likelihoods, baseline: Likelihoods | None
    ) -> MethodResult:
        """Returns one method's likelihoods summed up."""
        nll = measured.nll
        total = nll.double().sum().item()
        difference = None
        if baseline is not None and baseline is not measured:
            difference = versus("none", baseline.nll, nll)
        return MethodResult(
            method=one.method,
            rope_parameters=one.rope_parameters,
            factor=one.factor,
            attention_factor=one.attention_factor,
            nll=total / nll.numel(),
            perplexity=perplexity(total, nll.numel()),
            tokens_scored=nll.numel(),
            buckets=position_buckets(nll, self.protocol.bucket),
            versus_none=difference,
            seconds=measured.seconds,
        )


def together(cells: Sequence[Cell]) -> Likelihoods:
    """Returns one method's likelihoods of every document."""
    nll = torch.stack([cell["nll"] for cell in cells])
    return Likelihoods(nll, sum(cell["seconds"].item() for cell in cells))


def outcome(trial: Trial, cells: Mapping[str, Cell]) -> PasskeyTrial:
    """Returns a passkey trial's result; invalid where nothing could be asked."""
    one, length, depth, prompt = trial
    place = {"method": one.method, "length": length, "depth": depth, "candidates": CANDIDATES}
    if isinstance(prompt, str):
        return PasskeyTrial(**place, status="invalid", rank=None, reason=prompt)
    cell = cells[trial.name]
    status = "found" if cell["found"] else "missed"
    return PasskeyTrial(**place, status=status, rank=int(cell["rank"]))


def circumstances(one: Subject) -> dict[str, Any]:
    """Returns what a cell of one method depends on beside the protocol."""
    return {"method": one.method, "rope_parameters": one.rope_parameters}


def digest(tokens: Tensor) -> str:
    """Returns the SHA-256 of token ids."""
    return hashlib.sha256(tokens.to(torch.int64).numpy().tobytes()).hexdigest()
