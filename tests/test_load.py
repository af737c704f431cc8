"""Loading: what is asked for is what arrives, whole, or one clear line says why not."""

from __future__ import annotations

import json
import logging
import math
import shutil
import socket
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from longspan.adapters.gguf_file import lend_to_transformers, read_gguf
from longspan.adapters.load import load_model, read_config
from longspan.errors import ConfigError, InputError, UnsupportedModelError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|end|>", *BYTES, "ĠĠ", "12"]
MERGES = [("Ġ", "Ġ"), ("1", "2")]
VOCAB = 264
THETA = 10_000.0
FLOAT32_ROUNDING = 1e-5


def tiny_llama(**changed: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }
    config = transformers.LlamaConfig(**{**settings, **changed})
    return transformers.LlamaForCausalLM(config).eval()


def byte_tokenizer(extra: int = 0) -> transformers.PreTrainedTokenizerFast:
    vocab = {
        token: index for index, token in enumerate([*TOKENS, *map(str, range(900, 900 + extra))])
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def offline(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def logits(model: Any, length: int = 40) -> torch.Tensor:
    ids = torch.arange(length)[None] % VOCAB
    with torch.inference_mode():
        return model(ids).logits


def write_gguf(path: Path, model: Any, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Writes a Llama as llama.cpp's converter does: q and k rows in interleaved pairs."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(THETA)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(0)
    for key, value in {"tokenizer.ggml.pre": "gpt-2", "rope_dim": 8, **metadata}.items():
        add_value(writer, {"rope_dim": "llama.rope.dimension_count"}.get(key, key), value)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        which = name.split("_proj")[0][-1]
        if which in heads:
            paired = array.reshape(heads[which], 2, -1, array.shape[-1]).swapaxes(1, 2)
            array = np.ascontiguousarray(paired.reshape(array.shape))
        writer.add_tensor(gguf_name(name), array)
    for name, array in tensors.items():
        writer.add_tensor(name, np.asarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    add[type(value)](key, value)


def gguf_name(name: str) -> str:
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        name = name.replace(ours, theirs)
    return name


@pytest.fixture
def as_gguf(tmp_path):
    def write(metadata=None, tensors=None, model=None) -> Path:
        path = tmp_path / "tiny.gguf"
        return write_gguf(path, model or tiny_llama(), metadata or {}, tensors or {})

    return write


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# A folder


@pytest.mark.usefixtures("no_network")
def test_a_folder_loads_as_it_was_saved(saved):
    model, tokenizer = load_model(saved)
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model), logits(tiny_llama()))
    assert tokenizer.decode(tokenizer("two  12s é").input_ids) == "two  12s é"


def test_dtype_and_attention_are_as_asked(saved):
    model, _ = load_model(str(saved), dtype=torch.bfloat16, attn_implementation="eager")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


def test_an_unusable_device_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match=r"device 'cuda:99'.*'cpu' always can"):
        load_model("nowhere-at-all", device="cuda:99")


def test_config_of_a_folder_is_raw_with_its_misspelt_keys(copied):
    path = copied / "config.json"
    content = json.loads(path.read_text())
    content["rope_parameters"]["beta_fsat"] = 31
    path.write_text(json.dumps(content))
    assert read_config(copied) == content
    assert read_config(str(path)) == content


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_config_that_is_no_object_is_one_clear_line(copied, content):
    (copied / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json (cannot be read as JSON|must hold)"):
        read_config(copied)
    with pytest.raises(InputError) as caught:
        load_model(copied)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_refused(copied):
    (copied / "model.safetensors").unlink()
    torch.save({}, copied / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only pickle \(pytorch_model\.bin\), which can run code"):
        load_model(copied)


def test_a_folder_without_weights_an_adapter_or_a_bare_config_is_refused(copied):
    with pytest.raises(InputError, match="only a config; name the folder"):
        load_model(copied / "config.json")
    (copied / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds an adapter"):
        load_model(copied)
    (copied / "adapter_config.json").unlink()
    (copied / "model.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights"):
        load_model(copied)
    (copied / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        load_model(copied)


def test_code_that_comes_with_a_checkpoint_does_not_run_unasked(copied, tmp_path):
    content = json.loads((copied / "config.json").read_text())
    own = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    }
    (copied / "config.json").write_text(json.dumps({**content, **own}))
    (copied / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="trust_remote_code"):
        load_model(copied)
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_never_made_up(copied):
    path = copied / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(copied)


def test_weights_of_another_shape_are_never_made_up(copied):
    path = copied / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "intermediate_size": 48}))
    with pytest.raises(InputError, match=r"6 weights of another shape.*\[32, 64\] instead of"):
        load_model(copied)


def test_truncated_weights_are_one_clear_line(copied):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="could not be loaded") as caught:
        load_model(copied)
    assert "\n" not in str(caught.value)


def test_another_models_tokenizer_is_refused(copied):
    byte_tokenizer(extra=VOCAB - len(TOKENS)).save_pretrained(copied)
    load_model(copied)
    byte_tokenizer(extra=VOCAB - len(TOKENS) + 1).save_pretrained(copied)
    with pytest.raises(InputError, match=f"vocabulary mismatch.*up to {VOCAB}.*embeds {VOCAB}"):
        load_model(copied)


def test_loading_is_silent_and_leaves_transformers_as_it_was(saved, as_gguf, capfd):
    from transformers.utils import logging as log

    log.set_verbosity_info()
    try:
        for model in (saved, as_gguf()):
            capfd.readouterr()
            load_model(model)
            assert capfd.readouterr() == ("", "")
            assert log.get_verbosity() == logging.INFO
            assert log.is_progress_bar_enabled()
    finally:
        log.set_verbosity_warning()


# A name


@pytest.mark.parametrize("name", ["no/where/at/all", "./gone", "gone.gguf", "/gone", "a b"])
def test_a_nonexistent_path_says_what_is_allowed(name):
    for ask in (read_config, load_model):
        with pytest.raises(InputError, match=r"hub id, a folder .*\.gguf.*smollm2, gemma3-270m"):
            ask(name)


@pytest.mark.usefixtures("offline")
def test_a_typo_of_an_embedded_name_is_suggested():
    for ask in (read_config, load_model):
        with pytest.raises(InputError, match=r"'smollm' ?.*Did you mean 'smollm2'") as caught:
            ask("smollm")
        assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"neither a \.gguf nor a \.json"):
        load_model(tmp_path / "model.bin")


def test_an_embedded_name_is_fetched(as_gguf, monkeypatch):
    from longspan.adapters import checkpoints

    path = as_gguf()
    monkeypatch.setattr(checkpoints, "fetch", {"smollm2": path}.__getitem__)
    assert read_config("smollm2")["hidden_size"] == 32


# A GGUF file


@pytest.mark.usefixtures("no_network")
def test_a_gguf_computes_what_its_model_did(as_gguf):
    model, tokenizer = load_model(as_gguf())
    torch.testing.assert_close(
        logits(model), logits(tiny_llama()), atol=FLOAT32_ROUNDING, rtol=FLOAT32_ROUNDING
    )
    assert tokenizer("two  12s é").input_ids == byte_tokenizer()("two  12s é").input_ids
    config = read_config(as_gguf())
    assert config["max_position_embeddings"] == 64
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": THETA}


def test_a_gguf_can_be_saved_trained_and_loaded_again(as_gguf, tmp_path):
    model, tokenizer = load_model(as_gguf())
    assert not getattr(model, "is_quantized", False)
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    again, _ = load_model(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 16,
}


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        (
            {
                **YARN,
                "llama.rope.scaling.attn_factor": 0.5,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 16.0,
                "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1.0),
            },
        ),
    ],
    ids=["linear", "yarn", "yarn with its own numbers"],
)
def test_scaling_in_a_gguf_is_not_dropped(as_gguf, metadata, rope):
    path = as_gguf(metadata)
    assert read_config(path)["rope_parameters"] == {"rope_theta": THETA, **rope}
    model, _ = load_model(path)
    expected = tiny_llama(rope_parameters={"rope_theta": THETA, **rope})
    torch.testing.assert_close(
        logits(model), logits(expected), atol=FLOAT32_ROUNDING, rtol=FLOAT32_ROUNDING
    )
    assert (logits(model) - logits(tiny_llama())).abs().max() > 0.01


def test_per_pair_factors_in_a_gguf_divide_the_frequencies(as_gguf):
    factors = [1.0, 1.5, 2.0, 8.0]
    model, _ = load_model(as_gguf(tensors={"rope_freqs.weight": factors}))
    expected = [THETA ** (-2 * i / 8) / factor for i, factor in enumerate(factors)]
    assert model.model.rotary_emb.inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
    assert model.model.rotary_emb.attention_scaling == 1.0


def test_long_and_short_factors_in_a_gguf_are_read(as_gguf):
    metadata = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": 16,
        "llama.rope.scaling.attn_factor": 1.25,
    }
    short, long = [1.0, 1.0, 1.5, 2.0], [1.0, 2.0, 3.0, 4.0]
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    assert read_config(as_gguf(metadata, tensors))["rope_parameters"] == {
        "rope_theta": THETA,
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
        "attention_factor": 1.25,
    }


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        {**YARN, "llama.rope.scaling.yarn_ext_factor": 0.5},
        {"llama.rope.scaling.type": "banana"},
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.original_context_length": 16},
        {"tokenizer.ggml.pre": "deepseek-llm"},
    ],
    ids=["no original length", "unread key", "unknown type", "no factors", "split"],
)
def test_what_cannot_be_read_from_a_gguf_is_refused(as_gguf, metadata):
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf.*safetensors folder or hub id"):
        load_model(as_gguf(metadata))


@pytest.fixture
def as_header(tmp_path):
    """Writes a GGUF without weights, for families too large to write here."""

    def write(architecture: str, metadata: dict[str, Any]) -> Path:
        writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(64)
        writer.add_head_count(2)
        writer.add_head_count_kv(2)
        writer.add_token_list(TOKENS)
        for key, value in metadata.items():
            add_value(writer, f"{architecture}.{key}", value)
        writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "tiny.gguf"

    return write


def test_a_rotary_dimension_that_the_config_does_not_turn_is_refused(as_header):
    """Transformers drops it for this family, and turns a quarter of each head whatever it says."""
    path = as_header("stablelm", {"block_count": 1, "rope.dimension_count": 4})
    assert read_config(path)["rope_parameters"]["partial_rotary_factor"] == 0.25
    path = as_header("stablelm", {"block_count": 1, "rope.dimension_count": 8})
    with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count 8 where 4 turn"):
        read_config(path)


GEMMA3 = {"attention.key_length": 8, "rope.freq_base": 1e6, "attention.sliding_window": 16}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}


def test_gemma3_scales_its_full_layers_only(as_header):
    rope = read_config(as_header("gemma3", {"block_count": 6, **GEMMA3, **LINEAR}))[
        "rope_parameters"
    ]
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_the_largest_gemma3_divides_its_scores_by_another_number(as_header):
    scalar = {
        layers: read_config(as_header("gemma3", {"block_count": layers, **GEMMA3}))[
            "query_pre_attn_scalar"
        ]
        for layers in (6, 62)
    }
    assert scalar == {6: 256, 62: 32 // 2}


def test_digits_are_split_as_the_vocabulary_was_trained(as_gguf):
    """GPT-2's pattern gives a digit the last of two spaces; SmolLM's gives it none."""
    _, like_gpt2 = load_model(as_gguf())
    _, like_smollm = load_model(as_gguf({"tokenizer.ggml.pre": "smollm"}))
    assert like_gpt2.tokenize("a  12") == ["a", "Ġ", "Ġ", "12"]
    assert like_smollm.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_metadata_is_what_the_gguf_package_reads(as_gguf):
    path = as_gguf({**YARN, "general.name": "tiny"})
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.get(key) == field.contents(), key
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert np.array_equal(mine.data, other.data), mine.name


def test_lending_ends_with_its_block_even_on_error(as_gguf):
    def use(path: Path) -> None:
        with lend_to_transformers(read_gguf(path)):
            assert gguf.GGUFReader(path).path == path
            raise RuntimeError("stop")

    before = (gguf.GGUFReader, gguf.get_tensor_name_map)
    with pytest.raises(RuntimeError, match="stop"):
        use(as_gguf())
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


@pytest.mark.parametrize("keep", [0, 3, 30, 400, 5000, -1])
def test_a_cut_gguf_is_refused(as_gguf, keep):
    path = as_gguf()
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="not a whole GGUF file"):
        read_config(path)


def test_a_file_only_called_gguf_is_refused(tmp_path):
    (tmp_path / "fake.gguf").write_bytes(b"PK" + bytes(100))
    with pytest.raises(InputError, match="does not start with the letters GGUF"):
        load_model(tmp_path / "fake.gguf")


# Real models


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2")


@pytest.mark.model
def test_smollm2_is_what_its_card_says(smollm2):
    model, tokenizer = smollm2
    config = read_config("smollm2")
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100_000.0}
    assert config["max_position_embeddings"] == 8192
    expected = [100_000.0 ** (-2 * i / 64) for i in range(32)]
    assert model.model.rotary_emb.inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.model
def test_smollm2_knows_its_capitals(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert ids[0].tolist() == [504, 3575, 282, 4649, 314]  # no BOS
    continued = model.generate(ids, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(continued[0]) == "The capital of France is Paris."


@pytest.mark.model
def test_smollm2_tokens_join_to_the_text(smollm2):
    from pydoc_data.topics import topics

    _, tokenizer = smollm2
    text = "\n".join(topics.values()) + "Ünï日本 12 345\t"
    assert tokenizer.decode(tokenizer(text, verbose=False).input_ids) == text
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


@pytest.mark.model
def test_gemma3_has_two_rotations_and_a_window():
    """Its loss beyond the window shows it: with the window off, sliding layers lose their way."""
    from pydoc_data.topics import topics

    model, tokenizer = load_model("gemma3-270m")
    rope, table = model.config.rope_parameters, model.model.rotary_emb
    assert rope["sliding_attention"]["rope_theta"] == 10_000.0
    assert rope["full_attention"]["rope_theta"] == 1_000_000.0
    assert table.sliding_attention_inv_freq[64].item() == pytest.approx(1e-2)
    assert table.full_attention_inv_freq[64].item() == pytest.approx(1e-3)
    assert model.config.layer_types == [*["sliding_attention"] * 5, "full_attention"] * 3
    ids = torch.tensor([tokenizer(topics["assignment"]).input_ids[:768]])
    assert ids.shape[1] == 768
    assert ids[0, 0].item() == tokenizer.bos_token_id

    def loss_beyond_the_window() -> float:
        with torch.inference_mode():
            out = model(ids, logits_to_keep=129).logits[0, :-1]
        return torch.nn.functional.cross_entropy(out, ids[0, -128:]).item()

    assert model.config.sliding_window == 512
    right = loss_beyond_the_window()
    model.config.sliding_window = 100_000
    assert right + 0.5 < loss_beyond_the_window()


def test_a_model_with_sliding_layers_loads_with_longspans_attention(tmp_path):
    config = transformers.Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model, _ = load_model(tmp_path)
    assert model.config._attn_implementation == "longspan"  # sdpa refuses its soft cap
    model, _ = load_model(tmp_path, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_attention_that_cannot_be_lent_is_refused(tmp_path):
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_model(tmp_path)[0].config._attn_implementation == "eager"
    with pytest.raises(UnsupportedModelError, match="attention written into its layers"):
        load_model(tmp_path, attn_implementation="longspan")
