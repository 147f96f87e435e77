"""What a simulation gives back, and the figures drawn from it."""

from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.pytree import pytree
from pagedjax.simulate.trace import Limits, Trace

NOT_YET = np.int32(-1)
"""Step of something that has not happened."""


class Refusal(IntEnum):
    """Why a request was refused."""

    NONE = 0  #: it was not
    NEVER_FITS = 1  #: it can never fit the limits
    INVALID_LIMITS = 2  #: a value of the limits is out of range: nothing was simulated


@pytree
class Requests:
    """What became of each request. All [Q] int32; steps count from 0, -1 is "has not happened"."""

    admission_step: jax.Array  #: it began to run
    first_token_step: jax.Array  #: its first token was produced
    finish_step: jax.Array  #: its last token was produced, or it was refused
    num_cached_tokens: jax.Array  #: prompt tokens found in the prefix cache; -1 before admission
    num_preemptions: jax.Array
    refused: jax.Array  #: `Refusal`


@pytree
class Steps:
    """What each step did. All [num_steps] int32, as it is after the step."""

    num_running: jax.Array  #: rows
    num_waiting: jax.Array  #: rows of the table that wait, new or preempted
    num_outside: jax.Array  #: requests that are there but have no row yet
    num_scheduled_tokens: jax.Array
    num_free_blocks: jax.Array  #: empty
    num_evictable_blocks: jax.Array  #: cached and held by nobody
    num_preemptions: jax.Array  #: in this step


@pytree
class Result:
    """What `simulate` returns."""

    requests: Requests
    steps: Steps


@pytree
class Metrics:
    """Figures of one simulation, of `measure`."""

    time_to_first_token: jax.Array  #: [Q] int32: steps until the first token, at least 1; or -1
    queueing: jax.Array  #: [Q] int32: steps from arrival to admission; or -1
    preemption_rate: jax.Array  #: [] float32: preemptions for each admitted request
    hit_rate: jax.Array  #: [] float32: share of the admitted prompts' tokens that were cached
    pool_utilisation: jax.Array  #: [] float32: share of blocks held, mean over busy steps
    num_finished: jax.Array  #: [] int32: requests served to the end


def measure(trace: Trace, limits: Limits, result: Result) -> Metrics:
    """What one simulation shows; `vmap` it as `simulate` was. Rates are NaN if nothing ran."""
    requests, steps = result.requests, result.steps
    arrival = jnp.maximum(trace.arrival_step, 0)

    def since_arrival(step, more):
        return jnp.where(step == NOT_YET, NOT_YET, step + more - arrival)

    admitted = requests.admission_step != NOT_YET
    prompt = jnp.where(admitted, trace.num_prompt_tokens, 0).sum()
    cached = jnp.where(admitted, requests.num_cached_tokens, 0).sum()
    held = limits.num_blocks - steps.num_free_blocks - steps.num_evictable_blocks
    busy = steps.num_scheduled_tokens > 0
    served = (requests.finish_step != NOT_YET) & (requests.refused == 0)
    return Metrics(
        time_to_first_token=since_arrival(requests.first_token_step, 1),
        queueing=since_arrival(requests.admission_step, 0),
        preemption_rate=requests.num_preemptions.sum() / admitted.sum(),
        hit_rate=cached / prompt,
        pool_utilisation=jnp.where(busy, held / limits.num_blocks, 0).sum() / busy.sum(),
        num_finished=served.sum(dtype=jnp.int32),
    )
