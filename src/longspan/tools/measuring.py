"""One evaluation under way: parts measured one by one, each kept as soon as it is finished."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.adapters.prompt import ReadPrompt
from longspan.adapters.rotation import exact_rotation
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
from longspan.tools.subjects import Subject
from longspan.tools.summary import position_buckets, versus

Progress = Callable[[str, int, int], None]
"""Gets what is measured next, how many parts are done, and of how many."""


class Counter:
    """Tells a progress callback what comes next."""

    def __init__(self, progress: Progress | None, parts: int) -> None:
        self.progress, self.parts, self.done = progress, parts, 0

    def next(self, what: str) -> None:
        """Announces the next part."""
        if self.progress is not None:
            self.progress(what, self.done, self.parts)
        self.done += 1

    def end(self) -> None:
        """Announces that all parts are done."""
        if self.progress is not None:
            self.progress("done", self.parts, self.parts)


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
        counter: told of every part.
    """

    protocol: Protocol
    rows: Tensor
    bos: int | None
    tokenizer: Any
    reach: int
    cells: Cells
    counter: Counter

    def evaluation(
        self, subjects: Sequence[Subject], trials: Sequence[tuple[int, float]]
    ) -> Evaluation:
        """Measures what is not yet measured, and returns the whole."""
        measured = {one.method: self.likelihoods(one) for one in subjects}
        found = tuple(self.trial(one, *trial) for one in subjects for trial in trials)
        self.counter.end()
        baseline = measured.get("none")
        results = tuple(self.result(one, measured[one.method], baseline) for one in subjects)
        return Evaluation(protocol=self.protocol, methods=results, passkey=found)

    def likelihoods(self, one: Subject) -> Likelihoods:
        """Returns one method's likelihoods of every document."""
        cells = [self.document(one, index) for index in range(len(self.rows))]
        nll = torch.stack([cell["nll"] for cell in cells])
        return Likelihoods(nll, sum(cell["seconds"].item() for cell in cells))

    def document(self, one: Subject, index: int) -> dict[str, Tensor]:
        """Returns a document's NLL and seconds, from its cell if it is finished."""
        self.counter.next(f"{one.method}, document {index + 1} of {len(self.rows)}")
        row = self.rows[index : index + 1]

        def measure() -> dict[str, Tensor]:
            begun = time.perf_counter()
            nll = self.score(one, row)
            seconds = time.perf_counter() - begun
            return {"nll": nll, "seconds": torch.tensor(seconds, dtype=torch.float64)}

        own = {**circumstances(one), "tokens": digest(row)}
        return self.kept(f"{one.method}-document-{index:04d}", own, measure)

    def score(self, one: Subject, row: Tensor) -> Tensor:
        """Returns a document's NLL, read whole or in windows."""
        window, stride = self.protocol.window, self.protocol.stride
        if window is None or stride is None:
            return one.token_nll(row)
        bos = self.bos is not None
        return strided_nll(one.token_nll, row, window=window, stride=stride, bos=bos)

    def trial(self, one: Subject, length: int, depth: float) -> PasskeyTrial:
        """Returns one passkey trial, from its cell if it is finished."""
        self.counter.next(f"{one.method}, key at {depth:.0%} of {length} tokens")
        prompt = build_prompt(
            self.tokenizer, length=length, depth=depth, limit=self.reach, bos=self.bos
        )
        place = {"method": one.method, "length": length, "depth": depth, "candidates": CANDIDATES}
        if isinstance(prompt, str):
            return PasskeyTrial(**place, status="invalid", rank=None, reason=prompt)

        def measure() -> dict[str, Tensor]:
            got = self.retrieval(one, prompt, length)
            return {"found": torch.tensor(got.found), "rank": torch.tensor(got.rank)}

        own = {**circumstances(one), "tokens": digest(torch.tensor(prompt.tokens))}
        cell = self.kept(f"{one.method}-passkey-{length}-{depth:.4f}", own, measure)
        status = "found" if cell["found"] else "missed"
        return PasskeyTrial(**place, status=status, rank=int(cell["rank"]))

    def retrieval(self, one: Subject, prompt: PasskeyPrompt, length: int) -> Retrieval:
        """Returns a trial's outcome, under one table fixed for prompt and answer."""
        tokens = torch.tensor([prompt.tokens], dtype=torch.int64)
        with exact_rotation(one.split.model, one.ropes, seq_len=length, phase=one.phase):
            return retrieve(ReadPrompt(one.split, tokens), self.tokenizer, prompt)

    def kept(
        self,
        name: str,
        own: dict[str, Any],
        measure: Callable[[], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Returns a finished cell, or measures it and keeps it."""
        found = self.cells.load(name, own)
        if found is None:
            try:
                found = measure()
            except NumericalError as error:
                raise NumericalError(f"{name}: {error}") from None
            self.cells.save(name, found, own)
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


def circumstances(one: Subject) -> dict[str, Any]:
    """Returns what a cell of one method depends on beside the protocol."""
    return {"method": one.method, "rope_parameters": one.rope_parameters}


def digest(tokens: Tensor) -> str:
    """Returns the SHA-256 of token ids."""
    return hashlib.sha256(tokens.to(torch.int64).numpy().tobytes()).hexdigest()
