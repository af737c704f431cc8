"""A causal model's loss, its logits made a chunk at a time in the backward pass too."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longspan.adapters.head import returning
from longspan.training.packing import IGNORED

CHUNK_TOKENS = 256  # of 49,152 logits each: 50 MB, a few times over


class CausalLoss(nn.Module):
    """A model that returns the negative log-likelihood of targets instead of logits.

    The logits of one chunk exist at a time; the backward pass makes them again. It is this module
    that goes to several processes, so that body and head belong to one forward.

    Args:
        model: a transformers causal language model whose head can be run apart (`SplitForward`
            proves it).
        chunk_tokens: logits held at a time.
    """

    def __init__(self, model: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens
        self._no_split_modules = getattr(model, "_no_split_modules", None)  # read by FSDP

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns −ln p of every target, [B, T − 1] float32 nats; 0 where a target is `IGNORED`.

        Args:
            input_ids: [B, T] int64.
            targets: [B, T − 1] int64.
            position_ids: [B, T] int64.
            attention_mask: [B, T]. Without it transformers takes every position that does not go
                up by 1 for a new document: so packed rows have none, and skipped positions do.
        """
        body = self.model.base_model
        output = body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=False,
        )
        hidden = output.last_hidden_state
        chunk = max(1, self.chunk_tokens // input_ids.shape[0])
        parts = [
            self._chunk(output, hidden[:, start : start + chunk], targets[:, start : start + chunk])
            for start in range(0, targets.shape[1], chunk)
        ]
        return torch.cat(parts, dim=1)

    def _chunk(self, output: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden = hidden[:, : targets.shape[1]]  # the last token's has no target

        def negative_log_likelihood(hidden: Tensor) -> Tensor:
            ready = copy(output)
            ready.last_hidden_state = hidden
            with returning(self.model.base_model, ready):
                logits = self.model(input_ids=torch.zeros_like(targets), use_cache=False).logits
            return F.cross_entropy(
                logits.float().flatten(0, 1),
                targets.flatten(),
                ignore_index=IGNORED,
                reduction="none",
            ).view_as(targets)

        return checkpoint(
            negative_log_likelihood, hidden, use_reentrant=False, preserve_rng_state=False
        )

    def tie_weights(self) -> None:
        """Ties the model's weights again, which FSDP asks for."""
        self.model.tie_weights()
