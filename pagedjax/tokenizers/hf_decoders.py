"""The `decoder` of a tokenizer.json as bytes of tokens and rules (`DecodeRules`).

The `tokenizers` library decodes a list of tokens with a chain of steps. All chains that Llama-like
checkpoints use amount to bytes of each token and a rule for the beginning of the text; any other
chain is refused by name, since only an approximation of it could be streamed.

Two deliberate differences, both where the library loses text: an added token stands for its own
UTF-8 even if all its characters are in the byte-level alphabet, and a run of byte-fallback tokens
keeps its valid characters when another byte of the run is invalid (as in SentencePiece).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagedjax.tokenizers.vocabulary import (
    DecodeRules,
    LeadingSpace,
    byte_level_alphabet,
    byte_level_bytes,
    parse_byte_token,
)

ToBytes = Callable[[str, bool], bytes]  # token, is it an added token
ParsedDecoder = tuple[ToBytes, DecodeRules, Callable[[str], bool]]  # last: see literal_ids


def parse_decoder(decoder: Mapping[str, Any] | None) -> ParsedDecoder:
    """Bytes of a token, rules, and which tokens' leading spaces are literal text.

    ValueError names the decoder, or the step of it, that is not supported.
    """
    kind = None if decoder is None else decoder.get("type")
    if kind == "ByteLevel":
        alphabet = str.maketrans(byte_level_alphabet())

        def to_bytes(token: str, added: bool) -> bytes:
            return token.encode() if added else byte_level_bytes(token, alphabet)

        return to_bytes, DecodeRules(), _never
    if kind == "Metaspace":
        return _metaspace(decoder)
    if kind == "Sequence":
        return _sequence(decoder["decoders"])
    raise ValueError(
        f"decoder {kind!r} is not supported; supported: ByteLevel, Metaspace, and a Sequence of "
        f"Replace, ByteFallback, Fuse and Strip"
    )


def _metaspace(decoder: Mapping[str, Any]) -> ParsedDecoder:
    mark = decoder.get("replacement", "▁")
    scheme = decoder.get("prepend_scheme")
    if scheme is None:  # older files
        scheme = "always" if decoder.get("add_prefix_space", True) else "never"
    leading = LeadingSpace.KEEP if scheme == "never" else LeadingSpace.FIRST_TOKEN

    def to_bytes(token: str, added: bool) -> bytes:
        return token.replace(mark, " ").encode()

    # A literal space in a token would be taken for a mark by FIRST_TOKEN.
    return to_bytes, DecodeRules(leading_space=leading), lambda token: " " in token


def _sequence(steps: list[Mapping[str, Any]]) -> ParsedDecoder:
    """Replace and ByteFallback act on each token; Strip is understood after Fuse only."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip_count = 0
    for step in steps:
        kind = step.get("type")
        if kind == "Replace" and not fused and not byte_fallback and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused and not byte_fallback:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif _is_start_strip(step) and fused and not strip_count:
            strip_count = step["start"]
        else:
            names = [entry.get("type") for entry in steps]
            raise ValueError(f"decoder Sequence {names}: its step {dict(step)} is not supported")

    def to_bytes(token: str, added: bool) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = parse_byte_token(token) if byte_fallback else None
        return token.encode() if byte is None else bytes([byte])

    rules = DecodeRules(
        leading_space=LeadingSpace.TEXT if strip_count else LeadingSpace.KEEP,
        strip_count=strip_count,
        replace_each_byte=True,
    )
    return to_bytes, rules, _never


def _is_start_strip(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("stop") == 0


def _never(token: str) -> bool:
    return False
