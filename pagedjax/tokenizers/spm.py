"""SentencePiece models (`tokenizer.model`), through the sentencepiece library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedjax.tokenizers.base import check_text
from pagedjax.tokenizers.checkpoint_files import AddedToken, read_checkpoint_files
from pagedjax.tokenizers.detokenizer import decode
from pagedjax.tokenizers.spm_model import read_space_rules
from pagedjax.tokenizers.vocabulary import (
    DecodeRules,
    LeadingSpace,
    Vocabulary,
    parse_byte_token,
)

WORD_MARK = "▁"


class SentencePieceTokenizer:
    """A `sentencepiece.SentencePieceProcessor` behind PagedJAX's `Tokenizer` protocol.

    The library never produces control tokens from text; here a text is first cut at the special
    and added tokens written in it, and the library encodes what lies between (each part with the
    model's dummy space before it, as Hugging Face and llama.cpp do).

    Args:
      processor: the library's processor.
      added_tokens: tokens beyond the model's, or flags for tokens of it.
      ends: (ids before, ids after) that `add_special_tokens` adds.
      bos_token_id, eos_token_ids, special_tokens, chat_template: see `Tokenizer`.
      vocab_size: the model's vocabulary, where its embedding is padded beyond the tokenizer's.
    """

    def __init__(
        self,
        processor: Any,
        *,
        added_tokens: Iterable[AddedToken] = (),
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        ends: tuple[Sequence[int], Sequence[int]],
        vocab_size: int | None = None,
    ) -> None:
        added = tuple(added_tokens)
        self._processor = processor
        self.vocabulary = _vocabulary(processor, added).padded(vocab_size)
        self._ids = {
            token: token_id
            for token_id, token in enumerate(self.vocabulary.tokens)
            if token is not None
        }
        written = {self.vocabulary.tokens[token_id] for token_id in self.vocabulary.special_ids}
        written |= {token.content for token in added}
        self._special_pattern = _any_of(written)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.vocabulary.check_ids(self.eos_token_ids, "eos_token_id")
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self._before, self._after = ends

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self.vocabulary.special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        ids: list[int] = []
        for place, part in enumerate(self._special_pattern.split(text)):
            if place % 2:  # the pattern's group: a special token
                ids.append(self._ids[part])
            elif part:
                ids += self._processor.encode(part)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return decode(self.vocabulary, ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """See `Tokenizer.id_to_token`."""
        (token_id,) = self.vocabulary.check_ids([token_id])
        return self.vocabulary.tokens[token_id]

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        return self._ids.get(token)


def load_processor(model: bytes, where: str) -> Any:
    """A processor from a serialized model; ValueError names `where` it came from."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = processor.LoadFromSerializedProto(model)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{where}: not a SentencePiece model: {error}") from None
    if not loaded or not processor.vocab_size():
        raise ValueError(f"{where}: not a SentencePiece model")
    return processor


def load_tokenizer_model(
    path: str | Path, *, vocab_size: int | None = None
) -> SentencePieceTokenizer:
    """Loads a `tokenizer.model` and the files beside it (see `checkpoint_files`).

    A beginning-of-sequence token is added where the model has one, unless tokenizer_config.json
    says otherwise (as transformers does for Llama). ValueError names the file and what is wrong.
    """
    path = Path(path)
    processor = load_processor(path.read_bytes(), str(path))
    files = read_checkpoint_files(path.parent)
    ids = {
        name: token_id if token_id >= 0 else None
        for name, token_id in (
            ("bos_token", processor.bos_id()),
            ("eos_token", processor.eos_id()),
            ("unk_token", processor.unk_id()),
        )
    }
    special_tokens = {
        name: processor.id_to_piece(token_id)
        for name, token_id in ids.items()
        if token_id is not None
    }
    special_tokens.update(files.special_tokens)
    declared = {token.content: token.token_id for token in files.added_tokens}
    for name in ("bos_token", "eos_token"):
        content = files.special_tokens.get(name)
        if content is None:
            continue
        token_id = declared.get(content, processor.piece_to_id(content))
        if content not in declared and processor.id_to_piece(token_id) != content:
            raise ValueError(f"{path}: {name} {content!r} is not in the vocabulary")
        ids[name] = token_id
    bos_id, eos_id = ids["bos_token"], ids["eos_token"]
    add_bos = bos_id is not None if files.add_bos_token is None else files.add_bos_token
    add_eos = bool(files.add_eos_token)
    if (add_bos and bos_id is None) or (add_eos and eos_id is None):
        raise ValueError(f"{path}: add_bos_token or add_eos_token is true for a token it lacks")
    return SentencePieceTokenizer(
        processor,
        added_tokens=files.added_tokens,
        bos_token_id=bos_id,
        eos_token_ids=(*files.eos_token_ids, *([] if eos_id is None else [eos_id])),
        special_tokens=special_tokens,
        chat_template=files.chat_template,
        ends=([bos_id] if add_bos else [], [eos_id] if add_eos else []),
        vocab_size=vocab_size,
    )


def _vocabulary(processor: Any, added: tuple[AddedToken, ...]) -> Vocabulary:
    size = processor.vocab_size()
    tokens: list[str | None] = [processor.id_to_piece(token_id) for token_id in range(size)]
    data: list[bytes] = []
    special: set[int] = set()
    literal: set[int] = set()
    for token_id, token in enumerate(tokens):
        if processor.is_byte(token_id):
            data.append(bytes([parse_byte_token(token)]))
            literal.add(token_id)
        elif processor.is_unknown(token_id):
            # The text that the model shows for an unknown token (" ⁇ " by default).
            data.append(processor.decode([token_id]).encode())
            literal.add(token_id)
        else:
            data.append(token.replace(WORD_MARK, " ").encode())
        if processor.is_control(token_id):
            special.add(token_id)
    for token in added:
        gap = token.token_id + 1 - len(tokens)
        tokens += [None] * gap
        data += [b""] * gap
        if tokens[token.token_id] not in (None, token.content):
            raise ValueError(
                f"token {token.content!r} is declared with id {token.token_id}, which is "
                f"{tokens[token.token_id]!r} in the SentencePiece model"
            )
        if token.token_id >= size:
            tokens[token.token_id] = token.content
            data[token.token_id] = token.content.encode()
            literal.add(token.token_id)
        if token.special:
            special.add(token.token_id)
    return Vocabulary(
        tokens=tuple(tokens),
        token_bytes=tuple(data),
        special_ids=frozenset(special),
        literal_ids=frozenset(literal),
        rules=_rules(processor),
    )


def _rules(processor: Any) -> DecodeRules:
    """Decoding rules of SentencePiece (sentencepiece_processor.cc, Decode)."""
    spaces = read_space_rules(processor.serialized_model_proto())
    if spaces.treat_whitespace_as_suffix:
        raise ValueError("SentencePiece models with treat_whitespace_as_suffix are not supported")
    if spaces.denormalizes:
        raise ValueError("SentencePiece models with a denormalizer are not supported")
    if spaces.remove_extra_whitespaces:
        leading = LeadingSpace.PIECES
    elif spaces.add_dummy_prefix:
        leading = LeadingSpace.PIECE
    else:
        leading = LeadingSpace.KEEP
    return DecodeRules(leading_space=leading, replace_each_byte=True, special_ends_bytes=True)


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern with one group: any of `strings`, the longest first."""
    ordered = sorted(strings, key=lambda string: (-len(string), string))
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")
