"""The prefix cache: exact, token-granular, first in age then in depth to go."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.core.blocks import select_victims
from pagedjax.core.config import SchedulerConfig
from pagedjax.core.prefix import match
from pagedjax.core.ragged import expand
from pagedjax.core.state import NULL, Status, init_scheduler
from tests.core.driver import COLLIDING, Driver
from tests.core.policy_driver import LONGEST_PREFIX


@pytest.fixture
def driver():
    return Driver()  # blocks of 4 tokens


def run_to_end(driver, prompt, extra=3, **options):
    """Run one request alone; returns the hits it was admitted with."""
    before = int(driver.state.counters.num_hit_tokens)
    driver.add_request(prompt, len(prompt) + extra, stop=False, **options)
    for _ in range(200):
        if not driver.requests:
            return int(driver.state.counters.num_hit_tokens) - before
        driver.step()
    raise AssertionError("starves")


find = jax.jit(match, static_argnums=0)
PROMPT = [1, 2, 3, 4, 5, 0, 1, 1, 2, 2, 3, 3]


def test_prompt_of_exactly_k_blocks_twice(driver):
    """All blocks of the prompt are cached, yet its last token is computed: its logits are wanted.
    The last block is not shared but copied up to that token, then written."""
    assert run_to_end(driver, PROMPT) == 0
    assert run_to_end(driver, PROMPT) == len(PROMPT) - 1
    assert driver.counts["copies"] == 1


def test_hits_are_whole_blocks_then_tokens(driver):
    run_to_end(driver, PROMPT)
    assert run_to_end(driver, [*PROMPT[:8], 0, 0, 0]) == 8, "two whole blocks"
    assert run_to_end(driver, [*PROMPT[:10], 0, 0, 0]) == 10, "and two tokens of the third"
    assert run_to_end(driver, [0, *PROMPT]) == 0, "position matters"


def test_best_of_several_children_is_copied(driver):
    """Three blocks stand behind one parent; the one with most tokens in common is copied, not the
    one registered last."""
    for tail in ([4, 4, 4, 4], [4, 4, 0, 0], [0, 0, 0, 0]):
        run_to_end(driver, [*PROMPT[:8], *tail], extra=1)
    assert run_to_end(driver, [*PROMPT[:8], 4, 4, 4, 1, 1]) == 11
    assert run_to_end(driver, [*PROMPT[:8], 4, 4, 0, 1, 1]) == 11
    assert run_to_end(driver, [*PROMPT[:8], 0, 0, 1, 1, 1]) == 10


def test_salt_separates(driver):
    run_to_end(driver, PROMPT, salt=1)
    assert run_to_end(driver, PROMPT) == 0
    assert run_to_end(driver, PROMPT, salt=1) == len(PROMPT) - 1


def test_salt_separates_even_where_hashes_do_not():
    """The hash is salted too, so only a collision shows whether the salt itself is compared."""
    driver = Driver(**COLLIDING)
    for salt in range(6):  # of four hashes
        assert run_to_end(driver, PROMPT, salt=salt) == 0


def test_output_is_cached_too(driver):
    """A conversation's next turn finds the answer that was generated before it."""
    row = driver.add_request(PROMPT, len(PROMPT) + 9, stop=False)
    while driver.requests:
        driver.step()
    told = np.asarray(driver.state.rows.token_ids)[row, : len(PROMPT) + 9].tolist()
    # The last token was never computed; before it, 20 of 21 tokens fill five blocks.
    assert run_to_end(driver, [*told, 1, 2]) == 20


def test_forced_collision_is_rejected_by_tokens():
    """With two bits of hash there are more first blocks than hashes. Nobody ever gets wrong memory
    (the shadow pool checks each slot), and the true prefix is still found."""
    driver = Driver(**COLLIDING)
    assert run_to_end(driver, PROMPT) == 0
    for i in range(4):
        assert run_to_end(driver, [5 - PROMPT[0], i, *PROMPT[2:]]) <= 1
    assert run_to_end(driver, PROMPT) >= 4


def test_planted_false_entry_is_rejected(driver):
    """An index that lies about a block's tokens is not believed: overwrite what the index says of
    a block, and the hash alone does not make a hit."""
    run_to_end(driver, PROMPT)
    driver.add_request(PROMPT, 20, stop=False)
    row = jnp.asarray(list(driver.requests))
    prefix = driver.state.prefix
    lying = prefix.tokens.at[:, 1].add(1)
    truth = find(driver.config, driver.state, row)
    assert int(truth[0][0]) == 2
    assert int(truth[2][0]) == 3
    state = dataclasses.replace(driver.state, prefix=dataclasses.replace(prefix, tokens=lying))
    num_blocks, blocks, num_tokens, _ = find(driver.config, state, row)
    assert int(num_blocks[0]) == 0
    assert (blocks == NULL).all()
    assert int(num_tokens[0]) <= 1


def test_twins_in_one_batch_share_in_the_end(driver):
    """Two equal prompts admitted in one step both compute; then one gives its blocks back."""
    driver.add_request(PROMPT, 30, stop=False)
    driver.add_request(PROMPT, 30, stop=False)
    for _ in range(4):
        driver.step()
    tables = np.asarray(driver.state.blocks.block_tables)
    assert (tables[0, :3] == tables[1, :3]).all()
    assert (np.asarray(driver.state.blocks.ref_counts)[tables[0, :3]] == 2).all()
    driver.drain()


def test_oldest_chain_goes_first_and_tails_before_heads():
    driver = Driver(pool=9)
    old, new = [1] * 12, [2] * 12
    run_to_end(driver, old)  # 3 blocks cached (the output's block is not full)
    run_to_end(driver, new)
    driver.step()  # the ended row gives its blocks back
    assert int(driver.output.num_evictable_blocks) == 6
    run_to_end(driver, [3] * 14, extra=1)  # 4 blocks: 3 free, so one block is evicted
    probe = [driver.add_request(p, 20, stop=False) for p in (old, new)]
    rows = jnp.asarray(probe)
    num_blocks = find(driver.config, driver.state, rows)[0]
    assert num_blocks.tolist() == [2, 2], "the tail of the older chain went; a full hit is 2 + copy"
    run = find(driver.config, driver.state, rows)[2]
    assert run.tolist() == [0, 3]


def test_many_partial_matches_in_one_small_step():
    """Chunks that begin inside a copied block and end inside another: each needs a block more than
    its tokens alone would, and every one of them has its own."""
    driver = Driver(**LONGEST_PREFIX)
    run_to_end(driver, [*PROMPT[:9], 1, 1, 1], extra=1)
    for token in (0, 2, 3, 5):  # not PROMPT[7], which would fill the block
        driver.add_request([*PROMPT[:7], token, token], 16, stop=False)
    before = int(driver.output.num_free_blocks) + int(driver.output.num_evictable_blocks)
    driver.step()
    assert driver.counts["copies"] == 4
    assert int(driver.plan.num_seqs) == 4
    driver.drain()
    after = int(driver.output.num_free_blocks) + int(driver.output.num_evictable_blocks)
    assert before <= after == driver.config.num_blocks, "no block is lost"


def test_select_victims_against_a_sort():
    rng = np.random.default_rng(0)
    config = SchedulerConfig(
        num_rows=4, max_num_seqs=4, num_blocks=64, max_model_len=256, max_num_batched_tokens=64
    )
    state = init_scheduler(config)
    pick = jax.jit(lambda b, p, step, k: select_victims(config, b, p, step, k, capacity=64))
    for trial in range(30):
        cached, held = rng.random(64) < 0.7, rng.random(64) < 0.3
        last_use = rng.integers(0, [3, 1000, 2**30][trial % 3], 64)
        depth = rng.integers(0, 16, 64)
        blocks = dataclasses.replace(
            state.blocks,
            ref_counts=jnp.asarray(held, jnp.int32),
            last_use=jnp.asarray(last_use, jnp.int32),
        )
        prefix = dataclasses.replace(
            state.prefix,
            slot=jnp.where(cached, jnp.arange(64), NULL).astype(jnp.int32),
            depth=jnp.asarray(depth, jnp.int32),
        )
        able = np.flatnonzero(cached & ~held)
        k = int(rng.integers(0, len(able) + 1))
        step = 2**30 + 5
        got = np.asarray(pick(blocks, prefix, jnp.int32(step), jnp.int32(k)))
        got = got[got != NULL]
        age = np.minimum(step - last_use, 2 ** (31 - 4) - 1)
        order = sorted(able, key=lambda b: (-age[b], -depth[b]))
        keys = [(-age[b], -depth[b]) for b in order[:k]]
        assert len(set(got.tolist())) == k
        assert sorted((-age[b], -depth[b]) for b in got) == keys


def test_expand_against_repeat():
    rng = np.random.default_rng(1)
    for trial in range(20):
        counts = rng.integers(0, 4, 9) * (rng.random(9) < 0.6)
        n = int(counts.sum())
        total = 27 if trial > 2 else max(n, 1)  # more than there are, or exactly so many
        owner, offset, valid = expand(jnp.asarray(counts, jnp.int32), total)
        assert np.asarray(valid)[:n].all()
        assert not np.asarray(valid)[n:].any()
        np.testing.assert_array_equal(np.asarray(owner)[:n], np.repeat(np.arange(9), counts))
        want = np.concatenate([np.arange(c) for c in counts]) if n else []
        np.testing.assert_array_equal(np.asarray(offset)[:n], want)


def test_row_that_is_not_empty_takes_no_request(driver):
    driver.add_request(PROMPT, 20)
    before = jax.tree.map(np.asarray, driver.state)
    from tests.core.driver import make_params

    padded = np.zeros(driver.config.max_padded_len, np.int32)
    after = driver.jit.add(
        driver.state, np.int32(0), padded, np.int32(3), make_params(driver.config, 9)
    )
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, after))
    assert before.rows.status[0] == Status.WAITING
