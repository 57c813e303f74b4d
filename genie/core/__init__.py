"""The lock manager: a pure, deterministic state machine that decides which request holds which lock.

`LockManager.step(command, now)` is the entry point. `core/README.md` explains the theory.
"""

from genie.core.commands import Command, Disconnect, Expire, Extend, Recover, Release, Take
from genie.core.deadlines import NEVER
from genie.core.events import (
    AlreadyEnded,
    Blocker,
    Cycle,
    Deadlocked,
    Event,
    Extended,
    Granted,
    Insufficient,
    Locked,
    LockedAfterBlockers,
    Moved,
    NotHeld,
    Queued,
    QueueFull,
    Released,
    Taken,
    TimedOut,
    UnknownId,
    Wait,
)
from genie.core.manager import LockManager
from genie.core.model import ENDED, HELD, NO_TIMEOUT_MS, SUCCESS, WAITING, Mode, Origin, Reason, Request, State, Weight
from genie.core.view import Inspection, Row, blocked_resources, inspect

__all__ = [
    "ENDED",
    "HELD",
    "NEVER",
    "NO_TIMEOUT_MS",
    "SUCCESS",
    "WAITING",
    "AlreadyEnded",
    "Blocker",
    "Command",
    "Cycle",
    "Deadlocked",
    "Disconnect",
    "Event",
    "Expire",
    "Extend",
    "Extended",
    "Granted",
    "Inspection",
    "Insufficient",
    "LockManager",
    "Locked",
    "LockedAfterBlockers",
    "Mode",
    "Moved",
    "NotHeld",
    "Origin",
    "QueueFull",
    "Queued",
    "Reason",
    "Recover",
    "Release",
    "Released",
    "Request",
    "Row",
    "State",
    "Take",
    "Taken",
    "TimedOut",
    "UnknownId",
    "Wait",
    "Weight",
    "blocked_resources",
    "inspect",
]
