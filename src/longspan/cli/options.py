"""Options that several verbs share, and the types they parse to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import click

from longspan.errors import ConfigError
from longspan.rotary.scaling import scaling_for_method

Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULT_MODEL = "smollm2"


class Tokens(click.ParamType):
    """A number of tokens: 16384, 16k (1024s) or 1m."""

    name = "TOKENS"
    units = {"": 1, "k": 1024, "m": 1024 * 1024}  # noqa: RUF012

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the number; anything else is a usage error."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", str(value).strip().lower())
        number = Fraction(found[1]) * self.units[found[2]] if found else Fraction(0)
        if number < 1 or number.denominator != 1:
            self.fail(f"{value!r} is not a number of tokens, such as 16384 or 16k.", param, ctx)
        return int(number)


class Method(click.ParamType):
    """A scaling method's name."""

    name = "METHOD"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the canonical name; a misspelt one gets the nearest."""
        try:
            return scaling_for_method(str(value)).method
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class Methods(click.ParamType):
    """Several methods, separated by commas."""

    name = "METHOD,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        """Returns the canonical names, in order, each once."""
        if isinstance(value, list):
            return value
        names = [word.strip() for word in str(value).split(",") if word.strip()]
        if not names:
            self.fail("name at least one method, such as none,yarn.", param, ctx)
        return list(dict.fromkeys(Method().convert(name, param, ctx) for name in names))


class Fractions(click.ParamType):
    """Several numbers from 0 to 1, separated by commas."""

    name = "DEPTH,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[float]:
        """Returns the numbers in order."""
        if isinstance(value, list):
            return value
        try:
            numbers = [float(word) for word in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, such as 0,0.5,1.", param, ctx)
        if not all(0 <= number <= 1 for number in numbers):
            self.fail(f"{value!r} must lie between 0 and 1.", param, ctx)
        return numbers


model_argument = click.argument("model", default=DEFAULT_MODEL)

original_option = click.option(
    "--original",
    type=Tokens(),
    help="The trained length, where the config leaves it open.",
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on standard output."
)

texts_option = click.option(
    "--text",
    "texts",
    multiple=True,
    default=["python-docs"],
    show_default=True,
    help="A UTF-8 file, or python-docs, moby-dick. Repeat for more.",
)

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of weights and activations.",
)

trust_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run code that comes with the checkpoint. Only for one you trust.",
)


def scaling_options(function: Function) -> Function:
    """Adds --to, --method, --factor and --original."""
    for option in (
        original_option,
        click.option("--factor", type=float, help="Instead of the smallest that suffices."),
        click.option(
            "--method",
            type=Method(),
            help="linear (pi), ntk, dynamic, ntk-by-parts, yarn, llama3. "
            "The config's own if it is scaled already, else yarn.",
        ),
        click.option("--to", type=Tokens(), required=True, help="Tokens to read."),
    ):
        function = option(function)
    return function


def print_json(content: Any) -> None:
    """Prints a JSON document on standard output."""
    click.echo(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))
