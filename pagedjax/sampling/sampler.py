"""`sample`: one token a row, each row by its own parameters and paying only for what it asks."""

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.sampling import wide
from pagedjax.sampling.draw import DEPTH, LANES, ROW_MULTIPLE, WEIGHT_BITS, DrawParams, draw
from pagedjax.sampling.topn import max_and_argmax, pad_to_multiple, top_n
from pagedjax.sampling.types import NULL, Sampled, SamplingInputs


def sample(
    logits: jax.Array,
    inputs: SamplingInputs,
    *,
    max_logprobs: int,
    rows_per_block: int | None = None,
) -> Sampled:
    """Chooses the next token of every row.

    In vLLM's order: stop tokens are forbidden if asked, then temperature, min-p, top-k and top-p.
    Equal logits rank by token id, lowest first, everywhere: greedy takes the lowest id, top-k keeps
    exactly k tokens (vLLM keeps all that equal the k-th), top-p exactly as many as are needed.
    Top-p is a share of what min-p and top-k leave, and at least one token is kept.

    A row's token depends on its own logits and parameters only, bit for bit: not on its rank, R, or
    the other rows. Random numbers are keyed by (seed, position).

    Args:
      logits: [R, V] float32 as the model gave them; -inf is allowed. A row with NaN or +inf, or
        with no finite logit that may be chosen, gets `nan` set and token 0.
      inputs: per-row parameters.
      max_logprobs: static; P, the most top-n log-probabilities any row may want (0 to V).
      rows_per_block: static; rows handled together where more than an argmax is wanted; blocks hold
        wanting rows only. None picks by platform: 4 on CPU, where they stay in cache, R elsewhere.

    Returns:
      `Sampled`; log-probabilities are of the unmodified logits (before temperature and filters).

    Raises:
      ValueError: shapes or dtypes that do not fit, or max_logprobs out of range.
    """
    rows = _checked_shape(logits, inputs, max_logprobs)
    block = rows_per_block or (4 if jax.default_backend() == "cpu" else rows)
    block = min(block, rows)

    largest, best = max_and_argmax(logits)
    valid = inputs.valid
    nan = valid & ~jnp.isfinite(largest)
    random = valid & (inputs.temperature > 0)
    wants = (random | (valid & (inputs.forbid_stop | (inputs.num_logprobs >= 0)))) & ~nan

    out = Sampled(
        token_ids=jnp.where(valid & ~nan, best, 0),
        logprob=jnp.zeros(rows, jnp.float32),
        top_token_ids=jnp.full((rows, max_logprobs), NULL, jnp.int32),
        top_logprobs=jnp.full((rows, max_logprobs), -jnp.inf, jnp.float32),
        nan=nan,
    )
    order = jnp.argsort(~wants, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -rows % block), constant_values=NULL)
    num_wanting = jnp.sum(wants, dtype=jnp.int32)

    def body(i: jax.Array, out: Sampled) -> Sampled:
        ranks = lax.dynamic_slice_in_dim(order, i * block, block)
        live = i * block + jnp.arange(block, dtype=jnp.int32) < num_wanting
        ranks = jnp.where(live, ranks, NULL)
        pick = jnp.minimum(ranks, rows - 1)
        mine = jax.tree.map(lambda a: a[pick], inputs)
        answer = _sample_block(
            _take_rows(logits, pick), largest[pick], best[pick], live, mine, max_logprobs
        )
        return jax.tree.map(lambda o, a: o.at[ranks].set(a, mode="drop"), out, answer)

    return lax.fori_loop(0, (num_wanting + block - 1) // block, body, out)


def _checked_shape(logits: jax.Array, inputs: SamplingInputs, max_logprobs: int) -> int:
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be [R, V] float32, got {logits.shape} {logits.dtype}")
    rows, vocab = logits.shape
    if not 0 <= max_logprobs <= vocab:
        raise ValueError(f"max_logprobs must be in [0, {vocab}], got {max_logprobs}")
    for name, value in vars(inputs).items():
        if value.shape[:1] != (rows,):
            raise ValueError(f"inputs.{name} must have {rows} rows, got shape {value.shape}")
    return rows


def _take_rows(x: jax.Array, ranks: jax.Array) -> jax.Array:
    if ranks.shape[0] == 1:  # a plain copy, where a gather is a slow loop on CPU
        return lax.dynamic_slice_in_dim(x, ranks[0], 1)
    return x[ranks]


def _sample_block(
    raw: jax.Array,
    largest: jax.Array,
    best: jax.Array,
    live: jax.Array,
    inputs: SamplingInputs,
    max_logprobs: int,
) -> Sampled:
    """Rows [b, V] that want more than the argmax of their raw logits."""
    b, _ = raw.shape
    x, row_max, greedy = lax.cond(
        jnp.any(live & inputs.forbid_stop),
        lambda: _forbid_stop(raw, inputs),
        lambda: (raw, largest, best),
    )
    nan = live & ~jnp.isfinite(row_max)
    random = live & ~nan & (inputs.temperature > 0)
    drawn = lax.cond(
        jnp.any(random), lambda: _draw(x, row_max, random, inputs), lambda: jnp.zeros_like(best)
    )
    token = jnp.where(random, drawn, jnp.where(nan, 0, greedy))
    logprob, top_ids, top_logprobs = lax.cond(
        jnp.any(live & (inputs.num_logprobs >= 0)),
        lambda: _logprobs(raw, largest, token, inputs.num_logprobs, max_logprobs),
        lambda: (
            jnp.zeros(b, jnp.float32),
            jnp.full((b, max_logprobs), NULL, jnp.int32),
            jnp.full((b, max_logprobs), -jnp.inf, jnp.float32),
        ),
    )
    return Sampled(
        token_ids=token,
        logprob=logprob,
        top_token_ids=top_ids,
        top_logprobs=top_logprobs,
        nan=nan,
    )


def _forbid_stop(raw: jax.Array, inputs: SamplingInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rows with stop tokens at -inf where that is asked, their maxima, and the argmaxes."""
    ids = jnp.where(inputs.forbid_stop[:, None], inputs.stop_token_ids, NULL)
    rank = jnp.arange(raw.shape[0])[:, None]
    x = raw.at[rank, ids].set(-jnp.inf, mode="drop")
    return x, *max_and_argmax(x)


def _draw(x: jax.Array, row_max: jax.Array, random: jax.Array, inputs: SamplingInputs) -> jax.Array:
    vocab = x.shape[-1]
    x = pad_to_multiple(x, ROW_MULTIPLE)
    off = (inputs.top_k <= 0) | (inputs.top_k >= vocab)
    params = DrawParams(
        temperature=inputs.temperature,
        top_k=jnp.where(off, x.shape[-1], inputs.top_k),
        top_p=inputs.top_p,
        min_p=jnp.minimum(inputs.min_p, 1),
        seed=inputs.seed,
        position=inputs.position,
    )
    return draw(x, row_max, random, params)


def _logprobs(
    raw: jax.Array, largest: jax.Array, token: jax.Array, wanted: jax.Array, max_logprobs: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of the chosen and of the top tokens: [b], ids [b, P], values [b, P]."""
    log_total = jnp.log(_sum_to_one(jnp.exp(raw - largest[:, None])))
    chosen = jnp.take_along_axis(raw, token[:, None], axis=1)[:, 0]
    logprob = jnp.where(wanted >= 0, chosen - largest - log_total, 0)
    if max_logprobs == 0:
        empty = (raw.shape[0], 0)
        return logprob, jnp.zeros(empty, jnp.int32), jnp.zeros(empty, jnp.float32)
    values, ids = top_n(raw, max_logprobs)
    keep = jnp.arange(max_logprobs) < wanted[:, None]
    values = values - largest[:, None] - log_total[:, None]
    return logprob, jnp.where(keep, ids, NULL), jnp.where(keep, values, -jnp.inf)


def _sum_to_one(shares: jax.Array) -> jax.Array:
    """Row sums of numbers in [0, 1]: the same bits in any order, as the terms are made integers.

    Terms below 2**-14 are added up on a finer grid, so that a long tail is not lost.
    """
    b = shares.shape[0]
    shares = jnp.pad(shares, ((0, 0), (0, -shares.shape[1] % ROW_MULTIPLE)))
    shares = shares.reshape(b, -1, DEPTH, LANES)
    large = shares >= 2.0**-14

    def total(parts: jax.Array) -> jax.Array:
        grid = (parts * 2.0**WEIGHT_BITS + 0.5).astype(jnp.int32).astype(jnp.uint32)
        columns = jnp.sum(grid, axis=2, dtype=jnp.uint32)
        return wide.to_float(wide.wide_sum(columns.reshape(b, -1))) * 2.0**-WEIGHT_BITS

    return (
        total(jnp.where(large, shares, 0)) + total(jnp.where(large, 0, shares * 2.0**14)) * 2.0**-14
    )
