"""The state of a request of a wire client."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from faults.checker import Grant
from faults.connection import Connection


class State(Enum):
    """The state of the request, according to the messages that its client has received."""

    SENT = auto()
    QUEUED = auto()
    HELD = auto()
    RELEASING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """The current request of a client."""

    ref: str
    keys: tuple[str, ...]
    hold_ms: int
    sent_at: float
    state: State = State.SENT
    id: int = 0
    reason: str = ""
    grant: Grant | None = None
    extension_ms: int = 0
    """The timeout of an `extend` without a reply; 0 if there is none."""
    sent_on: Connection | None = None
    """The connection on which the last command about it was sent."""
    confirmed_on: Connection | None = None
    """The connection on which the server last sent a message about it."""
