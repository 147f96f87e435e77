"""From token ids to text, at once or as they come.

A stream is correct when its pieces, put together, are the text of all the ids. The usual way
(decode a window of tokens twice and compare) costs two decodes a token and only approximates that.
Here tokens are bytes, text is the UTF-8 of their concatenation, and the two places where a family
of tokenizers departs from it (spaces at the beginning, bytes that are no UTF-8) are rules with a
constant amount of state. A token costs O(its bytes), whatever came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pagedjax.tokenizers.base import Tokenizer
from pagedjax.tokenizers.vocabulary import LeadingSpace, Vocabulary


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens; never half a character.

    `push(ids)` returns the text that the new tokens complete; bytes that may still become a
    character wait for the next call. `finish()` returns what is left, replacing bytes that never
    became a character by U+FFFD. Pushes and finish together equal `tokenizer.decode` of all ids,
    however the ids are cut.

    With `prompt_ids` the text begins after the prompt's: what was shown of the prompt, the pushes
    and finish together equal the decode of prompt and output. A word mark on the first output token
    is then a space, as it should be, and bytes left open by the prompt may be completed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Iterable[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._state = _DecodeState(tokenizer.vocabulary, skip_special_tokens)
        self._state.push(prompt_ids)

    def push(self, ids: Iterable[int]) -> str:
        """New text. ValueError (and no change) for an id outside the vocabulary."""
        return self._state.push(ids)

    def finish(self) -> str:
        """The rest of the text; call it once, after the last push."""
        return self._state.finish()


def decode(vocabulary: Vocabulary, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """Text of `ids`. ValueError for an id outside the vocabulary."""
    state = _DecodeState(vocabulary, skip_special_tokens)
    return state.push(ids) + state.finish()


class _DecodeState:
    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._at_start = vocabulary.rules.leading_space is not LeadingSpace.KEEP
        self._strip_left = vocabulary.rules.strip_count
        self._pending = b""  # the beginning of a character: at most 3 bytes

    def push(self, ids: Iterable[int]) -> str:
        vocabulary = self._vocabulary
        skipped = vocabulary.special_ids if self._skip_special_tokens else frozenset()
        ends_bytes = vocabulary.rules.special_ends_bytes
        text: list[str] = []
        chunk = [self._pending]
        for token_id in vocabulary.check_ids(ids):
            if token_id in skipped:
                if ends_bytes:
                    text.append(self._to_text(b"".join(chunk), final=True))
                    chunk = []
                continue
            data = vocabulary.token_bytes[token_id]
            chunk.append(self._strip_start(token_id, data) if self._at_start else data)
        text.append(self._to_text(b"".join(chunk), final=False))
        return "".join(text)

    def finish(self) -> str:
        return self._to_text(self._pending, final=True)

    def _strip_start(self, token_id: int, data: bytes) -> bytes:
        """Bytes of a token that comes before any text, by the rule for leading spaces."""
        rule = self._vocabulary.rules.leading_space
        if rule is LeadingSpace.TEXT:
            while self._strip_left and data.startswith(b" "):
                data = data[1:]
                self._strip_left -= 1
            self._at_start = not data
            return data
        is_mark = token_id not in self._vocabulary.literal_ids
        if rule is LeadingSpace.FIRST_TOKEN:
            self._at_start = False
            return data.replace(b" ", b"") if is_mark else data
        marked = is_mark and data.startswith(b" ")
        stripped = data[1:] if marked else data
        self._at_start = not stripped and not (marked and rule is LeadingSpace.PIECE)
        return stripped

    def _to_text(self, data: bytes, *, final: bool) -> str:
        """Whole characters of `data`; the rest stays pending, or with `final` becomes U+FFFD."""
        if not self._vocabulary.rules.replace_each_byte:
            text, used = codecs.utf_8_decode(data, "replace", final)
            self._pending = data[used:]
            return text
        parts: list[str] = []
        view, start = memoryview(data), 0
        while True:
            try:
                text, used = codecs.utf_8_decode(view[start:], "strict", final)
            except UnicodeDecodeError as error:
                text, _ = codecs.utf_8_decode(view[start : start + error.start])
                parts += [text, "\ufffd" * (error.end - error.start)]
                start += error.end
                continue
            self._pending = data[start + used :]
            return "".join([*parts, text])
