"""A stretch of a text that a tokenizer reads as exactly so many tokens, to be read again and again.

python benchmarks/excerpt.py ten-thousand.txt
"""

from __future__ import annotations

from pathlib import Path

import click

from longspan.adapters.load import load_model
from longspan.files import write_text
from longspan.tools.texts import read_texts

FURTHER = 400  # places that are tried: where a word is cut, it is read as other tokens alone


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--model", default="smollm2", show_default=True)
@click.option("--text", default="moby-dick", show_default=True)
@click.option("--start", default=20_000, show_default=True, help="Tokens passed over, at least.")
@click.option("--tokens", default=10_000, show_default=True)
def main(path: Path, model: str, text: str, start: int, tokens: int) -> None:
    """Writes the first such stretch to PATH."""
    _, tokenizer = load_model(model)
    asked = {"add_special_tokens": False, "verbose": False}
    ids = tokenizer(read_texts([text])[0].content, **asked).input_ids
    for place in range(start, start + FURTHER):
        content = tokenizer.decode(ids[place : place + tokens])
        if len(tokenizer(content, **asked).input_ids) == tokens:
            write_text(path, content)
            click.echo(f"{path}: {tokens:,} tokens of {text} from token {place:,} on")
            return
    raise click.ClickException(f"no stretch of {tokens:,} tokens of {text} is read so alone.")


if __name__ == "__main__":
    main()
