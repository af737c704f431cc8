"""Streams with a real model: against transformers' own caches, and against reading afresh.

    python benchmarks/streaming.py --json docs/results/streaming.json

All contenders take turns in one process. transformers' sliding cache has no sinks, and its keys are
at positions that grow without end; it is here for its speed.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from longspan.adapters.load import load_model
from longspan.caches import Encoding, SinkCache
from longspan.files import write_text
from longspan.rotary.rope import Rope
from longspan.tools.stream import stream
from longspan.tools.texts import read_texts
from timing import Call, say_if_busy, show_table, surroundings, time_in_turn

SINKS = 4
CACHE = 1024  # sinks and window together, unless told otherwise
WINDOWS = (256, 512, 1024, 2048)  # of the comparison with reading afresh


@dataclass
class Row:
    """One contender in one setting."""

    setting: str
    cache: int
    contender: str
    milliseconds: float
    """The median, for a token."""
    of_ours: float


def sliding_cache(model: Any, size: int) -> Any:
    """Returns transformers' cache of the last tokens, for every layer."""
    from transformers import Cache
    from transformers.cache_utils import DynamicSlidingWindowLayer

    layers = [DynamicSlidingWindowLayer(size) for _ in range(model.config.num_hidden_layers)]
    return Cache(layers=layers)


def next_token(model: Any, cache: Any, row: Tensor) -> Call:
    """Returns a step that feeds the next token of a row, again and again."""
    fed = iter(range(row.shape[1]))

    def step() -> None:
        at = next(fed)
        model(row[:, at : at + 1], cache=cache, use_cache=True)

    return step


def filled(model: Any, cache: Any, row: Tensor) -> Any:
    """Returns the cache once it has read a row."""
    for part in row.split(256, dim=1):
        model(part, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def steps(model: Any, row: Tensor, repeats: int) -> list[Row]:
    """Returns a decode step of the whole model, ours and with transformers' sliding cache."""
    ours = stream(model, None, SINKS, CACHE - SINKS)
    past, rest = row[:, : CACHE + 256], row[:, CACHE + 256 :]
    calls = {
        "longspan": next_token(ours.model, filled(ours.model, ours.new_cache(), past), rest),
        "transformers sliding": next_token(
            model, filled(model, sliding_cache(model, CACHE), past), rest
        ),
    }
    return rows("decode step", CACHE, time_in_turn(calls, repeats, 5))


def cache_parts(model: Any, repeats: int) -> list[Row]:
    """Returns cache and attention of one layer's decode step, against turning all keys anew."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // heads
    rope = Rope(head_dim=dim, rope_theta=config.rope_parameters["rope_theta"])
    q, k, v = (torch.randn(1, n, 1, dim) for n in (heads, kv_heads, kv_heads))
    kept, how = SinkCache(SINKS, CACHE - SINKS), Encoding(rope)
    many = torch.randn(1, kv_heads, 2 * CACHE, dim)
    kept.attend(kept.begin(2 * CACHE), 0, many.repeat(1, 3, 1, 1)[:, :heads], many, many, how)

    def ours() -> None:
        kept.attend(kept.begin(1), 0, q, k, v, how)

    raw, values = many[:, :, :CACHE], many[:, :, :CACHE]
    table = rope.table(torch.arange(CACHE)[None])
    cos, sin = (torch.cat((part, part), dim=-1) for part in table)

    def anew() -> None:
        keys = torch.cat((raw[:, :, :SINKS], raw[:, :, SINKS + 1 :], k), dim=2)
        held = torch.cat((values[:, :, :SINKS], values[:, :, SINKS + 1 :], v), dim=2)
        turned, _ = apply_rotary_pos_emb(q, q, cos[:, -1:], sin[:, -1:])
        _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
        F.scaled_dot_product_attention(turned, keys, held, enable_gqa=True)

    calls: dict[str, Call] = {"longspan": ours, "all keys turned anew": anew}
    return rows("cache and attention of a layer", CACHE, time_in_turn(calls, 10 * repeats, 20))


def scoring(model: Any, row: Tensor, tokens: int, slow_tokens: int) -> list[Row]:
    """Returns the time for a scored token, in chunks, and one at a time as transformers does."""
    ours = stream(model, None, SINKS, CACHE - SINKS)
    start = time.perf_counter()
    ours.score(row[:, :tokens])
    chunked = (time.perf_counter() - start) * 1e3 / tokens
    cache = filled(model, sliding_cache(model, CACHE), row[:, :CACHE])
    step = next_token(model, cache, row[:, CACHE:])
    times = time_in_turn({"one": step}, slow_tokens, 2)["one"]
    found = {"longspan, chunks of 256": [chunked], "transformers, one at a time": times}
    return rows("scoring", CACHE, found)


def afresh(model: Any, row: Tensor, repeats: int) -> list[Row]:
    """Returns a token's latency against reading the whole window again for every token."""
    found: list[Row] = []
    for cache in WINDOWS:
        ours = stream(model, None, SINKS, cache - SINKS)
        past = filled(ours.model, ours.new_cache(), row[:, : cache + 64])
        window = row[:, :cache]
        calls: dict[str, Call] = {
            "longspan": next_token(ours.model, past, row[:, cache + 64 :]),
            "read afresh": lambda window=window: model(window, use_cache=False, logits_to_keep=1),
        }
        found += rows("latency", cache, time_in_turn(calls, repeats, 2))
    return found


def rows(setting: str, cache: int, times: dict[str, list[float]]) -> list[Row]:
    """Returns the medians, the first contender being what the others are compared with."""
    medians = {name: median(each) for name, each in times.items()}
    ours = next(iter(medians.values()))
    return [Row(setting, cache, name, ms, ms / ours) for name, ms in medians.items()]


def show(found: list[Row], console: Console) -> None:
    """Prints a setting."""
    cells = [
        (row.contender, str(row.cache), f"{row.milliseconds:.3g}", f"{row.of_ours:.2f}")
        for row in found
    ]
    show_table(console, found[0].setting, ("", "cache", "ms a token", "× longspan"), cells)


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--model", "name", default="smollm2", show_default=True)
@click.option("--text", default="moby-dick", show_default=True)
@click.option("--repeats", default=30, show_default=True)
@click.option("--tokens", default=8192, show_default=True, help="Scored in chunks.")
@click.option("--threads", default=2, show_default=True)
def main(path: Path | None, name: str, text: str, repeats: int, tokens: int, threads: int) -> None:
    """Times streams."""
    torch.set_num_threads(threads)
    console, facts = Console(width=100), surroundings(("torch", "transformers", "longspan"))
    say_if_busy(console)
    model, tokenizer = load_model(name)
    content = read_texts([text])[0].content[: 8 * tokens + 100_000]
    row = tokenizer(content, return_tensors="pt", verbose=False).input_ids
    found: list[Row] = []
    with torch.no_grad():
        for measured in (
            steps(model, row, repeats),
            cache_parts(model, repeats),
            scoring(model, row, tokens, 2 * repeats),
            afresh(model, row, max(3, repeats // 5)),
        ):
            show(measured, console)
            found += measured
    if path is not None:
        facts |= {"model": name, "text": text, "num_sink_tokens": SINKS, "repeats": repeats}
        content_json = {"protocol": facts, "rows": [asdict(each) for each in found]}
        write_text(path, json.dumps(content_json, indent=1) + "\n")


if __name__ == "__main__":
    main()
