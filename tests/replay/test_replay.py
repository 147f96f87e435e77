"""A recorded session is played again: every state is the same, and whatever is wrong is found."""

import dataclasses

import jax
import numpy as np
import pytest

from pagedjax.core.state import Status
from pagedjax.engine.snapshot import check_fingerprint
from pagedjax.eventlog import LogError, checksum
from pagedjax.eventlog.format import MAGIC, Kind, read_records, unpack
from pagedjax.eventlog.names import STOP
from pagedjax.replay import (
    Player,
    changes_of,
    compiled_predicate,
    describe_changes,
    describe_log,
    describe_state,
    first_failure,
    read_log,
)
from tests.replay.session import SHARED, record, rewritten
from tests.shell.tiny import make_engine


def equal(a, b, *, exact=True):
    ours, theirs = (checksum.leaves(jax.device_get(state)) for state in (a, b))
    for name in checksum.covered(list(ours), exact=exact):
        if exact or name != checksum.SLOT:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_every_state_is_the_recorded_one(session, player):
    log, states = session
    assert log.problem is None
    assert player.num_steps >= 500
    assert [m for m in player.verify() if m is not None] == []
    # The checksums were computed by the same code: compare whole states, too. They have other
    # names for tokens, but equal tokens have equal names as far as anybody can see.
    for number in (1, 7, 99, 250, 401, 500):
        equal(player.state(number), states[number], exact=False)


def test_back_is_the_same_as_forward(player):
    forward = {n: jax.device_get(player.state(n)) for n in (130, 131, 129, 128, 64, 3, 0)}
    fresh = Player(player.log, checkpoint_every=50)
    for n in (500, 131, 130, 129, 128, 64, 3, 0, 131):
        if n in forward:
            equal(fresh.state(n), forward[n])
    with pytest.raises(IndexError, match="from 0 to"):
        player.state(player.num_steps + 1)


def test_the_log_holds_no_text(session, folder):
    data = (folder / "events.log").read_bytes()
    assert SHARED.encode() not in data
    for place, kind, payload in read_records(folder / "events.log"):
        arrays, _ = unpack(payload)
        if kind == Kind.ADD:
            tokens = arrays["token_ids"]
            assert (tokens >= 260).all(), place  # no token id of the model
            assert len(set(tokens.tolist())) == len(tokens)  # nothing to be counted, "x" * 5 or not
    other = folder / "again.log"
    record(other, num_steps=30)
    first = [
        [unpack(p)[0]["token_ids"].tolist() for _, k, p in read_records(path) if k == Kind.ADD][:3]
        for path in (folder / "events.log", other)
    ]
    assert first[0] != first[1]  # another key
    assert [len(t) for t in first[0]] == [len(t) for t in first[1]]


def test_with_text_and_with_the_model(folder):
    from pagedjax.replay import verify_whole

    path = folder / "text.log"
    settings = {"event_log_text": True, "event_log_kv": True}
    record(path, num_steps=150, seed=1, **settings)
    log = read_log(path)
    assert SHARED.encode() == bytes(
        next(
            e.arrays["token_ids"]
            for s in log.steps
            for e in s.events
            if len(e.arrays["token_ids"]) > 30
        )[: len(SHARED)].astype(np.uint8)
    )
    player = Player(log)
    assert set(player.verify()) == {None}
    assert set(verify_whole(log, make_engine()._device)) == {None}
    # Other weights: other tokens, and the first step that has them is named.
    other = make_engine(jax.tree.map(lambda x: x * 1.5, make_engine()._device.params))._device
    differences = [d for d in verify_whole(log, other) if d is not None]
    assert differences[0].step == 1
    assert "v_pool" in differences[0].arrays
    assert "instead of" in "".join(map(str, differences))


def test_a_log_of_another_model_is_refused(session):
    other = make_engine(jax.tree.map(lambda x: x * 1.5, make_engine().device.params))
    theirs = session[0].header["fingerprint"]
    check_fingerprint(theirs, make_engine().fingerprint)
    with pytest.raises(ValueError, match="the log was made with another weights"):
        check_fingerprint(theirs, other.fingerprint, what="the log")


def test_without_text_no_model_can_play_it(session):
    from pagedjax.replay import verify_whole

    with pytest.raises(LogError, match="has no text"):
        next(verify_whole(session[0], make_engine()._device))


@pytest.mark.parametrize("text", [False, True])
def test_over_a_snapshot(folder, text):
    """A log that begins with a loaded state, requests in the middle of their answers."""
    from pagedjax.replay import verify_whole

    first = record(folder / f"before-{text}.log", num_steps=80, seed=2)
    first.save(folder / "state")
    second = make_engine(event_log=str(folder / f"after-{text}.log"), event_log_text=text)
    second.load(folder / "state")
    while second.has_work():
        second.step()
    log = read_log(second.config.event_log)
    player = Player(log)
    assert player.num_steps > 5
    assert set(player.verify()) == {None}
    holds = compiled_predicate("check_invariants", player)
    assert first_failure(player, holds, first=1, linear=True) is None
    if text:
        assert set(verify_whole(log, make_engine()._device)) == {None}
    else:
        (state,) = (e for e in log.steps[0].events if e.kind == Kind.STATE)
        for name in (".rows.token_ids", ".prefix.tokens"):
            tokens = state.arrays[name]
            assert ((tokens == 0) | (tokens >= 260)).all()


def test_a_changed_bit_is_noticed_at_its_step(session, folder):
    data = (folder / "events.log").read_bytes()
    places = [
        (place, values["step"])
        for place, kind, payload in read_records(folder / "events.log")
        if kind == Kind.RESULT
        for values in [unpack(payload)[1]]
    ]
    for place, step in (places[0], places[200], places[-1]):
        for offset in (0, 9, 40):  # its length, its kind, what is in it
            changed = bytearray(data)
            changed[place + offset] ^= 4
            path = folder / "damaged.log"
            path.write_bytes(changed)
            damaged = read_log(path)
            assert f"byte {place} is damaged" in damaged.problem
            assert f"belongs to step {step}" in damaged.problem
            assert damaged.num_steps == step - 1
            assert Player(damaged).num_steps == step - 1


def test_a_lost_record_is_noticed(session, folder):
    places = [p for p, k, _ in read_records(folder / "events.log") if k == Kind.STEP]
    data = (folder / "events.log").read_bytes()
    (folder / "lost.log").write_bytes(data[: places[50]] + data[places[51] :])
    assert "damaged" in read_log(folder / "lost.log").problem


def test_a_truncated_log_is_used_as_far_as_it_goes(session, folder):
    data = (folder / "events.log").read_bytes()
    (folder / "cut.log").write_bytes(data[: len(data) // 2])
    log = read_log(folder / "cut.log")
    assert f"truncated at byte {len(data) // 2}" in log.problem
    player = Player(log)
    assert 100 < player.num_steps < 400
    assert set(player.verify()) == {None}
    assert any("PROBLEM" in line for line in describe_log(log))


def test_a_wrong_event_is_found_at_its_step(session, folder):
    """Other tokens than those that were sampled, in a record that is whole; a request left out."""

    def change(_, kind, arrays, values):
        if kind == Kind.RESULT and values["step"] == 123:
            arrays["token_ids"] = np.full_like(arrays["token_ids"], STOP)

    log = rewritten(folder / "events.log", folder / "wrong.log", change)
    first = next(m for m in Player(log).verify() if m is not None)
    assert first.step == 123
    assert "rows.status" in first.arrays

    def lose(_, kind, arrays, values):
        if kind == Kind.ADD and arrays["token_ids"].size:
            seen.append(1)
            return len(seen) != 20

    seen = []
    log = rewritten(folder / "events.log", folder / "less.log", lose)
    first = next(m for m in Player(log).verify() if m is not None)
    assert "rows" in str(first)


def test_foreign_files_are_refused(tmp_path, session, folder):
    path = tmp_path / "x"
    path.write_bytes(b"hello")
    with pytest.raises(LogError, match="not a PagedJAX event log"):
        read_log(path)
    path.write_bytes(MAGIC + b"\x07\0\0\0")
    with pytest.raises(LogError, match="format version 7; this program reads version 2"):
        read_log(path)
    path.write_bytes((folder / "events.log").read_bytes()[:60])
    with pytest.raises(LogError, match="truncated"):
        read_log(path)

    def change(number, kind, arrays, values):
        if kind == Kind.HEADER:
            values["fingerprint"]["scheduler"]["not_known"] = 1

    with pytest.raises(LogError, match="another version"):
        Player(rewritten(folder / "events.log", tmp_path / "y", change))


class Faulty(Player):
    """Plays a log with a fault from some step on, as if the scheduler had it."""

    def __init__(self, log, fault_at):
        super().__init__(log)
        self.fault_at = fault_at

    def advance(self, state, number):
        state, copies = super().advance(state, number)
        if number == self.fault_at:
            blocks = state.blocks
            wrong = dataclasses.replace(blocks, ref_counts=blocks.ref_counts.at[3].add(1))
            state = dataclasses.replace(state, blocks=wrong)
        return state, copies


@pytest.mark.parametrize("linear", [False, True])
def test_bisect_finds_a_planted_fault(session, linear):
    player = Faulty(session[0], 317)
    holds = compiled_predicate("check_invariants", player)
    assert first_failure(player, holds, linear=linear) == 317
    assert next(m for m in player.verify() if m is not None).step == 317


def test_bisect_with_an_expression(session, player):
    number = first_failure(
        player, compiled_predicate("counters.num_preemptions == 0", player), linear=False
    )
    assert int(player.state(number).counters.num_preemptions) > 0
    assert int(player.state(number - 1).counters.num_preemptions) == 0
    assert "preempted" in changes_of(player, number).by_kind
    never = compiled_predicate("(rows.status < 9) & (step >= 0)", player)
    assert first_failure(player, never, linear=True, last=20) is None
    for text, words in (("1 +", "must be a Python expression"), ("rows.x == 1", "fails")):
        with pytest.raises(ValueError, match=words):
            first_failure(player, compiled_predicate(text, player), linear=True)


def test_changes_add_up(session, player):
    """What is told of all steps, taken together, is what the counters and the states say."""
    told = dict.fromkeys(("preempted", "evicted", "copied", "tokens"), 0)
    held, last = set(), 300
    for number in range(1, last + 1):
        changes = changes_of(player, number)
        for kind in told:
            told[kind] += changes.counts()[kind]
        state = jax.device_get(player.state(number))
        in_use = int((state.blocks.ref_counts > 0).sum())
        assert len(changes.by_kind.get("allocated", ())) <= 16
        held = in_use
    counters = jax.device_get(player.state(last)).counters
    assert told["preempted"] == int(counters.num_preemptions)
    assert told["evicted"] == int(counters.num_evictions)
    assert told["copied"] == int(counters.num_block_copies)
    assert told["tokens"] > 200
    assert held <= 28


def test_text(session, player):
    log, _ = session
    lines = list(describe_log(log))
    assert any("under other names" in line for line in lines)
    running = next(
        n for n, s in player.walk(50) if (np.asarray(s.rows.status) == Status.RUNNING).sum() == 4
    )
    lines = list(describe_state(player.state(running), running, 16))
    assert "4 running" in lines[0]
    assert sum("running" in line for line in lines[3:]) == 4
    lines = list(describe_changes(player, 0, 30))
    assert lines[0].startswith("step 1, ")
    assert any("  allocated" in line for line in lines)
    assert any("  admitted" in line for line in lines)
    assert lines[-1].startswith("from 0 to 30: added ")


def test_recording_compiles_nothing_after_warm_up(folder):
    engine = make_engine(event_log=str(folder / "warm.log"), event_log_text=True, event_log_kv=True)
    engine.warm_up()
    before = engine.num_compiled()
    record(None, engine=engine, num_steps=30)
    assert engine.num_compiled() == before
    assert set(Player(read_log(folder / "warm.log")).verify()) == {None}


def test_an_old_log_is_kept_and_a_full_disk_ends_the_log_only(folder, caplog):
    path = folder / "twice.log"
    record(path, num_steps=3)
    old = path.read_bytes()
    engine = record(path, num_steps=3)
    assert path.with_name("twice.log.1").read_bytes() == old
    recorder = engine._device._recorder

    def full(*_):
        raise OSError(28, "No space left on device")

    recorder._writer.append = full
    record(None, engine=engine, num_steps=20)
    assert "ends here" in caplog.text
    assert caplog.text.count("ends here") == 1
    assert Player(read_log(path)).num_steps >= 2
