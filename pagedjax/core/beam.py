"""Beam search inside the step: rows of one group are beams, and every step picks their successors.

A group is as many rows as beams are wanted. Its first row, the leader, computes the prompt like any
other; the others are SPARE and hold nothing. When all beams of a group have caught up they sample
together, and `commit` joins their best continuations and puts the best of them on the group's rows.
A beam that is continued stays in its row. Further continuations of it take rows of beams that ended
or spare ones, by reference to all of its blocks, the partly filled last one too: the first of them
to write copies it (`core/fork.py`). Blocks of a beam that nobody continues go back at once.

A group runs as a whole. Its beams sample in the same step or wait; it is preempted as a whole, and
then the beams come back one by one and wait for one another.

Continuations by a stop token are not put on rows: they are complete, and the host finds them in the
step's `top_token_ids`. The method is that of vLLM and Hugging Face: of each beam as many
continuations are looked at as it asked log-probabilities of, twice the width.
"""

import jax.numpy as jnp

from pagedjax.core.beam_groups import (
    group_bounds,
    is_active,
    leaders,
    of_group,
    present,
    whole_groups,
)
from pagedjax.core.beam_picks import Picks, end_together, move, pick, sampling
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.ragged import cdiv, when
from pagedjax.core.state import NULL, Status

__all__ = [
    "Picks",
    "all_or_nothing",
    "compact",
    "end_together",
    "group_bounds",
    "known_tokens",
    "leaders",
    "may_start",
    "move",
    "pick",
    "present",
    "reject",
    "sampling",
    "wanted",
    "whole_groups",
]


def reject(config: SchedulerConfig, rows, bad):
    """[S] bool: `bad` rows, with every group of which a row is bad, or that can never be run.

    Beams may have nothing in common but the whole blocks of the prompt's all but last token."""

    def look(bad):
        beams = leaders(rows) != NULL
        width = of_group(rows, beams, "add")
        common = jnp.maximum(rows.num_prompt_tokens - 1, 0) // config.block_size
        most = common + width * (cdiv(rows.max_total_tokens - 1, config.block_size) - common)
        limit = config.num_blocks - jnp.where(width > 1, config.watermark_blocks, 0)
        widest = min(config.max_beam_width, config.max_num_seqs, config.max_num_batched_tokens)
        waits = (rows.status == Status.WAITING) | (rows.status == Status.SPARE)
        bad |= beams & waits & ((most > limit) | (width > widest))
        return bad | (waits & (of_group(rows, bad, "max") > 0))

    return when(config.use_cond, present(rows), look, bad)


def known_tokens(config: SchedulerConfig, rows):
    """[S] int32: tokens of each row to compute while its group is incomplete: of a beam among
    several all but the last one, of others all."""

    def look(num_tokens):
        active = is_active(rows)
        return num_tokens - (active & (of_group(rows, active, "add") > 1)).astype(jnp.int32)

    return when(config.use_cond, present(rows), look, rows.num_tokens)


def wanted(config: SchedulerConfig, rows):
    """[S] int32: tokens that each running row wants to compute. Beams that wait for others of their
    group may want none."""
    known = known_tokens(config, rows)
    running = rows.status == Status.RUNNING

    def look(num_tokens):
        late = is_active(rows) & ~(running & (rows.num_computed_tokens == known))
        late &= known < num_tokens
        return jnp.where(of_group(rows, late, "max") == 0, num_tokens, known)

    limit = when(config.use_cond, present(rows), look, rows.num_tokens)
    return jnp.where(running, limit - rows.num_computed_tokens, 0)


def all_or_nothing(config: SchedulerConfig, rows, order, grant):
    """The grants [S], by rank, without those of groups that would sample in part."""

    def look(grant):
        mine = jnp.zeros_like(grant).at[order].set(grant)
        samples = rows.num_computed_tokens + mine == rows.num_tokens
        active = is_active(rows)
        several = of_group(rows, active, "add") > 1
        short = of_group(rows, active & ~samples, "max") > 0
        cut = active & samples & several & short
        return jnp.where(cut[order], 0, grant)

    return when(config.use_cond, present(rows), look, grant)


def may_start(config: SchedulerConfig, rows, row_ids, held, num_running):
    """[A] bool: candidates of admission, in their order, that beams do not keep out.

    A group takes as many places among the running rows as it has rows, from its start to its end.
    And nobody overtakes a beam that waits for another one of its group: two groups in part could
    wait for each other.
    """

    def look(_):
        leader = leaders(rows)
        spare = rows.status == Status.SPARE
        runs = of_group(rows, rows.status == Status.RUNNING, "max") > 0
        reserved = (spare & runs).sum(dtype=jnp.int32)
        brings = jnp.where(runs, 0, of_group(rows, spare, "add"))[row_ids]
        mine = leader[row_ids]
        a = jnp.arange(row_ids.shape[0])
        again = ((mine[None] == mine[:, None]) & (a[None] < a[:, None])).any(1)
        slots = jnp.cumsum(1 + jnp.where(again, 0, brings), dtype=jnp.int32) + reserved
        barrier = jnp.where(held & (leader != NULL), rows.arrival, NULL).min()
        fits = num_running + slots <= config.max_num_seqs
        return fits & (rows.arrival[row_ids] < barrier)

    everybody = jnp.ones(row_ids.shape[0], bool)
    return when(config.use_cond, present(rows), look, everybody)


def compact(config: SchedulerConfig, rows, *arrays):
    """The [S] arrays by rank, order, grant and others, with granted ranks first: beams that wait
    leave no gaps in the step."""

    def look(arrays):
        granted = arrays[1] > 0
        behind = granted.sum(dtype=jnp.int32) + jnp.cumsum(~granted, dtype=jnp.int32) - 1
        place = jnp.where(granted, jnp.cumsum(granted, dtype=jnp.int32) - 1, behind)
        return tuple(jnp.zeros_like(x).at[place].set(x) for x in arrays)

    return when(config.use_cond, present(rows), look, arrays)
