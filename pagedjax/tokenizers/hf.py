"""Tokenizers of the `tokenizers` library: a Hugging Face `tokenizer.json`, or one built in code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedjax.tokenizers.base import check_text
from pagedjax.tokenizers.checkpoint_files import AddedToken, CheckpointFiles, read_checkpoint_files
from pagedjax.tokenizers.detokenizer import decode
from pagedjax.tokenizers.hf_decoders import parse_decoder
from pagedjax.tokenizers.vocabulary import Vocabulary, tokens_by_id

# transformers rebuilds the ends of these tokenizers from add_bos_token and add_eos_token and then
# ignores the post-processor in tokenizer.json; so does `load_tokenizer_json`.
_CLASSES_WITH_FLAGS = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
)


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer` behind PagedJAX's `Tokenizer` protocol.

    Args:
      backend: the library's tokenizer; padding and truncation are switched off.
      vocabulary: tokens and bytes (decoding never goes through the library).
      bos_token_id, eos_token_ids, special_tokens, chat_template: see `Tokenizer`.
      ends: (ids before, ids after) for `add_special_tokens`, or None to leave it to the backend's
        post-processor.
    """

    def __init__(
        self,
        backend: Any,
        vocabulary: Vocabulary,
        *,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        ends: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._ends = ends
        self.vocabulary = vocabulary
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self.vocabulary.special_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        by_backend = add_special_tokens and self._ends is None
        ids = self._backend.encode(check_text(text), add_special_tokens=by_backend).ids
        if add_special_tokens and self._ends is not None:
            before, after = self._ends
            return [*before, *ids, *after]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return decode(self.vocabulary, ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """See `Tokenizer.id_to_token`."""
        (token_id,) = self.vocabulary.check_ids([token_id])
        return self.vocabulary.tokens[token_id]

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        return self._backend.token_to_id(token)


def load_tokenizer_json(path: str | Path, *, vocab_size: int | None = None) -> HuggingFaceTokenizer:
    """Loads a `tokenizer.json` and the files beside it.

    Args:
      path: the file.
      vocab_size: the model's vocabulary, where its embedding is padded beyond the tokenizer's.

    ValueError names the file and what is wrong or not supported in it.
    """
    from tokenizers import Tokenizer as Backend

    path = Path(path)
    text = path.read_text(encoding="utf-8")
    try:
        backend = Backend.from_str(text)
        decoder = json.loads(text).get("decoder")
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer of the tokenizers library: {error}") from None
    files = read_checkpoint_files(path.parent)
    _add_declared_tokens(backend, files.added_tokens, path)
    special_ids = _special_ids(backend, files, path)
    bos_id = _named_id(backend, files, "bos_token")
    eos_id = _named_id(backend, files, "eos_token")
    eos_ids = (*files.eos_token_ids, *([] if eos_id is None else [eos_id]))
    try:
        vocabulary = _vocabulary(backend, decoder, special_ids).padded(vocab_size)
        vocabulary.check_ids(eos_ids, "eos_token_id")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return HuggingFaceTokenizer(
        backend,
        vocabulary,
        bos_token_id=bos_id,
        eos_token_ids=eos_ids,
        special_tokens=files.special_tokens,
        chat_template=files.chat_template,
        ends=_ends(files, bos_id, eos_id),
    )


def _vocabulary(backend: Any, decoder: Mapping | None, special_ids: frozenset[int]) -> Vocabulary:
    to_bytes, rules, is_literal = parse_decoder(decoder)
    tokens = tokens_by_id(backend.get_vocab(with_added_tokens=True))
    added = backend.get_added_tokens_decoder()
    return Vocabulary(
        tokens=tokens,
        token_bytes=tuple(
            b"" if token is None else to_bytes(token, token_id in added)
            for token_id, token in enumerate(tokens)
        ),
        special_ids=special_ids,
        literal_ids=frozenset(
            token_id for token_id, token in enumerate(tokens) if token and is_literal(token)
        ),
        rules=rules,
    )


def _add_declared_tokens(backend: Any, declared: tuple[AddedToken, ...], path: Path) -> None:
    """Adds tokens that tokenizer_config.json declares and tokenizer.json lacks."""
    from tokenizers import AddedToken as BackendToken

    for token in declared:
        if backend.token_to_id(token.content) is None:
            backend.add_tokens(
                [BackendToken(token.content, special=token.special, normalized=False)]
            )
        token_id = backend.token_to_id(token.content)
        if token_id != token.token_id:
            raise ValueError(
                f"{path}: token {token.content!r} has id {token_id}, but the files beside it "
                f"declare {token.token_id}"
            )


def _special_ids(backend: Any, files: CheckpointFiles, path: Path) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    special |= {token.token_id for token in files.added_tokens if token.special}
    for name, content in files.special_tokens.items():
        token_id = backend.token_to_id(content)
        if token_id is not None:
            special.add(token_id)
        elif name in ("bos_token", "eos_token"):
            raise ValueError(f"{path}: {name} {content!r} is not in the vocabulary")
    return frozenset(special)


def _named_id(backend: Any, files: CheckpointFiles, name: str) -> int | None:
    content = files.special_tokens.get(name)
    return None if content is None else backend.token_to_id(content)


def _ends(
    files: CheckpointFiles, bos_id: int | None, eos_id: int | None
) -> tuple[list[int], list[int]] | None:
    """Ids before and after a text where add_bos_token or add_eos_token rules; else None."""
    says = files.add_bos_token is not None or files.add_eos_token is not None
    if not says or files.tokenizer_class not in _CLASSES_WITH_FLAGS:
        return None
    ends = []
    for flag, token_id, name, default in (
        (files.add_bos_token, bos_id, "bos_token", True),
        (files.add_eos_token, eos_id, "eos_token", False),
    ):
        wanted = default if flag is None else flag
        if wanted and token_id is None:
            raise ValueError(f"tokenizer_config.json: add_{name} is true, but there is no {name}")
        ends.append([token_id] if wanted else [])
    return ends[0], ends[1]
