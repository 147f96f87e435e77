"""The engine around the pure core: the queue, the clocks, the one mutable object."""

from pagedjax.engine.async_engine import AsyncEngine
from pagedjax.engine.build import build_engine
from pagedjax.engine.engine import Engine
from pagedjax.engine.errors import (
    EngineDeadError,
    EngineSavedError,
    InvalidRequestError,
    QueueFullError,
)
from pagedjax.engine.state_file import SnapshotError
from pagedjax.engine.stats import EngineStats

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineDeadError",
    "EngineSavedError",
    "EngineStats",
    "InvalidRequestError",
    "QueueFullError",
    "SnapshotError",
    "build_engine",
]
