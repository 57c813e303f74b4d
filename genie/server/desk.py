"""Who takes what connections bring: the pump of a server that leads, or the desk of one that doesn't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from genie.errors import Code
from genie.protocol import replies

if TYPE_CHECKING:
    from genie.observability.stats import Stats
    from genie.server.connection import Connection, Input


class Desk(Protocol):
    """What a connection hands its lines to."""

    leads: bool
    """Whether commands are carried out here."""

    def submit(self, connection: Connection, items: Input, size: int) -> None:
        """Lines of one connection, in order, that came in `size` bytes."""

    def gone(self, connection: Connection) -> None:
        """A connection has ended."""


class Refusing:
    """Answers every command with `unavailable` and, where that is known, the address of the server that leads."""

    leads = False
    leader: str | None = None

    def __init__(self, stats: Stats, namespace: str) -> None:
        self._stats = stats
        self._namespace = namespace

    def _why(self) -> str:
        if self.leader is None:
            return (
                f"this server does not lead the namespace {self._namespace!r}, and knows of none that does "
                "(or can't reach the store)"
            )
        return f"this server does not lead the namespace {self._namespace!r}; {self.leader} does"

    def submit(self, connection: Connection, items: Input, size: int) -> None:  # noqa: ARG002 - none waits
        """Refuse what was said. Nothing changes by it, so that there is nothing to wait for."""
        why = self._why()
        for item in items:
            rejected = connection.unavailable(item, why)
            if rejected is not None:
                self._stats.errors[rejected.code] += 1
                leader = self.leader if rejected.code == Code.UNAVAILABLE else None
                connection.out.append(replies.error(rejected, leader))
        connection.flush()
        if connection.ending:
            connection.finish()

    def gone(self, connection: Connection) -> None:
        """It had nothing here."""
