"""Streams with a real model: against transformers' own caches, and against reading afresh.

    python benchmarks/streaming.py --json docs/results/streaming.json

All contenders take turns in one process. transformers' sliding cache has no sinks, and its keys are
at positions that grow without end; it is here for its speed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from longspan.adapters.load import load_model
from longspan.caches import LayerEncoding, SinkCache
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


@dataclass(frozen=True)
class Layer:
    """The sizes of a model's attention, and how many layers take turns in the processor's cache."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    count: int


LAYERS = (Layer("SmolLM2-135M", 9, 3, 64, 30), Layer("Llama-2-7B", 32, 32, 128, 8))


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


def cache_parts(layer: Layer, repeats: int) -> list[Row]:
    """Returns cache and attention of a decode step, a layer's share, against turning all anew."""
    rope = Rope(head_dim=layer.head_dim, rope_theta=10_000.0)
    q = torch.randn(1, layer.heads, 1, layer.head_dim)
    k, v = (torch.randn(1, layer.kv_heads, 1, layer.head_dim) for _ in range(2))
    many = torch.randn(1, layer.kv_heads, CACHE, layer.head_dim)
    queries = torch.randn(1, layer.heads, CACHE, layer.head_dim)
    kept, how = SinkCache(SINKS, CACHE - SINKS), LayerEncoding(rope)
    for _ in range(2):
        step = kept.begin(CACHE)
        for number in range(layer.count):
            kept.attend(step, number, queries, many, many, how)

    def ours() -> None:
        step = kept.begin(1)
        for number in range(layer.count):
            kept.attend(step, number, q, k, v, how)

    raw = [(many.clone(), many.clone()) for _ in range(layer.count)]
    cos, sin = (torch.cat((part, part), dim=-1) for part in rope.table(torch.arange(CACHE)[None]))

    def anew() -> None:
        for number, (keys, values) in enumerate(raw):
            keys, values = without_oldest(keys, k), without_oldest(values, v)
            raw[number] = keys, values
            turned, _ = apply_rotary_pos_emb(q, q[:, :0], cos[:, -1:], sin[:, -1:])
            _, keys = apply_rotary_pos_emb(q[:, :0], keys, cos, sin)
            F.scaled_dot_product_attention(turned, keys, values, enable_gqa=True)

    times = time_in_turn({"longspan": ours, "all keys turned anew": anew}, repeats, 3)
    shares = {name: [ms / layer.count for ms in each] for name, each in times.items()}
    return rows(f"cache and attention, a layer of {layer.name}", CACHE, shares)


def without_oldest(kept: Tensor, new: Tensor) -> Tensor:
    """Returns sinks, the window without its oldest token, and the new one."""
    return torch.cat((kept[:, :, :SINKS], kept[:, :, SINKS + 1 :], new), dim=2)


def scoring(model: Any, row: Tensor, tokens: int, slow_tokens: int) -> list[Row]:
    """Returns the time for a scored token, in chunks, and one at a time as transformers does."""
    ours = stream(model, None, SINKS, CACHE - SINKS)
    cache = filled(model, sliding_cache(model, CACHE), row[:, :CACHE])
    step = next_token(model, cache, row[:, CACHE:])

    def one_at_a_time() -> None:
        for _ in range(slow_tokens):
            step()

    calls: dict[str, Call] = {
        "longspan, in chunks": lambda: ours.score(row[:, :tokens]),
        "transformers, one at a time": one_at_a_time,
    }
    chunked, single = time_in_turn(calls, 3, 0).values()
    shares = [ms / tokens for ms in chunked], [ms / slow_tokens for ms in single]
    return rows("scoring", CACHE, dict(zip(calls, shares, strict=True)))


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
            *(cache_parts(layer, repeats) for layer in LAYERS),
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
