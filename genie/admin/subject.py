"""What the admin port wants to know of a server. It looks, and asks for one thing: that a lock be released."""

from __future__ import annotations

from collections.abc import Sized
from ssl import SSLContext
from typing import Protocol

from genie.access import Access
from genie.config import Settings
from genie.core import LockManager
from genie.observability.stats import Stats


class Subject(Protocol):
    """A server, as far as the admin port is concerned."""

    settings: Settings
    stats: Stats

    @property
    def connections(self) -> Sized:
        """Those that are open."""

    @property
    def access(self) -> Access:
        """Who may come in at present."""

    @property
    def admin_tls(self) -> SSLContext | None:
        """What the admin port speaks, if not plain HTTP. Who shows a certificate has shown a good one (`genie.tls`)."""

    @property
    def role(self) -> str:
        """`starting` (nobody is known to lead), `leader`, `follower` or `stopping`."""

    @property
    def leader(self) -> str | None:
        """The address of the server that leads, where this one follows it."""

    @property
    def reaches_store(self) -> bool:
        """Whether the store answers, as far as this server needs it now."""

    @property
    def store_errors(self) -> int:
        """How often the store could not be reached, or took longer than it may."""

    @property
    def manager(self) -> LockManager | None:
        """All locks and lines, while this server leads."""

    @property
    def now(self) -> float:
        """The time of the lock manager (ms). Only while this server leads."""

    @property
    def sessions(self) -> int:
        """Sessions, with and without a connection."""

    async def carry_out(self, line: bytes) -> bytes:
        """Do what a line of the wire asks for; returns what a client would be told, when it is stored."""
