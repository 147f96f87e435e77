"""A whole scheduler state with other names for its tokens, its hashes and index made anew."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.prefix import finish_hash, mix
from pagedjax.core.state import NULL, ROOT, PrefixIndex, SchedulerState, SequenceTable, Status
from pagedjax.eventlog.names import STOP, PrefixNames


def renamed_state(
    state: SchedulerState, names: PrefixNames, *, config: SchedulerConfig
) -> SchedulerState:
    """The state as it would be if the tokens had had their other names from the start, but for the
    place of an entry within its bucket of the index. Nothing of the old names is left. Host side.
    """
    state = jax.device_get(state)
    return dataclasses.replace(
        state,
        rows=_rows(state.rows, names, config),
        prefix=_index(state.prefix, names, config),
    )


def _rows(rows: SequenceTable, names: PrefixNames, config: SchedulerConfig) -> SequenceTable:
    tokens = np.zeros_like(rows.token_ids)
    for row in np.flatnonzero(rows.status != Status.EMPTY):
        count = int(rows.num_tokens[row])
        tokens[row, :count] = names.start(int(row), rows.token_ids[row, :count])
    position = np.arange(tokens.shape[1], dtype=np.int32)
    known = position < np.where(rows.status == Status.EMPTY, 0, rows.num_tokens)[:, None]
    terms = np.where(known, np.asarray(mix(jnp.asarray(tokens), jnp.asarray(position))), 0)
    running = np.cumsum(terms, axis=1, dtype=np.uint32)
    ends = running[:, config.block_size - 1 :: config.block_size]
    stops = np.full_like(rows.stop_token_ids, NULL)
    stops[:, 0] = STOP
    return dataclasses.replace(
        rows,
        token_ids=tokens,
        stop_token_ids=stops,
        running_hash=running[:, -1],
        cum_logprob=np.zeros_like(rows.cum_logprob),
        block_hashes=_finish(config, ends, rows.salt[:, None]),
    )


def _index(prefix: PrefixIndex, names: PrefixNames, config: SchedulerConfig) -> PrefixIndex:
    b = config.block_size
    tokens = np.zeros_like(prefix.tokens)
    slot = np.full_like(prefix.slot, NULL)
    hashes, blocks = np.zeros_like(prefix.bucket_hashes), np.full_like(prefix.bucket_blocks, NULL)
    chains: dict[int, tuple[bytes, int]] = {int(ROOT): (b"", 0)}
    cached = np.flatnonzero(prefix.slot != NULL)
    for block in cached[np.argsort(prefix.depth[cached], kind="stable")].tolist():
        digest, running = chains[int(prefix.parent[block])]
        tokens[block], digest = names.walk(digest, prefix.tokens[block])
        position = int(prefix.depth[block]) * b + np.arange(b, dtype=np.int32)
        terms = np.asarray(mix(jnp.asarray(tokens[block]), jnp.asarray(position)))
        running = (running + int(terms.sum(dtype=np.uint32))) & 0xFFFFFFFF
        chains[block] = digest, running
        (value,) = _finish(config, np.asarray([running], np.uint32), prefix.salt[block])
        bucket = int(value) & (config.num_index_buckets - 1)
        way = int(np.flatnonzero(blocks[bucket] == NULL)[0])
        hashes[bucket, way], blocks[bucket, way] = value, block
        slot[block] = bucket * config.index_ways + way
    return dataclasses.replace(
        prefix, tokens=tokens, slot=slot, bucket_hashes=hashes, bucket_blocks=blocks
    )


def _finish(config: SchedulerConfig, running: np.ndarray, salt: Any) -> np.ndarray:
    return np.asarray(finish_hash(config, jnp.asarray(running), jnp.asarray(salt)))
