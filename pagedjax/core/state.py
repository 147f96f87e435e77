"""The engine's state: immutable pytrees, every field documented by its dimensions.

Letters: S rows of the request table, M blocks of one row, N blocks of the pool, B tokens of a
block, T tokens of a step, R rows of a step, A admissions of a step, P alternatives with
log-probabilities, Q stop token ids.

Sentinel: `NULL`, the largest int32, is out of range of every array, so a scatter with
`mode="drop"` drops it and a gather with `mode="fill"` fills it. It is never -1, since JAX wraps
negative indices even under `mode="drop"`.
"""

import dataclasses
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.pytree import pytree

NULL = np.int32(2**31 - 1)
"""No block, no slot, no row."""
ROOT = np.int32(2**31 - 2)
"""Parent of a sequence's first block in the prefix index."""
NO_TOKEN = np.int32(-1)
"""No token was produced. Never used as an index."""


class Status(IntEnum):
    """What a row of the request table is doing."""

    EMPTY = 0  #: free for a new request
    WAITING = 1  #: has a request, holds no block (new, or preempted)
    RUNNING = 2  #: holds blocks, takes part in steps
    FINISHED = 3  #: ended; its blocks go back in a following `schedule`, then it is EMPTY
    SWAPPED = 4  #: waits as WAITING does, but keeps what it has computed, mostly in the host pool
    SPARE = 5  #: belongs to a beam search and carries no beam at present; holds no block


class FinishReason(IntEnum):
    """Why a request ended."""

    NONE = 0
    STOP = 1  #: produced one of its stop token ids
    LENGTH = 2  #: reached its `max_total_tokens`
    ABORT = 3  #: aborted from outside
    ERROR = 4  #: see `ErrorCode`


class ErrorCode(IntEnum):
    """Failure as data: what went wrong with one request. The others are unaffected."""

    NONE = 0
    IMPOSSIBLE = 1  #: can never fit the pool or the table, or asks for no token
    NAN_LOGITS = 2  #: the model gave NaN or infinite values for this row


@pytree
class SequenceTable:
    """One row per request. All [S] int32 unless noted."""

    status: jax.Array  #: `Status`
    arrival: jax.Array  #: order of arrival; lower came earlier
    finish_reason: jax.Array  #: `FinishReason`
    error: jax.Array  #: `ErrorCode`
    priority: jax.Array  #: as the request gave it; lower is more urgent
    turn: jax.Array  #: round robin: place in the queue since it last yielded, 0 before
    num_passed_over: jax.Array  #: admissions of newer rows since it began to wait
    num_preemptions: jax.Array  #: how often it has stepped back
    num_tokens_started: jax.Array  #: `num_tokens` when it was last admitted
    num_tokens_dropped: jax.Array  #: computed tokens lost to preemption that are not back yet
    num_prompt_tokens: jax.Array
    num_tokens: jax.Array  #: prompt and output so far
    num_computed_tokens: jax.Array  #: tokens whose K and V lie in the row's blocks
    max_total_tokens: jax.Array  #: ends with LENGTH when `num_tokens` reaches it
    min_output_tokens: jax.Array  #: no stop token can be sampled before so many outputs
    num_hit_tokens: jax.Array  #: tokens found in the prefix cache at admission, -1 before
    num_cached_blocks: jax.Array  #: leading blocks of the row that are in the prefix index
    chain_broken: jax.Array  #: [S] bool: a hash collision; later blocks of the row stay uncached
    running_hash: jax.Array  #: [S] uint32: prefix sum of token hashes over all `num_tokens`
    group: jax.Array  #: rows of equal group have equal prompts and share them; NULL: alone
    beam_leader: jax.Array  #: first row of the row's beam group; NULL: no beam search
    beam_index: jax.Array  #: place of the row in its beam group
    cum_logprob: jax.Array  #: [S] float32: of the output so far; kept for beams only
    salt: jax.Array  #: [S] uint32: only requests of equal salt share blocks
    seed: jax.Array  #: [S] uint32
    temperature: jax.Array  #: [S] float32; 0 is greedy
    top_k: jax.Array  #: 0 is off
    top_p: jax.Array  #: [S] float32; 1 is off
    min_p: jax.Array  #: [S] float32; 0 is off
    num_logprobs: jax.Array  #: -1 none, 0 the chosen token's, n also the n most likely
    stop_token_ids: jax.Array  #: [S, Q], padded with NULL
    token_ids: jax.Array  #: [S, M * B]
    block_hashes: jax.Array  #: [S, M] uint32: hash of all tokens up to the end of block j


@pytree
class BlockPool:
    """Who holds which block."""

    ref_counts: jax.Array  #: [N] int32: block table entries that name the block
    free_stack: jax.Array  #: [N] int32: entries below `num_free` are the free blocks
    num_free: jax.Array  #: [] int32
    last_use: jax.Array  #: [N] int32: step of the block's last release
    block_tables: jax.Array  #: [S, M] int32, NULL past `num_blocks_held`
    num_blocks_held: jax.Array  #: [S] int32


@pytree
class PrefixIndex:
    """Full, immutable blocks that can be found by their content.

    A set-associative hash table over blocks: `bucket_*[hash mod buckets]` holds up to `index_ways`
    entries. Deleting is writing an empty entry: every way is always compared, so there are no
    tombstones and nothing is ever rehashed. The hash only proposes a block. A hit counts when
    salt, tokens and the parent block are equal, so a collision can never share memory.
    """

    bucket_hashes: jax.Array  #: [buckets, ways] uint32, 0 is empty
    bucket_blocks: jax.Array  #: [buckets, ways] int32, NULL is empty
    slot: jax.Array  #: [N] int32: the block's place in the flattened table, NULL when not cached
    parent: jax.Array  #: [N] int32: block before it in its chain, or ROOT
    depth: jax.Array  #: [N] int32: blocks before it in its chain
    salt: jax.Array  #: [N] uint32
    tokens: jax.Array  #: [N, B] int32
    last_child: jax.Array  #: [N] int32: block registered last behind this one; a hint, verified
    older_sibling: jax.Array  #: [N] int32: registered before it behind the same parent; a hint


@pytree
class SwapMap:
    """The pool in host memory: Nh blocks, each of which one row holds or none.

    The tables are empty when there is no host pool. See `pagedjax.core.swap`.
    """

    ref_counts: jax.Array  #: [Nh] int32: 1 where a row's table names the block
    free_stack: jax.Array  #: [Nh] int32: entries below `num_free` are the free blocks
    num_free: jax.Array  #: [] int32
    host_tables: jax.Array  #: [S, M] int32: host block of column j, NULL where it did not move
    stuck: jax.Array  #: [] bool: the last step could do nothing
    num_ref_errors: jax.Array  #: [] int32: as in `Counters`


@pytree
class Counters:
    """Totals since the start. All [] int32; they wrap after 2**31, differences stay right."""

    num_preemptions: jax.Array
    num_early_preemptions: jax.Array  #: of them, of resumed rows that had no new token yet
    num_yields: jax.Array  #: of them, at the end of a time slice
    num_recomputed_tokens: jax.Array  #: computed again after a preemption
    num_swaps_out: jax.Array  #: preemptions after which the row's blocks were kept
    num_swaps_in: jax.Array
    num_blocks_swapped_out: jax.Array
    num_blocks_swapped_in: jax.Array
    num_swaps_dropped: jax.Array  #: rows swapped out that were given up; see `drop_swapped`
    num_evictions: jax.Array
    num_block_copies: jax.Array
    num_hit_tokens: jax.Array
    num_prompt_tokens: jax.Array  #: prompt tokens of admitted rows, hits included, forks not
    num_forked_tokens: jax.Array  #: tokens that admitted rows took from a member of their group
    num_ref_errors: jax.Array  #: releases that went below zero: always 0, or the state is corrupt


@pytree
class SchedulerState:
    """Everything `schedule` and `commit` read and write."""

    rows: SequenceTable
    blocks: BlockPool
    prefix: PrefixIndex
    swap: SwapMap
    counters: Counters
    step: jax.Array  #: [] int32: steps committed
    next_arrival: jax.Array  #: [] int32
    blocked_arrival: jax.Array  #: [] int32: queue head that did not fit when last tried, or NULL
    blocked_means: jax.Array  #: [] int32: blocks available to it then, and of its prompt held
    batch_is_open: jax.Array | None = None  #: [] bool: see `static_batch`; None without it


@pytree
class EngineState:
    """All of a running engine. The KV pool's layout is the attention kernels' business."""

    scheduler: SchedulerState
    k_pool: jax.Array
    v_pool: jax.Array
    host_k_pool: jax.Array | None = None  #: None without a host pool
    host_v_pool: jax.Array | None = None


@pytree
class Plan:
    """What one step does. Rank r is a row's place in the step; scheduled rows are ranks
    0 .. num_seqs - 1, running rows before newly admitted ones, older before newer."""

    rank: jax.Array  #: [S] int32: row -> rank in the order of all rows
    row_ids: jax.Array  #: [R] int32: rank -> row, NULL past `num_seqs`
    num_seqs: jax.Array  #: [] int32
    num_scheduled_tokens: jax.Array  #: [R] int32
    query_start_loc: jax.Array  #: [R + 1] int32
    seq_lens: jax.Array  #: [R] int32: context of the row after this step, 0 past `num_seqs`
    block_tables: jax.Array  #: [R, M] int32
    logit_index: jax.Array  #: [R] int32: place in [0, T) of the row's last token
    needs_sample: jax.Array  #: [R] bool: the row has caught up and gets a new token
    token_ids: jax.Array  #: [T] int32, 0 in padding
    positions: jax.Array  #: [T] int32, 0 in padding
    slot_mapping: jax.Array  #: [T] int32: block * B + offset; NULL in padding
    copy_src: jax.Array  #: [A or A + R] int32: blocks to copy before the forward pass
    copy_dst: jax.Array  #: like copy_src: all sources are read before any destination is written
    swaps: "Swaps | None" = None  #: None without a host pool


@pytree
class Swaps:
    """Blocks to move before the forward pass: out first of all, in after the step's block copies.
    The first `num_*` entries of each list count."""

    out_src: jax.Array  #: [L] int32: device blocks
    out_dst: jax.Array  #: [L] int32: host blocks
    num_out: jax.Array  #: [] int32
    in_src: jax.Array  #: [C] int32: host blocks
    in_dst: jax.Array  #: [C] int32: device blocks
    num_in: jax.Array  #: [] int32


@pytree
class StepOutput:
    """What the host needs to know of a step: one small copy."""

    status: jax.Array  #: [S] int32 `Status` after the step
    token_ids: jax.Array  #: [S] int32: the new token, or NO_TOKEN
    num_tokens: jax.Array  #: [S] int32
    num_computed_tokens: jax.Array  #: [S] int32
    finish_reason: jax.Array  #: [S] int32 `FinishReason`
    error: jax.Array  #: [S] int32 `ErrorCode`
    num_hit_tokens: jax.Array  #: [S] int32: prompt tokens that came from the prefix cache
    logprob: jax.Array  #: [S] float32: of the new token; meaningful where asked for
    beam_parent: jax.Array  #: [S] int32: row whose beam this row carries on with the token, or NULL
    cum_logprob: jax.Array  #: [S] float32: of beams
    rank: jax.Array  #: [S] int32: row -> place in the two arrays below (R or more: not in the step)
    top_token_ids: jax.Array  #: [R, P] int32, by rank
    top_logprobs: jax.Array  #: [R, P] float32, by rank
    step: jax.Array  #: [] int32: number of this step, from 1
    num_running: jax.Array  #: [] int32
    num_waiting: jax.Array  #: [] int32
    num_scheduled_tokens: jax.Array  #: [] int32
    num_unscheduled_tokens: jax.Array  #: [] int32: tokens that running rows still have to compute
    num_free_blocks: jax.Array  #: [] int32: on the free stack
    num_evictable_blocks: jax.Array  #: [] int32: cached and held by nobody
    num_free_host_blocks: jax.Array  #: [] int32: of the host pool
    counters: Counters
    batch_is_open: jax.Array | None = None  #: [] bool: a static batch takes more; None without it


def init_scheduler(config: SchedulerConfig) -> SchedulerState:
    """An idle scheduler: every row empty, every block free, nothing cached."""
    s, n, m = config.num_rows, config.num_blocks, config.max_blocks_per_seq
    buckets, ways = config.num_index_buckets, config.index_ways

    def zeros(*shape, dtype=jnp.int32):
        return jnp.zeros(shape, dtype)

    def null(*shape):
        return jnp.full(shape, NULL, jnp.int32)

    rows = SequenceTable(
        **{
            name: zeros(s)
            for name in (
                "status arrival finish_reason error priority turn num_passed_over "
                "num_preemptions num_tokens_started num_tokens_dropped num_prompt_tokens "
                "num_tokens num_computed_tokens max_total_tokens min_output_tokens num_hit_tokens "
                "num_cached_blocks top_k"
            ).split()
        },
        chain_broken=zeros(s, dtype=bool),
        group=null(s),
        beam_leader=null(s),
        beam_index=zeros(s),
        cum_logprob=zeros(s, dtype=jnp.float32),
        **{name: zeros(s, dtype=jnp.uint32) for name in ("running_hash", "salt", "seed")},
        **{name: zeros(s, dtype=jnp.float32) for name in ("temperature", "top_p", "min_p")},
        num_logprobs=jnp.full(s, -1, jnp.int32),
        stop_token_ids=null(s, config.max_stop_token_ids),
        token_ids=zeros(s, config.max_padded_len),
        block_hashes=zeros(s, m, dtype=jnp.uint32),
    )
    blocks = BlockPool(
        ref_counts=zeros(n),
        free_stack=jnp.arange(n - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.asarray(n, jnp.int32),
        last_use=zeros(n),
        block_tables=null(s, m),
        num_blocks_held=zeros(s),
    )
    prefix = PrefixIndex(
        bucket_hashes=zeros(buckets, ways, dtype=jnp.uint32),
        bucket_blocks=null(buckets, ways),
        slot=null(n),
        parent=null(n),
        depth=zeros(n),
        salt=zeros(n, dtype=jnp.uint32),
        tokens=zeros(n, config.block_size),
        last_child=null(n),
        older_sibling=null(n),
    )
    host = config.num_host_blocks
    swap = SwapMap(
        ref_counts=zeros(host),
        free_stack=jnp.arange(host - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.asarray(host, jnp.int32),
        host_tables=null(s, m if host else 0),
        stuck=zeros(dtype=bool),
        num_ref_errors=zeros(),
    )
    return SchedulerState(
        rows=rows,
        blocks=blocks,
        prefix=prefix,
        swap=swap,
        counters=Counters(**{f.name: zeros() for f in dataclasses.fields(Counters)}),
        step=zeros(),
        next_arrival=zeros(),
        blocked_arrival=null(),
        blocked_means=zeros(),
        batch_is_open=jnp.asarray(True) if config.batching == "static" else None,
    )
