"""The choice of a step's size."""

import pytest

from pagedjax.engine.buckets import choose_bucket, step_cost

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def drain(num_decode, num_prefill, buckets=BUCKETS):
    """Sizes chosen until the prompts are computed."""
    sizes = []
    while num_prefill > 0:
        size = choose_bucket(num_decode, num_prefill, buckets)
        assert size > num_decode or size == buckets[-1]
        num_prefill -= size - num_decode
        sizes.append(size)
    return sizes


@pytest.mark.parametrize("num_decode", [0, 1, 2, 3, 17, 31, 32, 511, 512, 600])
def test_decode_only_takes_the_smallest_that_fits(num_decode):
    size = choose_bucket(num_decode, 0, BUCKETS)
    assert size >= min(num_decode, 512)
    assert all(other < num_decode for other in BUCKETS if other < size)


def test_prompt_that_fits_a_bucket_is_one_step():
    for size in BUCKETS[2:]:
        assert drain(0, size) == [size]


def test_padding_is_filled_with_a_piece_of_the_prompt():
    # 31 decode, 100 to compute: 128 is filled by 97 of them, where 256 would be half empty.
    assert drain(31, 100)[0] == 128
    # A place that decoding leaves free takes one token, but a prompt does not trickle in by ones.
    assert choose_bucket(31, 1, BUCKETS) == 32
    assert choose_bucket(31, 10, BUCKETS) == 64


def test_long_prompts_take_large_steps():
    assert drain(0, 2048) == [512] * 4
    assert len(drain(5, 1000)) == 2


@pytest.mark.parametrize("num_decode", [0, 1, 8, 31, 32])
@pytest.mark.parametrize("num_prefill", [1, 5, 33, 70, 100, 257, 300, 700, 1000, 1500])
def test_never_far_from_one_step_that_covers_all(num_decode, num_prefill):
    """Against the naive rule (smallest bucket that covers all demand, else the largest)."""
    naive, left = [], num_prefill
    while left > 0:
        size = next((b for b in BUCKETS if b >= left + num_decode), BUCKETS[-1])
        naive.append(size)
        left -= size - num_decode
    alone = step_cost(choose_bucket(num_decode, 0, BUCKETS)) if num_decode else 0

    def extra(sizes):
        return sum(step_cost(size) - alone for size in sizes)

    mine = drain(num_decode, num_prefill)
    assert extra(mine) <= extra(naive)
    assert len(mine) <= len(naive) + 3


def test_decode_rows_beyond_the_largest_bucket():
    assert choose_bucket(600, 100, BUCKETS) == 512
    assert choose_bucket(512, 100, BUCKETS) == 512


def test_single_bucket():
    assert choose_bucket(3, 50, (8,)) == 8
    assert choose_bucket(0, 0, (8,)) == 8
