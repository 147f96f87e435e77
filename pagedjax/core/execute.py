"""`execute`: run the model over a plan and sample. Touches the KV pool, not the scheduler."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.state import NULL, EngineState, Plan, SchedulerState
from pagedjax.sampling import Sampled, SamplingInputs, sample
from pallas_kernels import copy_blocks, move_blocks


class Model(Protocol):
    """What the engine needs of a model: a hashable object of pure functions.

    `pagedjax.models.llama.LlamaModel` is one. A model may also have `rows_at_once`, an int: logits
    are then computed and sampled for so many rows at a time (the bit-exact mode).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    attention: str | None
    """Implementation of attention, of KV writes, and of block copies within the pool, gathers and
    scatters; None: by platform. Not of moves to and from host memory: there is one only."""

    def forward(
        self, params, k_pool, v_pool, batch, output_indices
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Write K and V of the batch's tokens, attend.

        -> (k_pool, v_pool, hidden [R, E] of the tokens at `output_indices` [R])."""

    def compute_logits(self, params, hidden) -> jax.Array:
        """hidden [R, E] -> logits [R, V] float32."""


def sampling_inputs(state: SchedulerState, plan: Plan) -> SamplingInputs:
    """Each rank's sampling parameters, gathered from the request table. All [R]."""
    rows = state.rows
    row = jnp.where(plan.row_ids == NULL, 0, plan.row_ids)
    position = rows.num_tokens[row] - rows.num_prompt_tokens[row]
    return SamplingInputs(
        temperature=rows.temperature[row],
        top_k=rows.top_k[row],
        top_p=rows.top_p[row],
        min_p=rows.min_p[row],
        seed=rows.seed[row],
        position=position,
        forbid_stop=position < rows.min_output_tokens[row],
        stop_token_ids=rows.stop_token_ids[row],
        num_logprobs=rows.num_logprobs[row],
        valid=plan.needs_sample,
    )


def swap_out_blocks(state: EngineState, plan: Plan):
    """Copy the blocks that leave the device in this step. Before `execute`: the plan may have given
    them to other rows.

    Returns:
      (plan, host_k_pool, host_v_pool); without a host pool, the plan and None.
    """
    if plan.swaps is None:
        return plan, None, None
    out = plan.swaps.out_src, plan.swaps.out_dst, plan.swaps.num_out
    host_k_pool, num_k = move_blocks(state.k_pool, state.host_k_pool, *out)
    host_v_pool, num_v = move_blocks(state.v_pool, state.host_v_pool, *out)
    # Always true, and what `execute` writes first depends on it now.
    done = (num_k == num_v) & (num_k >= plan.swaps.num_out)
    plan = dataclasses.replace(plan, copy_src=jnp.where(done, plan.copy_src, NULL))
    return plan, host_k_pool, host_v_pool


def execute(
    params,
    k_pool: jax.Array,
    v_pool: jax.Array,
    plan: Plan,
    inputs: SamplingInputs,
    *,
    config: SchedulerConfig,
    model: Model,
    host_pools: tuple[jax.Array | None, jax.Array | None] = (None, None),
) -> tuple[jax.Array, jax.Array, Sampled]:
    """Copy blocks, swap blocks in, run the model, sample the rows that have caught up.

    Args:
      params: the model's pytree.
      k_pool, v_pool: the KV pool, all layers; consumed (donate them, and nothing is copied).
      plan: of `schedule`. inputs: of `sampling_inputs`.
      host_pools: of `swap_out_blocks`; only read.

    Returns:
      (k_pool, v_pool, sampled).
    """
    k_pool, v_pool = copy_blocks(
        k_pool, v_pool, plan.copy_src, plan.copy_dst, implementation=model.attention
    )
    if plan.swaps is not None:
        # Not before the copies: the source of one may have been evicted to make room for this.
        back = plan.swaps.in_src, plan.swaps.in_dst, plan.swaps.num_in
        k_pool, _ = move_blocks(host_pools[0], k_pool, *back)
        v_pool, _ = move_blocks(host_pools[1], v_pool, *back)
    k_pool, v_pool, hidden = model.forward(params, k_pool, v_pool, plan, plan.logit_index)
    sampled = _sample(params, hidden, inputs, plan.num_seqs, config=config, model=model)
    # A chunk that is not its row's last samples nothing, but its keys and values are cached. A bad
    # token spoils all later ones of its row, so the last token of the chunk tells.
    bad = (plan.row_ids != NULL) & ~jnp.isfinite(hidden).all(-1)
    return k_pool, v_pool, dataclasses.replace(sampled, nan=sampled.nan | bad)


def _sample(
    params, hidden, inputs: SamplingInputs, num_seqs, *, config: SchedulerConfig, model: Model
) -> Sampled:
    """Logits and samples of hidden [R, E]: all rows at once, or `model.rows_at_once` at a time.

    Then the loop's body has one shape whatever R is, and a row's bits do not depend on R.
    """

    def sample_rows(hidden, inputs):
        logits = model.compute_logits(params, hidden)
        return sample(logits, inputs, max_logprobs=config.max_logprobs)

    size = getattr(model, "rows_at_once", None)
    if size is None:
        return sample_rows(hidden, inputs)
    num_rows = hidden.shape[0]
    padded = -(-num_rows // size) * size
    hidden, inputs = jax.tree.map(
        lambda x: jnp.pad(x, ((0, padded - num_rows), *[(0, 0)] * (x.ndim - 1))), (hidden, inputs)
    )

    def body(i, outputs):
        rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * size, size), (hidden, inputs))
        sampled = lax.optimization_barrier(sample_rows(*lax.optimization_barrier(rows)))
        return jax.tree.map(
            lambda all_, some: lax.dynamic_update_slice_in_dim(all_, some, i * size, 0),
            outputs,
            sampled,
        )

    shapes = jax.eval_shape(sample_rows, hidden, inputs)
    outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sampled = lax.fori_loop(0, (num_seqs + size - 1) // size, body, outputs)
    return jax.tree.map(lambda x: x[:num_rows], sampled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Everything static about a step. Hashable.

    Attributes:
      scheduler: sizes and switches of the scheduler.
      model: the model's pure functions.
    """

    scheduler: SchedulerConfig
    model: Model
