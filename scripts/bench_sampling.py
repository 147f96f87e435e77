"""Times the sampler on this machine beside two other ways to do the same, in one run.

    python scripts/bench_sampling.py --rows 1 2 32 256

Columns: `sampler` is `pagedjax.sampling.sample`; `sort` is one full sort of [R, V] for whatever is
asked, as simple samplers do; `bisect` finds thresholds by bisection over float bits (one pass over
[R, V] per bit; it keeps all tokens that tie with the last) and then draws as the sampler does;
`gumbel` is `jax.random.categorical` with a key per row (temperature only); `argmax` is `jnp.argmax`
(greedy only, and blind to NaN). Milliseconds are medians per call of a compiled function; ratios
are how many times longer than the sampler. `--min` prints minima, which say more on a busy machine.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.sampling import NULL, SamplingInputs, sample

MAX_LOGPROBS = 20
WORKLOADS: dict[str, dict[str, float]] = {
    "greedy": {},
    "greedy, logprobs 20": {"num_logprobs": 20},
    "temperature": {"temperature": 0.8},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "all": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.02,
        "num_logprobs": 20,
        "forbid_stop": True,
    },
}


def make_inputs(rows: int, seed: int, params: dict[str, float]) -> SamplingInputs:
    """The same parameters for all rows, and a seed of its own for each."""

    def fill(name: str, default: float, dtype: object) -> jax.Array:
        return jnp.full((rows,), params.get(name, default), dtype)

    return SamplingInputs(
        temperature=fill("temperature", 0, jnp.float32),
        top_k=fill("top_k", 0, jnp.int32),
        top_p=fill("top_p", 1, jnp.float32),
        min_p=fill("min_p", 0, jnp.float32),
        seed=jnp.arange(rows, dtype=jnp.uint32) + seed * rows,
        position=fill("position", 0, jnp.int32),
        forbid_stop=fill("forbid_stop", False, bool),
        stop_token_ids=jnp.full((rows, 16), NULL, jnp.int32).at[:, 0].set(2),
        num_logprobs=fill("num_logprobs", -1, jnp.int32),
        valid=fill("valid", True, bool),
    )


def _logprobs(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, ...]:
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0]
    return token, chosen, *lax.top_k(logprobs, MAX_LOGPROBS)


def _keys(inputs: SamplingInputs) -> jax.Array:
    def key(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.key(seed), position)

    return jax.vmap(key)(inputs.seed, inputs.position)


def sort_sampler(logits: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, ...]:
    """The textbook: sort, cumulate, mask, draw, all of it always."""
    rows, vocab = logits.shape
    rank = jnp.arange(vocab)
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1)[:, None]
    order = jnp.argsort(logits, axis=-1, descending=True)
    x = jnp.take_along_axis(logits, order, axis=-1) / temperature
    x = jnp.where(x >= x[:, :1] + jnp.log(inputs.min_p)[:, None], x, -jnp.inf)
    top_k = jnp.where(inputs.top_k > 0, inputs.top_k, vocab)[:, None]
    x = jnp.where(rank < top_k, x, -jnp.inf)
    p = jax.nn.softmax(x)
    x = jnp.where(jnp.cumsum(p, axis=-1) - p < inputs.top_p[:, None], x, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(_keys(inputs), x)
    place = jnp.where(inputs.temperature > 0, drawn, 0)
    return _logprobs(logits, order[jnp.arange(rows), place])


def gumbel_sampler(logits: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, ...]:
    """Temperature only, by one random number per token."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1)[:, None]
    drawn = jax.vmap(jax.random.categorical)(_keys(inputs), logits / temperature)
    return (drawn,)


def argmax_sampler(logits: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, ...]:
    """Greedy only."""
    del inputs
    return (jnp.argmax(logits, axis=-1),)


def bisect_sampler(logits: jax.Array, inputs: SamplingInputs) -> object:
    """Thresholds of top-k and top-p by bisection over order-preserving bits, then a draw."""
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    keys = jnp.where(bits >= 0, bits, jnp.int32(-(2**31)) - bits)
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1)[:, None]
    share = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    share = jnp.where(share >= inputs.min_p[:, None], share, 0)

    def search(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The largest threshold per row whose upper set is enough."""

        def narrow(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends
            middle = low // 2 + high // 2 + (low % 2 + high % 2 + 1) // 2
            ok = enough(middle)
            return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

        low, high = jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)
        return lax.fori_loop(0, 32, narrow, (low, high))[0]

    top_k = jnp.where(inputs.top_k > 0, inputs.top_k, logits.shape[1])
    kth = lax.cond(
        jnp.any(inputs.top_k > 0),
        lambda: search(lambda t: jnp.sum(keys >= t[:, None], axis=-1, dtype=jnp.int32) >= top_k),
        lambda: jnp.min(keys, axis=-1),
    )
    share = jnp.where(keys >= kth[:, None], share, 0)
    need = jnp.sum(share, axis=-1) * inputs.top_p
    last = lax.cond(
        jnp.any(inputs.top_p < 1),
        lambda: search(lambda t: jnp.sum(jnp.where(keys >= t[:, None], share, 0), axis=-1) >= need),
        lambda: kth,
    )
    kept = jnp.where(keys >= jnp.maximum(kth, last)[:, None], logits, -jnp.inf)
    unfiltered = dataclasses.replace(
        inputs, top_k=jnp.zeros_like(inputs.top_k), top_p=jnp.ones_like(inputs.top_p)
    )
    return sample(kept, unfiltered, max_logprobs=MAX_LOGPROBS)


def rivals(params: dict[str, float]) -> dict[str, Callable[..., object]]:
    """The other implementations that can do a workload."""
    found: dict[str, Callable[..., object]] = {"sort": sort_sampler}
    if "top_k" in params or "top_p" in params:
        found["bisect"] = bisect_sampler
    elif not params:
        found["argmax"] = argmax_sampler
    elif "temperature" in params:
        found["gumbel"] = gumbel_sampler
    return found


def time_ms(function: Callable[..., object], calls: list[tuple], summary: Callable) -> float:
    """Milliseconds per call, over calls that differ in their seeds only."""
    jax.block_until_ready(function(*calls[0]))
    times = []
    for call in calls:
        start = time.perf_counter()
        jax.block_until_ready(function(*call))
        times.append(1e3 * (time.perf_counter() - start))
    return summary(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 32, 256])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--scale", type=float, default=2.5, help="spread of the random logits")
    parser.add_argument("--calls", type=int, default=15, help="timed calls; fewer of slow ones")
    parser.add_argument("--min", action="store_true", help="minima instead of medians")
    args = parser.parse_args()
    summary = min if args.min else statistics.median
    ours = jax.jit(functools.partial(sample, max_logprobs=MAX_LOGPROBS))
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, V = {args.vocab}")
    print(f"{'rows':>4}  {'workload':<20} {'sampler ms':>10}  others: ms (times the sampler's)")
    for rows in args.rows:
        logits = args.scale * jax.random.normal(jax.random.key(0), (rows, args.vocab))
        compiled = {f: jax.jit(f) for f in (sort_sampler, bisect_sampler, gumbel_sampler)}
        start = time.perf_counter()
        ours.lower(logits, make_inputs(rows, 0, {})).compile()
        print(f"{rows:>4}  (tracing and compiling: {time.perf_counter() - start:.2f} s)")
        for name, params in WORKLOADS.items():
            calls = [(logits, make_inputs(rows, i, params)) for i in range(args.calls)]
            jax.block_until_ready(calls)
            base = time_ms(ours, calls, summary)
            cells = []
            for rival, function in rivals(params).items():
                few = calls if rival == "argmax" else calls[: max(3, args.calls // rows)]
                took = time_ms(compiled.get(function) or jax.jit(function), few, summary)
                cells.append(f"{rival} {took:.2f} ({took / base:.1f}x)")
            print(f"{rows:>4}  {name:<20} {base:>10.3f}  {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
