"""Windows score every token once; with BOS it leads each and is never scored."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import ConfigError, NumericalError
from longspan.metrics.likelihood import token_nll
from longspan.metrics.windows import perplexity, strided_nll, strided_windows
from tiny_models import tiny_model, tokens


def test_case_26_windows_of_2000_tokens() -> None:
    windows = strided_windows(2000, window=1024, stride=512)
    assert [(w.start, w.stop) for w in windows] == [(0, 1024), (512, 1536), (1024, 2000)]
    assert sum(w.stop - w.first_scored for w in windows) == 1999


@given(tokens=st.integers(2, 300), window=st.integers(2, 80), stride=st.integers(1, 79))
@settings(deadline=None)
def test_each_token_is_scored_once_and_the_first_never(
    tokens: int, window: int, stride: int
) -> None:
    if stride >= window:
        stride = stride % (window - 1) + 1 if window > 2 else 1
    windows = strided_windows(tokens, window, stride)
    scored = [place for w in windows for place in range(w.first_scored, w.stop)]
    assert scored == list(range(1, tokens))
    assert all(w.start < w.first_scored < w.stop <= w.start + window for w in windows)
    assert all(w.stop - w.first_scored <= stride for w in windows[1:])


@pytest.mark.parametrize("bos", [False, True])
def test_strided_likelihood_is_that_of_each_window_read_alone(bos: bool) -> None:
    model, ids = tiny_model(), tokens(50)
    ids[0, 0] = 1
    nll = strided_nll(lambda row: token_nll(model, row), ids, window=20, stride=8, bos=bos)
    assert nll.shape == (49,)
    lead, room = (ids[:, :1], 19) if bos else (ids[:, :0], 20)
    text = ids[:, lead.shape[1] :]
    # token 25 of the text: its window starts at 8, the first multiple of 8 that reaches it
    start = 8
    read = torch.cat((lead, text[:, start : start + room]), dim=1)
    assert start + room > 25 >= room
    with torch.no_grad():
        logits = model(read).logits[0].double()
    place = lead.shape[1] + 25 - start
    expected = -logits[place - 1].log_softmax(-1)[text[0, 25]]
    assert nll[lead.shape[1] + 25 - 1].item() == pytest.approx(expected.item(), abs=1e-5)


def test_bos_leads_every_window_and_is_never_scored() -> None:
    seen: list[torch.Tensor] = []

    def score(row: torch.Tensor) -> torch.Tensor:
        seen.append(row)
        return row[0, 1:].float()

    ids = torch.arange(100, 130).view(1, -1)
    nll = strided_nll(score, ids, window=10, stride=4, bos=True)
    assert all(row[0, 0] == 100 and row.shape[1] <= 10 for row in seen)
    assert nll.tolist() == list(range(101, 130))  # every target but BOS, in place


def test_one_window_is_the_whole_forward() -> None:
    model, ids = tiny_model(), tokens(30)
    whole = token_nll(model, ids)
    strided = strided_nll(lambda row: token_nll(model, row), ids, window=30, stride=7, bos=False)
    torch.testing.assert_close(strided, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("count", "window", "stride", "message"),
    [
        (1, 10, 5, "2 tokens or more"),
        (20, 1, 1, "window must be at least 2"),
        (20, 10, 10, r"stride must be from 1 to window − 1 = 9, got 10"),
        (20, 10, 0, "stride must be from 1"),
    ],
)
def test_windows_that_skip_or_score_nothing_are_refused(
    count: int, window: int, stride: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        strided_windows(count, window, stride)


def test_perplexity_is_not_a_mean_of_window_means() -> None:
    first, second = torch.full((10,), 1.0), torch.full((2,), 4.0)
    total = (first.sum() + second.sum()).item()
    assert perplexity(total, 12) == pytest.approx(math.exp(1.5))
    assert perplexity(total, 12) != pytest.approx(math.exp(2.5))


def test_perplexity_of_nothing_or_too_much_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one scored token"):
        perplexity(0.0, 0)
    with pytest.raises(NumericalError, match="1e\\+04 nats"):
        perplexity(1e4, 1)
