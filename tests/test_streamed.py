"""A streamed model against an oracle that keeps every raw key and places the kept ones anew."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from longspan.adapters.rope import rope_from_config
from longspan.adapters.rotation import exact_rotation
from longspan.adapters.streamed import StreamedModel
from longspan.caches import cache
from longspan.errors import ConfigError, UnsupportedModelError
from longspan.tools.stream import stream as endless
from tiny_families import OWN, logits, tiny, tokens

S, W, N = 3, 11, 60
NATIVE = 16  # the window that tiny sliding layers have of their own
CHUNKS: dict[str, list[int] | None] = {
    "one at a time": [1] * N,
    "whole": [N],
    "mixed": [7, 20, 1, 1, 31],
    "no cache": None,
}
LATENT = ["deepseek_v3", "glm_moe_dsa"]
# transformers multiplies experts in groups, which float64 cannot be
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "minimax_m2", "gpt_oss"}
DOUBLE = dict(atol=1e-9, rtol=0)
FLOAT32 = dict(atol=2e-5, rtol=0)
OWN_TABLE = dict(atol=5e-5, rtol=0)  # transformers' own tables are float32
SEEN = 1e-2


class Unturned(nn.Module):
    """Gives the cos and sin of position 0 for every position, in the shape of the model's own."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.own(*args, **kwargs)
        return torch.ones_like(cos), torch.zeros_like(sin)


@dataclass
class Past:
    """What the oracle knows of one layer: its rope, the sizes, and every raw key and value."""

    rope: Any
    sinks: int
    window: int
    seq_len: int | None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def turned(x: Tensor, places: Tensor, rope: Any, seq_len: int) -> Tensor:
    """x [n, heads, D] turned by places [n] in float64."""
    inv_freq = rope.inv_freq(seq_len if rope.method.depends_on_length else None)
    pair, pairs = torch.arange(len(inv_freq)), len(inv_freq)
    first, second = pair, pair + pairs
    if rope.layout == "interleaved":
        first, second = 2 * pair, 2 * pair + 1
    angle = (places.double()[:, None] * inv_freq)[:, None]
    a, b, out = x[..., first], x[..., second], x.clone()
    out[..., first] = (a * angle.cos() - b * angle.sin()) * rope.attention_factor
    out[..., second] = (a * angle.sin() + b * angle.cos()) * rope.attention_factor
    return out


def one_token(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a single token; the model itself says which of its layers slide."""
    past = module.past
    past.keys.append(key[0, :, 0].double())
    past.values.append(value[0, :, 0].double())
    sinks, window = (0, sliding_window) if sliding_window else (past.sinks, past.window)
    last = len(past.keys) - 1
    kept = [at for at in range(last + 1) if at < sinks or at > last - window]
    q, k = query[:, :, 0].double(), torch.stack([past.keys[at] for at in kept])
    if past.rope is not None:
        places, length = torch.arange(len(kept)), past.seq_len or len(kept)
        q, k = turned(q, places[-1:], past.rope, length), turned(k, places, past.rope, length)
    group = q.shape[1] // k.shape[1]
    k, v = (
        x.repeat_interleave(group, dim=1) for x in (k, torch.stack([past.values[i] for i in kept]))
    )
    scores = torch.einsum("hd,nhd->hn", q[0], k) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.double()[:, None]), dim=1)
    weights = scores.softmax(-1)[:, : len(kept)]
    return torch.einsum("hn,nhd->hd", weights, v)[None, None].to(query.dtype), None


AttentionInterface.register("test_oracle", one_token)


def oracle(
    model: Any, row: Tensor, sinks: int = S, window: int = W, seq_len: int | None = None
) -> Tensor:
    """All logits of a row, [1, N, V], from a copy of the model that reads one token at a time."""
    plain, ropes = copy.deepcopy(model), rope_from_config(model.config)
    for parent in list(plain.modules()):
        if isinstance(getattr(parent, "rotary_emb", None), nn.Module):
            parent.rotary_emb = Unturned(parent.rotary_emb)
    plain.set_attn_implementation("test_oracle")
    assert plain.config._attn_implementation == "test_oracle"
    for module in plain.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.past = Past(ropes.for_layer(module.layer_idx), sinks, window, seq_len)
    outs = []
    with torch.no_grad():
        for at in range(row.shape[1]):
            place = torch.tensor([[at]])  # ministral3 scales its queries by it
            outs.append(plain(row[:, at : at + 1], position_ids=place, use_cache=False).logits)
    return torch.cat(outs, dim=1)


def made(family: str, rope: dict[str, Any] | None = None, **changed: Any) -> Any:
    """A tiny model, in float64 where the family can."""
    model = tiny(family, rope, **changed)
    if family == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.normal_(std=2.0)
    return model if family in EXPERTS else model.double()


def fed(stream: StreamedModel, row: Tensor, sizes: list[int] | None, cache: Any = None) -> Tensor:
    """All logits of a row fed in chunks; in one forward without a cache where sizes is None."""
    if sizes is None:
        return logits(stream.model, row)
    cache = stream.new_cache() if cache is None else cache
    with torch.no_grad():
        outs = [stream.model(part, cache=cache).logits for part in row.split(sizes, dim=1)]
    return torch.cat(outs, dim=1)


def padded(lengths: tuple[int, ...], more: int, side: str = "left") -> tuple[Tensor, Tensor]:
    """Prompts of these lengths filled up on one side, and `more` tokens each: ids and mask."""
    ids, prompt = tokens(max(lengths) + more, len(lengths)), max(lengths)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : prompt - length] = 0
        if side == "right":
            mask[row, :prompt] = mask[row, :prompt].flip(0)
    return ids, mask


def fed_with(
    stream: StreamedModel, ids: Tensor, mask: Tensor, sizes: list[int], into: Any = None
) -> Tensor:
    """As `fed`, with a mask as long as all tokens so far, and no position_ids."""
    cache, outs, end = stream.new_cache() if into is None else into, [], 0
    with torch.no_grad():
        for part in ids.split(sizes, dim=1):
            end += part.shape[1]
            outs.append(stream.model(part, attention_mask=mask[:, :end], cache=cache).logits)
    return torch.cat(outs, dim=1)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in OWN if family not in LATENT},
    "mistral, all layers slide": ("mistral", dict(sliding_window=NATIVE)),
    "qwen2, the last slides": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=NATIVE, max_window_layers=1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_any_chunking_of_any_family_is_the_oracle(case: str) -> None:
    family, changed = CASES[case]
    model, row = made(family, **changed), tokens(N)
    stream, wanted = StreamedModel(model, S, W), oracle(model, row)
    close = FLOAT32 if family in EXPERTS else DOUBLE
    for name, sizes in CHUNKS.items():
        found = fed(stream, row, sizes)
        torch.testing.assert_close(found, wanted, **close, msg=lambda m, n=name: f"{n}: {m}")
    own = logits(model, row)
    torch.testing.assert_close(wanted[:, : S + W], own[:, : S + W], **OWN_TABLE)
    if case != "mistral, all layers slide":
        assert (wanted - own)[:, S + W :].abs().max() > SEEN


@pytest.mark.parametrize("family", LATENT)
def test_latent_attention_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{family}' has latent attention .* yet"):
        StreamedModel(tiny(family), S, W)


TRAINED = 16
SHORT, LONG = [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def longrope(original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 4.0,
        "original_max_position_embeddings": original,
    }


SCALED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, {}),
    "dynamic": ("llama", DYNAMIC, dict(max_position_embeddings=TRAINED)),
    "yarn": (
        "llama",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
        {},
    ),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": TRAINED,
        },
        {},
    ),
    "longrope": ("phi3", longrope(TRAINED), dict(original_max_position_embeddings=TRAINED)),
    "dynamic, sliding": ("cohere2", DYNAMIC, dict(max_position_embeddings=8)),
}


@pytest.mark.parametrize(
    ("name", "seq_len"),
    [(name, None) for name in SCALED]
    + [("dynamic", 48), ("longrope", 48), ("dynamic, sliding", 12)],
)
def test_a_scaled_rope_is_the_oracle_beyond_the_original_length(
    name: str, seq_len: int | None
) -> None:
    family, rope, changed = SCALED[name]
    model, row, window = made(family, rope, **changed), tokens(N), 29
    assert TRAINED < S + window < N
    stream = StreamedModel(model, S, window, seq_len=seq_len)
    wanted = oracle(model, row, S, window, seq_len)
    for sizes in CHUNKS.values():
        torch.testing.assert_close(fed(stream, row, sizes), wanted, **DOUBLE)
    unscaled = StreamedModel(made(family, **changed), S, window)
    assert (fed(unscaled, row, None) - wanted).abs().max() > SEEN
    if seq_len is not None:
        by_step = StreamedModel(model, S, window)
        assert (fed(by_step, row, None) - wanted).abs().max() > SEEN


def test_a_static_table_does_not_read_the_declared_length() -> None:
    model, row = made(*SCALED["yarn"][:2]), tokens(N)
    found = [fed(StreamedModel(model, S, W, seq_len=n), row, [N]) for n in (None, 48)]
    assert torch.equal(*found)


ORIGINAL, PROMPT, GROWN = 32, 20, 96
LENGTHS = {"dynamic": DYNAMIC, "longrope": longrope(ORIGINAL)}
GROWTH = {"prefill, then steps": [PROMPT] + [1] * (GROWN - PROMPT), "mixed": [20, 1, 30, 1, 44]}


def case_11(name: str, layers: int) -> Any:
    length = ORIGINAL if name == "dynamic" else 4 * ORIGINAL
    return made("llama", LENGTHS[name], num_hidden_layers=layers, max_position_embeddings=length)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", LENGTHS)
def test_case_11_request_is_a_fresh_forward_of_the_declared_length(name: str, layers: int) -> None:
    model, row = case_11(name, layers), tokens(GROWN)
    ropes = rope_from_config(model.config)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")  # eager's softmax is float32
    with exact_rotation(plain, ropes, seq_len=GROWN):
        fresh = logits(plain, row)
    for seq_len, same in ((GROWN, True), (30, False)):
        declared = StreamedModel(model, 0, GROWN, seq_len=30)  # less than it then reads
        stream = endless(model, None, 0, GROWN, seq_len=seq_len).streamed if same else declared
        for sizes in GROWTH.values():
            off = (fed(stream, row, sizes) - fresh).abs().max()
            assert off < DOUBLE["atol"] if same else off > SEEN


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", LENGTHS)
def test_case_11_step_is_token_by_token_with_raw_keys(name: str, layers: int) -> None:
    model, row = case_11(name, layers), tokens(GROWN)
    stream, wanted = endless(model, None, 0, 128).streamed, oracle(model, row, 0, 128)
    for sizes in GROWTH.values():
        torch.testing.assert_close(fed(stream, row, sizes), wanted, **DOUBLE)
    ids, mask = padded((PROMPT, 41), GROWN - 41)
    beside = fed_with(stream, ids, mask, [30, 11] + [1] * (GROWN - 41))
    for at in range(2):
        here = mask[at].bool()
        alone = fed(stream, ids[at][here][None], [1] * int(here.sum()))
        torch.testing.assert_close(beside[at][here], alone[0], **DOUBLE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "smollm3", "gemma3_text", "cohere2", "gpt_oss"])
def test_a_padded_row_is_the_row_alone_without_position_ids(family: str, side: str) -> None:
    stream = StreamedModel(made(family), S, W)
    ids, mask = padded((1, W, 2 * W, 3 * W), 2 * W, side)
    found = fed_with(stream, ids, mask, [9, 3 * W - 9, 1, 5] + [1] * (2 * W - 6))
    close = FLOAT32 if family in EXPERTS else DOUBLE
    for row, token_ids, here in zip(found, ids, mask.bool(), strict=True):
        alone = fed(stream, token_ids[here][None], None)
        torch.testing.assert_close(row[here], alone[0], **close)


def test_sinks_and_window_each_change_the_output() -> None:
    model, row = made("llama"), tokens(N)
    outs = [fed(StreamedModel(model, *sizes), row, [N]) for sizes in ((S, W), (S + 1, W), (S, 12))]
    for other in outs[1:]:
        assert (outs[0] - other)[:, S + W + 1 :].abs().max() > SEEN


def test_a_window_that_the_model_never_exceeds_is_none() -> None:
    wide, none = (made("mistral", sliding_window=size) for size in (64, None))
    streams, row = [StreamedModel(model, S, W) for model in (wide, none)], tokens(N)
    assert [(each.num_sink_tokens, each.sliding_window) for each in streams] == [(S, W)] * 2
    assert torch.equal(*(fed(stream, row, [7, 1, 52]) for stream in streams))
    assert wide.config.max_position_embeddings == 64


def test_layers_that_slide_keep_their_own_window_whatever_is_asked() -> None:
    model, row = made("mistral", sliding_window=NATIVE), tokens(N)
    outs = [fed(StreamedModel(model, *sizes), row, [N]) for sizes in ((S, W), (0, 1), (8, 100))]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    torch.testing.assert_close(outs[0], logits(model, row), **OWN_TABLE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_restored_is_saved(family: str) -> None:
    stream, ids, more = StreamedModel(made(family), S, W), tokens(30, 2), tokens(20, 2, seed=2)
    kept, again = stream.new_cache(), stream.new_cache()
    fed(stream, ids, [29, 1], kept)
    saved = {name: tensor.clone() for name, tensor in kept.state().items()}
    sizes = [1, 1, 6] + [1] * 12
    wanted = fed(stream, more, sizes, kept)
    fed(stream, more, [20], again)  # something else, to be forgotten
    again.restore(saved)
    assert again.get_seq_length() == 30
    assert torch.equal(fed(stream, more, sizes, again), wanted)
    with pytest.raises(ConfigError, match=r"14 slots.* = 16"):
        StreamedModel(made(family), S, W + 2).new_cache().restore(saved)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("sizes", [[1] * 60, [7, 1, 20] + [1] * 32])
def test_positions_counted_anew_change_nothing(
    family: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StreamedModel(made(family), S, W)
    ids, mask = padded((3, 4, 5), 55)
    wanted = fed_with(stream, ids, mask, sizes)
    monkeypatch.setattr(cache, "REBASE", 24)
    kept, here = stream.new_cache(), mask.bool()
    found = fed_with(stream, ids, mask, sizes, kept)
    assert all(each.base > 0 for each in kept.caches.values())
    torch.testing.assert_close(found[here], wanted[here], **DOUBLE)

    kept, again, row = stream.new_cache(), stream.new_cache(), tokens(60)
    monkeypatch.setattr(cache, "REBASE", 1 << 20)
    wanted = fed(stream, row, sizes)
    monkeypatch.setattr(cache, "REBASE", 16)
    fed(stream, row[:, :40], [1] * 40, kept)
    assert all(each.base > 16 for each in kept.caches.values())
    again.restore(kept.state())
    torch.testing.assert_close(fed(stream, row[:, 40:], [1] * 20, again), wanted[:, 40:], **DOUBLE)


def test_a_cache_that_is_reset_is_new_and_one_that_is_full_does_not_grow() -> None:
    stream, row = StreamedModel(made("gemma3_text"), S, W), tokens(N)
    cache = stream.new_cache()
    first = fed(stream, row, [20] * 3, cache)
    sizes = {name: tensor.shape for name, tensor in cache.state().items()}
    fed(stream, row, [1] * N, cache)
    assert {name: tensor.shape for name, tensor in cache.state().items()} == sizes
    assert cache.get_seq_length() == 2 * N
    assert cache.batch_size == 1
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
    assert torch.equal(fed(stream, row, [20] * 3, cache), first)
