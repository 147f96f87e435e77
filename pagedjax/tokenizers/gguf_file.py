"""The tokenizer inside a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedjax.tokenizers.base import Tokenizer
from pagedjax.tokenizers.gguf_metadata import read_gguf_metadata
from pagedjax.tokenizers.hf import HuggingFaceTokenizer
from pagedjax.tokenizers.pre_tokenizers import PreTokenizer, build_pre_tokenizer, find_pre_tokenizer
from pagedjax.tokenizers.spm import SentencePieceTokenizer, load_processor
from pagedjax.tokenizers.spm_model import write_bpe_model
from pagedjax.tokenizers.vocabulary import (
    DecodeRules,
    Vocabulary,
    byte_level_alphabet,
    byte_level_bytes,
)

# Token types, the same numbers in GGUF and in SentencePiece's model format.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Ends of a turn or a message that older files do not point out with a key of their own.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_KNOWN_ENDS = {
    "eot_token_id": ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
    "eom_token_id": ("<|eom_id|>",),
}
_SPECIAL_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_gguf_tokenizer(path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
    """Builds the tokenizer of a GGUF file from its metadata.

    `tokenizer.ggml.model` "gpt2" is a byte-level BPE, built with the `tokenizers` library and the
    pre-tokenizer that the file names; "llama" is a SentencePiece BPE, rebuilt as a SentencePiece
    model. ValueError names the file and the key that is missing, malformed or not supported.

    Args:
      path: the file.
      vocab_size: the model's vocabulary, where its embedding is padded beyond the tokenizer's.
    """
    return tokenizer_from_metadata(read_gguf_metadata(path), str(path), vocab_size=vocab_size)


def tokenizer_from_metadata(
    metadata: Mapping[str, Any], where: str, *, vocab_size: int | None = None
) -> Tokenizer:
    """As `load_gguf_tokenizer`, from metadata already read; `where` names it in errors."""
    try:
        fields = _Fields(metadata)
        if fields.model == "gpt2":
            return _byte_level(fields, vocab_size)
        if fields.model == "llama":
            return _sentencepiece(fields, where, vocab_size)
        raise ValueError(
            f"tokenizer.ggml.model: {fields.model!r} is not supported (gpt2 and llama are)"
        )
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from error


class _Fields:
    """The tokenizer's keys, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = self.get("model", str)
        self.pre = self.get("pre", str)
        self.tokens: list[str] = self._column("tokens", str)
        self.types: list[int] = self._column("token_type", int)
        if len(self.types) != len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.token_type has {len(self.types)} values for "
                f"{len(self.tokens)} tokens"
            )
        self.chat_template = metadata.get("tokenizer.chat_template")
        self.end_ids = self._end_ids()
        self.special_ids = frozenset(
            token_id for token_id, kind in enumerate(self.types) if kind == CONTROL
        ) | set(self.end_ids)
        if (bos_id := self.token_id("bos_token_id")) is not None:
            self.special_ids |= {bos_id}
        self.special_tokens = {
            name: self.tokens[token_id]
            for name, key in _SPECIAL_NAMES.items()
            if (token_id := self.token_id(key)) is not None
        }

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"tokenizer.ggml.{key} must be {kind.__name__}, not {value!r:.60}")
        return value

    def _column(self, key: str, kind: type) -> list:
        values = self.get(key, list)
        if not values or not isinstance(values[0], kind):
            raise ValueError(f"tokenizer.ggml.{key} is missing or empty, or not of {kind.__name__}")
        return values

    def scores(self) -> list[float]:
        scores = self._column("scores", float)
        if len(scores) != len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.scores has {len(scores)} values for {len(self.tokens)} tokens"
            )
        return scores

    def merges(self) -> list[tuple[str, str]]:
        known = set(self.tokens)
        merges = []
        for line in self._column("merges", str):
            left, _, right = line.partition(" ")  # byte-level tokens hold no space
            if not {left, right, left + right} <= known:
                raise ValueError(f"tokenizer.ggml.merges: {line!r} does not join two tokens")
            merges.append((left, right))
        return merges

    def token_id(self, key: str) -> int | None:
        token_id = self.get(key, int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.{key}: {token_id} is out of range: the vocabulary has "
                f"{len(self.tokens)} tokens"
            )
        return token_id

    def _end_ids(self) -> list[int]:
        """eos first, then ends of turn and message, by key or by their well-known names."""
        ends = [token_id for key in _END_KEYS if (token_id := self.token_id(key)) is not None]
        for key, names in _KNOWN_ENDS.items():
            if self.token_id(key) is None:
                ends += [
                    token_id
                    for token_id, kind in enumerate(self.types)
                    if kind == CONTROL and self.tokens[token_id] in names
                ]
        return list(dict.fromkeys(ends))

    def ends(self, add_bos: bool) -> tuple[list[int], list[int]]:
        """Ids before and after a text, by add_bos_token (default `add_bos`) and add_eos_token."""
        sides = []
        for name, default in (("bos", add_bos), ("eos", False)):
            key = f"{name}_token_id"
            wanted = self.get(f"add_{name}_token", bool, default)
            token_id = self.token_id(key)
            if wanted and token_id is None:
                raise ValueError(f"tokenizer.ggml.{key} is missing, but the token is to be added")
            sides.append([token_id] if wanted else [])
        return sides[0], sides[1]


def _byte_level(fields: _Fields, vocab_size: int | None) -> HuggingFaceTokenizer:
    pre_tokenizer = find_pre_tokenizer(fields.pre)
    if fields.get("add_space_prefix", bool, False):
        raise ValueError("tokenizer.ggml.add_space_prefix: true is not supported for gpt2")
    backend = _bpe_backend(fields, pre_tokenizer)
    alphabet = str.maketrans(byte_level_alphabet())
    written = {CONTROL, USER_DEFINED, UNKNOWN}  # these stand for their own text
    vocabulary = Vocabulary(
        tokens=tuple(fields.tokens),
        token_bytes=tuple(
            token.encode() if kind in written else byte_level_bytes(token, alphabet)
            for token, kind in zip(fields.tokens, fields.types, strict=True)
        ),
        special_ids=fields.special_ids,
        literal_ids=frozenset(),
        rules=DecodeRules(),
    )
    return HuggingFaceTokenizer(
        backend,
        vocabulary.padded(vocab_size),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.end_ids,
        special_tokens=fields.special_tokens,
        chat_template=fields.chat_template,
        ends=fields.ends(pre_tokenizer.add_bos),
    )


def _bpe_backend(fields: _Fields, pre_tokenizer: PreTokenizer) -> Any:
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(fields.tokens)},
            merges=fields.merges(),
            ignore_merges=pre_tokenizer.ignore_merges,
        )
    )
    backend.pre_tokenizer = build_pre_tokenizer(pre_tokenizer)
    added = [
        AddedToken(token, special=token_id in fields.special_ids, normalized=False)
        for token_id, (token, kind) in enumerate(zip(fields.tokens, fields.types, strict=True))
        if token and (kind in (USER_DEFINED, UNKNOWN) or token_id in fields.special_ids)
    ]
    backend.add_tokens(added)
    return backend


def _sentencepiece(fields: _Fields, where: str, vocab_size: int | None) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(
        load_processor(_sentencepiece_model(fields), where),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.end_ids,
        special_tokens=fields.special_tokens,
        chat_template=fields.chat_template,
        ends=fields.ends(add_bos=True),
        vocab_size=vocab_size,
    )


def _sentencepiece_model(fields: _Fields) -> bytes:
    """A serialized SentencePiece BPE model with the file's pieces, scores and types.

    llama.cpp merges the neighbours whose union has the best score, as SentencePiece's BPE does, and
    normalizes nothing.
    """
    scores = fields.scores()
    if UNKNOWN not in fields.types:
        raise ValueError("tokenizer.ggml.token_type names no unknown token (type 2)")
    num_bytes = fields.types.count(BYTE)
    if num_bytes not in (0, 256):
        raise ValueError(f"tokenizer.ggml.token_type names {num_bytes} byte tokens, not 256")
    types = [
        CONTROL if token_id in fields.special_ids else kind  # also where the file says normal
        for token_id, kind in enumerate(fields.types)
    ]
    return write_bpe_model(
        zip(fields.tokens, scores, types, strict=True),
        unk_piece=fields.tokens[fields.types.index(UNKNOWN)],
        byte_fallback=num_bytes == 256,
        add_dummy_prefix=fields.get("add_space_prefix", bool, True),
        remove_extra_whitespaces=fields.get("remove_extra_whitespaces", bool, False),
    )
