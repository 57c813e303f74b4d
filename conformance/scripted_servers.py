"""The scripted servers of a case for clients: listening ports, and connections whose messages the case decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from conformance.automatic_server import AutomaticServer
from conformance.client_rules import SentCommands
from conformance.matching import Variables, matches, substitute

MAX_LINE_BYTES: Final = 1 << 22
BYTEWISE_PAUSE_S: Final = 0.001
WELCOME: Final = {
    "protocol": 1,
    "server": "conformance/1",
    "features": ["anyOf", "bye", "extend", "inspect", "note", "quiet", "sessions", "traceparent", "watch"],
    "pingInterval": 30000,
    "namespace": "genie",
    "resumed": False,
}
"""The fields of `welcome` that a case does not set."""


def encode(message: Any) -> bytes:
    """Return a message as a line. A string is sent as it is."""
    if isinstance(message, str):
        return message.encode()
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


class Connection:
    """A connection of the client under test to a scripted server."""

    def __init__(
        self,
        server: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        record: Callable[[str], None],
        commands: SentCommands,
    ) -> None:
        self.server = server
        """The number of the server, from 1."""
        self.name = "?"
        """The name by which the case refers to the connection."""
        self.accepted_at = time.monotonic()
        self.quiet = False
        """True if `hello` has asked for `quiet`: then the server sends no `queued`."""
        self.pings = "hold"
        """What happens with pings: `hold` them until the handshake is complete, `answer`, `ignore`, `expect` them as other
        commands, or answer `unavailable`."""
        self.received: list[dict[str, Any]] = []
        """The commands that no step has taken."""
        self.held_pings: list[dict[str, Any]] = []
        self.ended = False
        """True if the client has closed the connection."""
        self.automatic: AutomaticServer | None = None
        """The server that answers everything; None: the steps of the case do."""
        self.refusal: dict[str, Any] | None = None
        """The payload of the error that answers `hello`; None: the steps of the case decide."""
        self.responders: list[tuple[Any, Sequence[Any]]] = []
        """Patterns of commands that are answered at once, with their answers."""
        self.on_input: Callable[[], None] = lambda: None
        self._reader = reader
        self._writer = writer
        self._record = record
        self._commands = commands
        self._commands.on_connection(self)

    async def read(self) -> None:
        """Read the commands until the connection ends."""
        try:
            while line := await self._reader.readline():
                self._record(f"{self.name} <- {line.decode(errors='replace').strip()[:2000]}")
                command = self._commands.check(self, line)
                if command is not None:
                    self._take(command)
                self.on_input()
        except (ConnectionError, ValueError) as error:
            self._record(f"{self.name}: {error!r}")
        self.ended = True
        self._record(f"{self.name} was closed by the client")
        self.on_input()

    def send(self, messages: Sequence[Any], cut: int | None = None) -> None:
        """Send messages in one write, or only the first `cut` bytes."""
        kept = [message for message in messages if not self._is_superfluous(message)]
        data = b"".join(map(encode, kept))[:cut]
        for message in kept:
            self._record(
                f"{self.name} -> {encode(message).decode().strip()[:2000]}{'' if cut is None else f' [{cut} bytes]'}"
            )
        if data and not self._writer.is_closing():
            self._writer.write(data)

    async def send_bytewise(self, messages: Sequence[Any]) -> None:
        """Send messages byte by byte."""
        self._record(f"{self.name}: the next messages are sent byte by byte")
        for byte in b"".join(encode(message) for message in messages if not self._is_superfluous(message)):
            self._writer.write(bytes([byte]))
            await asyncio.sleep(BYTEWISE_PAUSE_S)

    async def send_again(self, messages: Sequence[Any], times: int) -> None:
        """Send messages several times, and wait until the client has read most of what was sent."""
        self._record(f"{self.name} -> the same, {times} times")
        self._writer.write(b"".join(map(encode, messages)) * times)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def _is_superfluous(self, message: Any) -> bool:
        """Return whether a message is a `queued` that a quiet connection does not get."""
        return isinstance(message, dict) and message.get("command") == "queued" and self.quiet

    def welcome(self, fields: dict[str, Any], hello: dict[str, Any]) -> None:
        """Answer `hello`."""
        self.quiet = hello.get("quiet") is True
        payload = WELCOME | {"quiet": self.quiet} | fields
        if "ref" in hello:
            payload["ref"] = hello["ref"]
        if "namespace" in hello and "namespace" not in fields:
            payload["namespace"] = hello["namespace"]
        self._commands.on_welcome(self)
        self.send([{"command": "welcome", "payload": payload}])

    def set_pings(self, mode: str) -> None:
        """Set what happens with pings, also with the held pings."""
        self.pings = mode
        if mode != "hold":
            held, self.held_pings = self.held_pings, []
            for ping in held:
                self._take(ping)

    def _take(self, command: dict[str, Any]) -> None:
        """Answer a command, or keep it for the steps of the case."""
        payload = command.get("payload", {})
        if self.automatic is not None:
            return self.automatic.answer(self, command["command"], payload)
        if self.refusal is not None:
            return self._refuse(payload)
        if command["command"] == "ping" and self.pings != "expect":
            return self._take_ping(command, payload)
        for pattern, answers in self.responders:
            variables: Variables = {}
            if matches(pattern, command, variables):
                return self.send(substitute(answers, variables))
        self.received.append(command)
        return None

    def _refuse(self, payload: dict[str, Any]) -> None:
        """Answer with the error with which this server refuses clients."""
        echo = {"ref": payload["ref"]} if "ref" in payload else {}
        self.send([{"command": "error", "payload": (self.refusal or {}) | echo}])

    def _take_ping(self, command: dict[str, Any], payload: dict[str, Any]) -> None:
        echo = {"ref": payload["ref"]} if "ref" in payload else {}
        if self.pings == "hold":
            self.held_pings.append(command)
        elif self.pings == "answer":
            self.send([{"command": "pong", "payload": echo}])
        elif self.pings == "unavailable":
            self.send([{"command": "error", "payload": {"code": "unavailable", "message": "the store is away"} | echo}])

    def serve(self, server: AutomaticServer) -> None:
        """Let an automatic server answer everything from now on, also what is waiting for an answer."""
        self.automatic = server
        waiting = [*self.held_pings, *self.received]
        self.held_pings, self.received = [], []
        for command in waiting:
            self._take(command)
        if self.ended:
            self.close()

    def close(self) -> None:
        """Close the connection after everything was sent."""
        self._record(f"{self.name} is closed by the server")
        self._writer.close()

    def kill(self) -> None:
        """Abort the connection: the client receives a TCP reset."""
        self._record(f"{self.name} is aborted by the server")
        sock = self._writer.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


class ScriptedServer:
    """One port of a scripted server. It refuses connections unless it listens."""

    def __init__(
        self, number: int, on_connection: Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Any]
    ) -> None:
        self.number = number
        self._on_connection = on_connection
        self._server: asyncio.Server | None = None
        self._sock: socket.socket | None = _bind(0)
        self.port = self._sock.getsockname()[1]

    @property
    def address(self) -> str:
        """The address as `HOST:PORT`."""
        return f"127.0.0.1:{self.port}"

    async def listen(self) -> None:
        """Accept connections."""
        if self._server is None and self._sock is not None:
            self._server = await asyncio.start_server(
                lambda reader, writer: self._on_connection(self.number, reader, writer),
                sock=self._sock,
                limit=MAX_LINE_BYTES,
            )
            self._sock = None

    def refuse(self) -> None:
        """Refuse connections from now on, and keep the port."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._sock = _bind(self.port)

    def stop(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _bind(port: int) -> socket.socket:
    """Return a socket that is bound to a port of the loopback and does not listen: connections are refused."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.setblocking(False)
    return sock
