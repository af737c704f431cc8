"""Which curves of a study each figure and table shows, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.errors import ConfigError
from longspan.report.wording import span
from longspan.tools.evaluation import Bucket
from longspan.tools.study_results import StudyCurve, StudyProtocol, StudyResult

TITLES = {
    "rope": "RoPE",
    "alibi": "ALiBi",
    "t5": "T5",
    "shaw": "Shaw",
    "transformer_xl": "Transformer-XL",
    "sinusoidal": "sinusoidal",
    "learned": "learned",
    "none": "NoPE",
}


def encoding_title(encoding: str) -> str:
    """Returns an encoding's name in prose; an unknown name is returned as it is.

    >>> encoding_title("rope+memory"), encoding_title("transformer_xl-memory")
    ('RoPE with memory', 'memoryless Transformer-XL')
    """
    plain = encoding.removesuffix("+memory").removesuffix("-memory")
    title = TITLES.get(plain, plain)
    if encoding.endswith("-memory"):
        return f"memoryless {title}"
    return f"{title} with memory" if encoding.endswith("+memory") else title


def whole_curves(result: StudyResult) -> list[StudyCurve]:
    """Returns the encodings that were read whole, without scaling."""
    return [one for one in result.curves if (one.reading, one.method) == ("whole", "none")]


def scaled_curves(result: StudyResult) -> list[StudyCurve]:
    """Returns RoPE read whole, plain and scaled; nothing where no scaling was read."""
    found = [one for one in result.curves if (one.encoding, one.reading) == ("rope", "whole")]
    return found if any(one.method != "none" for one in found) else []


def window_curves(result: StudyResult) -> dict[str, list[StudyCurve]]:
    """Returns each encoding's readings in windows, by length; a whole reading is the longest."""
    lines: dict[str, list[StudyCurve]] = {}
    for one in result.curves:
        if one.reading in ("window", "whole") and one.method == "none":
            lines.setdefault(one.encoding, []).append(one)
    return {
        encoding: sorted(line, key=lambda one: one.window)
        for encoding, line in lines.items()
        if len({one.window for one in line}) > 1
    }


def memory_curves(result: StudyResult) -> list[tuple[StudyCurve, StudyCurve]]:
    """Returns (segments, recurrent) of each encoding that was read both ways."""
    found = []
    for one in result.curves:
        if one.reading == "recurrent":
            alone = [
                other
                for other in result.curves
                if (other.reading, other.encoding, other.method)
                == ("segments", one.encoding, one.method)
            ]
            found += [(other, one) for other in alone]
    return found


def segment_curves(result: StudyResult) -> list[StudyCurve]:
    """Returns the readings in pieces of the trained length, each encoding's side by side."""
    found = [one for one in result.curves if one.reading in ("segments", "recurrent")]
    order = list(dict.fromkeys(one.encoding for one in found))
    return sorted(found, key=lambda one: order.index(one.encoding))


def unread_encodings(result: StudyResult) -> list[str]:
    """Returns the encodings that were measured, but not read whole."""
    whole = {one.encoding for one in whole_curves(result)}
    return [name for name in encodings(result) if name not in whole]


def encodings(result: StudyResult) -> list[str]:
    """Returns every encoding of the study, in order, once."""
    names = (*(one.encoding for one in result.models), *(one.encoding for one in result.curves))
    return list(dict.fromkeys(names))


def trained_bucket(curve: StudyCurve, length: int) -> Bucket | None:
    """Returns the last bucket within the trained length, if there is one."""
    return next((one for one in reversed(curve.buckets) if one.stop <= length), None)


def past_buckets(curve: StudyCurve, length: int) -> list[Bucket]:
    """Returns the buckets wholly past the trained length."""
    return [one for one in curve.buckets if one.start >= length]


def multiples(protocol: StudyProtocol) -> list[int]:
    """Returns the lengths to tell of: the trained one, its doublings, and the last position.

    All in tokens, each the end of a bucket.
    """
    found = [protocol.length]
    while found[-1] * 2 < protocol.reach:
        found.append(found[-1] * 2)
    return [*found, protocol.reach]


def bucket_at(curve: StudyCurve, position: int) -> Bucket | None:
    """Returns the bucket whose last target is at `position`, or just before it."""
    return next((one for one in curve.buckets if one.stop in (position, position + 1)), None)


def bucket_span(bucket: Bucket, protocol: StudyProtocol) -> str:
    """Returns a bucket's target positions in short form; the last target is the document's end."""
    return span(bucket.start, min(bucket.stop, protocol.reach))


def check_measured(result: StudyResult) -> None:
    """Refuses a study without curves, or a curve without buckets.

    Raises:
        ConfigError: naming what is missing.
    """
    if not result.curves:
        raise ConfigError(
            "this study holds no curve, so there is nothing to show. Run study with at least one "
            "encoding, such as 'rope'."
        )
    for one in result.curves:
        if not one.buckets or not one.by_seed:
            raise ConfigError(
                f"the reading {one.reading!r} of {one.name!r} holds no numbers by position or by "
                "seed, so it cannot be shown. Run study again."
            )


def joined(names: Sequence[str]) -> str:
    """Returns names as a sentence lists them.

    >>> joined(["a"]), joined(["a", "b"]), joined(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
