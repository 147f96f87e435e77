"""What every tokenizer knows about its tokens: their bytes, and the rules that join them to text.

All decoding in PagedJAX, whole or incremental, runs on this table and on nothing else, so a stream
and a whole decode cannot disagree (see `pagedjax.tokenizers.detokenizer`).
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


class LeadingSpace(enum.Enum):
    """What happens to spaces at the very beginning of a text."""

    KEEP = "keep"  # byte-level BPE: nothing is removed
    TEXT = "text"  # Hugging Face's Strip decoder: up to `strip_count` spaces of the whole text
    PIECE = "piece"  # SentencePiece: one word mark of the first piece that gives text
    PIECES = "pieces"  # SentencePiece with remove_extra_whitespaces: one mark of each, until text
    FIRST_TOKEN = "first_token"  # Hugging Face's Metaspace: every word mark of the first token


@dataclass(frozen=True, kw_only=True)
class DecodeRules:
    """How a family of tokenizers turns the bytes of its tokens into text.

    Fields:
      leading_space: see `LeadingSpace`.
      strip_count: spaces that `LeadingSpace.TEXT` removes.
      replace_each_byte: bytes that are not UTF-8 become one U+FFFD each (SentencePiece); otherwise
        one U+FFFD for each maximal ill-formed part (Unicode's recommendation; byte-level BPE).
      special_ends_bytes: a skipped special token ends a run of bytes, so that a character cannot be
        put together across it (SentencePiece); otherwise skipped tokens leave no trace.
    """

    leading_space: LeadingSpace = LeadingSpace.KEEP
    strip_count: int = 0
    replace_each_byte: bool = False
    special_ends_bytes: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The tokens of one tokenizer, by id. V is the number of ids.

    Fields:
      tokens: [V] the token as the checkpoint writes it ("Ġthe", "▁the", "<0x0A>"); None where no
        token has that id.
      token_bytes: [V] the bytes that the token adds to the text; b"" where there is no token.
      special_ids: tokens that `skip_special_tokens` leaves out.
      literal_ids: tokens whose leading space, if any, is text and never a word mark (byte-fallback
        tokens, the unknown token).
      rules: see `DecodeRules`.
    """

    tokens: tuple[str | None, ...]
    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    literal_ids: frozenset[int]
    rules: DecodeRules

    def check_ids(self, ids: Iterable[int], what: str = "token id") -> list[int]:
        """`ids` as plain ints; ValueError names an id that is no integer or not in 0..V-1.

        `what` is what the error calls the id.
        """
        size = len(self.tokens)
        checked = []
        for given in ids:
            try:
                token_id = operator.index(given)
            except TypeError:
                raise ValueError(
                    f"{what} {given!r} is not an integer (the vocabulary has {size} tokens, "
                    f"0 to {size - 1})"
                ) from None
            if not 0 <= token_id < size:
                raise ValueError(
                    f"{what} {token_id} is out of range: the vocabulary has {size} tokens "
                    f"(0 to {size - 1})"
                )
            checked.append(token_id)
        return checked

    def padded(self, size: int | None) -> Vocabulary:
        """The vocabulary with ids up to `size` that decode to nothing.

        Models often pad their embedding beyond the tokenizer (to a multiple of 64, say); such an
        id can be sampled, and must then not be an error. A `size` within V changes nothing.
        """
        missing = (size or 0) - len(self.tokens)
        if missing <= 0:
            return self
        return replace(
            self,
            tokens=self.tokens + (None,) * missing,
            token_bytes=self.token_bytes + (b"",) * missing,
        )


def tokens_by_id(vocab: Mapping[str, int]) -> tuple[str | None, ...]:
    """[V] tokens in id order from a token -> id mapping; None for ids that no token has."""
    tokens: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token
    return tuple(tokens)


def parse_byte_token(token: str) -> int | None:
    """The byte of a byte-fallback token ("<0x0A>" gives 10), or None."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def byte_level_alphabet() -> dict[str, str]:
    """GPT-2's printable stand-in of each byte -> the character with the byte's own code point.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in order
    (OpenAI GPT-2 encoder, `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + place): chr(byte) for place, byte in enumerate(others)})
    return alphabet


def byte_level_bytes(token: str, alphabet: Mapping[int, str]) -> bytes:
    """Bytes of a byte-level token; a token outside the alphabet stands for its own UTF-8.

    `alphabet` is `str.maketrans(byte_level_alphabet())`.
    """
    if any(ord(character) not in alphabet for character in token):
        return token.encode("utf-8", errors="replace")
    return token.translate(alphabet).encode("latin-1")
