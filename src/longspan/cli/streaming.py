"""The runs behind `longspan stream`: a chat, a text that goes on, a score, a comparison."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from longspan.adapters.load import load_model, read_config
from longspan.cli.options import print_json
from longspan.files import refuse_existing, whole_file, write_text
from longspan.report.figures import save_figure, stream_comparison, stream_score
from longspan.report.stream import print_comparison, print_score, shown_progress
from longspan.tools.chat import Chat, ChatTemplate, Writing
from longspan.tools.sampling import Sampling
from longspan.tools.stream import Stream, check_fits, reach, stream
from longspan.tools.stream_compare import compare as compare_methods
from longspan.tools.stream_compare import score_text, to_json
from longspan.tools.texts import read_texts

SCORE, COMPARISON, NLL, STATE = "score.json", "comparison.json", "nll.safetensors", "state"
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


def open_stream(
    model: str,
    *,
    num_sink_tokens: int,
    sliding_window: int,
    original: int | None,
    force: bool,
    dtype: str,
    trust_remote_code: bool,
    pinned: Callable[[Any], int] = lambda tokenizer: 0,
    load: Path | None = None,
    save: Path | None = None,
) -> Stream:
    """Returns a stream over a checkpoint; what can be refused is refused before it is loaded.

    Args:
        model: see `load_model`.
        num_sink_tokens, sliding_window, original: see `stream`.
        force: whether `save` may be there already.
        dtype, trust_remote_code: see `load_model`.
        pinned: from the tokenizer to the first tokens that must not be dropped.
        load, save: where a stream is taken up from, and will be kept.
    """
    if save is not None:
        refuse_existing(save, force=force)
        require_writable(save.parent)
    check_fits(reach(read_config(model), original), num_sink_tokens, sliding_window)
    loaded, tokenizer = load_model(
        model, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    sinks = max(num_sink_tokens, pinned(tokenizer))
    opened = stream(
        loaded, tokenizer, sinks, sliding_window, original_max_position_embeddings=original
    )
    if load is not None:
        opened.load(load)
    return opened


def require_writable(folder: Path) -> None:
    """Refuses a place that cannot be written to, before the work is done."""
    probe = folder / ".writable"
    write_text(probe, "")
    probe.unlink()


def score(
    model: str,
    *,
    score: str,
    output: Path | None,
    resume: bool,
    save_every: int,
    as_json: bool,
    original: int | None,
    force: bool,
    tokens: int | None,
    repeat: bool,
    chunk_size: int,
    **options: Any,
) -> None:
    """Scores a text, with a folder that an interrupted run goes on from."""
    state = None if output is None else output / f"{STATE}.safetensors"
    if output is not None and state is not None:
        prepare(output, state, force=force, resume=resume)
    text = read_texts([score])[0]
    opened = open_stream(model, original=original, force=force, **options)
    with told_when_interrupted(state), shown_progress() as announce:
        found, nll = score_text(
            opened,
            text,
            tokens=tokens,
            repeat=repeat,
            chunk_size=chunk_size,
            original_max_position_embeddings=original,
            name=model,
            announce=announce,
            state=state,
            save_every=save_every,
        )
    if output is not None and state is not None:
        with whole_file(output / NLL) as temporary:
            save_file({"nll": nll}, temporary)
        save_figure(stream_score(found), output / "score.png")
        write_text(output / SCORE, to_json(found))
        for left in (state, state.with_suffix(".json")):
            left.unlink(missing_ok=True)
    if as_json:
        click.echo(to_json(found))
        return
    print_score(found)
    if output is not None:
        click.echo(f"Written: {output}")


def prepare(output: Path, state: Path, *, force: bool, resume: bool) -> None:
    """Refuses to replace a result or an unfinished run, unless told to."""
    refuse_existing(output / SCORE, force=force)
    require_writable(output)
    if not state.exists() or resume:
        return
    if not force:
        raise click.ClickException(
            f"{output} holds an unfinished score. Pass --resume to go on from it, or --force to "
            "begin anew."
        )
    state.unlink()


@contextmanager
def told_when_interrupted(state: Path | None) -> Iterator[None]:
    """Turns Ctrl-C into a line that says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "Nothing was saved."
        if state is not None and state.exists():
            kept = "The same command with --resume goes on from where it was last saved."
        raise click.ClickException(f"interrupted. {kept}") from None


def compare(
    model: str,
    *,
    score: str,
    compare: list[str] | None,
    output: Path | None,
    as_json: bool,
    original: int | None,
    force: bool,
    dtype: str,
    trust_remote_code: bool,
    sinks: list[int] | None,
    num_sink_tokens: int,
    sliding_window: int,
    **settings: Any,
) -> None:
    """Compares methods and numbers of sinks on a text."""
    if output is not None:
        refuse_existing(output / COMPARISON, force=force)
        require_writable(output)
    text = read_texts([score])[0]
    check_fits(reach(read_config(model), original), num_sink_tokens, sliding_window)
    loaded, tokenizer = load_model(
        model, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    with told_when_interrupted(None), shown_progress() as announce:
        found = compare_methods(
            loaded,
            tokenizer,
            text,
            methods=compare or [],
            sinks=sinks or [],
            num_sink_tokens=num_sink_tokens,
            sliding_window=sliding_window,
            original_max_position_embeddings=original,
            name=model,
            announce=announce,
            **settings,
        )
    if output is not None:
        if found.methods:
            save_figure(stream_comparison(found), output / "comparison.png")
        write_text(output / COMPARISON, to_json(found))
    if as_json:
        click.echo(to_json(found))
        return
    print_comparison(found)
    if output is not None:
        click.echo(f"Written: {output}")
