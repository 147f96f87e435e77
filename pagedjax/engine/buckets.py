"""Which static step size to launch next: a small cost model, pure and deterministic.

The bucket is the step's token budget, so choosing it decides how large a piece of the waiting
prompts is computed. Padding costs as much as tokens do.
"""

import functools

STEP_OVERHEAD_TOKENS = 64
"""What a step costs before its first token, in tokens' worth of time: weights are read once."""

DELAY_TOKENS = STEP_OVERHEAD_TOKENS // 2
"""Price of one more step before a prompt is done. Without it the places that padding leaves free
beside the decoding rows look like a free lunch, and a prompt trickles in one token a step."""


@functools.lru_cache(maxsize=4096)
def choose_bucket(num_decode: int, num_prefill: int, buckets: tuple[int, ...]) -> int:
    """The step size for rows that decode beside prompt tokens still to compute.

    Every decoding row takes one token of each step, whatever its size, and the rest of the bucket
    goes to prompts. A plan is a first step, then largest steps while they fill up, then the one
    size that takes what is left. It costs what its steps cost, less what as many steps that only
    decode would have cost. The first step of the cheapest plan is taken, of equal plans the one
    with the larger first step: those prompts are done earlier.

    Args:
      num_decode: rows that need one token.
      num_prefill: tokens that all other rows together still need.
      buckets: the compiled sizes, ascending.
    """
    largest = buckets[-1]
    if num_prefill <= 0 or num_decode >= largest:
        return _smallest(max(num_decode, 1), buckets)
    alone = step_cost(_smallest(num_decode, buckets)) if num_decode else 0

    def extra(size: int) -> int:
        return step_cost(size) - alone + DELAY_TOKENS

    def finish(left: int) -> int:
        full, rest = divmod(max(left, 0), largest - num_decode)
        last = extra(_smallest(num_decode + rest, buckets)) if rest else 0
        return full * extra(largest) + last

    sizes = [size for size in reversed(buckets) if size > num_decode]
    return min(sizes, key=lambda size: extra(size) + finish(num_prefill - (size - num_decode)))


def step_cost(num_tokens: int) -> int:
    """Cost of a step of this size, in tokens' worth of time."""
    return num_tokens + STEP_OVERHEAD_TOKENS


def _smallest(num_tokens: int, buckets: tuple[int, ...]) -> int:
    return next((size for size in buckets if size >= num_tokens), buckets[-1])
