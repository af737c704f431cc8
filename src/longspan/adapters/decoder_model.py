"""A longspan decoder as a transformers model, so that every tool reads it like any other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from longspan.errors import ShapeError, UnsupportedModelError
from longspan.models import Decoder, load_decoder
from longspan.models.config import MODEL_TYPE


class DecoderModelConfig(PreTrainedConfig):
    """The decoder's settings, in config.json's words."""

    model_type = MODEL_TYPE


class _DecoderModel(PreTrainedModel):
    config_class = DecoderModelConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    config: DecoderModelConfig


class DecoderBody(_DecoderModel):
    """The decoder without its head; it keeps no cache."""

    def __init__(self, config: DecoderModelConfig, decoder: Decoder) -> None:
        super().__init__(config)
        self.decoder = decoder

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the token embedding."""
        return self.decoder.embed_tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> BaseModelOutput:
        """Returns the last hidden states of rows without padding.

        Raises:
            ShapeError: for rows with padding.
            UnsupportedModelError: if a cache is given or asked for.
        """
        if attention_mask is not None and not bool((attention_mask == 1).all()):
            raise ShapeError("a longspan decoder reads rows without padding. Give one at a time.")
        if use_cache or options.get("cache") is not None:
            raise UnsupportedModelError(
                "a longspan decoder keeps no key-value cache. Read whole rows with "
                "use_cache=False; Decoder itself remembers segments (memory_length)."
            )
        hidden = self.decoder(input_ids, positions=position_ids).hidden
        return BaseModelOutput(last_hidden_state=hidden)


class DecoderForCausalLM(_DecoderModel):
    """The decoder and its head.

    Args:
        decoder: any; its memory, if it has one, is not used.
    """

    def __init__(self, decoder: Decoder) -> None:
        settings = asdict(decoder.config)
        super().__init__(
            DecoderModelConfig(**{k: v for k, v in settings.items() if k != "scaling"})
        )
        self.model = DecoderBody(self.config, decoder.with_memory(0))

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the token embedding."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Returns what turns hidden states into logits."""
        decoder = self.model.decoder
        return decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutput:
        """Returns the logits; options as for the body."""
        hidden = self.model(input_ids=input_ids, **options).last_hidden_state
        return CausalLMOutput(logits=self.model.decoder.head(hidden))


def read_decoder(folder: str | Path) -> DecoderForCausalLM:
    """Returns the model that `longspan.models.save_decoder` wrote, in eval mode.

    Raises:
        InputError: if it is missing or damaged.
    """
    return DecoderForCausalLM(load_decoder(Path(folder))).eval()
