"""`longspan stream`: chat, continue a text or score one, without end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from longspan.cli.options import (
    Tokens,
    dtype_option,
    json_option,
    model_argument,
    original_option,
    trust_option,
)
from longspan.errors import did_you_mean

METHODS = ("streaming", "window", "recompute", "dense")

WRITING = {"max_new_tokens", "stop", "load", "save", "seq_len"}
WRITING |= {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
READING = {"score", "tokens", "repeat", "chunk_size", "output", "as_json"}
READ_BY = {
    "chat": WRITING | {"system", "pin_prompt"},
    "text": WRITING | {"prompt", "pin_prompt", "ignore_eos", "as_json"},
    "score": READING | {"resume", "save_every", "seq_len"},
    "compare": READING | {"compare", "sinks", "recompute_tokens", "dense_tokens"},
}
"""The options that each way to use the command reads, beside those that all of them read."""
WHERE = {
    "chat": "in a chat",
    "text": "with --prompt or piped text",
    "score": "with --score",
    "compare": "with --score and --compare or --sinks",
}
NEEDS = {
    "resume": (("output",), "-o, the folder a score is saved in"),
    "save_every": (("output",), "-o, the folder a score is saved in"),
    "repeat": (("tokens",), "--tokens, where to end"),
    "force": (("output", "save"), "-o or --save, what to replace"),
}
"""Options that do nothing without another one, and what is said then."""
METHOD_OF = {"recompute_tokens": "recompute", "dense_tokens": "dense"}
"""Options that one method of --compare reads."""


class Names(click.ParamType):
    """Several names out of a few, separated by commas."""

    name = "NAME,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        """Returns the names in order, each once; a misspelt one gets the nearest."""
        names = [word.strip() for word in str(value).split(",") if word.strip()]
        for name in names:
            if name not in METHODS:
                meant = did_you_mean(name, METHODS)
                self.fail(f"no method {name!r}.{meant} Known: {', '.join(METHODS)}.", param, ctx)
        if not names:
            self.fail(f"name at least one of {', '.join(METHODS)}.", param, ctx)
        return list(dict.fromkeys(names))


class Numbers(click.ParamType):
    """Several whole numbers, separated by commas."""

    name = "N,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Returns the numbers in order, each once."""
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() for word in words):
            self.fail(f"{value!r} is not a list of whole numbers, such as 0,1,2,4.", param, ctx)
        return list(dict.fromkeys(map(int, words)))


@click.command("stream", short_help="Chat, continue or score a text without end.")
@model_argument
@click.option("--prompt", metavar="TEXT", help="Continue this; piped text is continued likewise.")
@click.option("--system", metavar="TEXT", help="The system prompt of a chat.")
@click.option("--pin-prompt", is_flag=True, help="Never drop the system prompt, or the prompt.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    metavar="N",
    help="Tokens written at most; 0 goes on without end. [default: 256; in a chat 0]",
)
@click.option("--stop", metavar="TEXT", multiple=True, help="End before this. Repeat for more.")
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end.")
@click.option("--temperature", type=float, help="Draw tokens; the likeliest is taken without it.")
@click.option("--top-k", type=int, help="Draw from so many of the likeliest.")
@click.option("--top-p", type=float, help="Draw from the likeliest of this probability together.")
@click.option("--min-p", type=float, help="Draw from those with this share of the likeliest's.")
@click.option("--repetition-penalty", type=float, help="Above 1: repeat less.")
@click.option("--seed", type=int, help="Of the draws.")
@click.option(
    "--load",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Go on from what --save wrote.",
)
@click.option(
    "--save", type=click.Path(path_type=Path, dir_okay=False), help="Keep all that is remembered."
)
@click.option("--score", metavar="TEXT", help="Score a UTF-8 file, or python-docs, moby-dick.")
@click.option("--tokens", type=Tokens(), help="Read so many. [default: the whole text]")
@click.option("--repeat", is_flag=True, help="Read a shorter text again and again.")
@click.option(
    "--chunk-size", type=Tokens(), default=1024, show_default=True, help="Tokens read at once."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for JSON, figure and likelihoods.",
)
@click.option("--resume", is_flag=True, help="Go on where an interrupted score was last saved.")
@click.option(
    "--save-every",
    type=Tokens(),
    default="16k",
    show_default=True,
    help="Tokens between two saves of a score with -o.",
)
@click.option(
    "--compare", type=Names(), help="Of streaming,window,recompute,dense, on the same tokens."
)
@click.option(
    "--recompute-tokens",
    type=Tokens(),
    default=64,
    show_default=True,
    help="Tokens that recompute scores; each takes a whole cache.",
)
@click.option(
    "--dense-tokens",
    type=Tokens(),
    default="16k",
    show_default=True,
    help="Tokens that dense reads at most.",
)
@click.option("--sinks", type=Numbers(), help="Compare numbers of sinks in a cache of one size.")
@click.option(
    "--num-sink-tokens",
    type=click.IntRange(min=0),
    metavar="N",
    default=4,
    show_default=True,
    help="First tokens never dropped.",
)
@click.option(
    "--sliding-window",
    type=Tokens(),
    help="Last tokens kept. [default: 1020, or what a shorter trained length leaves]",
)
@click.option(
    "--seq-len",
    type=Tokens(),
    help="The length whose table dynamic NTK and LongRoPE use, at least the cache's. "
    "[default: of what the cache holds by then]",
)
@original_option
@click.option("--force", is_flag=True, help="Replace what is there.")
@dtype_option
@trust_option
@json_option
@click.pass_context
def command(ctx: click.Context, model: str, **options: Any) -> None:
    """Chat with MODEL, continue a text, or score one: without end, in constant memory.

    MODEL keeps the first tokens and a window of the last; it stays fluent, and forgets what left
    the window. Without --prompt, piped text or --score it chats: /quit or Ctrl-D ends it, Ctrl-C
    ends an answer.
    """
    if options["prompt"] is not None and options["score"] is not None:
        raise click.UsageError("--prompt is to be continued and --score read. Give one.", ctx)
    if options["score"] is None and (options["compare"] or options["sinks"]):
        raise click.UsageError("--compare and --sinks need --score TEXT, what to read.", ctx)
    mode = mode_of(options)
    refuse_unread(ctx, mode)
    from longspan.cli import scoring, writing

    run = {
        "chat": writing.chat,
        "text": writing.continue_text,
        "score": scoring.score,
        "compare": scoring.compare,
    }[mode]
    shared = {"model", "num_sink_tokens", "sliding_window", "original", "force", "dtype"}
    read = READ_BY[mode] | shared | {"trust_remote_code"}
    run(model, **{name: value for name, value in options.items() if name in read})


def mode_of(options: dict[str, Any]) -> str:
    """Returns which way the command is used."""
    if options["score"] is not None:
        return "compare" if options["compare"] or options["sinks"] else "score"
    return "text" if options["prompt"] is not None or not sys.stdin.isatty() else "chat"


def refuse_unread(ctx: click.Context, mode: str) -> None:
    """Refuses options that would do nothing, naming where they are read."""
    somewhere: set[str] = set().union(*READ_BY.values())
    for option in ctx.command.params:
        name = str(option.name)
        flag, given = option.opts[-1], ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and name in somewhere - READ_BY[mode]:
            places = [WHERE[other] for other, read in READ_BY.items() if name in read]
            raise click.UsageError(
                f"{flag} does nothing {WHERE[mode]}; use it {' or '.join(places)}.",
                ctx,
            )
        if given and name in ("system", "pin_prompt") and ctx.params["load"] is not None:
            raise click.UsageError(f"{flag} does nothing with --load: its text has begun.", ctx)
        method = METHOD_OF.get(name)
        if given and method and method not in (ctx.params["compare"] or ()):
            raise click.UsageError(f"{flag} needs {method} among the methods of --compare.", ctx)
        needed, why = NEEDS.get(name, (("model",), ""))
        if given and all(ctx.params[other] is None for other in needed):
            raise click.UsageError(f"{flag} needs {why}.", ctx)
