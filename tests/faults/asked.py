"""A request of a client of the wire, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from faults.link import Link
from faults.watch import Grant


class State(Enum):
    """How far its request has come, as far as it has heard."""

    ASKED = auto()
    QUEUED = auto()
    HELD = auto()
    LEAVING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """The one request of the moment."""

    ref: str
    keys: tuple[str, ...]
    hold_ms: int
    asked_at: float
    state: State = State.ASKED
    id: int = 0
    reason: str = ""
    grant: Grant | None = None
    extension_ms: int = 0
    """What is asked for by an `extend` that was not answered yet."""
    sent_on: Link | None = None
    """The connection on which what is asked for was sent last."""
    told_on: Link | None = None
    """The connection on which the server last said that it lives."""
