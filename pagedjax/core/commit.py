"""`commit`: put a step's samples into the state and tell the host what happened."""

import dataclasses

import jax.numpy as jnp

from pagedjax.core import beam
from pagedjax.core.blocks import num_evictable
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.policies import is_waiting
from pagedjax.core.prefix import finish_hash, mix
from pagedjax.core.ragged import take
from pagedjax.core.register import register
from pagedjax.core.state import (
    NO_TOKEN,
    NULL,
    ErrorCode,
    FinishReason,
    Plan,
    SchedulerState,
    Status,
    StepOutput,
)


def commit(
    state: SchedulerState,
    plan: Plan,
    sampled,
    *,
    config: SchedulerConfig,
    picks: beam.Picks | None = None,
) -> tuple[SchedulerState, StepOutput]:
    """Advance the scheduled rows, append their samples, finish rows, register full blocks.

    Args:
      state: as `schedule` returned it; consumed.
      sampled: `pagedjax.sampling.Sampled` by rank; tokens where `plan.needs_sample` is False are
        ignored. A scheduled row with `nan` ends with `ErrorCode.NAN_LOGITS` and gets no token.
      picks: which beams are carried on, where that is known; None: what `sampled` says.
    """
    num_tokens = plan.token_ids.shape[0]
    if config.max_beam_width:
        picks = beam.pick(config, state, plan, sampled) if picks is None else picks
        state = beam.move(config, state, picks, plan.row_ids.shape[0])
    state, token, logprob = _append(config, state, plan, sampled, picks)
    if config.enable_prefix_caching:
        state = register(config, state, num_tokens)
    return state, _report(state, plan, sampled, picks, token, logprob)


def _append(config: SchedulerConfig, state: SchedulerState, plan: Plan, sampled, picks):
    """Advance by what was computed, append the new token, extend its hash, detect the end."""
    rows, b = state.rows, config.block_size
    row = jnp.arange(config.num_rows, dtype=jnp.int32)
    advanced = take(plan.num_scheduled_tokens, plan.rank, 0)
    if picks is not None:  # a row that carries on another one's beam has what that one computed
        source = jnp.where(picks.parent == NULL, row, picks.parent)
        advanced = jnp.where(rows.status == Status.SPARE, 0, advanced[source])
    wants = take(plan.needs_sample, plan.rank, False)
    # A row aborted between schedule and commit keeps its end and gets no token.
    wants &= rows.status == Status.RUNNING
    nan = (advanced > 0) & (rows.status == Status.RUNNING) & take(sampled.nan, plan.rank, False)
    new = wants & ~nan
    token = take(sampled.token_ids, plan.rank, 0).astype(jnp.int32)
    if picks is not None:
        new = jnp.where(picks.moving, False, new) | (picks.parent != NULL)
        token = jnp.where(picks.parent != NULL, picks.token, token)
    token = jnp.where(new, token, NO_TOKEN)

    n = rows.num_tokens
    running_hash = jnp.where(new, rows.running_hash + mix(token, n), rows.running_hash)
    fills_block = new & ((n + 1) % b == 0)
    block_hash = finish_hash(config, running_hash, rows.salt)
    hash_column = jnp.where(fills_block, n // b, NULL)
    n_after = n + new.astype(jnp.int32)
    is_stop = new & (rows.stop_token_ids == token[:, None]).any(-1)
    is_length = new & (n_after >= rows.max_total_tokens)
    ends = is_stop | is_length | nan
    computed = rows.num_computed_tokens + advanced
    if config.kv_cache == "none":
        computed = jnp.where(new & ~ends, 0, computed)
    reason = jnp.where(is_stop, FinishReason.STOP, FinishReason.LENGTH)
    reason = jnp.where(nan, FinishReason.ERROR, reason)
    rows = dataclasses.replace(
        rows,
        status=jnp.where(ends, Status.FINISHED, rows.status),
        finish_reason=jnp.where(ends, reason, rows.finish_reason),
        error=jnp.where(nan, ErrorCode.NAN_LOGITS, rows.error),
        # Blocks of a row that went wrong must not be found by others.
        chain_broken=rows.chain_broken | nan,
        num_tokens=n_after,
        num_computed_tokens=computed,
        running_hash=running_hash,
        block_hashes=rows.block_hashes.at[row, hash_column].set(block_hash, mode="drop"),
        token_ids=rows.token_ids.at[row, jnp.where(new, n, NULL)].set(token, mode="drop"),
    )
    logprob = take(sampled.logprob, plan.rank, 0.0)
    if picks is not None:
        rows = beam.end_together(config, rows, picks)
        logprob = jnp.where(picks.parent != NULL, picks.logprob, logprob)
    logprob = jnp.where(new, logprob, 0.0)
    return dataclasses.replace(state, rows=rows, step=state.step + 1), token, logprob


def _report(state: SchedulerState, plan: Plan, sampled, picks, token, logprob) -> StepOutput:
    rows, blocks = state.rows, state.blocks
    nobody = jnp.full_like(rows.status, NULL)
    running = rows.status == Status.RUNNING
    behind = jnp.where(running, rows.num_tokens - rows.num_computed_tokens, 0)
    return StepOutput(
        status=rows.status,
        token_ids=token,
        num_tokens=rows.num_tokens,
        num_computed_tokens=rows.num_computed_tokens,
        finish_reason=rows.finish_reason,
        error=rows.error,
        num_hit_tokens=jnp.maximum(rows.num_hit_tokens, 0),
        logprob=logprob,
        beam_parent=nobody if picks is None else picks.parent,
        cum_logprob=rows.cum_logprob,
        rank=plan.rank,
        top_token_ids=sampled.top_token_ids,
        top_logprobs=sampled.top_logprobs,
        step=state.step,
        num_running=running.sum(dtype=jnp.int32),
        num_waiting=is_waiting(rows.status).sum(dtype=jnp.int32),
        num_scheduled_tokens=plan.query_start_loc[-1],
        num_unscheduled_tokens=behind.sum(dtype=jnp.int32),
        num_free_blocks=blocks.num_free,
        num_evictable_blocks=num_evictable(blocks, state.prefix),
        num_free_host_blocks=state.swap.num_free,
        counters=state.counters,
        batch_is_open=state.batch_is_open,
    )
