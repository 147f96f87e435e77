"""The little of SentencePiece's model file that its library does not tell or make.

The file is a protocol buffer (`sentencepiece_model.proto`). Reading four flags of one and writing
one from a GGUF file's columns is all that is needed, which the wire format's two relevant kinds
(varint and length-delimited, plus a 32-bit float) give without a dependency on protobuf.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Field numbers, by message.
_MODEL_PIECES, _MODEL_TRAINER, _MODEL_NORMALIZER, _MODEL_DENORMALIZER = 1, 2, 3, 5
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_TRAINER_MODEL_TYPE, _TRAINER_VOCAB_SIZE, _TRAINER_SPACE_AS_SUFFIX = 3, 4, 24
_TRAINER_BYTE_FALLBACK, _TRAINER_UNK_PIECE = 35, 45
_NORMALIZER_NAME, _NORMALIZER_CHARSMAP = 1, 2
_NORMALIZER_DUMMY_PREFIX, _NORMALIZER_REMOVE_SPACES, _NORMALIZER_ESCAPE_SPACES = 3, 4, 5

_MODEL_TYPE_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(frozen=True, kw_only=True)
class SpaceRules:
    """What a model does to spaces, and whether it changes text after decoding."""

    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    treat_whitespace_as_suffix: bool
    denormalizes: bool


def read_space_rules(model: bytes) -> SpaceRules:
    """Reads a serialized model (absent flags have the format's defaults)."""
    specs = {_MODEL_TRAINER: {}, _MODEL_NORMALIZER: {}, _MODEL_DENORMALIZER: {}}
    for number, value in _fields(model):
        if number in specs:
            specs[number].update(_fields(value))
    normalizer = specs[_MODEL_NORMALIZER]
    return SpaceRules(
        add_dummy_prefix=bool(normalizer.get(_NORMALIZER_DUMMY_PREFIX, 1)),
        remove_extra_whitespaces=bool(normalizer.get(_NORMALIZER_REMOVE_SPACES, 1)),
        treat_whitespace_as_suffix=bool(specs[_MODEL_TRAINER].get(_TRAINER_SPACE_AS_SUFFIX, 0)),
        denormalizes=bool(specs[_MODEL_DENORMALIZER].get(_NORMALIZER_CHARSMAP, b"")),
    )


def write_bpe_model(
    pieces: Iterable[tuple[str, float, int]],
    *,
    unk_piece: str,
    byte_fallback: bool,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
) -> bytes:
    """A serialized BPE model that normalizes nothing.

    `pieces` are (text, score, type) in id order; types as in the format (1 normal, 2 unknown,
    3 control, 4 user-defined, 5 unused, 6 byte).
    """
    model = bytearray()
    num_pieces = 0
    for text, score, kind in pieces:
        piece = _bytes(_PIECE_TEXT, text.encode())
        piece += _key(_PIECE_SCORE, _FIXED32) + struct.pack("<f", score) + _int(_PIECE_TYPE, kind)
        model += _bytes(_MODEL_PIECES, piece)
        num_pieces += 1
    trainer = _int(_TRAINER_MODEL_TYPE, _MODEL_TYPE_BPE) + _int(_TRAINER_VOCAB_SIZE, num_pieces)
    trainer += _int(_TRAINER_BYTE_FALLBACK, byte_fallback)
    trainer += _bytes(_TRAINER_UNK_PIECE, unk_piece.encode())
    normalizer = _bytes(_NORMALIZER_NAME, b"identity")
    normalizer += _int(_NORMALIZER_DUMMY_PREFIX, add_dummy_prefix)
    normalizer += _int(_NORMALIZER_REMOVE_SPACES, remove_extra_whitespaces)
    normalizer += _int(_NORMALIZER_ESCAPE_SPACES, True)
    model += _bytes(_MODEL_TRAINER, trainer) + _bytes(_MODEL_NORMALIZER, normalizer)
    return bytes(model)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, position = _read_varint(message, position)
        elif wire_type in (_BYTES, _FIXED32, _FIXED64):
            length = {_FIXED32: 4, _FIXED64: 8}.get(wire_type)
            if length is None:
                length, position = _read_varint(message, position)
            value, position = message[position : position + length], position + length
        else:
            raise ValueError(f"SentencePiece model: wire type {wire_type} is unknown")
        yield number, value


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _int(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(int(value))


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(value)) + value
