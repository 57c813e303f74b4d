"""The role of a server in one namespace, as one value. The store reports the roles of a follower. The namespace sets the
other roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class StoreOutage:
    """An interruption of the store: since when (event-loop time, seconds), and the last error."""

    since: float
    error: str


@dataclass(frozen=True, slots=True)
class Starting:
    """The store has not answered yet."""

    name: ClassVar[str] = "starting"


@dataclass(frozen=True, slots=True)
class Waiting:
    """The store answers, and no leader is known: this server waits until it may compete, or until another server leads."""

    name: ClassVar[str] = "waiting"


@dataclass(frozen=True, slots=True)
class Following:
    """Another server leads."""

    name: ClassVar[str] = "follower"

    leader: str
    """The leader's address for clients."""
    caught_up: bool
    """True if this server has a replica of the state, so that it can take over without loading the state first."""


@dataclass(frozen=True, slots=True)
class StoreUnavailable:
    """The server does not lead, and cannot use the store."""

    name: ClassVar[str] = "unavailable"

    outage: StoreOutage


@dataclass(frozen=True, slots=True)
class Leading:
    """The server leads."""

    name: ClassVar[str] = "leader"


@dataclass(frozen=True, slots=True)
class Stopping:
    """The server shuts down."""

    name: ClassVar[str] = "stopping"


FollowerRole = Waiting | Following | StoreUnavailable
"""The roles that the store reports until this server leads."""
Role = Starting | FollowerRole | Leading | Stopping
