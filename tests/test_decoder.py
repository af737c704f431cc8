"""The small decoder: any encoding against a naive one, recurrence, documents, checkpoints."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from longspan.errors import ConfigError, InputError, OutputError, ShapeError
from longspan.models import (
    ENCODINGS,
    Decoder,
    DecoderConfig,
    load_decoder,
    save_decoder,
    save_llama,
)
from longspan.rotary.scaling import Yarn

SMALL = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
)
YARN = Yarn(factor=2.0, original_max_position_embeddings=16)
RECURRENT = [name for name, one in ENCODINGS.items() if one.recurrent]


def config(position_encoding, **changes):
    return replace(SMALL, position_encoding=position_encoding, **changes)


def decoder(position_encoding, seed=0, **changes):
    """A decoder in float64 whose learned tables are large enough to matter."""
    made = Decoder(config(position_encoding, **changes), seed).double()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if not name.endswith("norm.weight"):
                weight.mul_(12)
    return made.eval()


def tokens(length=12, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL.vocab_size, (batch, length), generator=generator)


# --- a decoder written out plainly, one layer, one row, one query at a time ---


def naive_norm(x, weight, eps=1e-5):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def naive_turn(x, position, theta=10_000.0):
    half = len(x) // 2
    out = x.clone()
    for pair in range(half):
        angle = position * theta ** (-2 * pair / len(x))
        a, b = x[pair], x[pair + half]
        out[pair] = a * math.cos(angle) - b * math.sin(angle)
        out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def naive_t5_bucket(distance):
    if distance < 16:
        return distance
    return min(31, 16 + int(math.log(distance / 16) / math.log(128 / 16) * 16))


def naive_sinusoid(position, width):
    frequencies = [10_000.0 ** (-2 * i / width) for i in range(width // 2)]
    angles = [position * f for f in frequencies]
    return torch.tensor(
        [math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64
    )


def naive_logits(made, row):
    """The logits of one row of tokens under the model's own weights."""
    w = dict(made.named_parameters())
    encodings, heads = made.config.encodings, made.config.num_attention_heads
    dim, groups = made.config.head_dim, heads // made.config.num_key_value_heads
    width = made.config.hidden_size
    x = w["embed_tokens.weight"][row]
    if "sinusoidal" in encodings:
        x = x + torch.stack([naive_sinusoid(p, width) for p in range(len(row))]) / math.sqrt(width)
    if "learned" in encodings:
        x = x + w["positions.table"][: len(row)]
    for layer, name in enumerate(encodings):
        own = f"layers.{layer}."
        normed = naive_norm(x, w[own + "input_layernorm.weight"])
        q, k, v = (normed @ w[f"{own}self_attn.{part}_proj.weight"].T for part in "qkv")
        rows = []
        for i in range(len(row)):
            out = torch.zeros(width, dtype=x.dtype)
            for h in range(heads):
                of_q, of_k = (
                    slice(h * dim, (h + 1) * dim),
                    slice(h // groups * dim, (h // groups + 1) * dim),
                )
                scores, values = [], []
                for j in range(i + 1):
                    score, value = naive_score(
                        w, name, layer, h, heads, q[i, of_q], k[j, of_k], i, j
                    )
                    scores.append(score)
                    values.append(v[j, of_k] + value)
                weights = torch.stack(scores).softmax(0)
                out[of_q] = sum(
                    weight * value for weight, value in zip(weights, values, strict=True)
                )
            rows.append(out @ w[own + "self_attn.o_proj.weight"].T)
        x = x + torch.stack(rows)
        normed = naive_norm(x, w[own + "post_attention_layernorm.weight"])
        gate, up = (normed @ w[f"{own}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[own + "mlp.down_proj.weight"].T
    return naive_norm(x, w["norm.weight"]) @ w["embed_tokens.weight"].T


def naive_score(w, name, layer, h, heads, q, k, i, j):
    root = math.sqrt(len(q))
    if name == "rope":
        return naive_turn(q, i) @ naive_turn(k, j) / root, 0
    if name == "alibi":
        return q @ k / root - 2.0 ** (-8 * (h + 1) / heads) * (i - j), 0
    if name == "t5":
        return q @ k + w["layers.0.self_attn.bias.table"][naive_t5_bucket(i - j), h], 0
    if name == "shaw":
        place = max(-16, j - i) + 16
        keys, values = (w[f"layers.{layer}.self_attn.bias.{p}_table"] for p in ("key", "value"))
        return q @ (k + keys[place]) / root, values[place]
    if name == "transformer_xl":
        r = w[f"layers.{layer}.self_attn.bias.key_relative.weight"] @ naive_sinusoid(i - j, 16)
        r = r[h * len(q) : (h + 1) * len(q)]
        u, v = (w[f"layers.0.self_attn.bias.{p}"][h] for p in "uv")
        return (q @ k + q @ r + u @ k + v @ r) / root, 0
    return q @ k / root, 0


@pytest.mark.parametrize("name", ENCODINGS)
def test_logits_are_those_of_the_formulas_written_out(name):
    made, row = decoder(name), tokens(9, 1)
    with torch.no_grad():
        expected = naive_logits(made, row[0])
        torch.testing.assert_close(made.logits(row)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_changes_the_logits(name):
    others = [one for one in ENCODINGS if one != name]
    mine = decoder(name).logits(tokens())
    assert all((mine - decoder(other).logits(tokens())).abs().max() > 1e-3 for other in others)


def test_common_weights_start_equal_under_one_seed():
    made = {name: dict(Decoder(config(name), 3).named_parameters()) for name in ENCODINGS}
    common = set.intersection(*(set(weights) for weights in made.values()))
    assert len(common) == 2 + 9 * SMALL.num_hidden_layers
    for weights in made.values():
        for name in common:
            assert torch.equal(weights[name], made["rope"][name]), name
    other = dict(Decoder(config("rope"), 4).named_parameters())
    assert not torch.equal(other["embed_tokens.weight"], made["rope"]["embed_tokens.weight"])


def test_a_bias_is_shared_where_the_paper_shares_it():
    shared = {
        name: {key for key, _ in Decoder(config(name)).named_parameters() if "bias" in key}
        for name in ENCODINGS
    }
    assert shared["t5"] == {"layers.0.self_attn.bias.table"}
    assert {key for key in shared["transformer_xl"] if key[-2:] in (".u", ".v")} == {
        "layers.0.self_attn.bias.u",
        "layers.0.self_attn.bias.v",
    }
    assert len([key for key in shared["transformer_xl"] if "key_relative" in key]) == 3
    assert len(shared["shaw"]) == 6


# --- recurrence ---


def in_segments(made, input_ids, length, **options):
    memory, found = None, []
    for start in range(0, input_ids.shape[1], length):
        part = slice(start, start + length)
        given = {key: value[..., part] for key, value in options.items()}
        out = made(input_ids[:, part], memory=memory, **given)
        memory = out.memory
        found.append(made.head(out.hidden))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", RECURRENT)
def test_three_segments_with_memory_equal_one_pass(name):
    made = decoder(name, memory_length=8)
    whole = made.with_memory(0).logits(tokens())
    torch.testing.assert_close(in_segments(made, tokens(), 4), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_short_memory_is_another_function(name):
    short, long = decoder(name, memory_length=2), decoder(name, memory_length=8)
    apart = (in_segments(short, tokens(), 4) - in_segments(long, tokens(), 4)).abs()
    assert apart[:, :4].max() == 0
    assert apart[:, 4:].max() > 1e-3


def test_case_17_memory_of_segments():
    made = decoder("transformer_xl", memory_length=5)
    memory = None
    for start in range(0, 9, 3):
        memory = made(tokens()[:, start : start + 3], memory=memory).memory
    assert memory.positions.tolist() == [4, 5, 6, 7, 8]
    assert all(states.shape == (2, 5, 16) for states in memory.hidden)
    assert not any(states.requires_grad for states in memory.hidden)

    assert decoder("transformer_xl")(tokens()).memory is None  # memory_length 0 keeps nothing
    longer = decoder("transformer_xl", memory_length=100)(tokens()).memory
    assert longer.length == 12  # what exists, no more


def test_memory_holds_the_raw_input_of_every_layer():
    made = decoder("transformer_xl", memory_length=3)
    memory = made(tokens()).memory
    torch.testing.assert_close(memory.hidden[0], made.embed_tokens(tokens())[:, -3:])


def test_no_gradient_flows_into_an_earlier_segment():
    made = decoder("transformer_xl", memory_length=4)
    first = made(tokens()[:, :4])
    second = made(tokens()[:, 4:], memory=first.memory).hidden.sum()
    (gradient,) = torch.autograd.grad(second, [first.hidden], allow_unused=True)
    assert gradient is None


def test_the_memory_of_another_decoder_or_batch_is_refused():
    made = decoder("transformer_xl", memory_length=8)
    memory = made(tokens(batch=1)).memory
    with pytest.raises(
        ShapeError, match=r"of \[1, M, 16\], and this forward has .* of \[2, T, 16\]"
    ):
        made(tokens(batch=2), memory=memory)
    deeper = decoder("transformer_xl", memory_length=8, num_hidden_layers=5)
    with pytest.raises(ShapeError, match=r"this forward has 5 of"):
        deeper(tokens(batch=1), memory=memory)
    with pytest.raises(ShapeError, match="what an earlier forward returned, got str"):
        made(tokens(), memory="x")


def test_memory_does_not_reach_over_documents():
    made = decoder("transformer_xl", memory_length=8)
    documents = torch.tensor([[0] * 4 + [1] * 8, [0] * 12])
    together = in_segments(made, tokens(), 4, documents=documents)
    alone = made.with_memory(0).logits(tokens()[:1, 4:])
    torch.testing.assert_close(together[:1, 4:], alone, rtol=0, atol=1e-10)
    whole = made.with_memory(0).logits(tokens()[1:])
    torch.testing.assert_close(together[1:], whole, rtol=0, atol=1e-10)


def test_documents_must_be_given_for_every_segment_or_none():
    made = decoder("rope", memory_length=4)
    memory = made(tokens()).memory
    with pytest.raises(ShapeError, match="only one of memory and input"):
        made(tokens(), memory=memory, documents=torch.zeros(2, 12, dtype=torch.int64))


# --- documents and positions ---


@pytest.mark.parametrize("name", ENCODINGS)
def test_packed_copies_of_a_document_have_equal_logits(name):
    made, row = decoder(name), tokens(6, 1)
    packed = row.repeat(1, 2)
    positions = torch.arange(6).repeat(2)
    documents = torch.tensor([[0] * 6 + [1] * 6])
    logits = made.logits(packed, positions=positions, documents=documents)
    torch.testing.assert_close(logits[:, :6], logits[:, 6:], rtol=0, atol=1e-12)
    torch.testing.assert_close(logits[:, 6:], made.logits(row), rtol=0, atol=1e-12)


def test_positions_that_start_again_need_documents():
    with pytest.raises(ConfigError, match="go back at index 6"):
        decoder("rope").logits(tokens(), positions=torch.arange(6).repeat(2))


def test_two_tokens_of_a_document_are_not_at_one_position():
    with pytest.raises(ConfigError, match="go back at index 3"):
        decoder("rope").logits(tokens(5), positions=torch.tensor([0, 1, 2, 2, 3]))


def test_positions_may_not_go_back_into_memory():
    made = decoder("rope", memory_length=8)
    memory = made(tokens()).memory
    with pytest.raises(ConfigError, match="go back at index 8"):
        made(tokens(), memory=memory, positions=torch.arange(12))


@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "shaw", "transformer_xl"])
def test_positions_may_jump_ahead(name):
    """As PoSE trains: the jump changes distances, and hides nothing."""
    made, jumped = decoder(name), torch.cat((torch.arange(6), torch.arange(30, 36)))
    plain, skipped = made.logits(tokens()), made.logits(tokens(), positions=jumped)
    torch.testing.assert_close(plain[:, :6], skipped[:, :6])
    assert (plain[:, 6:] - skipped[:, 6:]).abs().max() > 1e-4
    changed = tokens().clone()
    changed[:, 0] = (changed[:, 0] + 1) % SMALL.vocab_size
    assert (made.logits(changed, positions=jumped) - skipped)[:, -1].abs().max() > 1e-6


def test_learned_positions_end_where_training_did():
    with pytest.raises(ConfigError, match="end at 15, got 0 to 16"):
        decoder("learned").logits(tokens(17))


# --- layers of several kinds ---


def test_sliding_layers_see_their_window_and_sinks():
    kinds = ("sliding_attention",) * 3
    made = decoder("none", layer_types=kinds, sliding_window=3, num_sink_tokens=1)
    base, row = made.logits(tokens(12, 1)), tokens(12, 1)
    reaches = []
    for place in range(12):
        changed = row.clone()
        changed[0, place] = (changed[0, place] + 1) % SMALL.vocab_size
        reaches.append((made.logits(changed) - base)[0, -1].abs().max().item() > 0)
    # three layers of a window of 3 reach back 3·(3 − 1) tokens; the sink is always seen
    assert reaches == [True] + [False] * 4 + [True] * 7


def test_rope_on_sliding_and_none_on_full_layers():
    mixed = decoder(
        ("rope", "rope", "none"),
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        sliding_window=4,
    )
    apart = [
        decoder(names, layer_types=mixed.config.layer_types, sliding_window=4).logits(tokens())
        for names in (("rope",) * 3, ("none",) * 3)
    ]
    assert all((mixed.logits(tokens()) - other).abs().max() > 1e-3 for other in apart)


@pytest.mark.parametrize(
    "changes", [{"learned_sinks": True}, {"scaling": YARN}, {"rope_theta": 100.0}]
)
def test_options_change_the_logits(changes):
    assert (
        decoder("rope", **changes).logits(tokens()) - decoder("rope").logits(tokens())
    ).abs().max() > 1e-3


def test_scaling_after_training_shares_the_weights():
    made = decoder("rope")
    scaled = made.with_scaling(YARN)
    expected = decoder("rope", scaling=YARN).logits(tokens())
    torch.testing.assert_close(scaled.logits(tokens()), expected)
    assert scaled.embed_tokens.weight is made.embed_tokens.weight
    assert made.config.scaling is None


# --- checkpoints ---


@pytest.mark.parametrize("name", ENCODINGS)
def test_saved_is_loaded(name, tmp_path):
    made = Decoder(config(name, scaling=YARN if name == "rope" else None), seed=5).eval()
    save_decoder(made, tmp_path / "model")
    found = load_decoder(tmp_path / "model")
    assert found.config == made.config
    assert torch.equal(found.logits(tokens()), made.logits(tokens()))


def test_a_mixed_decoder_is_saved_with_all_its_settings(tmp_path):
    made = Decoder(
        config(
            ("rope", "alibi", "none"),
            layer_types=("sliding_attention", "full_attention", "full_attention"),
            sliding_window=4,
            num_sink_tokens=1,
            learned_sinks=True,
            tie_word_embeddings=False,
        )
    ).eval()
    save_decoder(made, tmp_path / "model")
    found = load_decoder(tmp_path / "model")
    assert found.config == made.config
    assert torch.equal(found.logits(tokens()), made.logits(tokens()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_transformers_loads_the_llama(tmp_path, tied, scaling):
    from transformers import AutoModelForCausalLM

    made = Decoder(config("rope", scaling=scaling, tie_word_embeddings=tied), seed=1).eval()
    save_llama(made, tmp_path / "llama")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    assert type(llama).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(
            llama(tokens()).logits, made.logits(tokens()), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position_encoding": "alibi"}, "position_encoding='alibi'"),
        ({"memory_length": 4}, "memory_length=4"),
        ({"learned_sinks": True}, "learned_sinks=True"),
        ({"layer_types": ("sliding_attention",) * 3, "sliding_window": 2}, "sliding_window=2"),
    ],
)
def test_what_a_llama_cannot_be_is_not_exported(tmp_path, changes, named):
    made = Decoder(config(**{"position_encoding": "rope", **changes}))
    with pytest.raises(ConfigError, match=named):
        save_llama(made, tmp_path / "llama")
    assert not (tmp_path / "llama").exists()


def test_nothing_is_overwritten_unless_told(tmp_path):
    made = Decoder(config("none"))
    save_decoder(made, tmp_path / "model")
    with pytest.raises(OutputError, match="exists"):
        save_decoder(made, tmp_path / "model")
    save_decoder(made, tmp_path / "model", force=True)


def test_damaged_checkpoints_are_refused(tmp_path):
    folder = tmp_path / "model"
    save_decoder(Decoder(config("none")), folder)
    settings = json.loads((folder / "config.json").read_text())
    for broken, error, message in (
        ({**settings, "hidden_size": 32}, InputError, "config.json asks for"),
        ({**settings, "position_encoding": "t5"}, InputError, "in only one of them"),
        ({**settings, "hiden_size": 16}, ConfigError, "unknown key 'hiden_size'"),
        ({**settings, "model_type": "llama"}, InputError, "not a longspan decoder"),
    ):
        (folder / "config.json").write_text(json.dumps(broken))
        with pytest.raises(error, match=message):
            load_decoder(folder)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read"):
        load_decoder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_encoding": "alibbi"}, "Did you mean 'alibi'"),
        ({"position_encoding": ("rope", "none")}, "one name for each of 3 layers, got 2"),
        (
            {"position_encoding": ("learned", "sinusoidal", "none")},
            "only one encoding can be added",
        ),
        ({"position_encoding": "sinusoidal", "memory_length": 4}, "relative encoding"),
        ({"position_encoding": "alibi", "scaling": YARN}, "no layer rotates"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ({"hidden_size": 18}, "multiple of num_attention_heads, got 18 and 4"),
        ({"sliding_window": 4}, "go together"),
        ({"layer_types": ("sliding",) * 3}, "layer_types may hold"),
        ({"num_sink_tokens": 2}, "does nothing in full attention"),
        ({"vocab_size": 0}, "vocab_size must be a whole number ≥ 1, got 0"),
        ({"memory_length": -1}, "memory_length must be a whole number ≥ 0, got -1"),
    ],
)
def test_contradictory_settings_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


def test_input_must_be_rows():
    with pytest.raises(ShapeError, match=r"must be \[B, T\]"):
        decoder("none").logits(torch.arange(3))


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_weight_is_trained(name):
    made = Decoder(config(name, learned_sinks=True))
    F.cross_entropy(
        made.logits(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()
    ).backward()
    for key, weight in made.named_parameters():
        assert weight.grad is not None, key
        assert weight.grad.abs().max() > 0, key
