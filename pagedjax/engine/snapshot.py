"""A running engine in a file, and back: every request goes on where it stood.

What is saved: the scheduler's whole state, the blocks of the KV pool that somebody holds or the
prefix cache knows, those of the host pool in which rows lie that are swapped out, and the host's
part (the queue, which request sits in which row, the tokens each has so far).

The scheduler and the KV pool come back bit for bit, and so do seeds and the order of requests; with
equal settings on equal hardware the steps that follow are the same steps.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.state import NULL, SchedulerState
from pagedjax.engine import state_file
from pagedjax.engine.device import Device
from pagedjax.engine.request import Request
from pagedjax.engine.rows import RowBook
from pagedjax.engine.saved_requests import describe_request, restore_request
from pagedjax.engine.state_file import ArrayParts, SnapshotError
from pagedjax.eventlog.checksum import leaves
from pagedjax.outputs import RequestOutput, describe_output, restore_output
from pagedjax.tokenizers import Tokenizer

BLOCKS_AT_ONCE = 64
"""KV blocks that travel between device and host together."""

_BOOK = "rows."

_MAY_DIFFER = {"use_cond", "max_retirements", "evict_batch", "watermark_blocks", "max_admissions"}
"""Settings of the scheduler that neither shape its state nor say what a request may do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The host's part of a snapshot.

    Attributes:
      rows: the book of the request table.
      requests: those that go on, in the order of their arrival.
      queue: samples that wait before the table, in that order.
      held: what is held of a request until its end, by leader.
      numbers: of the intake.
      extra: what the caller of `save` wanted to keep.
    """

    rows: RowBook
    requests: list[Request]
    queue: list[Request]
    held: dict[Request, RequestOutput]
    numbers: dict[str, Any]
    extra: dict[str, Any]


class Snapshots:
    """Saves and loads the state of one engine.

    Args:
      eos_token_ids: as the engine's requests know them.
    """

    def __init__(
        self,
        device: Device,
        sizes: SchedulerConfig,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._device = device
        self._sizes = sizes
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """See `fingerprint`."""
        device = self._device
        kv_dtype = device.state.k_pool.dtype
        return fingerprint(device.params, self._sizes, device.model, self._tokenizer, kv_dtype)

    def warm_up(self) -> None:
        """Compile what `save` calls."""
        nothing = np.full(BLOCKS_AT_ONCE, NULL, np.int32)
        self._device.read(self._device.gather(nothing))
        if self._sizes.num_host_blocks:
            self._device.read(self._device.gather_host(nothing))

    def save(
        self,
        path: Path,
        *,
        rows: RowBook,
        requests: Sequence[Request],
        queue: Sequence[Request],
        held: Callable[[Request], RequestOutput | None],
        numbers: Mapping[str, Any],
        now: float,
        extra: Mapping[str, Any],
    ) -> None:
        """Write a snapshot. No step may be in flight.

        Args:
          requests: all that have not ended. queue: the samples that are in no row yet.
          held: what is held of a request until its end.
          numbers: of the intake, to be kept.
          now: the engine's clock.
          extra: what the caller wants to keep, as JSON can say it.

        Raises `OSError`; an old file is unharmed then.
        """
        device = self._device
        arrays: dict[str, Any] = scheduler_arrays(device.state.scheduler)
        blocks, host_blocks = blocks_in_use(arrays), host_blocks_in_use(arrays)
        row_numbers, book = rows.saved()
        place = {
            id(sample): [i, sample.index]
            for i, leader in enumerate(requests)
            for sample in leader.samples
        }
        outputs = [(i, held(leader)) for i, leader in enumerate(requests)]
        header = {
            "fingerprint": self.fingerprint,
            "requests": [describe_request(leader, now) for leader in requests],
            "placed": [(row, *place[id(sample)]) for row, sample in rows.requests()],
            "queue": [place[id(sample)] for sample in queue],
            "held": [(i, describe_output(o)) for i, o in outputs if o is not None],
            "rows": row_numbers,
            "numbers": dict(numbers),
            "extra": dict(extra),
        }
        arrays |= {f"{_BOOK}{name}": array for name, array in book.items()}
        arrays |= {"blocks": blocks, "host_blocks": host_blocks}
        pool = device.state.k_pool
        arrays["kv"] = pool_parts(blocks, device.gather, pool)
        arrays["host_kv"] = pool_parts(host_blocks, device.gather_host, pool)
        state_file.write(path, header, arrays)

    def load(self, path: Path, *, now: float) -> Loaded:
        """Put a snapshot's state on the device; -> the host's part. Nothing may be running.

        Raises:
          SnapshotError: the file is damaged or does not fit; the device is as it was.
          OSError: it could not be read.
        """
        device = self._device
        header, arrays = state_file.read(path)
        check_fingerprint(header["fingerprint"], self.fingerprint)
        scheduler = scheduler_from(arrays, device.state.scheduler)
        try:
            device.check(scheduler)
        except AssertionError as error:
            raise SnapshotError(f"{path}: {error}") from error

        requests = [
            restore_request(described, now, self._tokenizer, self._eos_token_ids)
            for described in header["requests"]
        ]
        placed = [(row, requests[i].samples[index]) for row, i, index in header["placed"]]
        book = {k.removeprefix(_BOOK): x for k, x in arrays.items() if k.startswith(_BOOK)}
        rows = RowBook(self._sizes)
        rows.restore(placed, header["rows"], book)
        dtype = device.state.k_pool.dtype
        device.restore(
            scheduler,
            batches(arrays["blocks"], arrays["kv"], dtype),
            batches(arrays["host_blocks"], arrays["host_kv"], dtype),
        )
        return Loaded(
            rows=rows,
            requests=requests,
            queue=[requests[i].samples[index] for i, index in header["queue"]],
            held={requests[i]: restore_output(output) for i, output in header["held"]},
            numbers=header["numbers"],
            extra=header["extra"],
        )


def scheduler_arrays(state: SchedulerState) -> dict[str, np.ndarray]:
    """Every leaf of the state, by its path."""
    named = leaves(jax.device_get(state))
    return {f"scheduler{name}": np.asarray(leaf) for name, leaf in named.items()}


def scheduler_from(arrays: Mapping[str, np.ndarray], like: SchedulerState) -> SchedulerState:
    """The inverse. `like` gives the structure, shapes and types that are expected.

    Raises `SnapshotError` for arrays that do not fit.
    """
    values = []
    for path, leaf in leaves(like).items():
        name = f"scheduler{path}"
        array = arrays.get(name)
        if array is None:
            raise SnapshotError(f"the snapshot has no {name}")
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise SnapshotError(
                f"the snapshot's {name} is {array.dtype} {array.shape}; this engine's is "
                f"{leaf.dtype} {leaf.shape}"
            )
        values.append(array)
    return jax.tree.unflatten(jax.tree.structure(like), values)


def blocks_in_use(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """[n] int32: blocks that a row holds or the prefix cache knows, ascending."""
    held = arrays["scheduler.blocks.ref_counts"] > 0
    cached = arrays["scheduler.prefix.slot"] != NULL
    return np.flatnonzero(held | cached).astype(np.int32)


def host_blocks_in_use(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """[n] int32: blocks of the host pool that a row holds, ascending."""
    return np.flatnonzero(arrays["scheduler.swap.ref_counts"] > 0).astype(np.int32)


def padded_batches(blocks: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """([BLOCKS_AT_ONCE] ids padded with NULL, how many are real): one shape, one compilation."""
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        part = blocks[start : start + BLOCKS_AT_ONCE]
        yield np.pad(part, (0, BLOCKS_AT_ONCE - len(part)), constant_values=NULL), len(part)


def pool_parts(blocks: np.ndarray, gather: Any, pool: Any) -> ArrayParts:
    """Keys and values of blocks, [n, 2, L, B, K, D], to be written part by part.

    Args:
      gather: ids [BLOCKS_AT_ONCE] -> the two pools' blocks.
      pool: anything with the shape [L, N, B, K, D] and dtype of either pool.
    """
    dtype = _plain_dtype(pool.dtype)

    def parts() -> Iterator[np.ndarray]:
        for ids, count in padded_batches(blocks):
            keys, values = (np.asarray(part)[:count].view(dtype) for part in gather(ids))
            yield np.stack([keys, values], axis=1)

    layers, _, *rest = pool.shape
    return ArrayParts(dtype, (len(blocks), 2, layers, *rest), parts())


def batches(
    blocks: np.ndarray, all_kv: np.ndarray, dtype: Any
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(ids, keys, values) of saved blocks [n], `BLOCKS_AT_ONCE` at a time, in the pool's dtype.

    Args:
      all_kv: [n, 2, L, B, K, D], as `pool_parts` gave them.
    """
    start = 0
    for ids, count in padded_batches(blocks):
        kv = all_kv[start : start + count]
        pad = [(0, BLOCKS_AT_ONCE - count)] + [(0, 0)] * (kv.ndim - 2)
        keys, values = (np.pad(kv[:, which], pad).view(dtype) for which in (0, 1))
        yield ids, keys, values
        start += count


def _plain_dtype(dtype: Any) -> np.dtype:
    """bfloat16 is no type of numpy's own: its bits travel as uint16."""
    dtype = np.dtype(dtype)
    return dtype if dtype.kind in "fiu" else np.dtype(f"u{dtype.itemsize}")


def fingerprint(
    params: Any, sizes: SchedulerConfig, model: Any, tokenizer: Tokenizer, kv_dtype: Any
) -> dict[str, Any]:
    """What must be equal in the engine that saved and the one that loads."""
    return {
        "scheduler": {
            # A policy of one's own is a function; the file holds its name.
            name: getattr(value, "__qualname__", repr(value)) if callable(value) else value
            for name, value in dataclasses.asdict(sizes).items()
        },
        "kv_dtype": np.dtype(kv_dtype).name,
        "model": repr(model),
        "weights": _hash_weights(params),
        "tokenizer": _hash_vocabulary(tokenizer),
    }


def check_fingerprint(
    saved: Mapping[str, Any], own: Mapping[str, Any], *, what: str = "the snapshot"
) -> None:
    """Raise `SnapshotError` naming what differs."""
    for name, value in own["scheduler"].items():
        other = saved["scheduler"].get(name)
        if other != value and name not in _MAY_DIFFER:
            raise SnapshotError(
                f"{what} was made with {name}={other!r}; this engine has {name}={value!r}"
            )
    for name in ("kv_dtype", "model", "weights", "tokenizer"):
        if saved[name] != own[name]:
            raise SnapshotError(
                f"{what} was made with another {name.replace('_', ' ')}: {saved[name]}, not "
                f"{own[name]}"
            )


def _hash_weights(params: Any) -> str:
    """Of every tensor its name, shape, type, first and last line: two models that differ in nothing
    of that are taken for the same one, without reading gigabytes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        for end in (0, -1):
            line = leaf[(end,) * (leaf.ndim - 1)]  # along the last axis; nothing large moves
            digest.update(np.asarray(line).tobytes())
    return digest.hexdigest()[:16]


def _hash_vocabulary(tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256()
    for data in tokenizer.vocabulary.token_bytes:
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()[:16]
