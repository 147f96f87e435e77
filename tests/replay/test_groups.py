"""Logs of sessions with several outputs, beam searches, swapping and priorities are played, too."""

import functools
import random

import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.core.state import Status
from pagedjax.eventlog import checksum
from pagedjax.eventlog.format import Kind
from pagedjax.replay import (
    Player,
    changes_of,
    compiled_predicate,
    describe_changes,
    describe_state,
    first_failure,
    read_log,
    verify_whole,
)
from tests.replay.session import rewritten
from tests.shell.test_snapshot_groups import a_request, engine


def session(path, *, text, num_steps=80):
    """Two engines, the second of which goes on where the first one was saved; -> their logs."""
    settings = {"event_log_text": text, "event_log_kv": text, "check_invariants": False}
    rng, logs, one, count = random.Random(4), [], None, 0
    for number in range(2):
        logs.append(path / f"{number}-{text}.log")
        other = engine(event_log=str(logs[-1]), **settings)
        if one is not None:
            one.save(path / "state")
            other.load(path / "state")
            assert int(other.device.state.scheduler.swap.num_free) < 40
        one = other
        for step in range(4 * num_steps):
            swapped = int(one.device.state.scheduler.swap.num_free) < 40
            if step >= num_steps and (swapped or number == 1):
                break
            if one.num_free_places() > 50 and rng.random() < 0.35:
                prompt, sampling = a_request(rng)
                urgent = isinstance(sampling, SamplingParams)
                priority = rng.randint(-1, 1) if urgent else None
                one.add_request(str(count), prompt, sampling, priority=priority)
                count += 1
            if rng.random() < 0.03 and one.request_states():
                one.abort(rng.choice(sorted(one.request_states())))
            one.step()
    while one.has_work():
        one.step()
    counters = one.device.state.scheduler.counters
    assert int(counters.num_swaps_out) > 0
    assert int(counters.num_forked_tokens) > 0
    return [read_log(log) for log in logs]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups")
    return functools.cache(lambda text: session(path, text=text))


@pytest.mark.parametrize("text", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_state_is_the_recorded_one(logs, text):
    branches = 0
    for log in logs(text):
        player = Player(log)
        assert player.num_steps >= 80
        assert set(player.verify()) == {None}
        for step in log.steps:
            rows, parents = step.result["rows"], step.result.get("beam_parents")
            branches += parents is not None and bool(((parents != rows) & (parents < 12)).any())
            assert ("cum_logprobs" in step.result) == (text and parents is not None)
    assert branches > 5, "beams did move"


@pytest.mark.slow
def test_with_the_model(logs):
    for log in logs(True):
        device = engine(check_invariants=False).device
        assert set(verify_whole(log, device)) == {None}


def test_what_is_told(logs):
    first = Player(logs(False)[0])
    kinds = {kind for n in range(1, 80) for kind in changes_of(first, n).by_kind}
    assert {"branched", "preempted", "copied", "shared"} <= kinds
    told = "\n".join(describe_changes(first, 0, first.num_steps))
    assert ", swapped out" in told
    assert " from request " in told
    assert "2147483647" not in told
    holds = compiled_predicate("swap.num_free == 40", first)
    number = first_failure(first, holds, linear=True)
    lines = list(describe_state(first.state(number), number, 16))
    assert "1 swapped out" in lines[0]
    assert lines[2].startswith("in host memory: ")
    row = next(line for line in lines[4:] if " swapped " in line)
    assert " h" in row


def test_the_log_holds_no_text(logs):
    """Neither tokens nor log-probabilities of beams, in a saved state that begins a log either."""
    (state,) = (e for e in logs(False)[1].steps[0].events if e.kind == Kind.STATE)
    spare = state.arrays[".rows.status"] == Status.SPARE
    assert spare.any()
    tokens = state.arrays[".rows.token_ids"]
    assert ((tokens == 0) | (tokens >= 260)).all()
    assert not state.arrays[".rows.cum_logprob"].any()
    assert not any(name.startswith(("ids", "host_ids", "host_keys")) for name in state.arrays)
    assert ".rows.cum_logprob" not in checksum.covered([".rows.cum_logprob"], exact=False)


@pytest.mark.parametrize(
    ("text", "name"),
    [(False, "beam_parents"), pytest.param(True, "cum_logprobs", marks=pytest.mark.slow)],
)
def test_a_beam_that_is_changed_is_noticed(logs, text, name, tmp_path):
    """Another parent, or another log-probability, than the one that was."""
    at = []

    def change(_, kind, arrays, values):
        if kind == Kind.RESULT and not at and len(set(arrays.get(name, ()))) > 2:
            changed = np.array(arrays[name])
            i = int(np.flatnonzero(arrays["beam_parents"] < 12)[0])
            others = [x for x in changed[arrays["beam_parents"] < 12] if x != changed[i]]
            changed[i] = others[0]
            arrays[name] = changed
            at.append(values["step"])

    log = rewritten(logs(text)[0].path, tmp_path / "changed.log", change)
    first = next(m for m in Player(log).verify() if m is not None)
    assert first.step == at[0]
