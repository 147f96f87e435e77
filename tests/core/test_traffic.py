"""Random traffic through the scheduler, invariants and a shadow KV pool checked at every step."""

import pytest

from tests.core.driver import COLLIDING, Driver, random_traffic
from tests.core.policy_driver import OWN_POLICY

CONFIGS = {
    "roomy": {},
    "tight pool": {"pool": 20},
    "a tight pool of its own": {"num_blocks": 20},
    "four hashes": {"hash_mask": 3},
    "collisions, no cond, tight": {**COLLIDING, "pool": 24, "use_cond": False},
    "index buckets overflow": {"index_ways": 1, "num_blocks": 30},
    "evict in batches": {**COLLIDING, "pool": 30},
    "evict in larger batches": {"evict_batch": 6, "num_blocks": 30},
    "one preemption a step": {**OWN_POLICY, "pool": 20},
    "one preemption a step, first come": {"max_preemptions": 1, "num_blocks": 20},
    # Two tokens, few hashes: many blocks agree in most of their tokens, so only a comparison of
    # everything tells them apart.
    "alphabet of two": {"alphabet": 2, **COLLIDING},
    "alphabet of two, blocks of two": {
        "alphabet": 2,
        "block_size": 2,
        "hash_mask": 15,
        "max_model_len": 32,
    },
    "alphabet of two, more hashes": {
        "alphabet": 2,
        "block_size": 2,
        "hash_mask": 63,
        "max_model_len": 32,
        "num_blocks": 24,
    },
    "no prefix caching": {"enable_prefix_caching": False},
    "watermark": {"watermark_blocks": 3, "num_blocks": 24},
    "budget below the rows": {"num_tokens": 3},
    "blocks of one token": {"block_size": 1, "max_model_len": 24, "num_blocks": 60},
}


# Every configuration compiles for some seconds, so the default lane runs those that between them
# take every path and are used by other tests, too; the slow lane all of them for long.
TELLING = [
    "roomy",
    "tight pool",
    "collisions, no cond, tight",
    "alphabet of two",
    "evict in batches",
    "one preemption a step",
]


@pytest.mark.parametrize("name", TELLING)
def test_random_traffic(name):
    driver = Driver(**CONFIGS[name])
    random_traffic(driver, steps=60, seed=1)
    assert driver.counts["finished"] > 5
    if name == "tight pool":
        assert int(driver.state.counters.num_preemptions) > 3
        assert int(driver.state.counters.num_evictions) > 20
    if name == "roomy":
        assert driver.counts["copies"] > 0, "partly matching blocks are copied"
    if name == "collisions, no cond, tight":
        assert driver.counts["hit_tokens"] > 0, "hits survive beside collisions"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_random_traffic_long(name, seed):
    driver = Driver(**CONFIGS[name])
    random_traffic(driver, steps=1000, seed=seed)
    assert driver.counts["finished"] > 100
    assert (driver.counts["hit_tokens"] > 0) == (name != "no prefix caching")


def test_one_trace_serves_all_traffic():
    driver = Driver(pool=20)
    names = "schedule", "commit", "add", "abort"
    before = [getattr(driver.jit, name)._cache_size() for name in names]
    random_traffic(driver, steps=40, seed=3)
    for name, size in zip(names, before, strict=True):
        assert getattr(driver.jit, name)._cache_size() - size <= (size == 0), name
