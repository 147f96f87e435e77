"""Admission: waiting rows start running, in the policy's order, while budget and memory last."""

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.core import beam, static_batch
from pagedjax.core.blocks import num_evictable
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.fork import choose, share, sources
from pagedjax.core.policies import is_waiting
from pagedjax.core.prefix import lookup, match
from pagedjax.core.pytree import pytree
from pagedjax.core.ragged import cdiv, inverse, take, when
from pagedjax.core.state import NULL, SchedulerState, Status
from pagedjax.core.swap import num_moved


@pytree
class Admitted:
    """What admission decided, one entry per candidate. All [A] int32 unless noted."""

    ok: jax.Array  #: [A] bool
    row_ids: jax.Array  #: NULL where not admitted
    forks: jax.Array  #: [A] bool: shares with a member of its group, not through the cache
    num_shared: jax.Array  #: blocks taken by reference; a fork's last one may be partly filled
    shared: jax.Array  #: [A, M]: their ids
    num_cached: jax.Array  #: of them, those that are in the prefix index
    num_computed: jax.Array  #: tokens found, those inside a copied block included
    chunk: jax.Array  #: tokens to compute in this step
    num_new: jax.Array  #: blocks to allocate
    copy_src: jax.Array  #: block to copy into the first new block, or NULL
    swapped: jax.Array  #: the row where it was swapped out, else NULL
    ref_counts: jax.Array  #: [N]: of the pool, the shared blocks' new holders counted


def _nobody(config: SchedulerConfig, ref_counts) -> Admitted:
    a = config.max_admissions
    zero, null = jnp.zeros(a, jnp.int32), jnp.full(a, NULL, jnp.int32)
    return Admitted(
        ok=jnp.zeros(a, bool),
        row_ids=null,
        forks=jnp.zeros(a, bool),
        num_cached=zero,
        num_shared=zero,
        shared=jnp.full((a, config.max_blocks_per_seq), NULL, jnp.int32),
        num_computed=zero,
        chunk=zero,
        num_new=zero,
        copy_src=null,
        swapped=null,
        ref_counts=ref_counts,
    )


def _find_prefix(config: SchedulerConfig, state: SchedulerState, row_ids):
    if config.enable_prefix_caching:
        return match(config, state, row_ids)
    nobody = _nobody(config, state.blocks.ref_counts)
    return nobody.num_shared, nobody.shared, nobody.num_computed, nobody.copy_src


def _begin(config: SchedulerConfig, state, row_ids, valid):
    """What candidates have before they compute anything: from the prefix cache, from a member of
    their group if that has more, or, swapped out, what they had.

    Returns:
      (cached [A] tokens, num_shared [A] blocks, shared [A, M] their ids, num_cached [A] of them in
      the prefix index, copy_src [A], forks [A] bool, swapped [A] bool).
    """
    rows, blocks = state.rows, state.blocks
    num_shared, shared, num_inside, source = _find_prefix(config, state, row_ids)
    cached = num_shared * config.block_size + num_inside
    forks, num_cached = jnp.zeros(config.max_admissions, bool), num_shared
    if config.enable_forks:
        forks, *forked = share(config, state, row_ids, cached)
        found = cached, num_shared, shared, num_cached
        pairs = zip(forked, found, strict=True)
        cached, num_shared, shared, num_cached = (choose(forks, new, old) for new, old in pairs)
        source = jnp.where(forks, NULL, source)
    swapped = valid & (rows.status[row_ids] == Status.SWAPPED)
    if config.num_host_blocks:
        forks &= ~swapped
        num_shared = jnp.where(swapped, blocks.num_blocks_held[row_ids], num_shared)
        shared = jnp.where(swapped[:, None], blocks.block_tables[row_ids], shared)
        cached = jnp.where(swapped, rows.num_computed_tokens[row_ids], cached)
        num_cached = jnp.where(swapped, rows.num_cached_blocks[row_ids], num_cached)
        source = jnp.where(swapped, NULL, source)
    return cached, num_shared, shared, num_cached, source, forks, swapped


def _cost(config: SchedulerConfig, state, row_ids, valid, cached, num_shared, wanted, swapped):
    """Blocks that candidates take from the free and evictable ones, for all that is known of them.

    A shared block that nobody held costs a block too, since it is no longer evictable; the first
    candidate that revives it pays.

    Args: wanted: [A, M] int32, blocks they get a reference to.

    Returns:
      (cost [A] int32, moved [A] int32: of it, what comes back from the host pool).
    """
    b, ref_counts = config.block_size, state.blocks.ref_counts
    # Of a block that is shared in part there will be a copy.
    cost = jnp.where(valid, cdiv(state.rows.num_tokens[row_ids], b) - cached // b, 0)
    if config.kv_cache == "contiguous":
        cost = jnp.where(valid, config.max_blocks_per_seq, 0)
    candidate = jnp.broadcast_to(
        jnp.arange(wanted.shape[0], dtype=jnp.int32)[:, None], wanted.shape
    )
    payer = jnp.full(config.num_blocks, NULL, jnp.int32).at[wanted].min(candidate, mode="drop")
    pays = (take(ref_counts, wanted, 1) == 0) & (take(payer, wanted, NULL) == candidate)
    cost += pays.sum(1, dtype=jnp.int32)
    moved = jnp.zeros_like(cost)
    if config.num_host_blocks:
        # Of its last block one is needed only if it did not move, since others hold it.
        last = take(state.blocks.block_tables, (row_ids, cached // b), NULL)
        copies = (cached % b > 0) & (take(ref_counts, last, 0) > 1)
        own = cdiv(state.rows.num_tokens[row_ids], b) - num_shared + copies.astype(jnp.int32)
        moved = jnp.where(swapped, num_moved(config, state, row_ids), 0)
        cost = jnp.where(swapped, own, cost) + moved
    return cost, moved


def _choose(config: SchedulerConfig, state, row_ids, valid, budget, room) -> Admitted:
    """The longest run of candidates, from the head of the queue, that fits budget and memory.

    A candidate fits memory if all that is known of it does, not just the chunk of this step: the
    rest would otherwise push out somebody in the next steps, mostly itself, and be computed again.
    """
    b = config.block_size
    begin = _begin(config, state, row_ids, valid)
    cached, num_shared, shared, num_cached, source, forks, swapped = begin
    left = jnp.where(valid, state.rows.num_tokens[row_ids] - cached, 0)
    chunk = jnp.clip(budget - (jnp.cumsum(left) - left), 0, left)
    most = cdiv(cached + chunk, b) - num_shared
    if config.kv_cache == "contiguous":
        most = config.max_blocks_per_seq
    num_new = jnp.where(chunk > 0, most, 0)
    wanted = jnp.where((valid & ~swapped)[:, None], shared, NULL)
    cost, moved = _cost(config, state, row_ids, valid, cached, num_shared, wanted, swapped)
    ok = valid & (chunk > 0) & (jnp.cumsum(cost) <= room)
    if config.num_host_blocks:
        ok &= jnp.cumsum(moved) <= config.swap_in_capacity

    def only(field, empty):
        return jnp.where(ok, field, empty)

    return Admitted(
        ok=ok,
        row_ids=only(row_ids, NULL),
        forks=ok & forks,
        num_cached=only(num_cached, 0),
        num_shared=only(num_shared, 0),
        shared=jnp.where(ok[:, None], shared, NULL),
        num_computed=only(cached, 0),
        chunk=only(chunk, 0),
        num_new=only(num_new, 0),
        copy_src=only(source, NULL),
        swapped=jnp.where(ok & swapped, row_ids, NULL),
        ref_counts=state.blocks.ref_counts.at[jnp.where(ok[:, None], wanted, NULL)].add(
            1, mode="drop"
        ),
    )


def _num_proposed(config: SchedulerConfig, state: SchedulerState, row):
    """[] int32: leading blocks of a row's prompt that others hold and the index proposes, or a
    member of its group can give. Cheaper than `match`.

    Those that nobody holds are among the blocks that can be had already, and may be evicted before
    the row is tried again."""
    forked = jnp.int32(0)
    if config.enable_forks:
        forked = sources(config, state, row[None])[1][0] // config.block_size
    if not config.enable_prefix_caching:
        return forked
    found = lookup(config, state.prefix, state.rows.block_hashes[row])
    full = jnp.arange(config.max_blocks_per_seq) < state.rows.num_tokens[row] // config.block_size
    proposed = jnp.cumprod((found != NULL) & full)
    held = proposed * (take(state.blocks.ref_counts, found, 0) > 0)
    return jnp.maximum(held.sum(dtype=jnp.int32), forked)


def admit(
    config: SchedulerConfig,
    state: SchedulerState,
    order,
    grant,
    num_new,
    num_copies,
    num_running,
    pressed,
    held,
    num_tokens: int,
):
    """Admit up to `max_admissions` waiting rows behind the running ones.

    Args (by rank): order, grant, num_new: [S] int32; num_copies: [] int32, blocks that the
    running rows need besides num_new; num_running: [] int32; pressed: [] bool, nobody is admitted
    then. By row: held: [S] bool, rows that wait for another one.

    Returns:
      (state, grant, num_new, admitted) with the admitted rows' grants and blocks filled in.
    """
    s, rows = config.num_rows, state.rows
    index = jnp.arange(config.max_admissions, dtype=jnp.int32)
    rank = num_running + index
    row_ids = take(order, jnp.where(rank < s, rank, NULL), 0)
    valid = (rank < config.max_step_rows(num_tokens)) & ~pressed
    valid &= is_waiting(rows.status[row_ids]) & ~held[row_ids]
    if config.batching == "static":
        valid = static_batch.may_join(config, state, row_ids, rank, valid)
    wanted = state
    if config.max_beam_width:
        valid &= beam.may_start(config, rows, row_ids, held, num_running)
        # The last token of a beam waits for the others of its group.
        known = dataclasses.replace(rows, num_tokens=beam.known_tokens(config, rows))
        wanted = dataclasses.replace(state, rows=known)
    budget = num_tokens - grant.sum(dtype=jnp.int32)
    available = state.blocks.num_free + num_evictable(state.blocks, state.prefix)
    # Of these, what running rows still need for the tokens they have is not to be given away.
    running = rows.status[order] == Status.RUNNING
    rest = cdiv(rows.num_tokens[order], config.block_size) - state.blocks.num_blocks_held[order]
    if config.kv_cache != "paged":
        rest = jnp.maximum(rest, 0)
    available = available - jnp.where(running, rest, 0).sum(dtype=jnp.int32) - num_copies
    room = available - jnp.where(rank > 0, config.watermark_blocks, 0)

    # A head of the queue that did not fit is not matched again until there is more memory or more
    # of its prompt is held by others: else every step under pressure would pay for a match that
    # cannot succeed. Its cost does not depend on the step's size, so nothing else can help it.
    # With nobody running it is always tried: nothing would change any more.
    head = rows.arrival[row_ids[0]]
    waits = valid[0] & (budget > 0)
    means = available + when(
        config.use_cond,
        waits,
        lambda _: _num_proposed(config, state, row_ids[0]),
        jnp.int32(0),
    )
    hopeless = (head == state.blocked_arrival) & (means <= state.blocked_means) & (num_running > 0)
    tried = waits & ~hopeless
    admitted = when(
        config.use_cond,
        tried,
        lambda _: _choose(config, wanted, row_ids, valid, budget, room),
        _nobody(config, state.blocks.ref_counts),
    )
    if config.batching == "static":
        num_admitted = admitted.ok.sum(dtype=jnp.int32)
        left = budget - admitted.chunk.sum(dtype=jnp.int32)
        open_ = static_batch.stays_open(config, state, order, num_running, num_admitted, left)
        state = dataclasses.replace(state, batch_is_open=open_ & ~pressed)
    state = _start_rows(config, state, admitted)
    state = dataclasses.replace(
        state,
        blocked_arrival=jnp.where(
            tried, jnp.where(admitted.ok[0], NULL, head), state.blocked_arrival
        ),
        blocked_means=jnp.where(tried, means, state.blocked_means),
    )
    place = jnp.where(admitted.ok, rank, NULL)
    grant = grant.at[place].set(admitted.chunk, mode="drop")
    num_new = num_new.at[place].set(admitted.num_new, mode="drop")
    return state, grant, num_new, admitted


def _start_rows(config: SchedulerConfig, state: SchedulerState, admitted: Admitted):
    """Admitted rows become RUNNING and hold their shared blocks."""
    rows, blocks, counters = state.rows, state.blocks, state.counters
    found, which = inverse(admitted.row_ids, config.num_rows)

    def put(field, value):
        return jnp.where(found, value, field)

    first_time = found & (rows.num_hit_tokens < 0)  # not after a preemption
    computed, forks = admitted.num_computed[which], admitted.forks[which]
    hits = jnp.where(forks, 0, computed)
    again = jnp.where(found, jnp.maximum(rows.num_tokens_dropped - computed, 0), 0)
    passed_over = rows.num_passed_over
    if config.scheduling_policy != "fcfs":
        last = jnp.max(jnp.where(found, rows.arrival, -1))
        overtaken = is_waiting(rows.status) & ~found & (rows.arrival < last)
        passed_over = put(passed_over, 0) + overtaken.astype(jnp.int32)
    rows = dataclasses.replace(
        rows,
        status=put(rows.status, Status.RUNNING),
        num_passed_over=passed_over,
        num_tokens_started=put(rows.num_tokens_started, rows.num_tokens),
        num_tokens_dropped=put(rows.num_tokens_dropped, 0),
        num_computed_tokens=put(rows.num_computed_tokens, computed),
        num_hit_tokens=jnp.where(first_time, hits, rows.num_hit_tokens),
        num_cached_blocks=put(rows.num_cached_blocks, admitted.num_cached[which]),
        chain_broken=put(rows.chain_broken, False),
    )
    blocks = dataclasses.replace(
        blocks,
        num_blocks_held=put(blocks.num_blocks_held, admitted.num_shared[which]),
        block_tables=blocks.block_tables.at[admitted.row_ids].set(admitted.shared, mode="drop"),
        ref_counts=admitted.ref_counts,
    )
    prompt = jnp.where(first_time & ~forks, rows.num_prompt_tokens, 0)
    counters = dataclasses.replace(
        counters,
        num_recomputed_tokens=counters.num_recomputed_tokens + again.sum(dtype=jnp.int32),
        num_hit_tokens=counters.num_hit_tokens
        + jnp.where(first_time, hits, 0).sum(dtype=jnp.int32),
        num_prompt_tokens=counters.num_prompt_tokens + prompt.sum(dtype=jnp.int32),
        num_forked_tokens=counters.num_forked_tokens
        + jnp.where(admitted.forks, admitted.num_computed, 0).sum(dtype=jnp.int32),
        num_block_copies=counters.num_block_copies
        + (admitted.copy_src != NULL).sum(dtype=jnp.int32),
    )
    return dataclasses.replace(state, rows=rows, blocks=blocks, counters=counters)
