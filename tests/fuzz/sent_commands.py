"""Parses the lines that a client sends, and lists the error codes with which each may be rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genie.config import Settings
from genie.core import Extend, Release, Request, Take
from genie.errors import RequestRejected
from genie.lock_modes import lock_text
from genie.protocol.commands import Hello, Namespaced, ReleaseByRef, is_http, read, without_namespace
from genie.protocol.diagnostics import is_hello
from genie.server.rejections import wrong_namespace

NAMESPACE = Settings().namespaces[0]

ALLOWED = {
    "request": {"ref-conflict", "too-many", "unavailable"},
    "release": {"unknown-id", "unavailable"},
    "extend": {"unknown-id", "bad-request", "unavailable"},
    "hello": {"bad-request", "unavailable", "unsupported-protocol", "unknown-namespace"},
    "bye": {"unavailable"},
    "ping": {"unavailable"},
    "inspect": {"unavailable"},
    "watch": {"too-many", "unavailable"},
    "unwatch": {"unavailable"},
}
"""The codes with which a valid command may be rejected."""

MALFORMED = {"bad-json", "bad-message"}
"""Codes of lines that are no command: the server replies with them in every state."""


@dataclass(slots=True)
class SentCommand:
    """One line: `kind` is the command, or `wrong`, `http`, `too long`."""

    kind: str
    at_ms: float
    decoded: Any = None
    """The decoded command, of a valid line."""
    ref: str | None = None
    id: int | None = None
    rejection: RequestRejected | None = None
    foreign: bool = False
    """The command is invalid on this connection only, because it names another namespace."""
    is_hello_attempt: bool = False
    """The command is a `hello`, valid or not. If it is rejected, the connection is not opened."""
    needs_reply: bool = False
    """The command repeats a request whose grant the client has received. The repetition has a reply even on a quiet connection."""
    settled_id: int | None = None
    """The id of the repeated request, if any client had received its grant or its end when this command was sent."""

    @property
    def by_ref(self) -> bool:
        """True if it is a `release` by `ref`."""
        return isinstance(self.decoded, ReleaseByRef)

    @property
    def request(self) -> Request:
        """The request of a `request` command."""
        return self.decoded.request if isinstance(self.decoded, Take) else self.decoded

    @property
    def modes(self) -> dict[str, str]:
        """The mode of each requested resource, of `anyOf` of the possible ones: `shared`, `exclusive`, or units as `2/10`."""
        modes = self.decoded.choices if isinstance(self.decoded, Take) else self.decoded.modes()
        return {name: lock_text(name, mode, self.decoded.units.get(name)).partition(":")[0] for name, mode in modes}


def parse_line(line: bytes, now_ms: float) -> SentCommand:
    """Parse a complete line that a client sends, as the protocol defines it."""
    try:
        command = read(line)
    except RequestRejected as rejected:
        resembles_hello = rejected.code in ("bad-json", "bad-message", "unknown-command") and b"hello" in line.lower()
        return SentCommand(
            "wrong",
            now_ms,
            ref=rejected.ref,
            id=rejected.id,
            rejection=rejected,
            is_hello_attempt=resembles_hello or is_hello(line),
        )
    if isinstance(command, Namespaced) and command.namespace != NAMESPACE:
        rejected = wrong_namespace(command, NAMESPACE)
        return SentCommand("wrong", now_ms, ref=rejected.ref, id=rejected.id, rejection=rejected, foreign=True)
    command = without_namespace(command)
    if isinstance(command, (Request, Take)):
        sent = SentCommand("request", now_ms, command)
        sent.ref = sent.request.ref
        return sent
    kind = "release" if isinstance(command, ReleaseByRef) else type(command).__name__.lower()
    assert kind in ALLOWED
    id_ = command.id if isinstance(command, (Release, Extend)) else None
    return SentCommand(kind, now_ms, command, command.ref, id_, is_hello_attempt=isinstance(command, Hello))


class LineSplitter:
    """Splits the bytes that a client sends into commands, as the protocol defines it."""

    def __init__(self, max_line: int) -> None:
        self.max_line = max_line
        self.rest = b""
        self.begun = False
        self.ended = False
        """The server reads nothing more: the last line was HTTP, or too long."""

    def feed(self, data: bytes, now_ms: float) -> list[SentCommand]:
        """Return the commands that the bytes complete."""
        commands: list[SentCommand] = []
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if self.ended:
                break
            if len(line.removesuffix(b"\r")) > self.max_line:
                commands.append(self._end("too long", now_ms))
            elif not line.strip():
                continue
            elif not self.begun and is_http(line):
                commands.append(self._end("http", now_ms))
            else:
                self.begun = True
                commands.append(parse_line(line, now_ms))
        if not self.ended and len(self.rest) > self.max_line + 1:
            commands.append(self._end("too long", now_ms))
        return commands

    def _end(self, kind: str, now_ms: float) -> SentCommand:
        self.ended = True
        return SentCommand(kind, now_ms)
