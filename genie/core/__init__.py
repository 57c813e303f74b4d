"""The lock manager: pure, deterministic, and the only place where it is decided who holds what.

`LockManager.step(command, now)` is the way in; `core/README.md` tells the theory.
"""

from genie.core.commands import Command, Disconnect, Expire, Extend, Recover, Release, Take
from genie.core.deadlines import NEVER
from genie.core.events import (
    Blocker,
    Cycle,
    Deadlocked,
    Event,
    Extended,
    Full,
    Granted,
    Locked,
    Moved,
    NotHeld,
    Queued,
    Refused,
    Released,
    Repeated,
    Taken,
    TimedOut,
    Unknown,
    Wait,
)
from genie.core.manager import LockManager
from genie.core.model import ENDED, HELD, NO_TIMEOUT_MS, SUCCESS, WAITING, Mode, Origin, Reason, Request, State, Weight
from genie.core.view import Inspection, Row, inspect, obstacles

__all__ = [
    "ENDED",
    "HELD",
    "NEVER",
    "NO_TIMEOUT_MS",
    "SUCCESS",
    "WAITING",
    "Blocker",
    "Command",
    "Cycle",
    "Deadlocked",
    "Disconnect",
    "Event",
    "Expire",
    "Extend",
    "Extended",
    "Full",
    "Granted",
    "Inspection",
    "LockManager",
    "Locked",
    "Mode",
    "Moved",
    "NotHeld",
    "Origin",
    "Queued",
    "Reason",
    "Recover",
    "Refused",
    "Release",
    "Released",
    "Repeated",
    "Request",
    "Row",
    "State",
    "Take",
    "Taken",
    "TimedOut",
    "Unknown",
    "Wait",
    "Weight",
    "inspect",
    "obstacles",
]
