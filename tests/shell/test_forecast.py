"""What the host expects of a step that it has not read yet."""

from dataclasses import replace

import numpy as np

from pagedjax.engine.forecast import Rows, Sizes, advance, demand, grants, share_prompts
from pagedjax.engine.prefix_forecast import PrefixForecast

SIZES = Sizes(max_num_seqs=4, max_admissions=2, block_size=4)


def rows(*specs, blocks=100, admitting=True):
    """Rows from (running, total, computed, most[, unseen])."""
    columns = list(zip(*[(*spec, 0)[:5] for spec in specs], strict=True))
    running, total, computed, most, unseen = (np.array(column) for column in columns)
    return Rows(
        running=running.astype(bool),
        total=total,
        computed=computed,
        most=most,
        unseen=unseen,
        num_available_blocks=blocks,
        admitting=admitting,
    )


def test_budget_goes_to_running_rows_first_and_then_to_the_queue():
    table = rows((1, 10, 9, 99), (1, 20, 12, 99), (0, 30, 0, 99))
    assert grants(table, 4, SIZES).tolist() == [1, 3, 0]
    assert grants(table, 16, SIZES).tolist() == [1, 8, 7]


def test_a_row_that_catches_up_needs_one_more_token():
    table = advance(rows((1, 10, 9, 99), (0, 5, 0, 99)), 16, SIZES)
    assert table.running.tolist() == [True, True]
    assert table.total.tolist() == [11, 6]
    assert table.computed.tolist() == [10, 5]
    assert demand(table, SIZES) == (2, 0)


def test_a_row_at_its_length_is_gone():
    table = advance(rows((1, 10, 9, 11), (1, 10, 9, 99)), 16, SIZES)
    assert table.most.tolist() == [99]


def test_a_chunk_leaves_the_rest():
    table = advance(rows((0, 50, 0, 99)), 16, SIZES)
    assert demand(table, SIZES) == (0, 34)


def test_limits_of_admission():
    waiting = [(0, 8, 0, 99)] * 5
    assert demand(rows(*waiting), SIZES) == (0, 16)  # two admissions a step
    running = [(1, 8, 7, 99)] * 4
    assert demand(rows(*running, *waiting), SIZES) == (4, 0)  # no place
    assert demand(rows(*running[:3], *waiting), SIZES) == (3, 8)  # one place
    assert grants(rows(*running[:3], *waiting), 64, SIZES).tolist() == [1, 1, 1, 8, 0, 0, 0, 0]


def test_waiting_rows_count_if_all_of_them_fits():
    """Not just a chunk; and behind one that does not fit nobody does."""
    waiting = (0, 12, 0, 99), (0, 4, 0, 99)
    assert demand(rows((1, 8, 7, 99), *waiting, blocks=4), SIZES) == (1, 16)
    assert demand(rows((1, 8, 7, 99), *waiting, blocks=3), SIZES) == (1, 12)
    assert demand(rows((1, 8, 7, 99), *waiting, blocks=2), SIZES) == (1, 0)
    # what running rows still need is not to be had
    assert demand(rows((1, 9, 8, 99), *waiting, blocks=4), SIZES) == (1, 12)
    assert demand(rows((1, 20, 8, 99), *waiting, blocks=5), SIZES) == (0, 12)
    # cached blocks cost nothing, a block begun costs all
    assert demand(rows((1, 8, 7, 99), (0, 80, 72, 99), blocks=2), SIZES) == (1, 8)
    assert demand(rows((1, 8, 7, 99), (0, 80, 79, 99), blocks=0), SIZES) == (1, 0)


def test_watermark_stays_free_while_others_run():
    sizes = replace(SIZES, watermark_blocks=1)
    assert demand(rows((1, 8, 7, 99), (0, 12, 0, 99), blocks=3), sizes) == (1, 0)
    assert demand(rows((1, 8, 7, 99), (0, 12, 0, 99), blocks=4), sizes) == (1, 12)
    assert demand(rows((0, 12, 0, 99), blocks=3), sizes) == (0, 12)


def test_a_queue_known_not_to_fit_does_not_count():
    table = rows((1, 8, 7, 99), (0, 80, 0, 99), admitting=False)
    assert demand(table, SIZES) == (1, 0)
    # but with nothing else running it must be tried
    assert demand(rows((0, 20, 0, 99), admitting=False), SIZES) == (0, 20)


def test_rows_newer_than_a_step_in_flight_are_not_in_it():
    table = rows((1, 8, 7, 99), (0, 10, 0, 99, 1))
    after = advance(table, 32, SIZES)
    assert after.computed.tolist() == [8, 0]
    assert demand(after, SIZES) == (1, 10)


def test_prefix_forecast_knows_what_was_computed():
    prefix = PrefixForecast(num_blocks=4, block_size=4)
    tokens = list(range(18))
    chain = prefix.chain(tokens)
    assert len(chain) == 4
    assert prefix.num_cached_tokens(chain, 18) == 0
    prefix.remember(chain[:2])
    assert prefix.num_cached_tokens(chain, 18) == 8
    prefix.remember(chain)
    assert prefix.num_cached_tokens(chain, 18) == 16
    assert prefix.num_cached_tokens(chain, 16) == 15  # the last token is always computed
    other = prefix.chain([*range(8), 99, *range(9, 18)])
    assert prefix.num_cached_tokens(other, 18) == 8
    prefix.remember(prefix.chain(list(range(50, 58))))  # two blocks push out the oldest tails
    assert prefix.num_cached_tokens(chain, 18) == 8


def grouped(table, group, prompt, followers=None):
    count = len(group)
    return replace(
        table,
        group=np.array(group),
        prompt=np.full(count, prompt),
        followers=None if followers is None else np.array(followers),
    )


def test_rows_of_a_group_wait_for_its_prompt():
    """Three rows of one prompt of ten tokens, and a fourth row of another one behind them."""
    table = rows((0, 10, 0, 99), (0, 10, 0, 99), (0, 10, 0, 99), (0, 6, 0, 99))
    table = grouped(table, [5, 5, 5, -1], 10)
    assert share_prompts(table)[1].tolist() == [False, True, True, False]
    # Those that are held back are passed by.
    assert grants(table, 16, SIZES).tolist() == [10, 0, 0, 6]
    assert demand(table, SIZES) == (0, 16)
    table = advance(table, 16, SIZES)
    # The prompt is there: each computes its last token again, in a copy of the last block.
    assert demand(table, SIZES) == (2, 2)
    free = table.num_available_blocks
    table = advance(table, 16, SIZES)
    assert table.running.tolist() == [True] * 4
    assert table.total.tolist() == [12, 11, 11, 8]
    assert free - table.num_available_blocks == 2
    assert demand(table, SIZES) == (4, 0)


def test_beams_that_follow_are_counted_once_there_is_an_output():
    table = grouped(rows((1, 10, 3, 99)), [1], 10, followers=[3])
    assert demand(table, SIZES) == (0, 7)
    assert demand(advance(table, 16, SIZES), SIZES) == (4, 0)


STATIC = replace(SIZES, batching="static")


def test_a_static_batch_takes_more_while_a_step_is_too_short():
    table = rows((0, 30, 0, 99), (0, 8, 0, 99), (0, 8, 0, 99))
    after = advance(table, 16, STATIC)  # 16 of the first prompt
    assert after.admitting
    assert grants(after, 24, STATIC).tolist() == [14, 8, 2]
    after = advance(after, 24, STATIC)  # two admissions a step; nothing waits then
    assert not after.admitting


def test_a_closed_static_batch_takes_nobody_until_it_has_ended():
    table = rows((1, 8, 7, 10), (0, 8, 0, 99), admitting=False)
    assert demand(table, STATIC) == (1, 0)
    after = advance(table, 16, STATIC)
    assert demand(after, STATIC) == (1, 0)
    after = advance(after, 16, STATIC)  # its last token
    assert after.admitting
    assert demand(after, STATIC) == (0, 8)


def test_who_has_ended_keeps_the_place_in_a_static_batch():
    running = [(1, 8, 7, 99)] * 2
    table = rows((1, 8, 7, 9), *running, *[(0, 8, 0, 99)] * 3)
    assert demand(table, STATIC) == (3, 8)
    after = advance(table, 3, STATIC)  # too short for a fourth one; one ends
    assert (after.admitting, after.num_ended) == (True, 1)
    assert demand(after, STATIC) == (2, 8)
    assert demand(replace(after, num_ended=2), STATIC) == (2, 0)


def test_a_static_batch_that_has_ended_keeps_no_place():
    """The rows are given back by the next step, before it admits others."""
    table = replace(rows(*[(0, 8, 0, 99)] * 3), num_ended=4, admitting=False)
    assert demand(table, STATIC) == (0, 16)


def test_who_was_preempted_comes_back_into_a_closed_static_batch():
    table = rows((1, 8, 7, 99), (0, 12, 0, 99), (0, 8, 0, 99), admitting=False)
    table = replace(table, preempted=np.array([False, True, False]))
    assert demand(table, STATIC) == (1, 12)
    after = advance(table, 16, STATIC)
    assert after.running.tolist() == [True, True, False]
    assert not after.admitting
    assert demand(replace(table, num_available_blocks=2), STATIC) == (1, 0)
