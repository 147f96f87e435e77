"""The file that a snapshot is: a header, arrays, and a checksum over both.

    "PAGEDJAX STATE\n" | version u32 | header length u64 | header | arrays | sha256

Numbers are little-endian. The header is JSON: what the caller wants to keep, and each array's name,
type and shape in the order in which their bytes follow. Header and arrays are padded to multiples
of 64 bytes, so that the arrays can be used where they lie. The checksum covers all before it.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

VERSION = 5
_MAGIC = b"PAGEDJAX STATE\n"
_SIZES = struct.Struct("<IQ")
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_HEADER_BYTES = 1 << 32
_ALIGNMENT = 64


class SnapshotError(ValueError):
    """A file that is no snapshot, is damaged, or does not fit the engine; the message says how."""


@dataclass(frozen=True)
class ArrayParts:
    """An array to be written in parts along its first axis, so that it need not exist as a whole.

    Attributes:
      dtype, shape: of the whole array.
      parts: arrays whose concatenation it is.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]


def write(path: Path, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a snapshot, or leave the file that is there as it is.

    The new file gets its name only when all of it is on the disk.

    Args:
      header: anything JSON can say.
      arrays: numpy arrays or `ArrayParts`, by name.

    Raises:
      OSError: it could not be written.
    """
    parts = {name: _as_parts(array) for name, array in arrays.items()}
    described = [
        {"name": name, "dtype": part.dtype.str, "shape": list(part.shape)}
        for name, part in parts.items()
    ]
    text = json.dumps({"header": dict(header), "arrays": described}).encode()
    text += b" " * _padding(len(text))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            digest = hashlib.sha256()

            def put(data: bytes | memoryview) -> None:
                digest.update(data)
                file.write(data)

            put(_MAGIC + _SIZES.pack(VERSION, len(text)) + text)
            for name, part in parts.items():
                _put_parts(name, part, put)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a snapshot. The arrays are views into the file's bytes in memory.

    Raises:
      SnapshotError: it is not one, or it is damaged.
      OSError: it could not be read.
    """
    with path.open("rb") as file:
        start = file.read(len(_MAGIC) + _SIZES.size)
        if not start.startswith(_MAGIC):
            raise SnapshotError(f"{path} is not a PagedJAX snapshot")
        if len(start) < len(_MAGIC) + _SIZES.size:
            raise SnapshotError(f"{path} is truncated: it has {len(start)} bytes")
        version, header_bytes = _SIZES.unpack_from(start, len(_MAGIC))
        if version != VERSION:
            raise SnapshotError(
                f"{path} has format version {version}; this program reads version {VERSION}"
            )
        body = _checked_body(file, path, start, header_bytes)
    try:
        described = json.loads(body[:header_bytes].tobytes())
        header, arrays = described["header"], described["arrays"]
    except (ValueError, KeyError, TypeError) as error:  # only by malice: the checksum was right
        raise SnapshotError(f"{path} has a header that cannot be read: {error}") from error
    return header, _views(body[header_bytes:], arrays, path)


def _checked_body(file: BinaryIO, path: Path, start: bytes, header_bytes: int) -> np.ndarray:
    """The bytes between the sizes and the checksum, uint8."""
    size = os.fstat(file.fileno()).st_size
    body_bytes = size - len(start) - _DIGEST_BYTES
    if header_bytes > min(body_bytes, _MAX_HEADER_BYTES):
        raise SnapshotError(f"{path} is truncated or damaged: it has {size} bytes")
    body = np.empty(body_bytes, np.uint8)
    if file.readinto(memoryview(body)) != body_bytes:
        raise SnapshotError(f"{path} is truncated: it became shorter while it was read")
    digest = hashlib.sha256(start)
    digest.update(memoryview(body))
    if digest.digest() != file.read(_DIGEST_BYTES):
        raise SnapshotError(f"{path} is truncated or damaged: its checksum is wrong")
    return body


def _views(data: np.ndarray, described: list[dict], path: Path) -> dict[str, np.ndarray]:
    arrays, place = {}, 0
    for entry in described:
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        size = dtype.itemsize * math.prod(shape)
        raw = data[place : place + size]
        if len(raw) != size:
            raise SnapshotError(f"{path} is damaged: {entry['name']} is not all there")
        arrays[entry["name"]] = raw.view(dtype).reshape(shape)
        place += size + _padding(size)
    if place != len(data):
        raise SnapshotError(f"{path} is damaged: {len(data) - place} bytes belong to no array")
    return arrays


def _as_parts(array: np.ndarray | ArrayParts) -> ArrayParts:
    if isinstance(array, ArrayParts):
        return array
    array = np.asarray(array)
    return ArrayParts(array.dtype, array.shape, [array])


def _put_parts(name: str, whole: ArrayParts, put) -> None:
    count = num_bytes = 0
    for part in whole.parts:
        part = np.ascontiguousarray(part)
        if part.dtype != whole.dtype or part.shape[1:] != whole.shape[1:]:
            raise ValueError(
                f"a part of {name} is {part.dtype} {part.shape}, not {whole.dtype} {whole.shape}"
            )
        count += part.size
        num_bytes += part.nbytes
        put(memoryview(part.reshape(-1).view(np.uint8)))
    if count != math.prod(whole.shape):
        raise ValueError(f"the parts of {name} have {count} elements, not {whole.shape}")
    put(bytes(_padding(num_bytes)))


def _padding(num_bytes: int) -> int:
    return -num_bytes % _ALIGNMENT
