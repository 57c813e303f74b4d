"""Every open connection, and how many there may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from genie.server.partial_lines import PartialLines

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.server.connection import Connection
    from genie.server.handshake import Handshake

SPARE = 16
"""Clients beyond the limits that are let through their TLS handshake, at a time, to be told why they are refused."""


class Registry:
    """Counts connections, in all and by the address that they come from.

    Those whose TLS handshake has not ended count, too, but are not among those that it lists.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[Connection, str | None] = {}
        """Every open connection with its address; None where it was refused, and does not count."""
        self._turned_away = 0
        """How many of them were refused."""
        self._beginning: dict[Handshake, str] = {}
        self._refused: set[Handshake] = set()
        """Handshakes beyond the limits."""
        self._from: Counter[str] = Counter()
        self.partial_lines = PartialLines(settings.max_partial)

    def __len__(self) -> int:
        return len(self._open) - self._turned_away + len(self._beginning)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._open)

    @property
    def handshakes(self) -> list[Handshake]:
        """Those that are under way."""
        return [*self._beginning, *self._refused]

    def begin(self, handshake: Handshake, address: str) -> bool:
        """Count a handshake in, until it ends; False where it must be cut, since there are far too many.

        The connection that it becomes enters after that, in the place that it had. Where it had none that is refused.
        """
        if self._full(address) is None:
            self._beginning[handshake] = address
            self._from[address] += 1
        elif len(self._refused) < SPARE and len(self._open) < self._settings.max_connections + SPARE:
            self._refused.add(handshake)
        else:
            return False
        return True

    def end(self, handshake: Handshake) -> None:
        """A handshake is over, in whatever way."""
        self._refused.discard(handshake)
        self._forget(self._beginning.pop(handshake, None))

    def enter(self, connection: Connection, address: str) -> str | None:
        """Count a connection in; returns why there is no place for it, if so. Then it is listed, and does not count."""
        why = self._full(address)
        if why is None:
            self._open[connection] = address
            self._from[address] += 1
        else:
            self._open[connection] = None
            self._turned_away += 1
        return why

    @property
    def crowded(self) -> bool:
        """Whether so many refused connections are open that the next one must be closed at once."""
        return self._turned_away > SPARE

    def leave(self, connection: Connection) -> None:
        """A connection has ended."""
        self.partial_lines.forget(connection)
        if connection in self._open:
            address = self._open.pop(connection)
            self._turned_away -= address is None
            self._forget(address)

    def _full(self, address: str) -> str | None:
        most, most_of_one = self._settings.max_connections, self._settings.max_connections_per_address
        if len(self) >= most:
            return f"this server takes {most} connections, and has them"
        if self._from[address] >= most_of_one:
            return f"this server takes {most_of_one} connections from one address, and has them from {address}"
        return None

    def _forget(self, address: str | None) -> None:
        if address is not None:
            self._from[address] -= 1
            if not self._from[address]:
                del self._from[address]
