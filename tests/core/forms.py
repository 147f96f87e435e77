"""The ways in which a step is used under `jax.jit`, compiled with the state donated."""

from functools import partial

import jax

from pagedjax.core.step import run, step


def compile_form(form, params, state, *, config, num_tokens):
    """One step ("step"), several in a `while_loop` ("run") or in a `scan`; shapes suffice."""
    one = partial(step, config=config, num_tokens=num_tokens)
    function = {
        "step": one,
        "run": partial(run, config=config, num_tokens=num_tokens, num_steps=30),
        "scan": lambda p, s: jax.lax.scan(lambda c, _: one(p, c), s, None, length=3),
    }[form]
    return jax.jit(function, donate_argnums=1).lower(params, state).compile()
