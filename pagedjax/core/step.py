"""`step` and `run`: the whole engine as a function of its state.

Under `jax.jit` with the state donated, nothing of the size of the KV pool is copied:

    step_fn = jax.jit(step, static_argnames=("config", "num_tokens"), donate_argnums=1)
    state, output = step_fn(params, state, config=config, num_tokens=64)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.core.commit import commit
from pagedjax.core.execute import StepConfig, execute, sampling_inputs, swap_out_blocks
from pagedjax.core.pytree import pytree
from pagedjax.core.schedule import schedule
from pagedjax.core.state import NULL, EngineState, Status, StepOutput, init_scheduler
from pallas_kernels import gather_blocks, init_pool, move_blocks, scatter_blocks


def init_state(config: StepConfig, *, kv_dtype, host_memory: Any = None) -> EngineState:
    """An idle engine with an empty KV pool of `kv_dtype` (float32, bfloat16 or float16).

    Args:
      host_memory: the `jax.sharding.Sharding` of the host pool, if there is one (on a GPU one of
        memory kind "pinned_host"). None: where new arrays go, which on a CPU is host memory.
    """
    model, sizes = config.model, config.scheduler
    k_pool, v_pool = init_pool(
        num_layers=model.num_layers,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype,
    )
    host_pools = (None, None)
    if sizes.num_host_blocks:
        shape = (k_pool.shape[0], sizes.num_host_blocks, *k_pool.shape[2:])
        host_pools = [
            jnp.zeros(shape, pool.dtype)
            if host_memory is None
            else jax.device_put(np.zeros(shape, pool.dtype), host_memory)
            for pool in (k_pool, v_pool)
        ]
    return EngineState(
        scheduler=init_scheduler(sizes),
        k_pool=k_pool,
        v_pool=v_pool,
        host_k_pool=host_pools[0],
        host_v_pool=host_pools[1],
    )


def read_blocks(
    state: EngineState, blocks: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of blocks [A] int32, [A, L, B, K, D] each, in the pool's storage type.

    Zeros for ids out of range. `implementation`: of `gather_blocks`; a model's `attention`."""
    return gather_blocks(state.k_pool, state.v_pool, blocks, implementation=implementation)


def write_blocks(
    state: EngineState,
    blocks: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    implementation: str | None = None,
) -> EngineState:
    """The inverse of `read_blocks`: the pool with these blocks' content. Donate the state.

    Ids out of range are dropped; none may occur twice."""
    k_pool, v_pool = scatter_blocks(
        state.k_pool, state.v_pool, keys, values, blocks, implementation=implementation
    )
    return dataclasses.replace(state, k_pool=k_pool, v_pool=v_pool)


def read_host_blocks(
    host_pools: tuple[jax.Array, jax.Array], blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`read_blocks` for the host pool (keys, values).

    Ids [A] int32; those that are NULL come last, and what is read for them is zeros."""
    count, places = _real(blocks)

    def read(pool):
        buffer = jnp.zeros((pool.shape[0], blocks.shape[0], *pool.shape[2:]), pool.dtype)
        return move_blocks(pool, buffer, blocks, places, count)[0].swapaxes(0, 1)

    return read(host_pools[0]), read(host_pools[1])


def write_host_blocks(
    host_pools: tuple[jax.Array, jax.Array], blocks: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The inverse of `read_host_blocks`: the host pools with these blocks' content. Donate them."""
    count, places = _real(blocks)

    def write(pool, content):
        return move_blocks(content.swapaxes(0, 1), pool, places, blocks, count)[0]

    return write(host_pools[0], keys), write(host_pools[1], values)


def _real(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(how many ids are not NULL, 0 .. A - 1)."""
    places = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    return (blocks != NULL).sum(dtype=jnp.int32), places


def step(
    params, state: EngineState, *, config: StepConfig, num_tokens: int
) -> tuple[EngineState, StepOutput]:
    """One step: `commit` after `execute` after `schedule`.

    Args:
      params: the model's pytree.
      state: consumed; donate it.
      num_tokens: T, static: the step's token budget and the shape of the model's batch.
    """
    sizes = config.scheduler
    scheduler, plan = schedule(state.scheduler, config=sizes, num_tokens=num_tokens)
    inputs = sampling_inputs(scheduler, plan)
    plan, host_k_pool, host_v_pool = swap_out_blocks(state, plan)
    k_pool, v_pool, sampled = execute(
        params,
        state.k_pool,
        state.v_pool,
        plan,
        inputs,
        config=sizes,
        model=config.model,
        host_pools=(host_k_pool, host_v_pool),
    )
    scheduler, output = commit(scheduler, plan, sampled, config=sizes)
    state = EngineState(
        scheduler=scheduler,
        k_pool=k_pool,
        v_pool=v_pool,
        host_k_pool=host_k_pool,
        host_v_pool=host_v_pool,
    )
    return state, output


@pytree
class RunOutput:
    """What `run` did. Entries at and past `num_steps` are zeros."""

    num_steps: jax.Array  #: [] int32, steps taken, at most n
    steps: StepOutput  #: every field with a leading axis [n]


def run(
    params, state: EngineState, *, config: StepConfig, num_tokens: int, num_steps: int
) -> tuple[EngineState, RunOutput]:
    """Up to `num_steps` steps in one `while_loop` on the device, without the host.

    Ends early when the host is needed: a request has ended (its row can be given away), or
    there is nothing left to do.

    Args:
      num_steps: n, static; the outputs of all steps are kept.
    """

    def body(carry):
        i, _, state, outputs = carry
        state, output = step(params, state, config=config, num_tokens=num_tokens)
        outputs = jax.tree.map(lambda all_, one: all_.at[i].set(one), outputs, output)
        ended = (output.status == Status.FINISHED).any()
        idle = (output.num_running == 0) & (output.num_waiting == 0)
        return i + 1, ended | idle, state, outputs

    shapes = jax.eval_shape(
        lambda p, s: step(p, s, config=config, num_tokens=num_tokens)[1], params, state
    )
    outputs = jax.tree.map(lambda x: jnp.zeros((num_steps, *x.shape), x.dtype), shapes)
    start = (jnp.int32(0), jnp.asarray(False), state, outputs)
    count, _, state, outputs = lax.while_loop(
        lambda carry: (carry[0] < num_steps) & ~carry[1], body, start
    )
    return state, RunOutput(num_steps=count, steps=outputs)
