"""One recorded session for all tests of replay."""

import jax
import pytest

from pagedjax.replay import Player, read_log
from tests.replay.session import record


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="session")
def session(folder):
    """(log without text, the scheduler's states as they were)."""
    states = {}

    def keep(engine):
        # The state after the step launched last, if nothing has been fed since.
        state = engine._device.state.scheduler
        states[int(state.step)] = jax.device_get(state)

    engine = record(folder / "events.log", on_step=keep)
    assert engine.stats().preemptions > 0
    assert engine.stats().finished["abort"] > 0
    assert engine.stats().finished["stop"] > 0
    assert engine.stats().cached_tokens > 0
    return read_log(folder / "events.log"), states


@pytest.fixture(scope="session")
def player(session):
    return Player(session[0])
