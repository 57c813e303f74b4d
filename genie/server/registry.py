"""Every open connection, and how many there may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.server.connection import Connection


class Registry:
    """Counts connections, in all and by the address that they come from. `opened` is how many there ever were."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[Connection, str] = {}
        self._from: Counter[str] = Counter()
        self.opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._open)

    def enter(self, connection: Connection, address: str) -> str | None:
        """Count a connection in; returns why there is no place for it, if so. It is counted until it leaves even then."""
        most, most_of_one = self._settings.max_connections, self._settings.max_connections_per_address
        why = None
        if len(self._open) >= most:
            why = f"this server takes {most} connections, and has them"
        elif self._from[address] >= most_of_one:
            why = f"this server takes {most_of_one} connections from one address, and has them from {address}"
        self._open[connection] = address
        self._from[address] += 1
        self.opened += 1
        return why

    def leave(self, connection: Connection) -> None:
        """A connection has ended."""
        address = self._open.pop(connection, None)
        if address is not None:
            self._from[address] -= 1
            if not self._from[address]:
                del self._from[address]
