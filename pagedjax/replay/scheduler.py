"""The scheduler's part of a step, with tokens that are given instead of sampled. Pure."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.beam import Picks
from pagedjax.core.beam import sampling as beam_sampling
from pagedjax.core.commit import commit
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.pytree import pytree
from pagedjax.core.ragged import take
from pagedjax.core.requests import RequestParams, add_request
from pagedjax.core.schedule import schedule
from pagedjax.core.state import NULL, SchedulerState, init_scheduler
from pagedjax.engine.device import end_rows
from pagedjax.eventlog import LogError
from pagedjax.eventlog.checksum import leaves
from pagedjax.eventlog.format import Kind
from pagedjax.replay.log import Event
from pagedjax.sampling import Sampled


@pytree
class Copies:
    """Blocks that a step copied, [A] int32 each, NULL for none."""

    src: jax.Array
    dst: jax.Array


@pytree
class Known:
    """What came out of a step. All [S]."""

    tokens: jax.Array  #: int32, each row's next token, if it gets one
    nan: jax.Array  #: bool, rows whose logits were NaN
    parents: jax.Array  #: int32, row whose beam this row carries on, or NULL
    cum_logprobs: jax.Array  #: float32, of beams that are carried on; 0 in a log without text


def step_with_tokens(
    state: SchedulerState, known: Known, *, config: SchedulerConfig, num_tokens: int
) -> tuple[SchedulerState, Copies]:
    """`commit` after `schedule`, as in `pagedjax.core.step`, without a model. What is swapped is in
    the plan and needs no more: nothing in the scheduler depends on the pools' content."""
    state, plan = schedule(state, config=config, num_tokens=num_tokens)
    (num_ranks,) = plan.row_ids.shape
    sampled = Sampled(
        token_ids=take(known.tokens, plan.row_ids, 0),
        logprob=jnp.zeros(num_ranks, jnp.float32),
        top_token_ids=jnp.zeros((num_ranks, config.max_logprobs), jnp.int32),
        top_logprobs=jnp.zeros((num_ranks, config.max_logprobs), jnp.float32),
        nan=take(known.nan, plan.row_ids, False),
    )
    picks = None
    if config.max_beam_width:
        carried = known.parents != NULL
        picks = Picks(
            moving=beam_sampling(state.rows, plan),
            parent=known.parents,
            token=known.tokens,
            logprob=jnp.zeros(config.num_rows, jnp.float32),  # goes nowhere but to the host
            cum_logprob=jnp.where(carried, known.cum_logprobs, state.rows.cum_logprob),
        )
    state, _ = commit(state, plan, sampled, config=config, picks=picks)
    return state, Copies(src=plan.copy_src, dst=plan.copy_dst)


@functools.cache
def _compiled() -> tuple[Callable, Callable, Callable]:
    """What adds a request, ends rows, takes a step; compiled once for each configuration."""

    def end(state, rows, *, config):
        return end_rows(state, rows, config=config)[0]

    return (
        jax.jit(add_request, static_argnames="config"),
        jax.jit(end, static_argnames="config"),
        jax.jit(step_with_tokens, static_argnames=("config", "num_tokens")),
    )


class Transitions:
    """What makes a state of the one before it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._add, self._end, self._step = _compiled()

    def initial(self) -> SchedulerState:
        """Where an engine begins."""
        return init_scheduler(self.config)

    def apply(self, state: SchedulerState, event: Event) -> SchedulerState:
        """The state after an event between two steps."""
        if event.kind == Kind.STATE:
            return scheduler_of(state, event.arrays)
        if event.kind == Kind.END:
            return self._end(state, self.rows(event), config=self.config)
        padded = np.zeros(self.config.max_padded_len, np.int32)
        tokens = event.arrays["token_ids"]
        padded[: len(tokens)] = tokens
        row, params = np.int32(event.values["row"]), request_params(event)
        count = np.int32(len(tokens))
        return self._add(state, row, padded, count, params, config=self.config)

    def rows(self, event: Event) -> np.ndarray:
        """[S] bool: the rows that an END names."""
        mask = np.zeros(self.config.num_rows, bool)
        mask[event.arrays["rows"]] = True
        return mask

    def step(
        self, state: SchedulerState, result: dict[str, np.ndarray], num_tokens: int
    ) -> tuple[SchedulerState, Copies]:
        """The state after a step with this result."""
        rows, count = result["rows"], self.config.num_rows
        known = Known(
            tokens=np.zeros(count, np.int32),
            nan=np.zeros(count, bool),
            parents=np.full(count, NULL, np.int32),
            cum_logprobs=np.zeros(count, np.float32),
        )
        known.tokens[rows] = result["token_ids"]
        known.nan[result.get("nan", [])] = True
        known.parents[rows] = result.get("beam_parents", NULL)
        known.cum_logprobs[rows] = result.get("cum_logprobs", 0)
        return self._step(state, known, config=self.config, num_tokens=num_tokens)


def scheduler_of(like: SchedulerState, arrays: dict[str, np.ndarray]) -> SchedulerState:
    """The state that a STATE event holds. Raises `LogError` if it is not shaped like `like`."""
    values = []
    for name, leaf in leaves(like).items():
        array = arrays.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise LogError(f"the log holds a state without a {name} of {leaf.dtype} {leaf.shape}")
        values.append(jnp.asarray(array))
    return jax.tree.unflatten(jax.tree.structure(like), values)


def request_params(event: Event) -> RequestParams:
    """What an ADD says of its request."""
    names = [field.name for field in dataclasses.fields(RequestParams)]
    missing = [name for name in names if name not in event.arrays]
    if missing:
        raise LogError(f"the log holds a request without {', '.join(missing)}")
    return RequestParams(**{name: event.arrays[name] for name in names})
