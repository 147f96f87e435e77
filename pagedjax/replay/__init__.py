"""Playing event logs: every state of an engine's scheduler again, bit for bit, and in any order.

log = read_log("events.log")
player = Player(log)
assert not any(player.verify())
state = player.state(120)
"""

from pagedjax.replay.changes import KINDS, Changes, changes_of
from pagedjax.replay.describe import describe_changes, describe_log, describe_state
from pagedjax.replay.log import Event, Log, Step, read_log
from pagedjax.replay.player import Mismatch, Player
from pagedjax.replay.search import compiled_predicate, first_failure, named_predicates
from pagedjax.replay.whole import Difference, verify_whole

__all__ = [
    "KINDS",
    "Changes",
    "Difference",
    "Event",
    "Log",
    "Mismatch",
    "Player",
    "Step",
    "changes_of",
    "compiled_predicate",
    "describe_changes",
    "describe_log",
    "describe_state",
    "first_failure",
    "named_predicates",
    "read_log",
    "verify_whole",
]
