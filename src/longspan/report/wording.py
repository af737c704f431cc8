"""How lengths, numbers and methods are written in figures, tables and pages."""

from __future__ import annotations

from typing import Any

from longspan.rotary.scaling import METHODS
from longspan.tools.evaluation import Evaluation, MethodResult

THOUSAND_TOKENS = 1024
MILLION_TOKENS = 1024 * 1024


def tokens(count: int) -> str:
    """Returns a token count in the field's short form, where it is exact.

    >>> tokens(8192), tokens(1536), tokens(2_097_152), tokens(12_000), tokens(500)
    ('8k', '1.5k', '2M', '12,000', '500')
    """
    if count >= MILLION_TOKENS and count % (MILLION_TOKENS // 2) == 0:
        return f"{count / MILLION_TOKENS:g}M"
    if count >= THOUSAND_TOKENS and count % (THOUSAND_TOKENS // 2) == 0:
        return f"{count / THOUSAND_TOKENS:g}k"
    return f"{count:,}"


def span(start: int, stop: int) -> str:
    """Returns the positions [start, stop) in short form.

    >>> span(10_240, 12_288)
    '10k–12k'
    """
    return f"{tokens(start)}–{tokens(stop)}"


def number(value: float) -> str:
    """Returns two decimals with a true minus.

    >>> number(3.456), number(-0.5)
    ('3.46', '−0.50')
    """
    return f"{value:.2f}".replace("-", "−")


def signed(value: float) -> str:
    """Returns a difference with its sign, two decimals and a true minus.

    >>> signed(0.514), signed(-0.03), signed(-0.001)
    ('+0.51', '−0.03', '0.00')
    """
    text = f"{value:+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text.replace("-", "−")


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun.

    >>> counted(1, "document"), counted(1200, "token")
    ('1 document', '1,200 tokens')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def method_title(method: str) -> str:
    """Returns a method's name in prose; a name that no scaling bears is returned as it is.

    >>> method_title("yarn"), method_title("none"), method_title("mine")
    ('YaRN', 'plain RoPE', 'mine')
    """
    return METHODS[method].title if method in METHODS else method


def result_title(result: MethodResult) -> str:
    """Returns a measured method's name in prose.

    "none" is plain RoPE only where the checkpoint carries no scaling of its own.
    """
    scaled = any(block.get("rope_type", "default") != "default" for block in rope_blocks(result))
    return "the checkpoint" if result.method == "none" and scaled else method_title(result.method)


def title_in(evaluation: Evaluation, method: str) -> str:
    """Returns the name in prose of one of an evaluation's methods."""
    for result in evaluation.methods:
        if result.method == method:
            return result_title(result)
    return method_title(method)


def rope_blocks(result: MethodResult) -> list[dict[str, Any]]:
    """Returns the rope parameters as a list, one block a kind of layer."""
    nested = [value for value in result.rope_parameters.values() if isinstance(value, dict)]
    return nested or [result.rope_parameters]


def sentence(text: str) -> str:
    """Returns the text with a capital at its start; the rest is left alone.

    >>> sentence("plain RoPE rises")
    'Plain RoPE rises'
    """
    return text[:1].upper() + text[1:]
