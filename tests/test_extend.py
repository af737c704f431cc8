"""A model extended in memory, and saved for plain transformers: proven, whole or not at all."""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longspan.adapters.families import FAMILIES
from longspan.adapters.rope import rope_from_config
from longspan.errors import ConfigError, NumericalError, OutputError, UnsupportedModelError
from longspan.rotary.scaling import NTKAware
from longspan.tools.extend import apply_plan, extend, save_extended
from longspan.tools.plan import Plan, plan
from tiny_families import (
    OWN,
    PLAIN,
    SHAPE,
    THETA,
    TRAINED,
    VOCAB,
    logits,
    tiny,
    tiny_config,
    tokens,
)

TO = 4 * TRAINED
SAVED = 1e-5
FLOAT32 = 5e-5
SEEN = 1e-2

# Gemma 4's proportional rope knows a factor alone; Phi-3's class loads LongRoPE and plain rope.
METHOD = {"gemma4_text": "linear", "phi3": "ntk"}
BY_HAND: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "linear": {"rope_type": "linear", "factor": 4.0},
}
HAND_BY_FAMILY: dict[str, dict[str, Any]] = {
    "gemma4_text": {**PLAIN["gemma4_text"], "factor": 4.0},
    "ministral3": {**PLAIN["ministral3"], "factor": 8.0},
    "phi3": {"rope_type": "default", "rope_theta": THETA * 4 ** (16 / 14)},
}


def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(VOCAB)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, model_max_length=TRAINED)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def extended(model: Any, **how: Any) -> tuple[Any, Plan]:
    planned = plan(model.config, **{"to": TO, **how})
    return apply_plan(model, planned), planned


@pytest.mark.parametrize("model_type", OWN)
def test_each_family_in_memory_and_saved(model_type: str, tmp_path: Path) -> None:
    model, row = tiny(model_type), tokens(100)
    method = METHOD.get(model_type, "yarn")
    own, content = logits(model, row), model.config.to_dict()
    longer, planned = extended(model, method=method)
    found = logits(longer, row)

    assert (found - own).abs().max() > SEEN
    assert torch.equal(logits(model, row), own)  # the given one stays, bit for bit
    assert model.config.to_dict() == content
    shared = dict(model.named_parameters())
    assert shared.keys() == dict(longer.named_parameters()).keys()
    for name, weight in longer.named_parameters():
        assert weight.data_ptr() == shared[name].data_ptr()

    # transformers' YaRN needs a head_dim, which Mixtral's class leaves out
    sizes = {"head_dim": 16} if model_type == "mixtral" else {}
    by_hand = tiny(model_type, HAND_BY_FAMILY.get(model_type, BY_HAND.get(method, {})), **sizes)
    torch.testing.assert_close(found, logits(by_hand, row), atol=FLOAT32, rtol=0)

    save_extended(longer, tokenizer(), planned, tmp_path / "longer")
    torch.testing.assert_close(logits(load(tmp_path / "longer"), row), found, atol=SAVED, rtol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["longer"]


METHODS = ["linear", "ntk", "dynamic", "ntk-by-parts", "yarn", "llama3"]


@pytest.mark.parametrize("method", METHODS)
def test_each_method_saved_equals_itself_in_memory(method: str, tmp_path: Path) -> None:
    model, row = tiny("llama"), tokens(TO)
    longer, planned = extended(model, method=method)
    save_extended(longer, tokenizer(), planned, tmp_path / "longer")
    loaded = load(tmp_path / "longer")
    torch.testing.assert_close(logits(loaded, row), logits(longer, row), atol=SAVED, rtol=0)
    assert rope_from_config(loaded.config) == planned.ropes
    assert planned.method == method


def test_the_methods_are_told_apart() -> None:
    row = tokens(TO)
    found = [logits(extend(tiny("llama"), to=TO, method=method), row) for method in METHODS]
    found.append(logits(extend(tiny("llama"), to=TO, method="yarn", factor=8.0), row))
    found.append(logits(tiny("llama"), row))
    for first in range(len(found)):
        for second in range(first):
            # dynamic NTK at its full length is NTK-aware
            same = {METHODS[i] for i in (first, second) if i < len(METHODS)} == {"ntk", "dynamic"}
            difference = (found[first] - found[second]).abs().max()
            assert difference < FLOAT32 if same else difference > SEEN


def test_extending_twice_equals_extending_once() -> None:
    model, row = tiny("llama"), tokens(TO)
    for method in METHODS:
        once = extend(model, to=TO, method=method)
        twice = extend(extend(model, to=TO // 2, method=method), to=TO)
        assert torch.equal(logits(twice, row), logits(once, row))
        assert twice.config.to_dict() == once.config.to_dict()


def test_the_trained_length_may_be_told() -> None:
    config = {"rope_type": "linear", "factor": 2.0}
    model = tiny("llama", config)
    with pytest.raises(ConfigError, match="before extension"):
        extend(model, to=TO)
    longer = extend(model, to=TO, original_max_position_embeddings=TRAINED // 2)
    assert longer.config.rope_parameters["factor"] == 8.0


def test_a_bfloat16_model_keeps_its_dtype_and_its_frequencies() -> None:
    model = tiny("llama").to(torch.bfloat16)
    longer = extend(model, to=TO)
    assert {weight.dtype for weight in longer.parameters()} == {torch.bfloat16}
    assert longer.model.rotary_emb.inv_freq.dtype == torch.float32
    assert logits(longer, tokens(100)).isfinite().all()


def test_weights_changed_later_are_seen_by_both() -> None:
    model = tiny("llama")
    longer = extend(model, to=TO)
    model.model.embed_tokens.weight.data[0] = 7.0
    assert (longer.model.embed_tokens.weight[0] == 7.0).all()


def test_the_extended_model_generates_past_the_trained_length() -> None:
    longer = extend(tiny("llama"), to=TO)
    row = tokens(TRAINED + 10)
    generated = longer.generate(row, max_new_tokens=3, do_sample=False)
    step = row
    for _ in range(3):
        step = torch.cat((step, logits(longer, step)[:, -1:].argmax(-1)), dim=1)
    assert generated.tolist() == step.tolist()


def test_a_generation_limit_of_the_old_length_goes() -> None:
    model = tiny("llama")
    model.generation_config.max_length = TRAINED
    model.generation_config.temperature = 0.5
    longer = extend(model, to=TO)
    assert longer.generation_config.max_length is None
    assert longer.generation_config.temperature == 0.5
    assert model.generation_config.max_length == TRAINED


# CASE 24


def test_case_24_a_config_changed_after_the_build_changes_nothing() -> None:
    """In transformers: so an extension must rebuild, and read the live frequencies back."""
    model, row = tiny("llama"), tokens(100)
    own = logits(model, row)
    model.config.rope_parameters = {**BY_HAND["yarn"], "rope_theta": THETA}
    assert torch.equal(logits(model, row), own)


def ignore_scaling(module: Any) -> None:
    module.inv_freq = THETA ** -(torch.arange(0, 16, 2) / 16)


def forget_the_attention_factor(module: Any) -> None:
    module.attention_scaling = 1.0


def shift_one_pair(module: Any) -> None:
    module.inv_freq[-1] *= 1.001


@pytest.mark.parametrize(
    ("sabotage", "message"),
    [
        (ignore_scaling, "pair|cos and sin"),
        (forget_the_attention_factor, "cos and sin at positions 0 to 3"),
        (shift_one_pair, "pair 7 turns by"),
    ],
)
def test_case_24_a_rotation_that_is_not_the_planned_one_is_an_error(
    sabotage: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, build = tiny("llama"), LlamaRotaryEmbedding.__init__

    def broken(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        sabotage(self)

    monkeypatch.setattr(LlamaRotaryEmbedding, "__init__", broken)
    with pytest.raises(
        NumericalError, match=rf"\(all layers\) is not the planned one: .*{message}"
    ):
        extend(model, to=TO)


def test_case_24_a_module_that_lays_cos_and_sin_out_otherwise_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = LlamaRotaryEmbedding.forward

    def interleaved(self: Any, *arguments: Any) -> Any:
        tables = turn(self, *arguments)
        return tuple(table[..., :8].repeat_interleave(2, dim=-1) for table in tables)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", interleaved)
    with pytest.raises(NumericalError, match="cos and sin at positions 0 to 3"):
        extend(tiny("llama"), to=TO)


def test_case_24_only_the_layers_that_reach_are_changed_and_the_others_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    model = tiny("gemma3_text")
    longer = extend(model, to=TO)
    before, after = model.model.rotary_emb, longer.model.rotary_emb
    assert torch.equal(before.sliding_attention_inv_freq, after.sliding_attention_inv_freq)
    assert not torch.equal(before.full_attention_inv_freq, after.full_attention_inv_freq)
    build = Gemma3RotaryEmbedding.__init__

    def broken(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.sliding_attention_inv_freq /= 4

    monkeypatch.setattr(Gemma3RotaryEmbedding, "__init__", broken)
    with pytest.raises(NumericalError, match=r"\(sliding_attention\)"):
        extend(model, to=TO)


# Multi-head latent attention: its softmax scale is computed once, when the model is built.

LATENT = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": TRAINED // 2,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm_moe_dsa"])
def test_the_softmax_scale_of_latent_attention_follows(model_type: str, tmp_path: Path) -> None:
    model, row = tiny(model_type, LATENT), tokens(100)
    own = logits(model, row)
    longer, planned = extended(model)
    attention = longer.model.layers[0].self_attn
    assert planned.factor == 8.0
    expected = 16**-0.5 * (0.1 * math.log(8.0) + 1) ** 2
    assert attention.scaling == pytest.approx(expected, rel=1e-12)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(
        16**-0.5 * (0.1 * math.log(2.0) + 1) ** 2
    )
    by_hand = logits(tiny(model_type, {**LATENT, "factor": 8.0}), row)
    torch.testing.assert_close(logits(longer, row), by_hand, atol=FLOAT32, rtol=0)
    save_extended(longer, tokenizer(), planned, tmp_path / "longer")
    torch.testing.assert_close(
        logits(load(tmp_path / "longer"), row), logits(longer, row), atol=SAVED, rtol=0
    )
    assert torch.equal(logits(model, row), own)


# Refused models


def test_gpt_j_is_refused_since_its_module_reads_no_scaling() -> None:
    sizes = dict(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    config = CONFIG_MAPPING["gptj"](**sizes, bos_token_id=None, eos_token_id=None)
    assert plan(config, to=64).factor == 4.0  # it can be planned
    with pytest.raises(UnsupportedModelError, match="'gptj' cannot be extended: transformers' own"):
        extend(AutoModelForCausalLM.from_config(config), to=64)


def test_an_unknown_family_is_refused_though_it_can_be_planned() -> None:
    config = CONFIG_MAPPING["arcee"](**SHAPE)
    assert plan(config, to=TO).factor == 4.0
    with pytest.raises(UnsupportedModelError, match="'arcee' is not known to longspan"):
        extend(AutoModelForCausalLM.from_config(config), to=TO)


NOT_EXTENDABLE = {
    "chatglm",
    "deepseek_v2",
    "gptj",
    "internlm2",
    "kimi_k2",
    "llama4_text",
    "minicpm",
    "phi-msft",
    "phi3_v",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3_vl_text",
}


def test_every_other_family_is_extended_here() -> None:
    known = {name for name, family in FAMILIES.items() if not family.extendable}
    assert known == NOT_EXTENDABLE
    assert FAMILIES.keys() == OWN.keys() | NOT_EXTENDABLE


@pytest.mark.parametrize("method", ["linear", "dynamic", "yarn", "llama3", "ntk-by-parts"])
def test_a_rope_that_transformers_would_not_load_is_not_saved(method: str, tmp_path: Path) -> None:
    longer, planned = extended(tiny("phi3"), method=method)
    with pytest.raises(UnsupportedModelError, match=r"Phi3Config does not load .*Method 'ntk'"):
        save_extended(longer, tokenizer(), planned, tmp_path / "longer")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["linear", "ntk", "dynamic"])
def test_queries_scaled_by_position_need_the_original_length(method: str) -> None:
    with pytest.raises(ConfigError, match="scales its queries by llama_4_scaling_beta"):
        extend(tiny("ministral3"), to=TO, method=method)


def test_queries_scaled_by_position_stay_scaled() -> None:
    longer = extend(tiny("ministral3"), to=TO)
    assert longer.config.rope_parameters["llama_4_scaling_beta"] == 0.5
    assert longer.config.rope_parameters["original_max_position_embeddings"] == TRAINED // 2


# Saved folders


def saved(path: Path, **how: Any) -> tuple[Any, Plan]:
    longer, planned = extended(tiny("llama"))
    save_extended(longer, tokenizer(), planned, path, **how)
    return longer, planned


def test_the_folder_says_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "longer"
    given = tokenizer()
    longer, planned = extended(tiny("llama"))
    save_extended(longer, given, planned, path)
    config = json.loads((path / "config.json").read_text())
    assert config["max_position_embeddings"] == TO
    assert config["longspan"] == {
        "method": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": TRAINED,
        "rope_theta": THETA,
    }
    assert AutoTokenizer.from_pretrained(path).model_max_length == TO
    assert given.model_max_length == TRAINED
    assert json.loads((path / "generation_config.json").read_text()).get("max_length") is None
    names = {file.name for file in path.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    assert path.stat().st_mode & 0o777 == 0o755


def test_a_saved_model_is_extended_further(tmp_path: Path) -> None:
    saved(tmp_path / "longer")
    further = extend(load(tmp_path / "longer"), to=8 * TRAINED)
    row = tokens(100)
    direct = extend(tiny("llama"), to=8 * TRAINED)
    torch.testing.assert_close(logits(further, row), logits(direct, row), atol=SAVED, rtol=0)


def test_an_existing_output_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "longer"
    path.mkdir()
    (path / "mine").write_text("kept")
    with pytest.raises(OutputError, match=r"longer exists\. Pass --force"):
        saved(path)
    assert (path / "mine").read_text() == "kept"


def a_model(path: Path, mine: str) -> Path:
    """A folder with a model, and a file beside it."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "mine").write_text(mine)
    return path


@pytest.mark.parametrize("what", ["a model", "nothing"])
def test_force_replaces_it_whole(what: str, tmp_path: Path) -> None:
    path = tmp_path / "longer"
    if what == "a model":
        a_model(path, "gone")
    else:
        path.mkdir()
    saved(path, force=True)
    assert not (path / "mine").exists()
    assert load(path).config.max_position_embeddings == TO
    assert [child.name for child in tmp_path.iterdir()] == ["longer"]


def test_what_is_no_models_folder_is_kept_whatever_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "longer"
    path.mkdir()
    (path / "mine").write_text("kept")
    with pytest.raises(OutputError, match=r"longer holds no model \(config.json or adapter"):
        saved(path, force=True)
    with pytest.raises(OutputError, match="mine is a file and is not replaced by a folder"):
        saved(path / "mine", force=True)
    (path / "config.json").write_text("{}")
    inner = path / "inner"
    inner.mkdir()
    with monkeypatch.context() as patched:
        patched.chdir(inner)
        with pytest.raises(OutputError, match="holds the folder you are in"):
            saved(path, force=True)
    monkeypatch.setenv("HOME", str(inner))
    with pytest.raises(OutputError, match="holds your home folder"):
        saved(path, force=True)
    assert (path / "mine").read_text() == "kept"


def broken_save(*_: Any, **__: Any) -> None:
    raise RuntimeError("in the middle")


@pytest.mark.parametrize("force", [False, True])
def test_a_failure_in_the_middle_leaves_everything_as_it_was(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "longer"
    if force:
        a_model(path, "kept")
    longer, planned = extended(tiny("llama"))
    given = tokenizer()
    monkeypatch.setattr(type(given), "save_pretrained", broken_save)  # after the weights
    with pytest.raises(RuntimeError, match="in the middle"):
        save_extended(longer, given, planned, path, force=force)
    assert [child.name for child in tmp_path.iterdir()] == (["longer"] if force else [])
    assert not force or (path / "mine").read_text() == "kept"


def test_a_replacement_that_fails_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import longspan.files as files

    path = a_model(tmp_path / "longer", "kept")
    rename, calls = files.os.rename, []

    def second_fails(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(files.os, "rename", second_fails)
    with pytest.raises(OutputError, match=r"cannot write .*longer: Input/output error"):
        saved(path, force=True)
    assert (path / "mine").read_text() == "kept"
    assert [child.name for child in tmp_path.iterdir()] == ["longer"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*longer: .*Name another place"):
        saved(tmp_path / "file" / "longer")


@contextmanager
def files_limited_to(limit: int) -> Iterator[None]:
    """A disk that is full after `limit` bytes of any one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_while_weights_are_written_is_told(tmp_path: Path) -> None:
    longer, planned = extended(tiny("llama"))
    with (
        files_limited_to(20_000),
        pytest.raises(OutputError, match=r"cannot write .*longer: .*File too large"),
    ):
        save_extended(longer, tokenizer(), planned, tmp_path / "longer")
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 100))
    longer, planned = extended(tiny("llama"))
    monkeypatch.setattr(type(longer), "save_pretrained", broken_save)
    with pytest.raises(OutputError, match=r"has 0\.0 GB free, but 0\.0 GB are needed"):
        save_extended(longer, tokenizer(), planned, tmp_path / "longer")


def test_a_config_that_does_not_say_what_was_planned_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer, planned = extended(tiny("llama"))
    write = type(longer).save_pretrained

    def other(self: Any, folder: Any, **options: Any) -> None:
        write(self, folder, **options)
        config = json.loads((Path(folder) / "config.json").read_text())
        del config["longspan"]
        config["rope_parameters"]["factor"] = 8.0
        (Path(folder) / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(type(longer), "save_pretrained", other)
    with pytest.raises(NumericalError, match="does not read back as planned"):
        save_extended(longer, tokenizer(), planned, tmp_path / "longer")
    assert list(tmp_path.iterdir()) == []


# Multimodal models

SEEING = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llama", dict(model_type="siglip_vision_model", image_size=28, patch_size=14)),
    "mistral3": ("mistral", dict(model_type="pixtral", head_dim=8, image_size=28, patch_size=14)),
    "gemma3": ("gemma3_text", dict(model_type="siglip_vision_model", image_size=28, patch_size=14)),
    "gemma4": ("gemma4_text", dict(num_key_value_heads=2, head_dim=8, global_head_dim=8)),
}


@pytest.mark.parametrize("model_type", VISION)
def test_a_multimodal_model_is_extended_at_its_text_part(model_type: str, tmp_path: Path) -> None:
    text, vision = VISION[model_type]
    config = CONFIG_MAPPING[model_type](
        text_config=tiny_config(text, pad_token_id=0).to_dict(), vision_config={**SEEING, **vision}
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    row = tokens(100)
    own, seen = logits(model, row), config.vision_config.to_dict()
    longer, planned = extended(model, method=METHOD.get(text, "yarn"))
    found = logits(longer, row)
    assert (found - own).abs().max() > SEEN
    assert torch.equal(logits(model, row), own)
    assert longer.config.vision_config.to_dict() == seen
    live = longer.model.language_model.config
    assert live is longer.config.get_text_config()
    assert live.max_position_embeddings == TO
    assert model.config.get_text_config().max_position_embeddings == TRAINED
    save_extended(longer, tokenizer(), planned, tmp_path / "longer")
    loaded = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "longer", attn_implementation="eager"
    )
    torch.testing.assert_close(logits(loaded.eval(), row), found, atol=SAVED, rtol=0)


def test_a_raised_theta_is_planned_as_ntk_aware() -> None:
    longer, planned = extended(tiny("llama"), method="ntk")
    assert planned.ropes["full_attention"].scaling == NTKAware(factor=4.0)
    assert longer.config.rope_parameters["rope_type"] == "default"
    assert longer.config.rope_parameters["rope_theta"] == pytest.approx(THETA * 4 ** (16 / 14))
