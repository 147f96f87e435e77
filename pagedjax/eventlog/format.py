"""The file that an event log is: records, one after the other, each with a checksum.

    "PAGEDJAX EVENTS\\n" | version u32 | record | record | ...
    record: length u64 | kind u16 | check of the two u16 | payload | crc32 u32

Numbers are little-endian. A record's crc32 covers the record and the crc32 of the one before it, so
a record that is changed, lost or out of place is noticed there. Records are appended with one call
each: a process that is killed leaves at most one of them unfinished, the last.

A payload is a set of named arrays: the length of a description in JSON, the description, the bytes.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

VERSION = 2
MAGIC = b"PAGEDJAX EVENTS\n"
_VERSION = struct.Struct("<I")
_START = struct.Struct("<QHH")
_CRC = struct.Struct("<I")
_LENGTH = struct.Struct("<I")


class Kind(IntEnum):
    """What a record says."""

    HEADER = 0  #: what the engine is; JSON only
    STATE = 1  #: the whole state is replaced (a snapshot was loaded)
    ADD = 2  #: a request goes into a row
    END = 3  #: rows are aborted, and what has ended is released
    STEP = 4  #: a step is launched
    RESULT = 5  #: what came out of a step


class LogError(ValueError):
    """A file that is no event log, or cannot be played; the message says why."""


class Damage(Exception):
    """A record that cannot be read; nothing after it can be."""


def pack(arrays: Mapping[str, Any], **values: Any) -> bytes:
    """Named arrays, and values that JSON can say."""
    parts, described = [], []
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.kind == "V":  # bfloat16, which is no type of numpy's own
            array = array.view(f"u{array.itemsize}")
        described.append([name, array.dtype.str, array.shape])
        parts.append(array.tobytes())
    text = json.dumps({"arrays": described, **values}, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def unpack(payload: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The inverse of `pack`: (arrays, values). Raises `Damage`."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        place = _LENGTH.size + length
        values = json.loads(payload[_LENGTH.size : place])
        arrays = {}
        for name, dtype, shape in values.pop("arrays"):
            count = math.prod(shape)
            array = np.frombuffer(payload, np.dtype(dtype), count, place)
            arrays[name] = array.reshape(shape)
            place += array.nbytes
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise Damage(f"it cannot be read: {error}") from error
    return arrays, values


class LogWriter:
    """Appends records to a new file.

    Raises `OSError`: it exists, or could not be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._crc = 0
        self._file.write(MAGIC + _VERSION.pack(VERSION))

    def append(self, kind: Kind, payload: bytes) -> None:
        """Write a record. It is with the system when this returns, though not on the disk yet."""
        check = zlib.crc32(struct.pack("<QH", len(payload), kind)) & 0xFFFF
        record = _START.pack(len(payload), kind, check) + payload
        self._crc = zlib.crc32(record, self._crc)
        data = memoryview(record + _CRC.pack(self._crc))
        while len(data):
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Nothing more is to be written."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def read_records(path: Path) -> Iterator[tuple[int, Kind, bytes]]:
    """(place in the file, kind, payload) of each record, as far as they are whole.

    Raises:
      LogError: it is no event log, or one of another format version.
      Damage: the next record is damaged or not all there.
      OSError: it could not be read.
    """
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + _VERSION.size)
        if not start.startswith(MAGIC) or len(start) < len(MAGIC) + _VERSION.size:
            raise LogError(f"{path} is not a PagedJAX event log")
        (version,) = _VERSION.unpack_from(start, len(MAGIC))
        if version != VERSION:
            raise LogError(
                f"{path} has format version {version}; this program reads version {VERSION}"
            )
        size, crc, place = path.stat().st_size, 0, len(start)
        while place < size:
            kind, payload, crc = _read_record(file, place, size, crc)
            yield place, kind, payload
            place = file.tell()


def _read_record(file: BinaryIO, place: int, size: int, crc: int) -> tuple[Kind, bytes, int]:
    start = file.read(_START.size)
    if len(start) < _START.size:
        raise Damage(f"the log is truncated at byte {size}: a record is not all there")
    length, kind, check = _START.unpack(start)
    if zlib.crc32(struct.pack("<QH", length, kind)) & 0xFFFF != check:
        raise Damage(f"the record at byte {place} is damaged: its length is wrong")
    if place + _START.size + length + _CRC.size > size:
        raise Damage(f"the log is truncated at byte {size}: a record is not all there")
    payload = file.read(length)
    (given,) = _CRC.unpack(file.read(_CRC.size))
    crc = zlib.crc32(payload, zlib.crc32(start, crc))
    if crc != given or kind not in tuple(Kind):
        raise Damage(f"the record at byte {place} is damaged: its checksum is wrong")
    return Kind(kind), payload, crc
