"""The runs of `longspan stream` that write: a chat, a text that goes on."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from longspan.cli.options import print_json
from longspan.cli.streaming import open_stream
from longspan.tools.chat import Chat, ChatTemplate, Writing
from longspan.tools.sampling import Sampling

HINT = "/quit or Ctrl-D ends the chat"
NEW_TOKENS = 256  # of a text that goes on, unless told otherwise


def chat(
    model: str,
    *,
    system: str | None,
    pin_prompt: bool,
    max_new_tokens: int | None,
    stop: tuple[str, ...],
    save: Path | None,
    **options: Any,
) -> None:
    """Asks and answers until /quit or the end of input."""
    sampling, options = sampling_of(options)
    require_utf8("--system", system)
    if pin_prompt and system is None:
        raise click.UsageError("--pin-prompt needs --system TEXT in a chat, the text to pin.")

    def pinned(tokenizer: Any) -> int:
        return ChatTemplate(tokenizer, system).opening() if pin_prompt else 0

    opened = open_stream(model, pinned=pinned, save=save, **options)
    talk = Chat(opened, ChatTemplate(opened.tokenizer, system))
    writing = Writing(opened, sampling, max_new_tokens or 0, stop)
    sizes = f"{opened.num_sink_tokens} + {opened.sliding_window:,} tokens"
    click.echo(f"{model} remembers {sizes}. {HINT}; Ctrl-C ends an answer.", err=True)
    while (text := asked()) is not None:
        for piece in writing.pieces(talk.turn(text)):
            show(piece)
        show("\n")
    if save is not None:
        opened.save(save)


def asked() -> str | None:
    """Returns what the user types next; None at /quit or the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401  (lets lines be edited)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            show("\n")
            return None
        except KeyboardInterrupt:
            click.echo(f"\n{HINT}.", err=True)
            continue
        if text == "/quit":
            return None
        if text:
            return text.encode("utf-8", "replace").decode("utf-8")


def continue_text(
    model: str,
    *,
    prompt: str | None,
    pin_prompt: bool,
    max_new_tokens: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    save: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Writes on from a text, piece by piece."""
    sampling, options = sampling_of(options)
    text = piped() if prompt is None else prompt
    if not text and prompt is None and options["load"] is None:
        raise click.UsageError("there is nothing to go on from: give --prompt TEXT, or pipe it in.")
    require_utf8("--prompt", text)

    def pinned(tokenizer: Any) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"]) if pin_prompt else 0

    opened = open_stream(model, pinned=pinned, save=save, **options)
    limit = NEW_TOKENS if max_new_tokens is None else max_new_tokens
    writing, written = Writing(opened, sampling, limit, stop, ignore_eos), ""
    for piece in writing.pieces(text):
        if as_json:
            written += piece
        else:
            show(piece)
    if save is not None:
        opened.save(save)
    if not as_json:
        show("\n")
        return
    print_json(
        {
            "model": model,
            "prompt": text,
            "text": written,
            "tokens": writing.tokens,
            "ended": writing.ended,
            "tokens_per_second": writing.tokens / writing.seconds,
            "num_sink_tokens": opened.num_sink_tokens,
            "sliding_window": opened.sliding_window,
            "seq_len": opened.streamed.seq_len,
            "sampling": asdict(sampling),
            "dtype": options["dtype"],
        }
    )


def piped() -> str:
    """Returns standard input without its last line end, which echo adds."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if sys.stdin else ""
    except UnicodeDecodeError as problem:
        raise click.ClickException(f"standard input is not UTF-8: {problem}.") from problem
    return text.removesuffix("\n").removesuffix("\r")


def show(text: str) -> None:
    """Prints text at once."""
    click.echo(text, nl=False)
    sys.stdout.flush()


def require_utf8(option: str, text: str | None) -> None:
    """Refuses words that the terminal handed over in another encoding."""
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError:
        raise click.UsageError(f"{option} is not UTF-8.") from None


def sampling_of(options: dict[str, Any]) -> tuple[Sampling, dict[str, Any]]:
    """Returns the options of sampling, and the others."""
    names = {field.name for field in fields(Sampling)}
    own = {name: value for name, value in options.items() if name in names}
    return Sampling(**own), {name: options[name] for name in options if name not in names}
