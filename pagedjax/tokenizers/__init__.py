"""Tokenizers, chat templates, incremental detokenization and stop strings."""

from pagedjax.tokenizers.base import Tokenizer
from pagedjax.tokenizers.chat import apply_chat_template, check_messages, encode_chat
from pagedjax.tokenizers.detokenizer import IncrementalDetokenizer
from pagedjax.tokenizers.gguf_metadata import read_gguf_metadata
from pagedjax.tokenizers.load import load_tokenizer
from pagedjax.tokenizers.stop_strings import StopChecker, StopResult
from pagedjax.tokenizers.vocabulary import Vocabulary

__all__ = [
    "IncrementalDetokenizer",
    "StopChecker",
    "StopResult",
    "Tokenizer",
    "Vocabulary",
    "apply_chat_template",
    "check_messages",
    "encode_chat",
    "load_tokenizer",
    "read_gguf_metadata",
]
