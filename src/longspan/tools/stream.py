"""`stream`: text without end in constant memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.adapters.head import SplitForward
from longspan.errors import ConfigError, ShapeError
from longspan.metrics.likelihood import check_finite, chunked_nll, nll_dtype
from longspan.rotary.scaling.base import check_length
from longspan.tools.cells import weights_digest
from longspan.tools.measuring import digest
from longspan.tools.sampling import REMEMBERED, Sampling
from longspan.tools.stream_reach import check_fits, default_window
from longspan.tools.stream_state import give_back_memory, read_state, write_state
from longspan.tools.stream_text import KEPT, Pieces, until_stop

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.adapters.stream_cache import StreamCache
    from longspan.adapters.streamed import StreamedModel

CHUNK = 1024
LOGITS = 256  # positions whose logits exist at once
LISTS = ("pending", "last", "written")  # of tokens, that a stream remembers beside its cache


@dataclass(frozen=True)
class StreamScore:
    """How likely a text was, token by token.

    Attributes:
        nll: [N − 1] float32 on the CPU, float64 of a float64 model, nats; entry i belongs to
            token i + 1.
    """

    nll: Tensor

    @property
    def perplexity(self) -> float:
        """The exponential of the mean over all scored tokens."""
        return float(self.nll.double().mean().exp())


class Stream:
    """A model that reads and writes without end: first tokens and a window are all it keeps.

    It goes on from where it is: `generate` adds to what was read and written before.

    Attributes:
        model: the model it runs, over the weights of the one it was made from. Its forward and
            `generate` take `cache=stream.new_cache()`.
        tokenizer: or None, where only token ids are used.
        num_sink_tokens, sliding_window: see `stream`.
    """

    def __init__(self, streamed: StreamedModel, tokenizer: Any) -> None:
        self.streamed, self.tokenizer = streamed, tokenizer
        self.model = streamed.model
        self.num_sink_tokens = streamed.num_sink_tokens
        self.sliding_window = streamed.sliding_window
        self.generator: torch.Generator | None = None
        self._split = SplitForward(streamed.model)
        self._cache = streamed.new_cache()
        self._writer: object = None
        self._pending: list[int] = []
        self._last: deque[int] = deque(maxlen=KEPT)
        self._written: deque[int] = deque(maxlen=REMEMBERED)

    def new_cache(self) -> StreamCache:
        """Returns an empty cache for `self.model`, for a batch of its own."""
        return self.streamed.new_cache()

    @property
    def tokens_seen(self) -> int:
        """Tokens read and written so far."""
        return self._cache.columns + len(self._pending)

    @property
    def last_token(self) -> int | None:
        """The token that its text ends with, read or written."""
        return self._last[-1] if self._last else None

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end what the model writes."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        own = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset([*ends, *([] if own is None else [own])])

    def read(self, prompt: str | Sequence[int]) -> None:
        """Adds to the text without answering. A string's first tokens get BOS where it is usual."""
        self._add(self._ids(prompt))

    def generate(
        self,
        prompt: str | Sequence[int] = (),
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        sampling: Sampling | None = None,
        chunk_size: int = CHUNK,
    ) -> Iterator[str]:
        """Yields what the model writes, piece by piece.

        Args:
            prompt: text or token ids, added to what was read before.
            max_new_tokens: at most; None goes on until a stop.
            stop: strings that end it; they are not yielded.
            ignore_eos: the model's own end does not end it.
            sampling: how tokens are drawn; the likeliest one unless given.
            chunk_size: tokens of the prompt read at once.

        Raises:
            ConfigError: without a tokenizer, or with nothing to go on from.
        """
        if self.tokenizer is None:
            raise ConfigError("generate yields text, so the stream needs a tokenizer.")
        tokens = self.generate_ids(
            prompt,
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            sampling=sampling,
            chunk_size=chunk_size,
        )
        return until_stop(self.pieces(tokens), stop)

    def pieces(self, tokens: Iterator[int]) -> Iterator[str]:
        """Returns what `generate_ids` yields as text, as it stands behind the text so far."""
        return Pieces(self.tokenizer, self._last).of(tokens)

    def generate_ids(
        self,
        prompt: str | Sequence[int] = (),
        *,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        sampling: Sampling | None = None,
        chunk_size: int = CHUNK,
    ) -> Iterator[int]:
        """Yields the token ids the model writes; see `generate`."""
        check_length("chunk_size", chunk_size)
        if max_new_tokens is not None:
            check_length("max_new_tokens", max_new_tokens)
        self.read(prompt)
        if not self._pending:
            raise ConfigError("there is nothing to go on from: give a prompt, text or token ids.")
        return self._writing(max_new_tokens, ignore_eos, sampling or Sampling(), chunk_size)

    def _writing(
        self, count: int | None, ignore_eos: bool, sampling: Sampling, chunk_size: int
    ) -> Iterator[int]:
        ends = () if ignore_eos else self.ends
        choose = sampling.chooser(self.generator, self._written)
        written, mine = 0, object()
        self._writer = mine
        while count is None or written < count:
            if self._writer is not mine:
                raise ConfigError(
                    "another generate has gone on with this stream's text, so this one cannot. "
                    "Use up one before the next, or make two streams."
                )
            logits = self._next_logits(chunk_size)
            token = choose(logits)
            self._add([token])
            self.generator = choose.generator
            if token in ends:
                self._written.pop()  # an answer's end is not to be avoided in the next
                return
            yield token
            written += 1

    def score(
        self,
        token_ids: Tensor | Sequence[int],
        chunk_size: int = CHUNK,
        *,
        progress: Callable[[Tensor], None] = lambda nll: None,
        state: Path | None = None,
        save_every: int = 0,
    ) -> StreamScore:
        """Returns the negative log-likelihood of every token of a text, read from its beginning.

        The stream's own text stays as it is. Any chunk size gives the numbers of one token at a
        time.

        Args:
            token_ids: [N] or [1, N], N ≥ 2.
            chunk_size: tokens read at once.
            progress: told the likelihoods so far, at the start and after each chunk.
            state: a file that an interrupted run goes on from. It stays once the score is whole;
                remove it when the result is safe.
            save_every: tokens between two writes of `state`; 0 never writes it.

        Raises:
            ShapeError: if it is not one row of two or more tokens.
            ConfigError: if `state` belongs to another text, other weights or other sizes.
            NumericalError: if a logit is NaN or infinite, with its position.
        """
        if isinstance(token_ids, str):
            raise ShapeError("score takes token ids. Pass tokenizer(text).input_ids.")
        row = torch.as_tensor(token_ids, dtype=torch.int64)
        row = row.unsqueeze(0) if row.dim() == 1 else row
        check_length("chunk_size", chunk_size)
        if row.dim() != 2 or row.shape[0] != 1 or row.shape[1] < 2:
            raise ShapeError(
                f"a text to score is one row of at least 2 tokens, got {list(row.shape)}."
            )
        self._split.check_ids(row)
        nll, cache = (
            torch.empty(row.shape[1] - 1, dtype=nll_dtype(self.model.dtype)),
            self.new_cache(),
        )
        done = saved = self._resume(state, row, chunk_size, nll, cache)
        progress(nll[:done])
        while done < len(nll):
            stop = min(done + chunk_size, len(nll))
            hidden = self._split.hidden(row[:, done:stop], cache)
            targets = row[0, done + 1 : stop + 1].to(hidden.device)
            nll[done:stop] = chunked_nll(self._split.logits, hidden, targets, LOGITS).cpu()
            if not nll[done:stop].isfinite().all():  # told with its place in the whole text
                check_finite(nll[:stop], str(self.model.dtype).removeprefix("torch."))
            done = stop
            whole = done == len(nll)
            if state is not None and save_every and (whole or done - saved >= save_every):
                # copies without a name are free once written, and then the allocator's to return
                write_state(
                    state, self._facts(row, chunk_size), {**cache.state(), "nll": nll[:done]}
                )
                give_back_memory()
                saved = done
            progress(nll[:done])
        return StreamScore(nll)

    def save(self, path: str | Path) -> None:
        """Writes all that is remembered to a safetensors file, so that `load` goes on from it.

        Raises:
            OutputError: if the place cannot be written.
        """
        found = self._cache.state()
        for name in LISTS:
            found[name] = torch.tensor(list(getattr(self, f"_{name}")), dtype=torch.int64)
        if self.generator is not None:
            found["generator"] = self.generator.get_state()
        write_state(Path(path), self._facts(), found)

    def load(self, path: str | Path) -> None:
        """Goes on from what `save` wrote, bit for bit, in place of what is remembered now.

        Raises:
            InputError: if the file is not there or not a stream's.
            ConfigError: if it was saved by a stream of another model or other sizes.
        """
        found = read_state(Path(path), self._facts())
        for name in LISTS:
            own = getattr(self, f"_{name}")  # that an open generator may hold
            own.clear()
            own.extend(found.pop(name).tolist())
        self.generator = None
        if "generator" in found:
            self.generator = torch.Generator()
            self.generator.set_state(found.pop("generator"))
        self._cache = self.new_cache()
        self._cache.restore(found)

    def _resume(
        self, state: Path | None, row: Tensor, chunk_size: int, nll: Tensor, cache: StreamCache
    ) -> int:
        if state is None or not state.exists():
            return 0
        found = read_state(state, self._facts(row, chunk_size))
        known = found.pop("nll")
        nll[: len(known)] = known
        cache.restore(found)
        return len(known)

    def _facts(self, row: Tensor | None = None, chunk_size: int = 0) -> dict[str, Any]:
        """Returns what must agree for a saved state to be this stream's, or of this score."""
        own = {"holds": "a stream"}
        if row is not None:
            own = {
                "holds": "a score",
                "tokens": row.shape[1],
                "text": digest(row),
                "chunk_size": chunk_size,
            }
        return own | self.streamed.facts() | {"weights": self._weights}

    @cached_property
    def _weights(self) -> str:
        return weights_digest(self.model)

    def _add(self, tokens: Sequence[int]) -> None:
        self._pending += tokens
        self._last.extend(tokens)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ConfigError("a text prompt needs a tokenizer; give token ids, or a tokenizer.")
        first = self.tokens_seen == 0
        found = self.tokenizer(prompt, add_special_tokens=first, verbose=False)
        return list(found["input_ids"])

    def _next_logits(self, chunk_size: int) -> Tensor:
        """Reads what is pending; returns the logits of the next token, [V] float32."""
        row, hidden = torch.tensor([self._pending], dtype=torch.int64), None
        for part in row.split(chunk_size, dim=1):
            hidden = self._split.hidden(part, self._cache)
            del self._pending[: part.shape[1]]
        assert hidden is not None
        return self._split.logits(hidden[:, -1:])[0, -1].float()


def stream(
    model: PreTrainedModel,
    tokenizer: Any = None,
    num_sink_tokens: int = 4,
    sliding_window: int | None = None,
    *,
    seq_len: int | None = None,
    original_max_position_embeddings: int | None = None,
) -> Stream:
    """Returns a stream over a model: it reads and writes without end, in constant memory.

    Kept are the first tokens, which heads lean on, and a window of the last ones; distances are
    those within the cache and never leave the trained range. The text stays fluent; what left the
    window is forgotten.

    Args:
        model: a causal model with rotary positions or ALiBi; it stays as it is.
        tokenizer: needed for text in and out.
        num_sink_tokens: first tokens that are never dropped.
        sliding_window: last tokens kept, the newest included. With the sinks it must not exceed
            the trained length, or the distances would. 1020 unless given, or what the sinks leave
            of a shorter length.
        seq_len: the declared total length, where the rope's table depends on one (dynamic NTK,
            LongRoPE); without it every token uses the table of what the cache holds by then.
        original_max_position_embeddings: the trained length, where the config leaves it open.

    Raises:
        UnsupportedModelError: for a family that longspan does not know.
        ConfigError: for sizes out of range, or a `seq_len` that nothing depends on.

    Source: Xiao et al. 2023 (arXiv:2309.17453).
    """
    from longspan.adapters.streamed import StreamedModel  # it imports transformers

    given = original_max_position_embeddings
    if sliding_window is None:
        sliding_window = default_window(model.config, num_sink_tokens, given)
    streamed = StreamedModel(model, num_sink_tokens, sliding_window, seq_len, given)
    check_fits(
        model.config,
        num_sink_tokens,
        sliding_window,
        seq_len=seq_len,
        original_max_position_embeddings=given,
    )
    return Stream(streamed, tokenizer)
