"""A GGUF file's metadata and tensors, parsed in one quick pass, and lent to transformers.

transformers reads a GGUF through `gguf.GGUFReader`, which takes seconds for a large vocabulary and
is run again for the config, the tokenizer and the weights. `lend_to_transformers` hands it this
parse instead. Where a later transformers asks for something else, it is merely slower again.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from longspan.errors import InputError

_NUMBERS = {
    **{0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4"},
    **{7: "?", 10: "u8", 11: "i8", 12: "f8"},
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32  # bytes, unless general.alignment says otherwise


class Field(NamedTuple):
    """One metadata entry, in the shape of gguf's own ReaderField."""

    parts: Any  # a sequence of one-element arrays or of byte strings
    types: list[int]

    @property
    def data(self) -> range:
        """Which parts hold the values: all of them."""
        return range(len(self.parts))

    @property
    def value(self) -> Any:
        """A number, a string or a list of them."""
        values = [p.decode() if isinstance(p, bytes) else p[0].item() for p in self.parts]
        return values if self.types[0] == _ARRAY else values[0]


class Tensor(NamedTuple):
    """One tensor as stored: `data` is a view of the file, of blocks where it is quantized."""

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds; `fields` by metadata key, in file order."""

    path: Path
    fields: Mapping[str, Field]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        """Llama.cpp's name of the model family."""
        return self.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value, or `default` where the file has none."""
        return self.fields[key].value if key in self.fields else default

    def get_own(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value of the family's own section, such as `llama.` + key."""
        return self.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path) -> GgufFile:
    """Returns the parsed file; tensors stay on disk until they are used.

    Raises:
        InputError: if it is not a whole GGUF file of version 2 or 3.

    Source: the GGUF specification, versions 2 and 3 (ggml).
    """
    try:
        file = _Parser(path).parse()
    except (struct.error, ValueError, IndexError) as error:
        raise InputError(
            f"{path} is not a whole GGUF file: {error}. It may be truncated; get it again."
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error
    if "general.architecture" not in file.fields:
        raise InputError(f"{path} names no general.architecture, so it holds no language model.")
    return file


class _Parser:
    """A cursor over the file's bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as source:
            self._bytes = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0

    def parse(self) -> GgufFile:
        magic, version, tensor_count, field_count = self._take("4sIQQ")
        if magic != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, known are 2 and 3")
        fields = {self._string().decode(): self._field() for _ in range(field_count)}
        table = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = fields.get("general.alignment")
        step = alignment.value if alignment else _DEFAULT_ALIGNMENT
        start = -(-self._at // step) * step
        return GgufFile(self._path, fields, tuple(self._tensor(start, *row) for row in table))

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> bytes:
        (length,) = self._take("Q")
        self._at += length
        if self._at > len(self._bytes):
            raise ValueError(f"a string ends at byte {self._at:,}, after the end of the file")
        return self._bytes[self._at - length : self._at]

    def _field(self) -> Field:
        (kind,) = self._take("I")
        if kind != _ARRAY:
            return Field(self._values(kind, 1), [kind])
        element, count = self._take("IQ")
        return Field(self._values(element, count), [kind, element])

    def _values(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"metadata of type {kind} is not known")
        dtype = np.dtype("<" + _NUMBERS[kind])
        values = np.frombuffer(self._bytes, dtype, count, self._at)
        self._at += values.nbytes
        return values.reshape(count, 1)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string().decode()
        (dimensions,) = self._take("I")
        shape = self._take(f"{dimensions}Q")[::-1]  # stored fastest-moving first
        kind, offset = self._take("IQ")
        return name, shape, kind, offset

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor_type = GGMLQuantizationType(kind)
        per_block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        row_bytes = shape[-1] // per_block * block_bytes
        count = int(np.prod(shape[:-1], dtype=np.int64)) * row_bytes
        begin = start + offset
        if begin + count > len(self._bytes):
            raise ValueError(f"tensor {name} ends after the end of the file")
        data = np.frombuffer(self._bytes, np.uint8, count, begin)
        plain = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}.get(tensor_type.name)
        data = data.reshape(*shape[:-1], row_bytes)
        return Tensor(name, shape, tensor_type, data if plain is None else data.view(plain))


@contextmanager
def lend_to_transformers(file: GgufFile) -> Iterator[None]:
    """While it lasts, transformers reads `file` from this parse, without its progress bar."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loader

    original = gguf.GGUFReader

    def reader(path: Any, *args: Any, **kwargs: Any) -> Any:
        same = Path(path).resolve() == file.path.resolve()
        return file if same else original(path, *args, **kwargs)

    names: Callable[..., Any] = functools.lru_cache(gguf.get_tensor_name_map)
    with ExitStack() as patches:
        patches.enter_context(_replaced(gguf, "GGUFReader", reader))
        patches.enter_context(_replaced(gguf, "get_tensor_name_map", names))
        if bar := getattr(loader, "tqdm", None):
            patches.enter_context(_replaced(loader, "tqdm", functools.partial(bar, disable=True)))
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
