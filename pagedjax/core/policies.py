"""Who starts next and who steps back: policies, as pure functions of the scheduler's state.

A policy gives every row of the table a sort key: `(state, config) -> [S] int32`, lower first. It
says nothing else. What must hold under every policy is not left to it:

- running rows come before waiting ones, and get the budget in the order of their arrival;
- the oldest running row is never a victim and never yields, so it ends;
- a row that has been resumed becomes a victim before it has produced a token only when none but
  such rows, and the oldest, are left;
- a waiting row that newer ones have passed over in `max_passed_over` steps goes before all others,
  in order of arrival. So no request starves, whatever the policy; with `max_passed_over` 0 one
  that always loses by the policy may. First come first served passes nobody over.

A row's key decides only among rows of the same standing; equal keys go by arrival.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.core.beam import leaders
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.prefix import lookup
from pagedjax.core.ragged import take
from pagedjax.core.state import NULL, SchedulerState, Status


def is_waiting(status):
    """Whether rows of this status want to be admitted."""
    return (status == Status.WAITING) | (status == Status.SWAPPED)


def was_preempted(rows):
    """[S] bool: rows that wait to go on."""
    return is_waiting(rows.status) & (rows.num_preemptions > 0)


# -- admission: the lowest key first ---------------------------------------------------------------


def fcfs(state: SchedulerState, config: SchedulerConfig):
    """First come, first served."""
    return state.rows.arrival


def priority(state: SchedulerState, config: SchedulerConfig):
    """The most urgent request first. A stream of urgent requests delays the others up to the bound
    of `max_passed_over`."""
    return state.rows.priority


def round_robin(state: SchedulerState, config: SchedulerConfig):
    """Rows take turns: who has waited longest since its last turn goes first.

    A turn is a time slice: while others wait for a place, a row that has produced
    `time_slice_tokens` tokens yields and queues up again behind all that have arrived (see
    `yielding`). Only the oldest running row keeps its place.
    """
    return jnp.maximum(state.rows.arrival, state.rows.turn)


def longest_prefix(state: SchedulerState, config: SchedulerConfig):
    """The row with most blocks in the prefix cache first, as in SGLang's longest-prefix match.

    Cached blocks of a chain are a run from its beginning, so a binary search finds the end of it.
    By hash alone: a collision gives a row a better place in the queue and nothing else.
    """
    if not config.enable_prefix_caching:
        return jnp.zeros(config.num_rows, jnp.int32)
    rows, row = state.rows, jnp.arange(config.num_rows)
    low = jnp.zeros(config.num_rows, jnp.int32)  # so many are cached
    high = rows.num_tokens // config.block_size  # at most so many
    for _ in range(config.max_blocks_per_seq.bit_length()):
        middle = (low + high + 1) // 2
        hashes = rows.block_hashes[row, jnp.maximum(middle - 1, 0)]
        cached = lookup(config, state.prefix, hashes) != NULL
        low, high = jnp.where(cached, middle, low), jnp.where(cached, high, middle - 1)
        low = jnp.minimum(low, jnp.maximum(high, 0))
    # A row that is swapped out has all it had computed.
    kept = jnp.where(rows.status == Status.SWAPPED, rows.num_computed_tokens, 0)
    return -jnp.maximum(low, kept // config.block_size)


# -- preemption: the greatest key steps back first -------------------------------------------------


def newest(state: SchedulerState, config: SchedulerConfig):
    """The latest arrival steps back first: the least is lost, and the order of arrival kept."""
    return state.rows.arrival


def most_tokens(state: SchedulerState, config: SchedulerConfig):
    """The row that has generated most steps back first: it gives most blocks back."""
    return state.rows.num_tokens - state.rows.num_prompt_tokens


_SCHEDULING = {
    "fcfs": fcfs,
    "priority": priority,
    "round_robin": round_robin,
    "longest_prefix": longest_prefix,
}
_PREEMPTION = {"newest": newest, "most_tokens": most_tokens, "lowest_priority": priority}


def one_of(policies: Sequence[str | Callable], which) -> Callable:
    """A policy that is one of several, by a number that may be traced: `jax.vmap` over policies.

    The keys of all of them are computed. Not for `round_robin`, which is more than its keys.

    Args:
      policies: names of either kind, or functions.
      which: [] int32, index into `policies`. A number that is out of range is refused; of a traced
        one the caller must know that it is not (as `pagedjax.simulate` does).
    """
    if not isinstance(which, jax.core.Tracer) and not 0 <= which < len(policies):
        raise ValueError(f"which must be from 0 to {len(policies) - 1}, got {which}")
    if "round_robin" in policies:
        raise ValueError(f"round_robin cannot be one of several policies, got {tuple(policies)}")
    known = _SCHEDULING | _PREEMPTION
    functions = [known.get(policy, policy) for policy in policies]

    def policy(state: SchedulerState, config: SchedulerConfig):
        return jnp.stack([_keys(each, config, state) for each in functions])[which]

    return policy


def rank_rows(config: SchedulerConfig, state: SchedulerState, held_back):
    """[S] int32: rank -> row. Running rows in order of arrival, then waiting ones: those passed
    over too often in order of arrival, the others by `scheduling_policy`. Waiting rows that are
    `held_back` [S] bool come after all others; those of a static batch before all others."""
    rows = state.rows
    status, arrival = rows.status, rows.arrival
    row = jnp.arange(config.num_rows, dtype=jnp.int32)
    if config.scheduling_policy == "fcfs":
        waiting_key = jnp.where(is_waiting(status) & ~held_back, arrival + (1 << 30), NULL)
        key = jnp.where(status == Status.RUNNING, arrival, waiting_key)
        return lax.sort((key, row), num_keys=1)[1]
    policy = _SCHEDULING.get(config.scheduling_policy, config.scheduling_policy)
    key = _keys(policy, config, state)
    first = rows.num_passed_over >= (config.max_passed_over or NULL)
    waiting = is_waiting(status) & ~held_back
    group = jnp.where(waiting, jnp.where(first, 2, 3), jnp.where(status == Status.RUNNING, 0, 4))
    if config.batching == "static":
        group = jnp.where(was_preempted(rows), 1, group)
    key = jnp.where(group == 3, key, 0)
    return lax.sort((group.astype(jnp.int32), key, arrival, row), num_keys=3)[3]


def victim_order(config: SchedulerConfig, state: SchedulerState, order, num_running, yields):
    """[S] int32: the ranks of running rows from the one that stays longest to the first victim,
    then all other ranks.

    Args:
      order: [S] int32, rank -> row. yields: [S] bool by rank, or None.
    """
    rows, s = state.rows, config.num_rows
    rank = jnp.arange(s, dtype=jnp.int32)
    resumed = rows.num_preemptions > 0
    early = (resumed & (rows.num_tokens == rows.num_tokens_started))[order]
    group = jnp.where(early, 1, 2)
    if yields is not None:
        group = jnp.where(yields, 3, group)
    group = jnp.where(rank == 0, 0, jnp.where(rank < num_running, group, 4)).astype(jnp.int32)
    newest_first = config.preemption_policy == "newest"  # rank is the order of arrival
    if newest_first and not config.max_beam_width:
        key = group * s + rank
        return lax.sort((key, rank), num_keys=1)[1]
    key, place = jnp.zeros(s, jnp.int32), rank
    if not newest_first:
        policy = _PREEMPTION.get(config.preemption_policy, config.preemption_policy)
        key = _keys(policy, config, state)[order]
    if config.max_beam_width:  # the beams of a search go together
        leader = jnp.where(rank < num_running, leaders(rows)[order], NULL)
        group, key, place = (_of_beams(leader, x) for x in (group, key, place))
    return lax.sort((group, key, place, rank), num_keys=4)[3]


def _of_beams(leader, values):
    """[S] values, for beams the least of all with the same leader [S] (NULL: no beam)."""
    least = jnp.full(values.shape, NULL, values.dtype).at[leader].min(values, mode="drop")
    return jnp.where(leader != NULL, take(least, leader, 0), values)


def yielding(config: SchedulerConfig, state: SchedulerState, order, held_back, num_running):
    """[S] bool by rank: rows whose time slice is over while others wait for their place; None under
    other policies than the round robin. At most `max_preemptions` and as many as wait."""
    if config.scheduling_policy != "round_robin":
        return None
    rows = state.rows
    waiting = is_waiting(rows.status) & ~held_back
    blocked = (waiting & (rows.arrival == state.blocked_arrival)).any()
    wanted = (num_running >= config.max_num_seqs) | blocked
    most = jnp.minimum(waiting.sum(dtype=jnp.int32), config.max_preemptions)
    over = rows.num_tokens - rows.num_tokens_started >= config.time_slice_tokens
    rank = jnp.arange(config.num_rows)
    if config.max_beam_width:  # a search keeps its places to its end
        over &= leaders(rows) == NULL
    over = over[order] & (rank > 0) & (rank < num_running) & wanted
    return over & (jnp.cumsum(over, dtype=jnp.int32) <= most)


def _keys(policy, config: SchedulerConfig, state: SchedulerState):
    key = jnp.asarray(policy(state, config))
    if key.shape != (config.num_rows,) or key.dtype != jnp.int32:
        raise ValueError(
            f"a policy must return [num_rows] = [{config.num_rows}] int32 keys, got "
            f"{key.dtype} {list(key.shape)}"
        )
    return key
