"""A small readable decoder that takes any position encoding: for studies, tests and recurrence."""

from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder, DecoderOutput
from longspan.models.encodings import ENCODINGS, Encoding
from longspan.models.memory import Memory
from longspan.models.saving import load_decoder, save_decoder, save_llama

__all__ = [
    "ENCODINGS",
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "Encoding",
    "Memory",
    "load_decoder",
    "save_decoder",
    "save_llama",
]
