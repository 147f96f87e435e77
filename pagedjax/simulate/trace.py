"""What a simulation is given: sizes, a trace of arrivals, limits."""

import dataclasses
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.core.config import PREEMPTION_POLICIES, SCHEDULING_POLICIES, SchedulerConfig
from pagedjax.core.policies import one_of
from pagedjax.core.pytree import pytree
from pagedjax.core.state import NULL

NEVER = NULL
"""Arrival step of a request that does not come: padding, so that traces have one length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Everything static about a simulation. Hashable.

    Attributes:
      scheduler: sizes and switches. Give `use_cond=False` under `vmap`, where both branches of a
        conditional are computed anyway.
      num_tokens: T, the token budget of every step. (An engine's shell picks a size for each.)
      num_steps: steps to take.
      max_entries: E, most requests that enter the table in one step; the rest wait outside.
      vocab_size: tokens are below it.
      scheduling_policies: the policies among which `Limits.scheduling_policy` chooses, by names or
        functions, so that one compilation has several; empty: the scheduler's own. `round_robin` is
        the scheduler's own or none. preemption_policies: likewise.
    """

    scheduler: SchedulerConfig
    num_tokens: int
    num_steps: int
    max_entries: int = 8
    vocab_size: int = 1 << 20
    scheduling_policies: tuple[str | Callable, ...] = ()
    preemption_policies: tuple[str | Callable, ...] = ()

    def __post_init__(self):
        for name in ("num_tokens", "num_steps", "max_entries", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vocab_size > 1 << 30:
            raise ValueError(f"vocab_size must be at most 2**30, got {self.vocab_size}")
        for kind, known in (
            ("scheduling", SCHEDULING_POLICIES),
            ("preemption", PREEMPTION_POLICIES),
        ):
            known = [name for name in known if name != "round_robin"]
            for policy in getattr(self, f"{kind}_policies"):
                if not callable(policy) and policy not in known:
                    raise ValueError(
                        f"{kind}_policies must hold functions or names of {', '.join(known)}, got "
                        f"{policy!r}"
                    )
        if self.num_tokens > self.scheduler.max_num_batched_tokens:
            raise ValueError(
                f"num_tokens must be at most max_num_batched_tokens "
                f"({self.scheduler.max_num_batched_tokens}), got {self.num_tokens}"
            )


@pytree
class Trace:
    """What comes in, oldest first. All [Q] int32. `make_trace` makes one from lists."""

    arrival_step: jax.Array  #: step from which the request is there; never falls. Or `NEVER`
    num_prompt_tokens: jax.Array
    num_output_tokens: jax.Array  #: how many it produces, at least 1
    prefix_group: jax.Array  #: requests of one group begin with the same tokens
    num_prefix_tokens: jax.Array  #: with how many of them; 0 shares with nobody
    priority: jax.Array  #: lower is more urgent, where a policy goes by it


@pytree
class Limits:
    """What may be used of what `SchedulerConfig` reserves. All [] int32; see `make_limits`.

    With a value out of range nothing is simulated: every request is refused, with
    `Refusal.INVALID_LIMITS`.
    """

    num_blocks: jax.Array  #: blocks of the pool, 1 to `config.num_blocks`
    num_rows: jax.Array  #: rows of the request table, 1 to `config.num_rows`
    scheduling_policy: jax.Array | int = 0
    """Index into `SimulationConfig.scheduling_policies`; 0 if there are none."""
    preemption_policy: jax.Array | int = 0
    """Index into `SimulationConfig.preemption_policies`; 0 if there are none."""


def make_trace(
    arrival_step: Sequence[int],
    num_prompt_tokens: Sequence[int],
    num_output_tokens: Sequence[int],
    prefix_group: Sequence[int] | None = None,
    num_prefix_tokens: Sequence[int] | None = None,
    priority: Sequence[int] | None = None,
    *,
    size: int | None = None,
) -> Trace:
    """A trace from sequences of one length, padded to `size` requests (None: not padded).

    Raises `ValueError` naming the field, the value given and the values accepted.
    """
    zeros = np.zeros(len(arrival_step), np.int32)
    fields = {
        "arrival_step": (arrival_step, 0),
        "num_prompt_tokens": (num_prompt_tokens, 1),
        "num_output_tokens": (num_output_tokens, 1),
        "prefix_group": (zeros if prefix_group is None else prefix_group, 0),
        "num_prefix_tokens": (zeros if num_prefix_tokens is None else num_prefix_tokens, 0),
        "priority": (zeros if priority is None else priority, -(1 << 30)),
    }
    count = len(arrival_step)
    size = count if size is None else size
    if size < max(count, 1):
        raise ValueError(f"size must be at least {max(count, 1)} (got {size})")
    arrays = {}
    for name, (values, least) in fields.items():
        array = np.asarray(values, np.int64)
        if array.shape != (count,):
            raise ValueError(f"{name} must have shape ({count},) (got {array.shape})")
        if array.size and not least <= array.min() <= array.max() < 1 << 30:
            bad = array[(array < least) | (array >= 1 << 30)][0]
            raise ValueError(f"{name} must be from {least} to {(1 << 30) - 1} (got {bad})")
        padding = {"arrival_step": NEVER, "priority": 0}.get(name, least)
        padded = np.full(size, padding, np.int32)
        padded[:count] = array
        arrays[name] = jnp.asarray(padded)
    if (np.diff(np.asarray(arrival_step)) < 0).any():
        raise ValueError("arrival_step must never fall: the oldest request comes first")
    return Trace(**arrays)


def make_limits(
    config: SchedulerConfig | SimulationConfig,
    *,
    num_blocks: int | None = None,
    num_rows: int | None = None,
    scheduling_policy: str | Callable | int | None = None,
    preemption_policy: str | Callable | int | None = None,
) -> Limits:
    """Limits from numbers; what is left out is what `config` has.

    Args:
      scheduling_policy, preemption_policy: one of those among which the limits choose, itself or by
        its number; they are `config`'s, which must be a `SimulationConfig` then. None: the first.

    Raises `ValueError` naming the field, the value given and the values accepted.
    """
    sizes = config.scheduler if isinstance(config, SimulationConfig) else config
    values = {}
    for name, value in (("num_blocks", num_blocks), ("num_rows", num_rows)):
        most = getattr(sizes, name)
        number = most if value is None else _whole(value)
        if number is None or not 1 <= number <= most:
            raise ValueError(f"{name} must be from 1 to {most}, config.{name} (got {value})")
        values[name] = number
    for name, value in (
        ("scheduling_policy", scheduling_policy),
        ("preemption_policy", preemption_policy),
    ):
        values[name] = _policy_number(config, name, value)
    return Limits(**{name: jnp.asarray(value, jnp.int32) for name, value in values.items()})


def _policy_number(config, field: str, policy) -> int:
    """The number of a policy, see `make_limits`."""
    if policy is None:
        return 0
    plural = field.replace("policy", "policies")
    choice = getattr(config, plural, ())
    if not choice:
        raise ValueError(
            f"{field} must be left out where no SimulationConfig.{plural} are given to choose "
            f"among (got {policy!r})"
        )
    if isinstance(policy, str) or callable(policy):
        if policy not in choice:
            names = ", ".join(getattr(each, "__name__", str(each)) for each in choice)
            raise ValueError(f"{field} must be one of config.{plural}: {names} (got {policy!r})")
        return choice.index(policy)
    number = _whole(policy)
    if number is None or not 0 <= number < len(choice):
        raise ValueError(
            f"{field} must be from 0 to {len(choice) - 1}, an index into config.{plural} "
            f"(got {policy!r})"
        )
    return number


def _whole(value) -> int | None:
    """The value as an int; None if it is no whole number, or of a type that is none."""
    try:
        return None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return None


def checked(config: SimulationConfig, limits: Limits) -> tuple[jax.Array, Limits]:
    """([] bool: every limit is in range, the limits, or if not, those of `config`)."""
    sizes = config.scheduler
    ranges = {
        "num_blocks": (1, sizes.num_blocks),
        "num_rows": (1, sizes.num_rows),
        "scheduling_policy": (0, max(len(config.scheduling_policies) - 1, 0)),
        "preemption_policy": (0, max(len(config.preemption_policies) - 1, 0)),
    }
    valid = jnp.asarray(True)
    for name, (least, most) in ranges.items():
        value = jnp.asarray(getattr(limits, name))
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} of the limits must be of an integer type (got {value.dtype})")
        valid &= (least <= value) & (value <= most)
    return valid, jax.tree.map(
        lambda value, default: jnp.where(valid, value, default).astype(jnp.int32),
        limits,
        make_limits(config),
    )


def with_policies(config: SimulationConfig, limits: Limits) -> SimulationConfig:
    """The configuration with the scheduler's policies being those that the limits choose.

    It holds traced values if the limits do: make it inside of what is traced. The limits must be
    in range, see `checked`.
    """
    chosen = {
        name: one_of(policies, getattr(limits, name))
        for name, policies in (
            ("scheduling_policy", config.scheduling_policies),
            ("preemption_policy", config.preemption_policies),
        )
        if policies
    }
    if not chosen:
        return config
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **chosen))
