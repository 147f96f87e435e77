"""The event log of an engine: all that went into its scheduler, so that it can be played again."""

from pagedjax.eventlog.format import LogError
from pagedjax.eventlog.recorder import Recorder

__all__ = ["LogError", "Recorder"]
