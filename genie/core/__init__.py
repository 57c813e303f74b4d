"""The lock manager: a pure, deterministic state machine that decides which request holds which lock.

`LockManager.step(command, now)` is the entry point. `core/README.md` explains the theory.
"""

from genie.core.commands import Command, Continue, Disconnect, Expire, Extend, Recover, Release, Take
from genie.core.context import Context, Origin, context_of, shown_note
from genie.core.deadlines import NEVER
from genie.core.events import (
    AlreadyEnded,
    Blocker,
    Cycle,
    Deadlocked,
    Event,
    Extended,
    Granted,
    GraphFull,
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
from genie.core.model import (
    ENDED,
    HELD,
    NO_TIMEOUT_MS,
    SUCCESS,
    WAITING,
    Reason,
    Request,
    State,
    Weight,
    in_parts,
    needs_session,
)
from genie.core.special import MAX_COMPARED_NAMES, MAX_QUEUES, MAX_SEARCHED_LEVELS, MAX_WAITERS_BELOW
from genie.core.view import Inspection, Row, blocked_resources, inspect
from genie.core.wait_queue import MAX_ARRIVAL_STEPS
from genie.lock_modes import Mode

__all__ = [
    "ENDED",
    "HELD",
    "MAX_ARRIVAL_STEPS",
    "MAX_COMPARED_NAMES",
    "MAX_QUEUES",
    "MAX_SEARCHED_LEVELS",
    "MAX_WAITERS_BELOW",
    "NEVER",
    "NO_TIMEOUT_MS",
    "SUCCESS",
    "WAITING",
    "AlreadyEnded",
    "Blocker",
    "Command",
    "Context",
    "Continue",
    "Cycle",
    "Deadlocked",
    "Disconnect",
    "Event",
    "Expire",
    "Extend",
    "Extended",
    "Granted",
    "GraphFull",
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
    "context_of",
    "in_parts",
    "inspect",
    "needs_session",
    "shown_note",
]
