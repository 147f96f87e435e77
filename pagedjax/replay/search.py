"""The first state of which something does not hold."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pagedjax.core.invariants import check_invariants
from pagedjax.core.state import SchedulerState, Status
from pagedjax.replay.player import Player

Predicate = Callable[[SchedulerState], bool]


@functools.cache
def _check() -> Callable:
    return jax.jit(check_invariants, static_argnames="config")


def named_predicates(player: Player) -> dict[str, Predicate]:
    """Predicates that have names: `check_invariants`, no invariant is broken."""

    def invariants(state: SchedulerState) -> bool:
        counts = dataclasses.asdict(jax.device_get(_check()(state, config=player.config)))
        return not any(np.any(count) for count in counts.values())

    return {"check_invariants": invariants}


def compiled_predicate(text: str, player: Player) -> Predicate:
    """A predicate from its name, or from a Python expression.

    The expression may use `state`, its parts `rows`, `blocks`, `prefix`, `swap` and `counters`, the
    number of committed steps `step`, `Status`, `config` and `np`; all arrays are numpy's.

    Raises `ValueError` for what is neither.
    """
    named = named_predicates(player)
    if text in named:
        return named[text]
    try:
        code = compile(text, "<predicate>", "eval")
    except SyntaxError as error:
        raise ValueError(
            f"the predicate must be a Python expression or one of {', '.join(named)}; {text!r} is "
            f"not: {error}"
        ) from error

    def holds(state: SchedulerState) -> bool:
        state = jax.device_get(state)
        names: dict[str, Any] = {
            **{"state": state, "rows": state.rows, "blocks": state.blocks, "prefix": state.prefix},
            **{
                "counters": state.counters,
                "swap": state.swap,
                "step": int(state.step),
                "np": np,
                "Status": Status,
            },
            "config": player.config,
        }
        try:
            return bool(np.all(eval(code, names)))
        except Exception as error:
            raise ValueError(f"the predicate {text!r} fails: {error!r}") from error

    return holds


def first_failure(
    player: Player, holds: Predicate, *, first: int = 0, last: int | None = None, linear: bool
) -> int | None:
    """The first state, from `first` to `last`, of which `holds` is false; None if there is none.

    Args:
      linear: look at every state. False: by halves, which is right only if, once it is false, it
        stays false; a failure that goes away again may then be missed.
    """
    last = player.num_steps if last is None else last
    if linear:
        return next((n for n, state in player.walk(first, last) if not holds(state)), None)
    if not holds(player.state(first)):
        return first
    if holds(player.state(last)):
        return None
    good, bad = first, last
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(player.state(middle)) else (good, middle)
    return bad
