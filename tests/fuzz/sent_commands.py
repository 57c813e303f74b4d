"""Parses the lines that a client sends, and lists the error codes with which each may be rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genie.config import Settings
from genie.core import Extend, Release, Request, Take
from genie.errors import RequestRejected
from genie.protocol.commands import HTTP_METHODS, Hello, Namespaced, ReleaseByRef, read
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
    command: Any = None
    ref: str | None = None
    id: int | None = None
    wrong: RequestRejected | None = None
    foreign: bool = False
    """It is invalid on this connection only: it names another namespace."""
    greets: bool = False
    """It is a `hello`, valid or not."""
    must: bool = False
    """It repeats a request whose grant the client has received: also a quiet connection gets a reply."""

    @property
    def by_ref(self) -> bool:
        """Whether it releases by `ref`."""
        return isinstance(self.command, ReleaseByRef)

    @property
    def request(self) -> Request:
        """The request of a `request` command."""
        return self.command.request if isinstance(self.command, Take) else self.command

    @property
    def names(self) -> dict[str, bool]:
        """The resources that it requests or may be granted; True: exclusively."""
        if isinstance(self.command, Take):
            return dict(self.command.choices)
        return dict(self.command.modes())


def parse_line(line: bytes, now_ms: float) -> SentCommand:
    """Parse a line by the rules of the protocol."""
    try:
        command = read(line)
    except RequestRejected as wrong:
        meant = wrong.code in ("bad-json", "bad-message", "unknown-command") and b"hello" in line.lower()
        return SentCommand("wrong", now_ms, ref=wrong.ref, id=wrong.id, wrong=wrong, greets=meant or is_hello(line))
    if isinstance(command, Namespaced):
        if command.namespace != NAMESPACE:
            wrong = wrong_namespace(command, NAMESPACE)
            return SentCommand("wrong", now_ms, ref=wrong.ref, id=wrong.id, wrong=wrong, foreign=True)
        command = command.command
    if isinstance(command, (Request, Take)):
        said = SentCommand("request", now_ms, command)
        said.ref = said.request.ref
        return said
    kind = "release" if isinstance(command, ReleaseByRef) else type(command).__name__.lower()
    assert kind in ALLOWED
    id_ = command.id if isinstance(command, (Release, Extend)) else None
    return SentCommand(kind, now_ms, command, command.ref, id_, greets=isinstance(command, Hello))


class LineSplitter:
    """Splits the bytes that a client sends into commands, by the rules of the protocol."""

    def __init__(self, max_line: int) -> None:
        self.max_line = max_line
        self.rest = b""
        self.begun = False
        self.over = False
        """The server reads nothing after this."""

    def say(self, data: bytes, now_ms: float) -> list[SentCommand]:
        """Return the commands that the bytes complete."""
        found: list[SentCommand] = []
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if self.over:
                break
            if len(line.removesuffix(b"\r")) > self.max_line:
                found.append(self._end("too long", now_ms))
            elif not line.strip():
                continue
            elif not self.begun and line.startswith(HTTP_METHODS):
                found.append(self._end("http", now_ms))
            else:
                self.begun = True
                found.append(parse_line(line, now_ms))
        if not self.over and len(self.rest) > self.max_line + 1:
            found.append(self._end("too long", now_ms))
        return found

    def _end(self, kind: str, now_ms: float) -> SentCommand:
        self.over = True
        return SentCommand(kind, now_ms)
