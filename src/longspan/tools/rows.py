"""Texts as rows of tokens, as a model is trained to see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.errors import InputError
from longspan.tools.texts import Text, documents


def read_rows(
    tokenizer: Any,
    texts: Sequence[Text],
    *,
    length: int,
    count: int | None = None,
    vocab_size: int,
) -> Tensor:
    """Returns rows of `length` tokens that do not overlap, none across two texts.

    Args:
        tokenizer: the model's.
        texts: cut from the start of each, in order.
        length: tokens a row, BOS included where the tokenizer adds one.
        count: how many rows; as many as the texts hold unless given.
        vocab_size: tokens the model knows.

    Returns:
        [rows, length] int64.

    Raises:
        InputError: if the texts are too short, or hold a token the model does not know.
    """
    bos = bos_token(tokenizer)
    lead = [] if bos is None else [bos]
    encoded = [token_ids(tokenizer, text.content) for text in texts]
    cut = documents(encoded, length - len(lead), count)
    rows = torch.tensor([[*lead, *row] for row in cut], dtype=torch.int64)
    highest = int(rows.max())
    if highest >= vocab_size:
        raise InputError(
            f"the tokenizer gives token {highest}, but the model's vocabulary has {vocab_size}. "
            "Use the tokenizer that belongs to the model."
        )
    return rows


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text of any length, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def bos_token(tokenizer: Any) -> int | None:
    """Returns the token the tokenizer puts before every text, or None.

    That it has a BOS token does not mean that the model was trained with it.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    first = tokenizer("a")["input_ids"][0]
    return bos if bos is not None and first == bos else None
