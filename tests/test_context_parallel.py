"""A sequence read in slices by two real processes is the sequence read whole by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from attend_examples import TINY
from longspan.adapters.context_parallel import context_parallel, shard_positions, shard_sequence
from longspan.adapters.rope import rope_from_config
from longspan.adapters.rotation import exact_rotation
from longspan.attention import dispatch, plan
from longspan.errors import ConfigError, LongspanError, ShapeError
from processes import meet, side_by_side
from tiny_models import TRAINED, VOCAB, tiny_model

LENGTH, WINDOW = 3 * TRAINED, 24  # the window reaches over the joints of slices
FLOAT32 = 1e-5  # logits are of order 1; sums run in another order
GRADIENT = 1e-6  # gradients are of order 0.01
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3": {"sliding_window": WINDOW},
}
assert WINDOW < LENGTH // 4
ORDERS = "zigzag", "contiguous"
CASES = [
    (family, order, engine)
    for family in MODELS
    for order in ORDERS
    for engine in ("few pairs", "tiles")
]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def sequence() -> Tensor:
    return torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def targets() -> Tensor:
    return F.pad(sequence()[:, 1:], (0, 1), value=-100)


def model_of(family: str) -> Any:
    return tiny_model(family, initializer_range=0.15, **MODELS[family])


def mean_loss(logits: Tensor, own: Tensor) -> Tensor:
    """This slice's part of the mean over the whole sequence."""
    total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
    return total / (targets() >= 0).sum()


# In one process, without a group.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_position_is_in_one_slice(size: int, order: Any) -> None:
    slices = [shard_positions(30 * size, rank, size, order) for rank in range(size)]
    assert torch.cat(slices).sort().values.tolist() == list(range(30 * size))
    assert {len(one) for one in slices} == {30}


def test_zigzag_slices_have_as_many_pairs() -> None:
    def pairs(order: Any) -> list[int]:
        return [int((shard_positions(24, rank, 3, order) + 1).sum()) for rank in range(3)]

    assert pairs("zigzag") == [100, 100, 100]  # of 24 · 25 / 2
    assert pairs("contiguous") == [36, 100, 164]


def test_a_slice_keeps_its_tokens_and_tells_where_they_are() -> None:
    ids = torch.arange(100, 116).view(1, 16).repeat(2, 1)
    own, position_ids = shard_sequence(ids, 1, 2)
    assert position_ids.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert own.tolist() == [[104, 105, 106, 107, 108, 109, 110, 111]] * 2
    own, position_ids = shard_sequence(ids, 1, 2, "contiguous")
    assert own.tolist() == [list(range(108, 116))] * 2
    assert position_ids.tolist() == [list(range(8, 16))]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10, 0, 2), ShapeError, "zigzag slices for 2 ranks need a multiple of 4 tokens, got 10"),
        ((9, 0, 2, "contiguous"), ShapeError, "a multiple of 2 tokens, got 9"),
        ((0, 0, 2), ShapeError, "got 0"),
        ((8, 2, 2), ConfigError, "from 0 to size − 1, got 2 of 2"),
        ((8, 0, 2, "ring"), ConfigError, "'zigzag' or 'contiguous', got 'ring'"),
    ],
)
def test_slices_that_do_not_come_out_even_are_refused(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shard_positions(*arguments)


def test_without_ranks_it_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="Start the script with torchrun"),
        context_parallel(tiny_model()),
    ):
        pass


# In two processes.


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What each rank found: logits and gradients by case, and texts of errors."""
    place = tmp_path_factory.mktemp("slices")
    for one in side_by_side(__file__, str(place)):
        assert one.returncode == 0, one.stderr
    return [load_file(place / f"{rank}.safetensors") for rank in range(2)]


@pytest.fixture(scope="module", params=MODELS)
def whole(request: pytest.FixtureRequest) -> tuple[str, Tensor, dict[str, Tensor]]:
    """A family, and its logits and gradients in one process, by transformers' own attention."""
    model = model_of(request.param)
    model.set_attn_implementation("eager")
    logits = model(sequence(), use_cache=False).logits
    mean_loss(logits, targets()).backward()
    return request.param, logits.detach(), gradients(model)


@pytest.mark.parametrize("engine", ["few pairs", "tiles"])
@pytest.mark.parametrize("order", ORDERS)
def test_logits_and_gradients_are_those_of_the_whole(
    found: list[dict[str, Tensor]], whole: Any, order: Any, engine: str
) -> None:
    family, logits, wanted = whole
    together = torch.full_like(logits, torch.nan)
    for rank, each in enumerate(found):
        positions = shard_positions(LENGTH, rank, 2, order)
        together[:, positions] = each[f"{family} {order} {engine} logits"]
    torch.testing.assert_close(together, logits, atol=FLOAT32, rtol=0)
    for name, gradient in wanted.items():
        summed = sum(each[f"{family} {order} {engine} {name}"] for each in found)
        torch.testing.assert_close(summed, gradient, atol=GRADIENT, rtol=0, msg=name)
        assert gradient.abs().max() > 100 * GRADIENT, f"{name} says nothing"


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def text_of(found: dict[str, Tensor], name: str) -> str:
    return found[name].numpy().tobytes().decode()


REFUSED = {
    "cache": "without key-value caches",
    "generate": "without key-value caches",
    "padding": "no padding",
    "no positions": "needs its position_ids",
    "fewer positions": "needs its position_ids",
    "same positions": "must be 0 … 191, each once",
    "labels": "labels would be shifted within a slice",
    "weights": "output_attentions",
    "dynamic": "depends on the length of the whole sequence",
    "alibi": "bloom",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_slices_cannot_do_is_refused_on_every_rank(
    found: list[dict[str, Tensor]], what: str
) -> None:
    for each in found:
        assert REFUSED[what] in text_of(each, what)


def test_what_is_wrong_on_one_rank_ends_the_others_too(found: list[dict[str, Tensor]]) -> None:
    first, second = (text_of(each, "padding on one") for each in found)
    assert first == "rank 1 refused its slice; its own error says why."
    assert "no padding" in second
    for each in found:
        assert "must be of one shape, got [[2, 96], [2, 92]]" in text_of(each, "unlike shapes")


def test_a_table_of_one_length_is_the_wholes(found: list[dict[str, Tensor]]) -> None:
    model = tiny_model(rope=DYNAMIC)
    with torch.no_grad():
        logits = model(sequence(), use_cache=False).logits  # transformers' own dynamic table
    for rank, each in enumerate(found):
        own = logits[:, shard_positions(LENGTH, rank, 2)]
        torch.testing.assert_close(each["dynamic logits"], own, atol=1e-4, rtol=0)


def test_the_models_own_loss_is_the_slices(found: list[dict[str, Tensor]]) -> None:
    loss = tiny_model()(sequence(), labels=sequence(), use_cache=False).loss
    torch.testing.assert_close(sum(each["own loss"] for each in found), loss.detach())


def test_recomputed_layers_give_the_same_gradients(found: list[dict[str, Tensor]]) -> None:
    for each in found:
        assert each["recomputed"] < GRADIENT


def test_the_model_is_left_as_it_was(found: list[dict[str, Tensor]]) -> None:
    for each in found:
        assert text_of(each, "restored") == "sdpa, no hooks, nothing registered"


# What runs in the processes.


def side(rank: int, place: Path) -> dict[str, Tensor]:
    meet(place, rank)
    found: dict[str, Tensor] = {}
    usual = dispatch.SMALL_PAIRS, plan.SIZES
    for family, order, engine in CASES:
        if engine == "tiles":
            dispatch.SMALL_PAIRS, plan.SIZES = 0, TINY
        else:
            dispatch.SMALL_PAIRS, plan.SIZES = usual
        logits, grads = read_slice(model_of(family), rank, order)
        case = f"{family} {order} {engine}"
        found |= {f"{case} logits": logits, **{f"{case} {n}": g for n, g in grads.items()}}
    dispatch.SMALL_PAIRS, plan.SIZES = usual
    found |= {name: as_bytes(error_of(call)) for name, call in refused(rank).items()}
    found["dynamic logits"] = dynamic_logits(rank)
    found["own loss"] = own_loss(rank)
    found["recomputed"] = recomputed(rank)
    found["restored"] = as_bytes(restored(rank))
    return found


def read_slice(model: Any, rank: int, order: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ids, position_ids = shard_sequence(sequence(), rank, 2, order)
    own, _ = shard_sequence(targets(), rank, 2, order)
    with context_parallel(model):
        logits = model(ids, position_ids=position_ids).logits
        mean_loss(logits, own).backward()
    return logits.detach(), gradients(model)


def refused(rank: int) -> dict[str, Callable[[], Any]]:
    """What must not be done, by name."""
    ids, position_ids = shard_sequence(sequence(), rank, 2)
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    one_padded = padded if rank else torch.ones_like(ids)
    fewer = slice(0, ids.shape[1] - 4 * rank)

    def lent(model: Any, **given: Any) -> Callable[[], Any]:
        given = {"input_ids": ids, "position_ids": position_ids, **given}

        def call() -> None:
            with context_parallel(model), torch.no_grad():
                model(**given)

        return call

    def generate() -> None:
        model = tiny_model()
        with context_parallel(model):
            model.generate(ids, max_new_tokens=2, do_sample=False)

    return {
        "cache": lent(tiny_model(), use_cache=True),
        "generate": generate,
        "padding": lent(tiny_model(), attention_mask=padded),
        "padding on one": lent(tiny_model(), attention_mask=one_padded),
        "no positions": lent(tiny_model(), position_ids=None),
        "fewer positions": lent(tiny_model(), position_ids=position_ids[:, fewer][:, :-4]),
        "same positions": lent(tiny_model(), position_ids=torch.arange(ids.shape[1])[None]),
        "unlike shapes": lent(
            tiny_model(), input_ids=ids[:, fewer], position_ids=position_ids[:, fewer]
        ),
        "labels": lent(tiny_model(), labels=ids),
        "weights": lent(tiny_model(), output_attentions=True),
        "dynamic": lent(tiny_model(rope=DYNAMIC)),
        "alibi": lent(bloom()),
    }


def bloom() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))


def dynamic_logits(rank: int) -> Tensor:
    model = tiny_model(rope=DYNAMIC)
    ids, position_ids = shard_sequence(sequence(), rank, 2)
    ropes = rope_from_config(model.config)
    with exact_rotation(model, ropes, seq_len=LENGTH), context_parallel(model), torch.no_grad():
        return model(ids, position_ids=position_ids).logits


def own_loss(rank: int) -> Tensor:
    model = tiny_model()
    ids, position_ids = shard_sequence(sequence(), rank, 2)
    own, _ = shard_sequence(targets(), rank, 2)
    with context_parallel(model), torch.no_grad():
        given = {"labels": own, "shift_labels": own, "num_items_in_batch": (targets() >= 0).sum()}
        return model(ids, position_ids=position_ids, **given).loss


def recomputed(rank: int) -> Tensor:
    """The greatest difference that recomputing layers in the backward pass makes."""
    plain, saving = tiny_model().train(), tiny_model().train()
    saving.activation_checkpointing_enable()
    wanted, found = (read_slice(model, rank, "zigzag")[1] for model in (plain, saving))
    return torch.stack([(found[name] - wanted[name]).abs().max() for name in wanted]).max()


def restored(rank: int) -> str:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    model = tiny_model()
    read_slice(model, rank, "zigzag")
    hooks = [*model._forward_pre_hooks, *model.base_model._forward_pre_hooks]
    names = [*AttentionInterface._global_mapping, *AttentionMaskInterface._global_mapping]
    left = [name for name in names if "slice" in name]
    return f"{model.config._attn_implementation}, {hooks or 'no hooks'}, " + (
        f"{left}" if left else "nothing registered"
    )


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except LongspanError as error:
        return str(error)
    return "nothing refused"


def as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


if __name__ == "__main__":
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    save_file(side(number, folder), folder / f"{number}.safetensors")
    dist.destroy_process_group()
