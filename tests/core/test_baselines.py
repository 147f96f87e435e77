"""The modes to compare with: static batches, contiguous reservations, no KV cache."""

import numpy as np
import pytest

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.state import Status
from tests.core.driver import Driver, random_traffic

ARTICLE = {"num_rows": 8, "max_num_seqs": 4, "num_blocks": 128, "max_model_len": 256}
STATIC = ARTICLE | {"batching": "static"}
LENGTHS = {"A": 100, "B": 50, "C": 200, "D": 30, "E": 60, "F": 60, "G": 60}


def serve_article(**changes):
    """The article's example: four requests, then three more; -> name -> (first, last step)."""
    driver = Driver(**(ARTICLE | changes))
    names, waiting, spans = {}, list(LENGTHS), {}
    for step in range(1, 1000):
        for row in driver.empty_rows():
            if waiting and len(driver.requests) < 8:
                name = waiting.pop(0)
                names[row] = name
                total, salt = 1 + LENGTHS[name], ord(name)  # nobody finds another's blocks
                driver.add_request([salt % 5], total, stop=False, row=row, salt=salt)
        if not driver.requests:
            return spans
        driver.step()
        for rank in range(int(driver.plan.num_seqs)):
            name = names[int(driver.plan.row_ids[rank])]
            spans[name] = (spans.get(name, (step,))[0], step)
    raise AssertionError("never done")


def test_continuous_batching_joins_at_the_articles_steps():
    """A request ends at step 30, 50 and 100; the next one joins at the step after."""
    spans = serve_article()
    assert spans["D"] == (1, 30)
    assert spans["B"] == (1, 50)
    assert spans["A"] == (1, 100)
    assert spans["C"] == (1, 200)
    assert spans["E"] == (31, 90)
    assert spans["F"] == (51, 110)
    # E has ended before A does, so G need not wait for A; the article leaves E's length open.
    assert spans["G"] == (91, 150)


def test_a_long_request_keeps_the_place_until_a_has_ended(monkeypatch):
    monkeypatch.setitem(LENGTHS, "E", 120)
    monkeypatch.setitem(LENGTHS, "F", 120)
    spans = serve_article()
    assert (spans["E"][0], spans["F"][0], spans["G"][0]) == (31, 51, 101)


def test_static_batching_waits_for_the_longest():
    spans = serve_article(**STATIC)
    assert [spans[name][1] for name in "ABCD"] == [100, 50, 200, 30]
    assert [spans[name] for name in "EFG"] == [(201, 260)] * 3


def test_a_static_batch_keeps_its_memory_until_all_have_ended():
    driver = Driver(**STATIC)
    driver.add_request([1] * 4, 4 + 1, stop=False)
    driver.add_request([2] * 4, 4 + 9, stop=False)
    held = []
    while driver.requests:
        driver.step()
        held.append(int((driver.state.blocks.ref_counts > 0).sum()))
    # The first ends at once and keeps its block; the second has computed 4, 5 .. 12 tokens.
    assert held == [2, 3, 3, 3, 3, 4, 4, 4, 4]
    driver.drain()  # checks that none is held


def test_rows_admitted_in_several_steps_are_one_static_batch():
    """The prompts of a batch need not fit into one step's budget."""
    driver = Driver(**STATIC)
    running = []
    for i, length in enumerate([60, 4, 4]):
        driver.add_request([i] * length, length + 12, stop=False)
    while driver.requests:
        driver.step()
        running.append(int((np.asarray(driver.output.status) == Status.RUNNING).sum()))
    # Of 24 tokens a step: 24, 24, 12 of the first prompt and both others; 12 tokens for each.
    assert running == [1, 1, *[3] * 11, 0]


def test_contiguous_takes_room_for_the_longest_sequence():
    """40 blocks are room for two sequences of 64 tokens, however short they are."""
    driver = Driver(kv_cache="contiguous", enable_prefix_caching=False)
    for i in range(5):
        driver.add_request([i % 6] * 3, 8, stop=False)
    driver.step()
    assert int(driver.output.num_running) == 2
    assert int(driver.output.num_free_blocks) == 40 - 2 * 16
    driver.drain()
    assert driver.counts["finished"] == 5
    assert int(driver.state.counters.num_preemptions) == 0


def test_without_a_cache_every_token_is_computed_anew():
    driver = Driver(kv_cache="none", enable_prefix_caching=False)
    driver.add_request([1] * 6, 6 + 5, stop=False)
    computed = []
    while driver.requests:
        driver.step()
        computed.append(int(driver.output.num_scheduled_tokens))
    assert computed == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("kv_cache", "sizes"),
    [
        ("paged", STATIC | {"pool": 20}),
        ("none", {}),
        ("contiguous", {}),
        pytest.param("paged", {"batching": "static"}, marks=pytest.mark.slow),
        pytest.param("contiguous", {"batching": "static"}, marks=pytest.mark.slow),
        pytest.param("none", {"batching": "static"}, marks=pytest.mark.slow),
    ],
)
def test_random_traffic(kv_cache, sizes):
    """The same tokens as alone, all invariants, under preemption where the mode knows it."""
    driver = Driver(kv_cache=kv_cache, enable_prefix_caching=kv_cache == "paged", **sizes)
    random_traffic(driver, 120, seed=3, longest=64)
    assert driver.counts["finished"] > 10
    if "pool" in sizes:
        assert int(driver.state.counters.num_preemptions) > 0


def test_refused():
    sizes = {"num_rows": 4, "max_num_seqs": 4, "num_blocks": 4, "max_num_batched_tokens": 16}
    with pytest.raises(ValueError, match=r"batching must be one of continuous, static, got 'x'"):
        SchedulerConfig(**sizes, max_model_len=64, batching="x")
    with pytest.raises(ValueError, match=r"kv_cache 'none' needs enable_prefix_caching=False"):
        SchedulerConfig(**sizes, max_model_len=64, kv_cache="none")
    with pytest.raises(ValueError, match=r"num_blocks of at least 5, for one sequence .*\(65\)"):
        SchedulerConfig(
            **sizes, max_model_len=65, kv_cache="contiguous", enable_prefix_caching=False
        )
