"""Playing a log with the model: every token is computed again, and every state compared."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedjax.core.state import NO_TOKEN
from pagedjax.engine.device import Device
from pagedjax.eventlog import LogError, checksum
from pagedjax.eventlog.format import Kind
from pagedjax.replay.log import Event, Log
from pagedjax.replay.player import differing_arrays
from pagedjax.replay.scheduler import request_params, scheduler_of


@dataclass(frozen=True)
class Difference:
    """What is not as recorded after a step.

    Attributes:
      tokens: (row, recorded token, token computed now), -1 for none.
      arrays: arrays whose checksums differ, "k_pool" and "v_pool" among them.
    """

    step: int
    tokens: list[tuple[int, int, int]]
    arrays: list[str]

    def __str__(self) -> str:
        parts = [f"row {row}: token {new} instead of {old}" for row, old, new in self.tokens]
        if self.arrays:
            parts.append(f"the state differs in {', '.join(self.arrays)}")
        return f"step {self.step}: {'; '.join(parts)}"


def verify_whole(log: Log, device: Device) -> Iterator[Difference | None]:
    """Play the log on an idle device of the same model and sizes; per step, what differs.

    It goes on where a step's output is not in the log any more: those are computed and not
    compared.

    Raises `LogError`: the log has no text.
    """
    if not log.has_text:
        raise LogError(
            f"{log.path} has no text: its tokens are other names, which a model cannot read. "
            "Write logs with event_log_text to play them with the model."
        )
    names = checksum.covered(list(checksum.leaves(device.state.scheduler)), exact=True)
    sums, kv_sums = checksum.compiled()
    for number, step in enumerate(log.steps, 1):
        for event in step.events:
            _apply(device, event)
        output = device.read(device.launch(step.num_tokens))
        if step.result is None:
            yield None
            continue
        arrays = []
        if "sums" in step.result:
            own = sums(device.state.scheduler, exact=True)
            arrays += differing_arrays(step.result["sums"], own, names)
        if "kv_sums" in step.result:
            pools = ("k_pool", "v_pool")
            arrays += differing_arrays(step.result["kv_sums"], kv_sums(device.state), pools)
        tokens = _differing_tokens(step.result, output)
        yield Difference(number, tokens, arrays) if tokens or arrays else None


def _apply(device: Device, event: Event) -> None:
    if event.kind == Kind.ADD:
        tokens = event.arrays["token_ids"]
        device.add(event.values["row"], tokens, request_params(event))
    elif event.kind == Kind.END:
        rows = np.zeros(device.state.scheduler.rows.status.shape, bool)
        rows[event.arrays["rows"]] = True
        device.end(rows)
    else:
        arrays, dtype = event.arrays, device.state.k_pool.dtype
        device.restore(
            scheduler_of(device.state.scheduler, arrays),
            _kv_blocks(arrays, "", dtype),
            _kv_blocks(arrays, "host_", dtype),
        )


def _kv_blocks(arrays: dict[str, np.ndarray], pool: str, dtype: Any) -> list[tuple]:
    """(ids, keys, values) of blocks, as the recorder has written them."""
    batches: list[tuple] = []
    while f"{pool}ids{len(batches)}" in arrays:
        number = len(batches)
        kv = (arrays[f"{pool}{name}{number}"].view(dtype) for name in ("keys", "values"))
        batches.append((arrays[f"{pool}ids{number}"], *kv))
    return batches


def _differing_tokens(result: dict[str, np.ndarray], output: Any) -> list[tuple[int, int, int]]:
    recorded = np.full(output.token_ids.shape, NO_TOKEN)
    recorded[result["rows"]] = result["token_ids"]
    return [
        (int(row), int(recorded[row]), int(output.token_ids[row]))
        for row in np.flatnonzero(recorded != output.token_ids)
    ]
