"""The command line: parse, call one tool, print."""

from longspan.cli.main import main

__all__ = ["main"]
