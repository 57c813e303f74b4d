"""The lock manager: pure, deterministic, and the only place where it is decided who holds what.

`LockManager.step(command, now)` is the way in; `core/README.md` tells the theory.
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
