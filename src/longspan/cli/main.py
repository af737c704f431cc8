"""The `longspan` command: its group of verbs, and how errors leave it."""

from __future__ import annotations

import sys
from typing import Any

import click

from longspan._version import __version__
from longspan.errors import LongspanError, did_you_mean


class Verbs(click.Group):
    """Loads a verb's module only when it is called, and tells errors in one line."""

    modules = ("plan", "extend", "evaluate", "finetune", "stream", "study", "sinks")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the verbs in the order of the work."""
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a verb's command."""
        if cmd_name not in self.modules:
            return None
        from importlib import import_module

        return import_module(f"longspan.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the verb; a misspelt one gets the nearest."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self.modules:
            raise click.UsageError(
                f"no such command {name!r}.{did_you_mean(name, self.modules)} "
                f"Commands: {', '.join(self.modules)}.",
                ctx,
            )
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="longspan")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Longer context for real checkpoints, with proof.

    MODEL is a hub id, a folder with config.json, a .gguf file, or an embedded model's name:
    smollm2 (the default) or gemma3-270m, downloaded once, or one of the zoo, such as zoo:rope.
    Lengths are tokens: 16384 or 16k.
    """


def main(args: list[str] | None = None) -> Any:
    """Runs the command line; exits 0, 1 after an error, 2 after a usage error."""
    given = sys.argv[1:] if args is None else args
    debug = "--debug" in given
    # the flag works behind the verb too, where people type it
    given = ["--debug", *[word for word in given if word != "--debug"]] if debug else given
    try:
        cli.main(args=given, standalone_mode=False, prog_name="longspan")
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.UsageError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(1)
    except (KeyboardInterrupt, click.exceptions.Abort):
        sys.exit(
            _fail(
                "interrupted. Nothing is half-written; evaluate, study and finetune keep what is "
                "finished, and the same command goes on from it."
            )
        )
    except LongspanError as error:
        if debug:
            raise
        sys.exit(_fail(str(error)))
    except OSError as error:
        if debug:
            raise
        # without a file's name it is standard output: a full disk behind it, or a closed pipe
        place = error.filename or "cannot write standard output"
        sys.exit(_fail(f"{place}: {error.strerror or error}."))
    except MemoryError:
        sys.exit(_fail("out of memory. Lower --length, or use --dtype bfloat16."))


def _fail(message: str) -> int:
    click.echo(f"Error: {message}", err=True)
    return 1
