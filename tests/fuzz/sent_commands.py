"""What a client has said, line by line, and what it may be answered."""

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
"""The codes with which a good command may be refused."""

MALFORMED = {"bad-json", "bad-message"}
"""Of lines that are no command: they are refused with that whatever the server can do now."""


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
    greets: bool = False
    """It is a `hello`, whatever may be wrong with it."""
    must: bool = False
    """It repeats a request of which this client was told that it was granted, so that it is answered also where it is quiet."""

    @property
    def by_ref(self) -> bool:
        """Whether it releases by `ref`."""
        return isinstance(self.command, ReleaseByRef)

    @property
    def request(self) -> Request:
        """What was asked for, of a `request`."""
        return self.command.request if isinstance(self.command, Take) else self.command

    @property
    def names(self) -> dict[str, bool]:
        """Every name that it asks for (or could take), and whether exclusively."""
        if isinstance(self.command, Take):
            return dict(self.command.choices)
        return dict(self.command.modes())


def understood(line: bytes, now_ms: float) -> Said:
    """A line as the rule of the protocol has it."""
    try:
        command = read(line)
    except RequestRejected as wrong:
        meant = wrong.code in ("bad-json", "bad-message", "unknown-command") and b"hello" in line.lower()
        return Said("wrong", now_ms, ref=wrong.ref, id=wrong.id, wrong=wrong, greets=meant or is_hello(line))
    if isinstance(command, Namespaced):
        if command.namespace != NAMESPACE:
            wrong = wrong_namespace(command, NAMESPACE)
            return Said("wrong", now_ms, ref=wrong.ref, id=wrong.id, wrong=wrong, foreign=True)
        command = command.command
    if isinstance(command, (Request, Take)):
        said = Said("request", now_ms, command)
        said.ref = said.request.ref
        return said
    kind = "release" if isinstance(command, ReleaseByRef) else type(command).__name__.lower()
    assert kind in ALLOWED
    id_ = command.id if isinstance(command, (Release, Extend)) else None
    return Said(kind, now_ms, command, command.ref, id_, greets=isinstance(command, Hello))


class Mouth:
    """Cuts what a client says into lines, as the protocol has them."""

    def __init__(self, max_line: int) -> None:
        self.max_line = max_line
        self.rest = b""
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
                continue
            elif not self.begun and line.startswith(HTTP_METHODS):
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
