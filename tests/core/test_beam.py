"""Beam search in the scheduler, against the same search as a few lines of Python.

`BeamDriver` follows every search from the outputs of the steps, compares it with the state after
each and with the plain search at its end; `Driver` checks invariants and the shadow pool."""

import dataclasses
import itertools
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import initialize, rule

from pagedjax.core.config import SchedulerConfig
from pagedjax.core.state import NULL, Status
from tests.core.beam_driver import STOP, BeamDriver, beam_search, continuations
from tests.core.driver import prefix_hashes
from tests.core.machines import DriverMachine, cases

PROMPT = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
# One more compilation of everything, with the small limits that make things happen.
TIGHT: dict = {
    "enable_prefix_caching": True,
    "num_blocks": 17,
    "hash_mask": 3,
    "num_tokens": 6,
    "max_num_batched_tokens": 6,
    "max_admissions": 2,
    "max_preemptions": 4,
    "max_retirements": 1,
    "watermark_blocks": 1,
    "evict_batch": 2,
}


@pytest.mark.parametrize("caching", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_widths_at_once(caching):
    driver = BeamDriver(enable_prefix_caching=caching)
    for width, extra, stop in ((4, 12, True), (1, 9, True), (3, 14, False), (2, 7, True)):
        driver.add_search(PROMPT[: 10 - width], width, 10 - width + extra, stop=stop)
        driver.step()
    driver.drain()
    assert driver.counts["searches"] == 4
    assert driver.counts["moves"] > 5
    assert driver.counts["completed"] > 5
    assert int(driver.state.counters.num_block_copies) > 5


def test_search_against_brute_force():
    """A width that covers every sequence of a tiny vocabulary: what comes out is what one finds by
    looking at all of them."""
    vocab, length, width = 3, 3, 4  # two tokens that are no stop: four beams after two of them
    driver = BeamDriver(vocab=vocab)
    number = driver.add_search([1, 2, 3], width, 3 + length)
    group = driver.groups[number]
    driver.drain()
    everything = {}
    for n in range(1, length + 1):
        for tokens in itertools.product(range(vocab), repeat=n):
            inner, last = tokens[:-1], tokens[-1]
            if STOP in inner or (last != STOP and n < length):
                continue
            total, prefix = 0.0, [1, 2, 3]
            for token in tokens:
                total += dict(continuations(prefix_hashes(prefix)[-1], vocab, vocab))[token]
                prefix.append(token)
            everything[tuple(prefix)] = total
    found = dict([*group.beams.values(), *group.completed])
    for penalty in (0.0, 0.5, 1.0, 2.0):

        def score(tokens, total, penalty=penalty):
            return total / max(len(tokens) - 3 - (tokens[-1] == STOP), 1) ** penalty

        def best(some, score=score):
            return sorted(some, key=lambda tokens: -score(tokens, some[tokens]))[:width]

        assert best(found) == best(everything)


def test_blocks_of_a_search():
    """Three beams behind a prompt of ten tokens, blocks of four: two whole blocks in common, and
    one each. A beam that nobody continues gives its own back in the same step."""
    driver = BeamDriver()
    driver.add_search(PROMPT, 3, 24, stop=False)
    (group,) = driver.groups.values()
    driver.step()
    refs = np.asarray(driver.state.blocks.ref_counts)
    assert sorted(refs[refs > 0].tolist()) == [3, 3, 3]  # three beams, one block of them half full
    assert int(driver.state.blocks.num_free) == 18 - 3
    ended = 0
    while driver.groups:
        before = dict(group.beams)
        driver.step()
        tables = np.asarray(driver.state.blocks.block_tables)[group.rows]
        named = set(tables[tables != NULL].tolist())
        # Exactly the blocks that the beams of now need are taken, the others are free.
        assert int(driver.state.blocks.num_free) == 18 - len(named)
        parents = np.asarray(driver.output.beam_parent)[group.rows]
        ended += len(set(before) - set(parents.tolist()))
        computed = {len(tokens) - 1 for tokens, _ in group.beams.values()}
        if driver.groups:
            assert len(computed) == 1
            assert len(named) >= num_needed(group.beams, 4)
    assert ended > 3


def num_needed(beams, b):
    """Different blocks that these beams need at least: one for each different full prefix."""
    prefixes = set()
    for tokens, _ in beams.values():
        prefixes |= {tokens[: (j + 1) * b] for j in range((len(tokens) - 1) // b)}
    return len(prefixes)


def test_beams_wait_for_one_another():
    """A budget that older rows take: the group samples as a whole or not at all."""
    driver = BeamDriver(**TIGHT)
    driver.add_search(PROMPT, 4, 20, stop=False)
    driver.step()
    driver.step()
    driver.step()
    for i in range(4):
        driver.add_request([i, 2, 3, 4, 5, 1, 2, 3, 4, 5, 2, 3], 25, stop=False)
    driver.drain()
    assert driver.counts["searches"] == 1
    assert driver.counts["finished"] == 4


def test_group_behind_others_is_all_or_nothing():
    driver = BeamDriver(**TIGHT)
    driver.add_request([1] * 2, 18, stop=False)
    driver.step()
    driver.add_request([2] * 2, 18, stop=False)
    driver.step()
    driver.add_request([3] * 2, 18, stop=False)
    driver.step()
    driver.add_search(PROMPT[:3], 4, 10, stop=False)  # three rows decode, four do not fit beside
    for _ in range(8):
        driver.step()
        assert int(driver.plan.num_seqs) in (3, 4)
    driver.drain()
    assert driver.counts["searches"] == 1


@pytest.mark.parametrize("caching", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_preempted_as_a_whole(caching):
    driver = BeamDriver(enable_prefix_caching=caching)
    driver.add_request([3] * 4, 44, stop=False)
    driver.add_request([4] * 4, 44, stop=False)
    driver.add_search(PROMPT, 4, 24, stop=False)
    (group,) = driver.groups.values()
    back = False
    while driver.groups:
        driver.step()
        status = np.asarray(driver.state.rows.status)[group.rows]
        back |= bool((status == Status.WAITING).any())
    driver.drain()
    assert back
    assert int(driver.state.counters.num_preemptions) >= 2
    assert driver.counts["searches"] == 1


def test_impossible_searches():
    """Too many blocks for the pool, or wider than there may be: the group ends as an error."""
    driver = BeamDriver()
    driver.add_search(PROMPT, 4, 40)
    driver.drain()
    assert driver.counts["errors"] == 1
    driver.add_search(PROMPT[:2], 5, 4)
    driver.drain()
    assert driver.counts["errors"] == 2


def test_all_continuations_complete():
    """One beam, one continuation looked at: when that is the stop token, nothing is left."""
    driver = BeamDriver()
    for i in range(8):
        driver.add_search([1 + i % 2, 2, 1, *[1] * i], 1, 40, count=1)
    driver.drain()
    assert driver.counts["searches"] == 8
    assert driver.counts["completed"] >= 3


def test_bad_logits_end_the_group_alone():
    driver = BeamDriver()
    driver.add_search(PROMPT, 3, 20, stop=False)
    other = driver.add_request([5, 5, 5], 12, stop=False)
    driver.step()
    plain = driver._sampled

    def spoiled(plan, token_ids):
        sampled = plain(plan, token_ids)
        rank = int(plan.rank[driver.groups[0].rows[-1]])
        return dataclasses.replace(sampled, nan=sampled.nan.at[rank].set(True))

    driver._sampled = spoiled
    driver.step()
    driver._sampled = plain
    assert driver.counts["errors"] == 1
    assert other in driver.requests
    driver.drain()
    assert driver.counts["finished"] == 1


def test_rows_of_an_ended_search_are_used_again_one_by_one():
    """Rows leave the table one at a time, so a new group's leader may sit where an old group's
    leader sat while rows of the old group are still there."""
    driver = BeamDriver(**TIGHT)
    driver.add_search(PROMPT[:2], 4, 6, stop=False)
    while driver.groups:
        driver.step()
    driver.step()
    assert driver.empty_rows()[0] == 0
    driver.add_search(PROMPT[:3], 4, 9, stop=False)
    driver.drain()
    assert driver.counts["searches"] == 2


@pytest.mark.parametrize("use_cond", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_branches_or_straight_line(use_cond):
    driver = BeamDriver(use_cond=use_cond)
    driver.add_search(PROMPT, 3, 20)
    driver.add_search(PROMPT[:7], 2, 18)
    driver.add_group(PROMPT, 20, 2, group=3, stop=False)
    driver.drain()
    assert driver.counts["searches"] == 2


def test_configuration_is_checked():
    sizes = {
        "num_rows": 8,
        "max_num_seqs": 4,
        "num_blocks": 8,
        "max_model_len": 16,
        "max_num_batched_tokens": 8,
        "enable_forks": True,
    }
    SchedulerConfig(**sizes, max_beam_width=4)
    with pytest.raises(ValueError, match="max_beam_width must be at most max_num_seqs"):
        SchedulerConfig(**sizes, max_beam_width=5)
    with pytest.raises(ValueError, match="max_beam_width needs enable_forks"):
        SchedulerConfig(**sizes | {"enable_forks": False}, max_beam_width=2)
    with pytest.raises(ValueError, match="max_beam_width must be at least 0"):
        SchedulerConfig(**sizes, max_beam_width=-1)


def test_plain_search_by_hand():
    """The reference itself: width one is greedy."""
    beams, completed = beam_search([1], width=1, max_total=5, vocab=6, count=6, stop=False)
    tokens = [1]
    while len(tokens) < 5:
        tokens.append(continuations(prefix_hashes(tokens)[-1], 6, 1)[0][0])
    assert beams[0][0] == tuple(tokens)
    assert not completed


token = st.integers(0, 5)


class BeamMachine(DriverMachine):
    """Searches, groups that fork, single requests and aborts, in a pool that is too small."""

    sizes: ClassVar = {}

    @initialize()
    def start(self):
        self.driver = BeamDriver(**self.sizes)
        self.num_groups = 0

    @rule(
        prompt=st.lists(token, min_size=1, max_size=14),
        width=st.integers(1, 4),
        extra=st.integers(1, 10),
        stop=st.booleans(),
    )
    def search(self, prompt, width, extra, stop):
        if len(self.driver.empty_rows()) >= width:
            self.driver.add_search(prompt, width, len(prompt) + extra, stop=stop)

    @rule(
        prompt=st.lists(token, min_size=1, max_size=14),
        num=st.integers(1, 4),
        extra=st.integers(1, 10),
    )
    def fork(self, prompt, num, extra):
        num = min(num, len(self.driver.empty_rows()))
        self.driver.add_group(prompt, len(prompt) + extra, num, group=self.num_groups, stop=False)
        self.num_groups += 1

    @rule(prompt=st.lists(token, min_size=1, max_size=20), extra=st.integers(1, 18))
    def add(self, prompt, extra):
        if self.driver.empty_rows():
            self.driver.add_request(prompt, len(prompt) + extra, stop=False)

    @rule(pick=st.integers(0, 7))
    def abort(self, pick):
        rows, groups = sorted(self.driver.requests), sorted(self.driver.groups)
        if groups and (pick % 2 or not rows):
            self.driver.abort_search(groups[pick % len(groups)], which=pick)
        elif rows:
            self.driver.abort_row(rows[pick % len(rows)])


class CachedBeamMachine(BeamMachine):
    sizes: ClassVar = {"enable_prefix_caching": True}


class TightBeamMachine(BeamMachine):
    """A small budget, few preemptions and admissions at once, a watermark."""

    sizes: ClassVar = TIGHT


class MixedBeamMachine(BeamMachine):
    """Everything at once: victims by their tokens, time slices, some swapped out."""

    sizes: ClassVar = {
        "enable_prefix_caching": True,
        "num_host_blocks": 12,
        "preemption_mode": "swap",
        "preemption_policy": "most_tokens",
        "scheduling_policy": "round_robin",
        "time_slice_tokens": 3,
    }


MACHINES = BeamMachine, CachedBeamMachine, TightBeamMachine, MixedBeamMachine
globals().update(cases(MACHINES, long_only=(CachedBeamMachine, TightBeamMachine)))
