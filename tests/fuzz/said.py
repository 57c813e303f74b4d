"""What a client has said, line by line, and what it may be answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genie.config import Settings
from genie.core import Extend, Release, Request, Take
from genie.errors import RequestRejected
from genie.protocol.commands import HTTP, Hello, Inspect, Unwatch, Watch, Within, read
from genie.server.refusal import spanning

NAMESPACE = Settings().namespaces[0]

ALLOWED = {
    "request": {"ref-conflict", "too-many", "unavailable"},
    "release": {"unknown-id", "unavailable"},
    "extend": {"unknown-id", "bad-request", "unavailable"},
    "hello": {"bad-request", "unavailable"},
    "ping": {"unavailable"},
    "inspect": {"unavailable"},
    "watch": {"too-many", "unavailable"},
    "unwatch": {"unavailable"},
}
"""The codes with which a good command may be refused."""


@dataclass(slots=True)
class Said:
    """One line: `kind` is the command, or `wrong`, `http`, `too long`."""

    kind: str
    at_ms: float
    command: Any = None
    ref: str | None = None
    id: int | None = None
    wrong: RequestRejected | None = None
    foreign: bool = False
    """It is wrong only for this connection: it says another namespace."""

    @property
    def request(self) -> Request:
        """What was asked for, of a `request`."""
        return self.command.request if isinstance(self.command, Take) else self.command

    @property
    def names(self) -> dict[str, bool]:
        """Every name that it asks for (or could take), and whether exclusively."""
        if isinstance(self.command, Take):
            return dict(self.command.choices)
        return dict(self.command.wants())


def understood(line: bytes, now_ms: float) -> Said:
    """A line as the rule of the protocol has it."""
    try:
        command = read(line)
    except RequestRejected as wrong:
        return Said("wrong", now_ms, ref=wrong.ref, id=wrong.id, wrong=wrong)
    if isinstance(command, Within):
        if command.namespace != NAMESPACE:
            wrong = spanning(command, NAMESPACE)
            return Said("wrong", now_ms, ref=wrong.ref, id=wrong.id, wrong=wrong, foreign=True)
        command = command.command
    if isinstance(command, (Request, Take)):
        said = Said("request", now_ms, command)
        said.ref = said.request.ref
        return said
    if isinstance(command, (Release, Extend)):
        return Said(type(command).__name__.lower(), now_ms, command, id=command.id)
    assert isinstance(command, (Hello, Inspect, Watch, Unwatch)) or type(command).__name__ == "Ping"
    return Said(type(command).__name__.lower(), now_ms, command)


class Mouth:
    """Cuts what a client says into lines, as the protocol has them."""

    def __init__(self, max_line: int) -> None:
        self.max_line = max_line
        self.rest = b""
        self.blank = False
        """It began with a blank line."""
        self.begun = False
        self.over = False
        """Nothing behind is read."""

    def say(self, data: bytes, now_ms: float) -> list[Said]:
        """The commands that the bytes complete."""
        found: list[Said] = []
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if self.over:
                break
            if len(line.removesuffix(b"\r")) > self.max_line:
                found.append(self._end("too long", now_ms))
            elif not line.strip():
                self.blank = self.blank or not self.begun
            elif not self.begun and line.startswith(HTTP):
                found.append(self._end("http", now_ms))
            else:
                self.begun = True
                found.append(understood(line, now_ms))
        if not self.over and len(self.rest) > self.max_line + 1:
            found.append(self._end("too long", now_ms))
        return found

    def _end(self, kind: str, now_ms: float) -> Said:
        self.over = True
        return Said(kind, now_ms)
