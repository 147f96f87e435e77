"""Metadata of a GGUF file, without its tensors.

The gguf library's reader makes several numpy objects for each string, which takes seconds for the
vocabulary of one model; this reads the same section in well under one. Format: the GGUF
specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}
_SCALARS |= {11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Key -> value: int, float, bool, str, or a list of these.

    ValueError names the file when it is no GGUF file, of another version, big-endian or cut short.
    """
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path}: not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(data)
            except (struct.error, IndexError):
                raise ValueError(f"{path}: the GGUF file is cut short") from None
            except ValueError as error:  # UnicodeDecodeError too
                raise ValueError(f"{path}: {error}") from None


def _read(data: mmap.mmap) -> dict[str, Any]:
    version, _, num_keys = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(
            f"GGUF version {version} (or a big-endian file) is not supported; 2, 3 are"
        )
    position = 24
    metadata = {}
    for _ in range(num_keys):
        key, position = _read_string(data, position)
        (kind,) = struct.unpack_from("<I", data, position)
        metadata[key], position = _read_value(data, position + 4, kind)
    return metadata


def _read_value(data: mmap.mmap, position: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _read_string(data, position)
    if kind == _ARRAY:
        item_kind, length = struct.unpack_from("<IQ", data, position)
        return _read_array(data, position + 12, item_kind, length)
    if kind not in _SCALARS:
        raise ValueError(f"GGUF value type {kind} is unknown")
    (value,) = struct.unpack_from(_SCALARS[kind], data, position)
    return value, position + struct.calcsize(_SCALARS[kind])


def _read_array(data: mmap.mmap, position: int, kind: int, length: int) -> tuple[list, int]:
    if length > len(data):  # before anything of that size is made
        raise ValueError(f"GGUF array of {length} values is longer than the file")
    if kind in _SCALARS:
        code = f"<{length}{_SCALARS[kind][1]}"
        return list(struct.unpack_from(code, data, position)), position + struct.calcsize(code)
    values = []
    for _ in range(length):
        value, position = _read_value(data, position, kind)
        values.append(value)
    return values, position


def _read_string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = _LENGTH.unpack_from(data, position)
    start, end = position + 8, position + 8 + length
    if end > len(data):
        raise IndexError
    return data[start:end].decode("utf-8"), end
