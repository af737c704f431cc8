"""Makes the zoo that ships with longspan from the trained models of one study.

    python benchmarks/zoo.py STATE

STATE is the `state` folder that `longspan study … -o OUT` leaves in OUT. Of every encoding the
model of one seed is taken, in bfloat16; the RoPE one as a Llama checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import torch

from longspan.adapters.zoo import FOLDER
from longspan.models import load_decoder, save_decoder, save_llama

LARGEST = 3_000_000  # bytes a model


def tokenizer_files(state: Path) -> dict[str, str]:
    """Returns what transformers needs to load the study's tokenizer."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": (state / "tokenizer.json").read_text(encoding="utf-8"),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


@click.command()
@click.argument("state", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--seed", default=0, show_default=True)
def main(state: Path, seed: int) -> None:
    """Writes one folder an encoding."""
    beside = tokenizer_files(state)
    for path in sorted(state.glob(f"*-{seed}/model")):
        name = path.parent.name.removesuffix(f"-{seed}")
        decoder, folder = load_decoder(path), FOLDER / name
        llama = set(decoder.config.encodings) == {"rope"} and not decoder.config.memory_length
        save = save_llama if llama else save_decoder
        save(decoder, folder, dtype=torch.bfloat16, force=True, beside=beside)
        size = sum(file.stat().st_size for file in folder.iterdir())
        if size > LARGEST:
            shutil.rmtree(folder)
            raise click.ClickException(f"{name} has {size:,} bytes, more than {LARGEST:,}.")
        click.echo(f"zoo:{name}: {size:,} bytes")


if __name__ == "__main__":
    main()
