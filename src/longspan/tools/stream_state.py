"""A stream's memory: on disk, one file that is whole or not at all; and resident, as it runs."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.errors import ConfigError, InputError
from longspan.files import whole_file, write_text

FORM = "longspan stream 2"
SIZES = ("num_sink_tokens", "sliding_window", "seq_len", "tokens", "chunk_size")  # by option


def write_state(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, and the facts that a later reader must agree with.

    Raises:
        OutputError: if the place cannot be written.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with whole_file(path) as temporary:
        save_file(whole, temporary, {"form": FORM, "facts": json.dumps(dict(facts))})


def give_back_memory() -> None:
    """Asks glibc to return what is free, or copies that are gone would stay resident."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none
        if trim is not None:
            trim(0)


def read_state(path: Path, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a file that `write_state` wrote.

    Raises:
        InputError: if it is not there, damaged, or another kind of file.
        ConfigError: if a fact differs, naming both values.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read as a stream's state: {error}") from error
    if about.get("form") != FORM:
        raise InputError(f"{path} is not a stream's state; those are written by save and --save.")
    saved = json.loads(about["facts"])
    for name, value in facts.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{path} was saved with {name} {saved.get(name)!r}, and this stream has {value!r}. "
                + _remedy(name, saved.get(name))
            )
    return tensors


def _remedy(name: str, saved: Any) -> str:
    if name in SIZES and saved is None:
        return f"Leave {name} (--{name.replace('_', '-')}) out, or remove the file."
    if name in SIZES:
        return f"Give {name} {saved} (--{name.replace('_', '-')} {saved}), or remove the file."
    return "Use the same model, text and sizes, or remove the file."


class Meter:
    """Notes how fast a text goes by, and the resident memory on the way.

    It measures at every tenth of the text and four times a doubling.

    Args:
        tokens: of the text.
        path: a file that an interrupted run's measurements are taken up from; None keeps none.

    Attributes:
        samples: (tokens done, bytes resident).
        resumed_at: tokens that were done before this run.
    """

    def __init__(self, tokens: int, path: Path | None = None) -> None:
        self.tokens, self.path = tokens, path
        self.samples: list[tuple[int, int]] = []
        self.resumed_at = self._done = 0
        self._begun = self._now = self._next = 0.0

    def __call__(self, done: int) -> None:
        """Told the tokens done: once at the start, then after each chunk."""
        self._done, self._now = done, time.perf_counter()
        if not self._begun:
            self._begun, self.resumed_at = self._now, done
            if self.path is not None and done and self.path.exists():
                known = json.loads(self.path.read_text(encoding="utf-8"))
                self.samples = [(at, size) for at, size in known if at <= done]
        elif done >= self._next and (size := held_bytes()) is not None:
            self.samples.append((done, size))
            if self.path is not None:
                write_text(self.path, json.dumps(self.samples))
        else:
            return
        tenth = (10 * done // self.tokens + 1) * self.tokens / 10
        self._next = min(done * 2**0.25, tenth, self.tokens) if done else 0

    @property
    def tokens_per_second(self) -> float | None:
        """Of this run alone; None where it read nothing."""
        seconds = self._now - self._begun
        return (self._done - self.resumed_at) / seconds if seconds else None


def held_bytes() -> int | None:
    """Returns the memory this process has resident once what is free has gone back."""
    give_back_memory()
    return resident_bytes()


def resident_bytes() -> int | None:
    """Returns the memory this process has resident; its peak where only that is told, or None."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
