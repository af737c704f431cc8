"""A causal language model's forward in two parts: hidden states once, logits a chunk at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ConfigError, ShapeError, UnsupportedModelError

PROOF_TOKENS = 16
FLOAT32_AGREEMENT = 1e-5  # of the largest logit; both sides run the same operations
LOW_PRECISION_AGREEMENT = 2e-2


class SplitForward:
    """Runs a model's body and its head apart, so that all logits never exist at once.

    The head is the model's own code: its forward is run on hidden states that are already there,
    so logit scales, soft caps and biases of any family are those of the family. The first tokens
    read prove it against the undivided forward.

    Args:
        model: a transformers causal language model, in eval mode.

    Raises:
        ConfigError: if the model is in training mode, where dropout would blur every number.
        UnsupportedModelError: if it has no body apart from its head.
    """

    def __init__(self, model: Any) -> None:
        body = getattr(model, "base_model", None)
        if body is None or body is model or model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no language head apart from its body. "
                "Load a causal language model (AutoModelForCausalLM)."
            )
        if model.training:
            raise ConfigError(
                f"{type(model).__name__} is in training mode, where dropout changes the numbers. "
                "Call model.eval() first."
            )
        self.model = model
        self.body = body
        self._output: Any = None
        self._proven = False

    @property
    def vocab_size(self) -> int:
        """Tokens the input embedding knows."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the input embedding lies."""
        return self.model.get_input_embeddings().weight.device

    @torch.no_grad()
    def hidden(self, input_ids: Tensor, cache: Any = None) -> Tensor:
        """Returns the body's last hidden states, [B, T, hidden].

        No attention mask is passed, so causal attention runs without an N² mask.

        Args:
            input_ids: [B, T] int64.
            cache: a transformers cache to read and fill, or None.

        Raises:
            ShapeError: for another shape or a token the model does not have.
            UnsupportedModelError: if the two parts do not give the model's own logits.
        """
        input_ids = input_ids.to(self.device)
        self.check_ids(input_ids)
        if not self._proven:
            self._prove(input_ids[:1, :PROOF_TOKENS])
        return self._hidden(input_ids, cache)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the model's logits, [B, T, vocabulary], of the body's hidden states."""
        if self._output is None:
            raise ConfigError("logits() needs hidden states of this object's hidden(), run first.")
        ready = copy(self._output)
        ready.last_hidden_state = hidden
        stand_in_ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        with returning(self.body, ready):
            return self.model(input_ids=stand_in_ids, use_cache=False).logits

    def _hidden(self, input_ids: Tensor, cache: Any) -> Tensor:
        if cache is None:
            output = self.body(input_ids=input_ids, use_cache=False)
        else:
            keywords = {cache_keyword(self.body): cache}
            output = self.body(input_ids=input_ids, use_cache=True, **keywords)
        hidden = output.last_hidden_state
        if self._output is None:
            self._output = type(output)(last_hidden_state=hidden[:, :0])
        return hidden

    def _prove(self, input_ids: Tensor) -> None:
        whole = self.model(input_ids=input_ids, use_cache=False).logits.float()
        parts = self.logits(self._hidden(input_ids, None)).float()
        low_precision = self.model.dtype in (torch.float16, torch.bfloat16)
        agreement = LOW_PRECISION_AGREEMENT if low_precision else FLOAT32_AGREEMENT
        if whole.isfinite().all():
            if parts.shape != whole.shape:
                raise self._unequal(f"shapes {tuple(parts.shape)} and {tuple(whole.shape)}")
            difference = (parts - whole).abs().max().item()
            if not difference <= agreement * max(1.0, whole.abs().max().item()):
                raise self._unequal(f"a difference of {difference:.3g}")
        self._proven = True

    def _unequal(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(self.model).__name__}: logits computed in chunks are not those of its whole "
            f"forward ({what}), so its likelihoods would be wrong. Longer texts of this family "
            "cannot be measured."
        )

    def check_ids(self, input_ids: Tensor) -> None:
        """Refuses what is not rows of the vocabulary's tokens.

        Raises:
            ShapeError: naming a token, or the shape.
        """
        if input_ids.dim() != 2 or input_ids.shape[1] < 1 or input_ids.dtype != torch.int64:
            raise ShapeError(
                f"input_ids must be int64 [B, T] with T ≥ 1, got {input_ids.dtype} "
                f"{tuple(input_ids.shape)}."
            )
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ShapeError(
                f"token {low if low < 0 else high} is outside the model's vocabulary of "
                f"{self.vocab_size}. Use the tokenizer that belongs to the model."
            )


def split_forward(model: Any) -> SplitForward:
    """Returns `model` itself if it is already split, else its two parts."""
    return model if isinstance(model, SplitForward) else SplitForward(model)


def cache_keyword(body: Any) -> str:
    """Returns what this release of transformers calls the cache argument of a forward."""
    names = inspect.signature(type(body).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@contextmanager
def returning(module: torch.nn.Module, output: Any) -> Iterator[None]:
    """Makes `module` return `output` whatever it is asked, and restores it afterwards."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before
