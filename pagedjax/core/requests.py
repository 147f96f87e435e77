"""Requests enter and leave the state here: pure functions of state and arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.beam import whole_groups
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.prefix import finish_hash, mix
from pagedjax.core.pytree import pytree
from pagedjax.core.state import NULL, FinishReason, SchedulerState, Status

NO_PRIORITY = np.int32(0)


@pytree
class RequestParams:
    """What a request asks for. Arrays (or numbers), never static.

    Attributes:
      max_total_tokens: [] int32, prompt and output tokens together at most.
      min_output_tokens: [] int32, stop token ids cannot be sampled before so many outputs.
      stop_token_ids: [Q] int32, padded with NULL; the end-of-sequence id is one of them.
      temperature, top_p, min_p: [] float32. top_k: [] int32, 0 is off.
      seed: [] uint32. num_logprobs: [] int32, -1 for none.
      salt: [] uint32, only requests of equal salt share cached blocks.
      priority: [] int32, lower is more urgent; read by the policies that go by it.
      group: [] int32, requests of equal group have the same prompt, which is computed once and
        shared (with `enable_forks`). A number that no other group in the table has; NULL for none.
      beam_leader: [] int32, the row of its group's first request, which is a beam search with as
        many beams as the group has requests; NULL for none. They are added one after the other,
        before the next step, with equal `group` and everything else equal, too. `num_logprobs` is
        how many continuations of a beam are looked at: the width, and one more for each stop token
        or, as others do, twice the width.
      beam_index: [] int32, place among them, from 0, which is the leader.
    """

    max_total_tokens: jax.Array
    min_output_tokens: jax.Array
    stop_token_ids: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    num_logprobs: jax.Array
    salt: jax.Array
    priority: jax.Array = NO_PRIORITY
    group: jax.Array = NULL
    beam_leader: jax.Array = NULL
    beam_index: jax.Array = 0


def add_request(
    state: SchedulerState,
    row: jax.Array,
    token_ids: jax.Array,
    num_prompt_tokens: jax.Array,
    params: RequestParams,
    *,
    config: SchedulerConfig,
) -> SchedulerState:
    """Put a request into an EMPTY row, where it waits for admission in order of arrival.

    Args:
      row: [] int32, an EMPTY row. A row that is not EMPTY is left as it is and the request is
        not taken: the caller knows the empty rows from `StepOutput.status`.
      token_ids: [M * B] int32, the prompt, padded with anything.
      num_prompt_tokens: [] int32. A request that can never fit is not refused here but by the
        next `schedule`, as an error of that request alone.

    The hash of every full block comes from one prefix sum. Donate `state` in the caller's jit.
    """
    rows = state.rows
    row = jnp.where(rows.status[row] == Status.EMPTY, row, config.num_rows)
    position = jnp.arange(config.max_padded_len, dtype=jnp.int32)
    terms = jnp.where(position < num_prompt_tokens, mix(token_ids, position), 0)
    running = jnp.cumsum(terms, dtype=jnp.uint32)
    salt = jnp.asarray(params.salt, jnp.uint32)
    hashes = finish_hash(config, running[config.block_size - 1 :: config.block_size], salt)
    follows = (jnp.asarray(params.beam_leader) != NULL) & (jnp.asarray(params.beam_index) > 0)
    values = {
        "status": jnp.where(follows, Status.SPARE, Status.WAITING),
        "arrival": state.next_arrival,
        "finish_reason": FinishReason.NONE,
        "error": 0,
        "priority": params.priority,
        "turn": 0,
        "num_passed_over": 0,
        "num_preemptions": 0,
        "num_tokens_started": 0,
        "num_tokens_dropped": 0,
        "num_prompt_tokens": num_prompt_tokens,
        "num_tokens": num_prompt_tokens,
        "num_computed_tokens": 0,
        "max_total_tokens": params.max_total_tokens,
        "min_output_tokens": params.min_output_tokens,
        "num_hit_tokens": -1,
        "num_cached_blocks": 0,
        "chain_broken": False,
        "running_hash": running[-1],
        "group": params.group,
        "beam_leader": params.beam_leader,
        "beam_index": params.beam_index,
        "cum_logprob": 0,
        "salt": salt,
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "num_logprobs": params.num_logprobs,
        "stop_token_ids": params.stop_token_ids,
        "token_ids": token_ids,
        "block_hashes": hashes,
    }
    put = {}
    for name, value in values.items():
        field = getattr(rows, name)
        put[name] = field.at[row].set(jnp.asarray(value).astype(field.dtype), mode="drop")
    taken = (row < config.num_rows).astype(jnp.int32)
    return dataclasses.replace(
        state,
        rows=dataclasses.replace(rows, **put),
        next_arrival=state.next_arrival + taken,
    )


def abort(state: SchedulerState, rows_to_abort: jax.Array) -> SchedulerState:
    """End waiting and running rows from outside.

    Args:
      rows_to_abort: [S] bool. Rows that are EMPTY or FINISHED already are left as they are. Beams
        end with their whole group.

    The blocks go back in a following `schedule`; cached ones stay cached.
    """
    rows = state.rows
    live = (rows.status != Status.EMPTY) & (rows.status != Status.FINISHED)
    end = live & whole_groups(rows, rows_to_abort)
    rows = dataclasses.replace(
        rows,
        status=jnp.where(end, Status.FINISHED, rows.status),
        finish_reason=jnp.where(end, FinishReason.ABORT, rows.finish_reason),
        # Nothing of it can be cached any more: some of its blocks are not on the device.
        chain_broken=rows.chain_broken | (end & (rows.status == Status.SWAPPED)),
    )
    return dataclasses.replace(state, rows=rows)
