"""The protocol that the engine sees of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from pagedjax.tokenizers.vocabulary import Vocabulary


class Tokenizer(Protocol):
    """Text to token ids and back; immutable, and safe to share between threads.

    Attributes:
      vocabulary: tokens, their bytes and the rules that join them (`IncrementalDetokenizer`).
      bos_token_id: beginning-of-sequence token, or None.
      eos_token_ids: every token that ends a sequence (end of text, of turn, of message), sorted.
      special_tokens: names that chat templates use -> text, e.g. {"bos_token": "<s>"}.
      chat_template: the checkpoint's jinja2 template, or None.
    """

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def vocab_size(self) -> int:
        """Number of ids: valid ids are 0 to vocab_size - 1."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` leaves out."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what the checkpoint says belongs at the ends (usually the
        beginning-of-sequence token, or nothing). Special tokens written in the text ("<|im_end|>")
        always become those tokens, as in Hugging Face and vLLM: chat templates rely on it.
        ValueError when `text` is no string or holds lone surrogates.
        """

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. ValueError names an id that is not in the vocabulary and its size."""

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the checkpoint writes it; None for an id that no token has."""

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the checkpoint writes it, or None."""


def check_text(text: str) -> str:
    """`text` itself; ValueError unless it is a string that UTF-8 can hold."""
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds a lone surrogate at character {error.start}: "
            f"{text[error.start]!r} is not valid Unicode text"
        ) from None
    return text
