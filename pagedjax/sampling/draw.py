"""One token from each row's filtered distribution, exactly, with no sort.

Probabilities become integer weights, `w = round(exp((x - max) / temperature) * 2**27)`, so sums of
them are exact; a token less than 2**-28 times as likely as the likeliest weighs nothing. A draw is
one random number and an inverse CDF over the weights. The filters cost nothing until a token is
drawn: then one pass over the row counts the tokens that come before it (a larger logit, or an equal
one and a lower id) and adds up their weights, which says whether the token is inside top-k and
top-p. If it is not, everything from it downwards is outside too, so the next draw is from what
comes before it. What is accepted is distributed exactly as in the filtered set, and since each
refusal leaves a uniform share of the weight, about 1 + ln(1 / kept probability) passes are needed.
(Rejection with a rising pivot is due to FlashInfer's sampling kernels; exact integer sums, the
single test of both filters, and the bounds on the top-k weight below are ours.)

With top-k and top-p together, p is a share of the weight of the top k, which is not known. Every
pass brackets it: below the weight before any token outside the top k, and not below the weight up
to any token inside. If the bracket is too wide to decide, tokens drawn from inside it are tested
until it is not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.sampling import wide
from pagedjax.sampling.wide import Wide

WEIGHT_BITS = 27
DEPTH = 16
"""Tokens per column. Columns are added up first, so DEPTH * 2**WEIGHT_BITS must fit uint32."""
LANES = 32
"""Columns per group. A row is [groups, DEPTH, LANES]; the inverse CDF goes group, lane, token."""
ROW_MULTIPLE = DEPTH * LANES
"""Rows are padded with -inf to a multiple of this many tokens."""


class DrawParams(NamedTuple):
    """Per-row parameters of the draw: all [b]. An unused `top_k` is the row's padded width, W."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    position: jax.Array


class _Place(NamedTuple):
    """A place in a row's order (larger logit first, then lower id): the token at it."""

    logit: jax.Array
    id: jax.Array


_DRAWN, _INSIDE, _OUTSIDE = range(3)


class _State(NamedTuple):
    """The loop's carry.

    Three marks in each row's order: the last token drawn; the last token known to be inside the top
    k; the first known to be outside it.
    """

    pivot: _Place
    """Where to measure next: a fresh draw, or a probe that helps to decide about the last one."""
    pivot_weight: jax.Array
    fresh: jax.Array
    """[b] bool; the pivot is a draw."""
    marks: _Place
    """[3, b]."""
    mass: Wide
    """[3, b, groups]; the weight per group before the mark (up to it and with it, for _INSIDE)."""
    drawn_in_k: jax.Array
    drawn_before: Wide
    bounds: Wide
    """[2, b]; the weight of the top k lies between them."""
    attempt: jax.Array
    done: jax.Array


def draw(x: jax.Array, row_max: jax.Array, active: jax.Array, params: DrawParams) -> jax.Array:
    """Draws a token id for every active row.

    Args:
      x: [b, W] float32 logits, W a multiple of ROW_MULTIPLE, padded with -inf; no NaN or +inf in
        active rows.
      row_max: [b] the largest logit of each row; finite in active rows.
      active: [b] bool.
      params: temperatures must be positive in active rows.

    Returns:
      [b] int32 token ids; meaningless where not active.
    """
    b, width = x.shape
    x = x.reshape(b, -1, DEPTH, LANES)
    weights = _weights(x, row_max, params)
    ids = jnp.arange(width, dtype=jnp.int32).reshape(1, -1, DEPTH, LANES)

    def body(s: _State) -> _State:
        mass, count = _measure(x, weights, ids, s, params.top_k)
        s = _judge(s, mass, count, params)
        pivot, pivot_weight = _pick(x, weights, s, params)
        kept = _Place(*(jnp.where(s.done, a, c) for a, c in zip(s.pivot, pivot, strict=True)))
        return s._replace(pivot=kept, pivot_weight=pivot_weight, done=s.done | unfiltered)

    # Without top-k and top-p the first draw is the answer, and needs no measuring.
    unfiltered = (params.top_k >= width) & ~(params.top_p < 1)
    first = _initial(b, width, active)
    last = lax.while_loop(lambda s: jnp.any(~s.done), body, first)
    return jnp.where(unfiltered, last.pivot.id, last.marks.id[_DRAWN])


def _weights(x: jax.Array, row_max: jax.Array, params: DrawParams) -> jax.Array:
    """uint32 weights of the shape of x; tokens below min_p weigh nothing."""
    row_max, temperature, min_p = (
        a[:, None, None, None] for a in (row_max, params.temperature, params.min_p)
    )
    # A finite reciprocal: 0 * inf at the largest logit, or -inf * 0 at a masked one, would be NaN.
    share = jnp.exp((x - row_max) * jnp.clip(1 / temperature, 1e-30, 1e30))
    share = jnp.where(share < min_p, 0, share)
    return (share * 2.0**WEIGHT_BITS + 0.5).astype(jnp.int32).astype(jnp.uint32)


def _initial(b: int, width: int, active: jax.Array) -> _State:
    """Starts with a "draw" past the last token: refusing it leaves the whole row to draw from."""
    zero = jnp.zeros(b, jnp.uint32)
    nothing = jnp.zeros((3, b, width // ROW_MULTIPLE), jnp.uint32)
    inf, past = jnp.full(b, jnp.inf, jnp.float32), jnp.full(b, width, jnp.int32)
    return _State(
        pivot=_Place(-inf, past),
        pivot_weight=zero,
        fresh=jnp.ones(b, bool),
        marks=_Place(
            jnp.stack([-inf, inf, -inf]), jnp.stack([past, jnp.full_like(past, -1), past])
        ),
        mass=(nothing, nothing),
        drawn_in_k=jnp.zeros(b, bool),
        drawn_before=(zero, zero),
        bounds=(jnp.stack([zero, ~zero]), jnp.stack([zero, zero])),
        attempt=zero,
        done=~active,
    )


def _measure(
    x: jax.Array, weights: jax.Array, ids: jax.Array, s: _State, top_k: jax.Array
) -> tuple[Wide, jax.Array]:
    """What comes before the pivot: weight per group [b, groups], and number of tokens [b]."""
    width = ids.size
    before = _comes_before(x, ids, _expand(s.pivot, 3))
    columns = jnp.sum(jnp.where(before, weights, 0), axis=2, dtype=jnp.uint32)
    # Counting is a second pass (a two-valued reduction is not vectorised on CPU): only for top-k.
    # Without it every token is "inside", except the place past the end that the loop starts with.
    count = lax.cond(
        jnp.any((top_k < width) & (s.attempt > 0)),
        lambda: jnp.sum(
            _comes_before(x, ids, _expand(s.pivot, 3)), axis=(1, 2, 3), dtype=jnp.int32
        ),
        lambda: jnp.where(s.attempt == 0, width, 0),
    )
    return wide.wide_sum(columns), count


def _judge(s: _State, mass: Wide, count: jax.Array, params: DrawParams) -> _State:
    """Takes in what was measured: narrows the weight of the top k, accepts or refuses the draw."""
    before = wide.wide_total(mass)
    upto = wide.add(before, wide.widen(s.pivot_weight))
    in_k = count < params.top_k
    k_low, k_high = ((s.bounds[0][i], s.bounds[1][i]) for i in (0, 1))
    last = wide.select(in_k, upto, before)  # the weight of a set inside, or around, the top k
    moves_low, moves_high = in_k & ~wide.less(last, k_low), ~in_k & ~wide.less(k_high, last)
    # The tokens at k - 1 and k (from 0) give the weight of the top k itself, from either side.
    exact = (count == params.top_k) | (count == params.top_k - 1)
    bounds = wide.select(
        jnp.stack([moves_low | exact, moves_high | exact]),
        _stack(last, last),
        s.bounds,
    )

    fresh = s.fresh & ~s.done
    drawn_in_k = jnp.where(fresh, in_k, s.drawn_in_k)
    drawn_before = wide.select(fresh, before, s.drawn_before)
    surely, maybe = _in_top_p(drawn_before, bounds, params.top_p)
    moved = jnp.stack([fresh, moves_low, moves_high])
    own = jnp.arange(mass[0].shape[-1]) == (s.pivot.id // ROW_MULTIPLE)[:, None]
    with_own = wide.add(mass, wide.widen(jnp.where(own, s.pivot_weight[:, None], 0)))
    return s._replace(
        fresh=~(drawn_in_k & maybe),
        marks=_Place(
            jnp.where(moved, s.pivot.logit, s.marks.logit), jnp.where(moved, s.pivot.id, s.marks.id)
        ),
        mass=wide.select(moved[:, :, None], _stack(mass, with_own, mass), s.mass),
        drawn_in_k=drawn_in_k,
        drawn_before=drawn_before,
        bounds=bounds,
        attempt=s.attempt + 1,
        done=s.done | (drawn_in_k & surely),
    )


def _stack(*values: Wide) -> Wide:
    return jnp.stack([v[0] for v in values]), jnp.stack([v[1] for v in values])


def _in_top_p(before: Wide, bounds: Wide, top_p: jax.Array) -> jax.Array:
    """Whether a token is inside top-p, by the weight before it: [2, b] bool, surely and possibly.

    It is if that weight has not reached p of the top-k weight, or if there is none before it.
    """
    digits = []
    rest = jnp.clip(top_p, 0, 1 - 2.0**-24)  # exact: 48 binary places in base 2**16
    for _ in range(3):
        rest = rest * 2.0**16
        digits.append(jnp.floor(rest).astype(jnp.uint32))
        rest = rest - jnp.floor(rest)
    needed = wide.scale_by_fraction(bounds, digits, ceil=True)
    return wide.less(before, needed) | ~(top_p < 1) | ((before[0] | before[1]) == 0)


def _pick(
    x: jax.Array, weights: jax.Array, s: _State, params: DrawParams
) -> tuple[_Place, jax.Array]:
    """Draws by weight from what comes before a refused draw, or else from the top-k bracket."""
    start, end = _between(s)
    drawn, inside, outside = ((s.mass[0][i], s.mass[1][i]) for i in (_DRAWN, _INSIDE, _OUTSIDE))
    mass = wide.select(s.fresh[:, None], drawn, wide.subtract(outside, inside))
    digits = _random_digits(params.seed, params.position, s.attempt)
    target = wide.scale_by_fraction(wide.wide_total(mass), digits)
    group, target = wide.locate(mass, target)

    logits, own = (_at(a, group) for a in (x, weights))  # [b, DEPTH, LANES]
    offset = jnp.arange(ROW_MULTIPLE, dtype=jnp.int32).reshape(DEPTH, LANES)
    ids = group[:, None, None] * ROW_MULTIPLE + offset
    eligible = _comes_before(logits, ids, _expand(end, 2))
    eligible &= ~_comes_before(logits, ids, _expand(start, 2)) & (ids != start.id[:, None, None])
    weight = jnp.where(eligible, own, 0)
    columns = jnp.sum(weight, axis=1, dtype=jnp.uint32)
    lane, target = wide.locate(wide.widen(columns), target)
    column = jnp.take_along_axis(weight, lane[:, None, None], axis=2)[:, :, 0]
    depth, _ = wide.locate(wide.widen(column), target)

    inside_group = depth * LANES + lane
    logit = _at(logits.reshape(-1, ROW_MULTIPLE), inside_group)
    place = _Place(logit, group * ROW_MULTIPLE + inside_group)
    return place, _at(own.reshape(-1, ROW_MULTIPLE), inside_group)


def _between(s: _State) -> tuple[_Place, _Place]:
    """The places, both excluded, between which the next pivot is drawn."""
    logit, token = s.marks
    start = _Place(
        jnp.where(s.fresh, jnp.inf, logit[_INSIDE]), jnp.where(s.fresh, -1, token[_INSIDE])
    )
    end = _Place(
        jnp.where(s.fresh, logit[_DRAWN], logit[_OUTSIDE]),
        jnp.where(s.fresh, token[_DRAWN], token[_OUTSIDE]),
    )
    return start, end


def _at(a: jax.Array, index: jax.Array) -> jax.Array:
    """a[r, index[r]] for every row r."""
    return jnp.take_along_axis(a, index.reshape(-1, *[1] * (a.ndim - 1)), axis=1)[:, 0]


def _comes_before(x: jax.Array, ids: jax.Array, place: _Place) -> jax.Array:
    return (x > place.logit) | ((x == place.logit) & (ids < place.id))


def _expand(place: _Place, axes: int) -> _Place:
    return _Place(*(a.reshape(-1, *[1] * axes) for a in place))


def _random_digits(seed: jax.Array, position: jax.Array, attempt: jax.Array) -> list[jax.Array]:
    """Uniform in [0, 1), 48 binary places: Threefry-2x32 with key (seed, position), at attempt."""

    def one(seed: jax.Array, position: jax.Array, attempt: jax.Array) -> jax.Array:
        words = jnp.stack([seed.astype(jnp.uint32), position.astype(jnp.uint32)])
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, attempt))

    words = jax.vmap(one)(seed, position, attempt)
    return [words[:, 0] >> 16, words[:, 0] & 0xFFFF, words[:, 1] >> 16]
