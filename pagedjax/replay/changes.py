"""What a step changed: blocks and rows, from the states before and after it. Host side."""

from collections import Counter
from dataclasses import dataclass, field

import jax
import numpy as np

from pagedjax.core.state import NULL, FinishReason, SchedulerState, Status
from pagedjax.eventlog.format import Kind
from pagedjax.replay.log import Event
from pagedjax.replay.player import Player

KINDS = (
    *("added", "aborted", "admitted", "preempted", "branched", "pruned", "finished", "left"),
    *("allocated", "shared", "copied", "freed", "cached", "evicted"),
)
"""Of rows, then of blocks, in the order in which they are told."""


@dataclass
class Changes:
    """What one step changed, and what happened before it.

    Attributes:
      by_kind: of `KINDS`, each with descriptions such as "request 3" or "block 7 by request 3".
      tokens: (request, token) of each one produced.
    """

    step: int
    num_tokens: int
    by_kind: dict[str, list[str]] = field(default_factory=dict)
    tokens: list[tuple[int, int]] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        self.by_kind.setdefault(kind, []).append(text)

    def counts(self) -> Counter[str]:
        """How many of each kind, and "tokens"."""
        counts = Counter({kind: len(items) for kind, items in self.by_kind.items()})
        counts["tokens"] += len(self.tokens)
        return counts


def request_name(arrival: int) -> str:
    """How a request is called: by its place in the order of arrival at the table, from 0."""
    return f"request {arrival}"


def changes_of(player: Player, number: int) -> Changes:
    """What step `number` changed."""
    step = player.log.steps[number - 1]
    previous = player.state(number - 1)
    before = jax.device_get(previous)
    ready = jax.device_get(player.before(previous, number))
    state, copies = player.advance(previous, number)
    after, copies = jax.device_get((state, copies))
    changes = Changes(number, step.num_tokens)
    _tell_events(changes, before, step.events)
    _tell_rows(changes, ready, after)
    _tell_blocks(changes, before, after)
    for src, dst in zip(copies.src, copies.dst, strict=True):
        if NULL not in (src, dst):
            changes.add("copied", f"block {src} to block {dst}")
    result = step.result
    arrival = ready.rows.arrival
    for row, token in zip(result["rows"], result["token_ids"], strict=True):
        changes.tokens.append((int(arrival[row]), int(token)))
    for row, parent in zip(result["rows"], result.get("beam_parents", ()), strict=False):
        if parent not in (row, NULL):
            whose = request_name(int(arrival[parent]))
            changes.add("branched", f"{request_name(int(arrival[row]))} from {whose}")
    return changes


def _tell_events(changes: Changes, before: SchedulerState, events: list[Event]) -> None:
    arrival = int(before.next_arrival)
    for event in events:
        if event.kind == Kind.ADD:
            length = len(event.arrays["token_ids"])
            row = event.values["row"]
            name = request_name(arrival)
            changes.add("added", f"{name} into row {row}, a prompt of {length} tokens")
            arrival += 1
        elif event.kind == Kind.END:
            for row in event.arrays["rows"]:
                changes.add("aborted", f"row {row}")
        else:
            arrival = int(event.arrays[".next_arrival"])
            changes.add("added", "a whole state, from a snapshot")


def _tell_rows(changes: Changes, before: SchedulerState, after: SchedulerState) -> None:
    for row, (old, new) in enumerate(zip(before.rows.status, after.rows.status, strict=True)):
        if old == new:
            continue
        name = request_name(int(before.rows.arrival[row]))
        if new == Status.RUNNING and old == Status.SPARE:
            continue  # told with the beam that it carries on
        if new == Status.RUNNING:
            hits = int(after.rows.num_hit_tokens[row])
            again = before.rows.num_hit_tokens[row] >= 0
            changes.add("admitted", f"{name}, " + ("again" if again else f"{hits} tokens cached"))
        elif new == Status.WAITING and old == Status.SWAPPED:
            changes.add("preempted", f"{name}, its blocks in host memory given up")
        elif new == Status.WAITING:
            changes.add("preempted", name)
        elif new == Status.SWAPPED:
            changes.add("preempted", f"{name}, swapped out")
        elif new == Status.SPARE:
            changes.add("pruned", name)
        elif new == Status.FINISHED:
            reason = FinishReason(int(after.rows.finish_reason[row])).name.lower()
            if old in (Status.WAITING, Status.SWAPPED) and reason != "error":
                changes.add("admitted", name)
            changes.add("finished", f"{name}, {reason}")
        elif new == Status.EMPTY:
            changes.add("left", name)


def _holders(state: SchedulerState) -> set[tuple[int, int]]:
    """(arrival of the request, block) of every table entry that is held."""
    blocks = state.blocks
    held = np.arange(blocks.block_tables.shape[1]) < blocks.num_blocks_held[:, None]
    rows, columns = np.nonzero(held)
    arrivals, ids = state.rows.arrival[rows], blocks.block_tables[rows, columns]
    here = ids != NULL  # the others lie in host memory
    return set(zip(arrivals[here].tolist(), ids[here].tolist(), strict=True))


def _tell_blocks(changes: Changes, before: SchedulerState, after: SchedulerState) -> None:
    was, now = before.prefix, after.prefix
    cached_before, cached_after = was.slot != NULL, now.slot != NULL
    # A block may leave the index and come in again, for something else, in one step.
    same = (was.parent == now.parent) & (was.depth == now.depth) & (was.salt == now.salt)
    same &= (was.tokens == now.tokens).all(-1)
    evicted = cached_before & ~(cached_after & same)
    entered = cached_after & ~(cached_before & same)
    held_before, held_after = before.blocks.ref_counts > 0, after.blocks.ref_counts > 0
    stays = cached_before & ~evicted
    for arrival, block in sorted(_holders(after) - _holders(before)):
        kind = "shared" if stays[block] else "allocated"
        changes.add(kind, f"block {block} by {request_name(arrival)}")
    for block in np.flatnonzero(held_before & ~held_after & ~cached_after):
        changes.add("freed", f"block {block}")
    for kind, mask in (("cached", entered), ("evicted", evicted)):
        for block in np.flatnonzero(mask):
            changes.add(kind, f"block {block}")
