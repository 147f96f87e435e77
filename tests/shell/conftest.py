"""One warmed-up engine for all tests that leave it idle."""

import pytest

from tests.shell.tiny import drain, make_engine


@pytest.fixture(scope="session")
def warm_engine():
    engine = make_engine()
    engine.warm_up()
    return engine


@pytest.fixture
def engine(warm_engine):
    """The shared engine; every test must leave it idle, with all blocks free or cached."""
    assert not warm_engine.has_work()
    yield warm_engine
    drain(warm_engine)
    stats = warm_engine.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks
