"""An evaluation as one HTML page that needs nothing else: no scripts, no requests."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from longspan._version import __version__
from longspan.files import write_text
from longspan.report.claims import difference_claim, nll_claim
from longspan.report.figures import figure_svg, nll_by_position, passkey_grid
from longspan.report.page_rows import (
    bucket_rows,
    facts,
    method_rows,
    paired_note,
    passkey_rows,
    protocol_rows,
)
from longspan.report.passkey import invalid_reasons, passkey_claim, passkey_lengths
from longspan.report.style import theme
from longspan.report.wording import tokens
from longspan.tools.evaluation import Evaluation

NLL_CAPTION = (
    "Each point is the mean of one bucket of positions, at the bucket's middle; bands are the "
    "mean's 95 % interval, where there is one. Perplexity stands in brackets. The dashed line is "
    "the trained length."
)
PASSKEY_CAPTION = (
    "Depth runs from the start of the prompt (0 %) to its end. Where one place was tried more than "
    "once, a cell is filled as far as its rate. The dashed line is the trained length."
)


def evaluation_page(evaluation: Evaluation, *, command: str) -> str:
    """Returns the evaluation as a self-contained HTML page.

    Args:
        evaluation: what was measured.
        command: the command line that measures it again.

    Raises:
        ConfigError: if the evaluation holds no method or no buckets.
    """
    headline, passkey = nll_claim(evaluation), passkey_claim(evaluation)
    leads = [difference_claim(evaluation), f"{passkey}." if passkey else ""]
    return render(
        "page.html.j2",
        protocol=evaluation.protocol,
        headline=headline,
        leads=[text for text in leads if text],
        facts=facts(evaluation),
        methods=method_rows(evaluation),
        paired=paired_note(evaluation),
        buckets=bucket_rows(evaluation),
        intervals=any(b.low is not None for result in evaluation.methods for b in result.buckets),
        trained=tokens(evaluation.protocol.trained_length),
        nll_figure=nll_figure(evaluation),
        nll_caption=NLL_CAPTION,
        protocol_rows=protocol_rows(evaluation.protocol),
        command=command,
        **passkey_values(evaluation, passkey),
    )


def nll_figure(evaluation: Evaluation) -> str:
    """Returns the figure of NLL by position as inline SVG."""
    description = f"Line chart of NLL by target position. {nll_claim(evaluation)}."
    return figure_svg(nll_by_position(evaluation), description, "nll", svg_colors())


def passkey_values(evaluation: Evaluation, claim: str) -> dict[str, Any]:
    """Returns what the page's passkey section needs; an empty figure where there were no trials."""
    if not evaluation.passkey:
        return {"passkey_figure": ""}
    description = f"Grid of passkey trials by depth and prompt length. {claim}."
    return {
        "passkey_figure": figure_svg(
            passkey_grid(evaluation), description, "passkey", svg_colors()
        ),
        "passkey_caption": PASSKEY_CAPTION,
        "passkey_lengths": [tokens(length) for length in passkey_lengths(evaluation)],
        "passkeys": passkey_rows(evaluation),
        "reasons": invalid_reasons(evaluation),
    }


def svg_colors() -> dict[str, str]:
    """Returns the page's variable for each colour of the figures, so that they follow its theme."""
    return {color.light: f"var({color.variable})" for color in theme()}


def render(template: str, **values: Any) -> str:
    """Returns a template of this package filled in; everything but ready markup is escaped.

    Every page that extends base.html.j2 gets the figures' colours and the version.
    """
    environment = template_environment()
    colors = [(color.variable, color.light, color.dark) for color in theme()]
    page = environment.get_template(template)
    return page.render(colors=colors, longspan_version=__version__, **values)


@lru_cache(maxsize=1)
def template_environment() -> Environment:
    """Returns the environment that finds templates beside this file and escapes every value."""
    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(read_template),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["unbroken"] = unbroken
    return environment


def unbroken(text: str) -> str:
    """Returns the text with spans such as 10k–12k and 95 % kept on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%").replace("–", "\N{WORD JOINER}–\N{WORD JOINER}")


def read_template(name: str) -> str:
    """Returns a template's text from the installed package."""
    return resources.files("longspan.report").joinpath(name).read_text(encoding="utf-8")


def write_page(path: str | Path, html: str) -> Path:
    """Writes a page, whole or not at all; an older file is replaced.

    Raises:
        OutputError: if the file cannot be written.
    """
    write_text(Path(path), html)
    return Path(path)
