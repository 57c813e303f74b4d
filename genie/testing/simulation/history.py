"""The recorded history of a simulation: messages sent and received, faults and notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from genie.testing.simulation.network import Connection, Observer, SimTransport

Message = dict[str, Any]

CLIENT_SENT = "client sent"
SERVER_SENT = "server sent"
CLIENT_RECEIVED = "client received"
CONNECTED = "connected"
DISCONNECTED = "disconnected"
FAULT = "fault"
"""The nemesis broke or healed something."""
NOTE = "note"
"""A program of the simulation recorded a remark."""


@dataclass(slots=True, frozen=True)
class Entry:
    """One event of a simulation."""

    at: float
    """The virtual time in seconds."""
    kind: str
    """One of the kinds above, such as `CLIENT_SENT`. A subclass of `History` may have further kinds."""
    node: str
    """The name of a simulated process."""
    data: Any
    """The decoded JSON of a message, or a text. A subclass of `History` may record other objects."""
    connection: int = 0
    """The number of a connection. 0 if the event concerns no connection."""

    def __str__(self) -> str:
        data = self.data
        if isinstance(data, dict):
            data = json.dumps(data, default=str)
        connection = f" #{self.connection}" if self.connection else ""
        return f"{self.at:12.6f} {self.node}{connection} {self.kind} {data}"


@dataclass
class History(Observer):
    """Collects the entries of a simulation, as the observer of the network.

    `clock` returns the virtual time in seconds.
    """

    clock: Callable[[], float]
    server_port: int = 7077
    impaired: dict[str, list[float]] = field(default_factory=dict)
    """The times at which each host was observed to be down, stopped or partitioned, by host name."""
    lifetimes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The times at which each server process started and ended, by process name."""
    entries: list[Entry] = field(default_factory=list)
    _partial_lines: dict[tuple[SimTransport, str], bytes] = field(default_factory=dict)
    """The bytes of an incomplete line, by one side of a connection and the kind of the entry."""

    def restart(self) -> None:
        """Drop all entries. The times of new entries are counted from now on."""
        self.entries.clear()
        clock, started_at = self.clock, self.clock()
        self.clock = lambda: clock() - started_at

    def append(self, kind: str, node: str, data: Any, connection: int = 0) -> None:
        """Append an entry with the current time."""
        self.entries.append(Entry(self.clock(), kind, node, data, connection))

    # -- network.Observer ---------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """Record a connection to a server."""
        if connection.address[1] == self.server_port:
            self.append(CONNECTED, connection.client.node.name, connection.server.node.name, connection.number)

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """Record the messages that a client or a server has written."""
        connection = transport.connection
        if connection.address[1] == self.server_port:
            self._record_lines(transport, CLIENT_SENT if transport is connection.client else SERVER_SENT, data)

    def received(self, transport: SimTransport, data: bytes) -> None:
        """Record the messages that a client process is about to receive."""
        connection = transport.connection
        if connection.address[1] == self.server_port and transport is connection.client:
            self._record_lines(transport, CLIENT_RECEIVED, data)

    def closed(self, transport: SimTransport, how: str) -> None:
        """Record that one side of a connection has ended, and how."""
        connection = transport.connection
        if connection.address[1] == self.server_port:
            side = "client" if transport is connection.client else "server"
            self.append(DISCONNECTED, transport.node.name, f"{side} {how}", connection.number)

    def _record_lines(self, transport: SimTransport, kind: str, data: bytes) -> None:
        """Record each complete line as a message. An incomplete line is kept until the rest of the line arrives."""
        key = transport, kind
        unrecorded = self._partial_lines.pop(key, b"") + data
        *complete_lines, partial_line = unrecorded.split(b"\n")
        if partial_line:
            self._partial_lines[key] = partial_line
        node, number = transport.node.name, transport.connection.number
        for line in complete_lines:
            if not line.strip():
                continue
            try:
                message = json.loads(line)
            except ValueError:
                message = {"command": "garbage", "payload": {"line": repr(line)}}  # the line is not JSON
            self.append(kind, node, message, number)
