"""Seconds of a device program, dispatch left out."""

import time
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

TRIPS = 16
"""Calls in one compiled loop."""


def looped(call: Callable[..., Any], num_layers: int, trips: int = TRIPS) -> Callable[..., Any]:
    """A compiled function that runs ``call(x, layer, *rest)`` so many times, each on the last
    one's result, going through the layers. Its arguments are ``(x, *rest)``.
    """

    def run(x, *rest):
        def body(i, x):
            return jax.tree.map(
                lambda new, old: new.astype(old.dtype), call(x, lax.rem(i, num_layers), *rest), x
            )

        return lax.fori_loop(0, trips, body, x)

    return jax.jit(run)


def seconds_per_call(
    call: Callable[..., Any],
    x: Any,
    *rest: Any,
    num_layers: int,
    target_s: float = 0.05,
    quick: bool = False,
) -> float:
    """Seconds of one ``call(x, layer, *rest)`` on the device.

    A loop of calls is compiled once and launched again and again, each launch on the last one's
    result and without waiting, so that the device always has work; the least of three rounds.

    Args:
      target_s: how long a round takes, about.
      quick: one launch of two calls: for a look at the course of things, not for figures.
    """
    trips = 2 if quick else TRIPS
    run = looped(call, num_layers, trips)
    x = jax.block_until_ready(run(x, *rest))
    if quick:
        return _round(run, x, rest, 1) / trips
    once = _round(run, x, rest, 1)
    launches = max(2, min(1000, int(target_s / max(once, 1e-7))))
    return min(_round(run, x, rest, launches) for _ in range(3)) / (launches * trips)


def _round(run: Callable[..., Any], x: Any, rest: tuple, launches: int) -> float:
    started = time.perf_counter()
    for _ in range(launches):
        x = run(x, *rest)
    jax.block_until_ready(x)
    return time.perf_counter() - started
