"""The zoo: real trained models that come with longspan, read like any other."""

import pytest
import torch

from longspan.adapters.decoder_model import DecoderForCausalLM
from longspan.adapters.load import load_model, read_config
from longspan.adapters.zoo import FOLDER, zoo_models
from longspan.errors import ConfigError, InputError, ShapeError, UnsupportedModelError
from longspan.metrics.likelihood import token_nll
from longspan.models import load_decoder
from longspan.tools.evaluate import evaluate
from longspan.tools.stream import stream
from longspan.tools.texts import read_texts

TRAINED = 256
ENGLISH = "It was a clear steel-blue day. The firmaments of air and sea were hardly separable."


def test_the_zoo_has_the_encodings_of_the_study():
    assert {"rope", "alibi", "t5", "sinusoidal", "none", "transformer_xl"} <= {
        name.removeprefix("zoo:") for name in zoo_models()
    }
    for name in zoo_models():
        folder = FOLDER / name.removeprefix("zoo:")
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 3_000_000, name


@pytest.mark.parametrize("name", zoo_models())
def test_each_was_trained_on_english(name):
    model, tokenizer = load_model(name)
    ids = tokenizer(ENGLISH, return_tensors="pt").input_ids
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    read, noise = token_nll(model, ids).mean().item(), token_nll(model, shuffled).mean().item()
    assert read < 4.7  # nats a token of 512, where guessing gives 6.2
    assert noise > read + 1.5


@pytest.mark.parametrize("name", [name for name in zoo_models() if name != "zoo:rope"])
def test_a_wrapped_decoder_gives_its_own_logits(name):
    model, tokenizer = load_model(name)
    assert isinstance(model, DecoderForCausalLM)
    ids = tokenizer(ENGLISH, return_tensors="pt").input_ids
    decoder = load_decoder(FOLDER / name.removeprefix("zoo:")).with_memory(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, decoder.logits(ids))


def test_the_rope_model_is_a_llama():
    assert read_config("zoo:rope")["model_type"] == "llama"
    assert type(load_model("zoo:rope")[0]).__name__ == "LlamaForCausalLM"


def far_nll(name, methods=("none",), **changes):
    """The mean NLL of positions 1024 to 2048 of Python's own documentation, by method."""
    model, tokenizer = load_model(name)
    settings = dict(length=8 * TRAINED, documents=4, bucket=4 * TRAINED, methods=methods)
    result = evaluate(model, tokenizer, read_texts(["python-docs"]), **settings, **changes)
    return {one.method: one.buckets[-1].nll for one in result.methods}


def test_alibi_holds_where_rope_and_sinusoids_break():
    alibi, rope, sinusoidal = (
        far_nll(f"zoo:{name}")["none"] for name in ("alibi", "rope", "sinusoidal")
    )
    assert alibi + 0.3 < rope < sinusoidal


def test_yarn_repairs_rope():
    found = far_nll("zoo:rope", ("none", "yarn"))
    assert found["yarn"] < found["none"] - 0.3


def test_an_option_of_rotation_is_refused_where_nothing_rotates():
    with pytest.raises(ConfigError, match="this model has none"):
        far_nll("zoo:alibi", phase="hf_float32")


def test_scaling_is_refused_where_nothing_rotates():
    with pytest.raises(UnsupportedModelError, match=r"yarn scales rotation.*--methods none"):
        far_nll("zoo:alibi", ("none", "yarn"))
    with pytest.raises(UnsupportedModelError, match="cannot be streamed: its positions come from"):
        stream(load_model("zoo:alibi")[0])


def test_an_unknown_one_is_refused():
    with pytest.raises(InputError, match="Did you mean 'zoo:rope'"):
        load_model("zoo:rpoe")


def test_a_decoder_refuses_what_it_cannot_do():
    model, tokenizer = load_model("zoo:alibi")
    ids = tokenizer(ENGLISH, return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    assert torch.equal(model(ids, attention_mask=mask).logits, model(ids).logits)
    mask[0, 0] = 0
    with pytest.raises(ShapeError, match="without padding"):
        model(ids, attention_mask=mask)
    with pytest.raises(UnsupportedModelError, match="keeps no key-value cache"):
        model(ids, use_cache=True)
    with pytest.raises(ConfigError, match="attends by itself"):
        load_model("zoo:alibi", attn_implementation="eager")
