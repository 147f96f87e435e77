"""States and changes as text."""

from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np

from pagedjax.core.state import NULL, FinishReason, SchedulerState, Status
from pagedjax.replay.changes import KINDS, changes_of
from pagedjax.replay.log import Log
from pagedjax.replay.player import Player

MAX_ITEMS = 8
"""Of one kind in one line."""


def describe_log(log: Log) -> Iterator[str]:
    """What a log holds."""
    header = log.header
    sizes = log.scheduler_config
    yield f"log      {log.path}, begun {header['created']}"
    yield f"engine   jax {header['jax']} on {header['device']}"
    yield (
        f"sizes    {sizes.num_blocks} blocks of {sizes.block_size}, {sizes.num_rows} rows, "
        f"{sizes.max_num_seqs} of them at once"
    )
    text = "as they are" if log.has_text else "under other names (no text)"
    yield f"tokens   {text}"
    without = len(log.steps) - log.num_steps
    open_end = f", and {without} whose output is not known" if without else ""
    yield f"steps    {log.num_steps}{open_end}"
    if log.problem:
        yield f"PROBLEM  {log.problem}"


def describe_state(state: SchedulerState, number: int, num_tokens: int | None) -> Iterator[str]:
    """One state: its blocks, and a line for each request."""
    state = jax.device_get(state)
    rows, blocks = state.rows, state.blocks
    held = int((blocks.ref_counts > 0).sum())
    cached = int(((blocks.ref_counts == 0) & (state.prefix.slot != NULL)).sum())
    waiting = int((rows.status == Status.WAITING).sum())
    running = int((rows.status == Status.RUNNING).sum())
    bucket = "" if num_tokens is None else f", {num_tokens} tokens at most"
    swapped = int((rows.status == Status.SWAPPED).sum())
    out = f", {swapped} swapped out" if swapped else ""
    yield f"step {number}{bucket}: {running} running, {waiting} waiting{out}"
    yield (
        f"blocks: {held} held, {cached} cached and free to go, {int(blocks.num_free)} free of "
        f"{len(blocks.ref_counts)}"
    )
    if num_host := len(state.swap.ref_counts):
        yield f"in host memory: {num_host - int(state.swap.num_free)} held of {num_host}"
    yield "row  request  status    prompt  tokens  computed  cached  blocks"
    live = np.flatnonzero(rows.status != Status.EMPTY)
    for row in live[np.argsort(rows.arrival[live])]:
        status = Status(int(rows.status[row])).name.lower()
        if status == "finished":
            status = FinishReason(int(rows.finish_reason[row])).name.lower()
        yield (
            f"{row:3}  {rows.arrival[row]:7}  {status:8}  {rows.num_prompt_tokens[row]:6}  "
            f"{rows.num_tokens[row]:6}  {rows.num_computed_tokens[row]:8}  "
            f"{max(int(rows.num_hit_tokens[row]), 0):6}  {_few(_block_names(state, row), ' ')}"
        )


def _block_names(state: SchedulerState, row: int) -> Iterator[str]:
    """The row's blocks; "h3" is block 3 of the host pool."""
    tables = state.blocks.block_tables[row, : int(state.blocks.num_blocks_held[row])]
    for column, block in enumerate(tables.tolist()):
        moved = block == NULL and state.swap.host_tables.shape[1] > 0
        yield f"h{state.swap.host_tables[row, column]}" if moved else str(block)


def describe_changes(player: Player, first: int, last: int) -> Iterator[str]:
    """What happened from state `first` to state `last`, step by step, and in sum."""
    total: Counter[str] = Counter()
    for number in range(first + 1, last + 1):
        changes = changes_of(player, number)
        total += changes.counts()
        yield f"step {number}, {changes.num_tokens} tokens at most"
        for kind in KINDS:
            if items := changes.by_kind.get(kind):
                yield f"  {kind:9}  {_few(items, '; ')}"
        if changes.tokens:
            pairs = [f"{token} (request {arrival})" for arrival, token in changes.tokens]
            yield f"  {'tokens':9}  {_few(pairs, ', ')}"
    told = ", ".join(f"{kind} {total[kind]}" for kind in (*KINDS, "tokens") if total[kind])
    yield f"from {first} to {last}: {told or 'nothing changed'}"


def _few(items, separator: str) -> str:
    items = list(items)
    more = f"{separator}... {len(items)} in all" if len(items) > MAX_ITEMS else ""
    return separator.join(items[:MAX_ITEMS]) + more
