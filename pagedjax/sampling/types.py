"""What goes into the sampler and what comes out: two small pytrees of per-row arrays."""

from dataclasses import dataclass

import jax

NULL = 2**31 - 1
"""The "no token" sentinel: padding of `stop_token_ids`, and of `top_token_ids` past a wish."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingInputs:
    """The sampling parameters of one step's rows, all traced: no value ever means a new compile.

    Out-of-range values mean "off" (`top_k <= 0` or `>= V`, `top_p >= 1`, `min_p <= 0`) or the
    nearest value that means something (`top_p <= 0` keeps one token, `min_p > 1` acts as 1). NaN
    is off; a temperature that is NaN or negative is greedy.
    """

    temperature: jax.Array
    """[R] float32; 0 is greedy."""
    top_k: jax.Array
    """[R] int32; keep the k most probable tokens; 0 is off."""
    top_p: jax.Array
    """[R] float32; keep the smallest set of most probable tokens that reaches p; 1 is off."""
    min_p: jax.Array
    """[R] float32; keep tokens at least this likely relative to the most likely; 0 is off."""
    seed: jax.Array
    """[R] uint32."""
    position: jax.Array
    """[R] int32; index of the token among the request's outputs, from 0."""
    forbid_stop: jax.Array
    """[R] bool; the row's stop tokens cannot be chosen (`min_tokens` is not reached)."""
    stop_token_ids: jax.Array
    """[R, Q] int32, padded with NULL."""
    num_logprobs: jax.Array
    """[R] int32; -1 wants none, 0 the chosen token's, n also those of the n most likely tokens."""
    valid: jax.Array
    """[R] bool; the row samples in this step."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """The sampler's answer, one entry a row. Rows that are not valid hold the stated fillers."""

    token_ids: jax.Array
    """[R] int32; 0 where the row is not valid or `nan` is set."""
    logprob: jax.Array
    """[R] float32, natural log, of the raw model distribution; 0 where not wanted."""
    top_token_ids: jax.Array
    """[R, P] int32, most likely first, lowest id first among equals; NULL past the row's wish."""
    top_logprobs: jax.Array
    """[R, P] float32, beside `top_token_ids`; -inf past the row's wish."""
    nan: jax.Array
    """[R] bool; the logits hold NaN or +inf, or leave no token that may be chosen."""
