"""The `unavailable` answer to commands that this server cannot execute now: it does not lead, or its store is away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genie.core import Extend, Release, Request, Take
from genie.errors import Code, RequestRejected
from genie.protocol.commands import Hello, Namespaced, ReleaseByRef, WireCommand, read

if TYPE_CHECKING:
    from genie.server.connection import Item

AWAY = "the store can't be reached, try again later"

MALFORMED = (Code.BAD_JSON, Code.BAD_MESSAGE)
"""What is said of a line that is no command at all, also by a server that executes none."""


def refusal(item: Item, why: str = AWAY) -> RequestRejected | None:
    """Return the answer to a line, or the error that it was replaced by; None where there is none."""
    if isinstance(item, bytes):
        if not item or item.isspace():
            return None
        try:
            return about(read(item), Code.UNAVAILABLE, why)
        except RequestRejected as wrong:
            malformed = wrong.code in MALFORMED
            return wrong if malformed else RequestRejected(Code.UNAVAILABLE, why, ref=wrong.ref, id=wrong.id)
    if isinstance(item, RequestRejected):
        return item
    return about(item, Code.UNAVAILABLE, why) if isinstance(item, (Hello, Namespaced)) else None


def about(command: WireCommand, code: Code, why: str) -> RequestRejected:
    """Return an error with the `ref` of the command, and of `release` and `extend` with the `id`."""
    if isinstance(command, Namespaced):
        command = command.command
    ref = command.request.ref if isinstance(command, Take) else command.ref
    id_ = command.id if isinstance(command, (Release, Extend)) else None
    return RequestRejected(code, why, ref=ref, id=id_)


def spanning(command: Namespaced, namespace: str) -> RequestRejected:
    """Return the answer to a command for another namespace than that of its connection."""
    why = (
        f"namespace must be {namespace!r}, which this connection is for, not {command.namespace!r}: a request can't span "
        "namespaces, since deadlocks between them would not be found; use one connection for each"
    )
    inner = command.command
    names = {Request: "request", Take: "request", ReleaseByRef: "release"}
    name = names.get(type(inner), type(inner).__name__.lower())
    return about(command, Code.BAD_REQUEST, f"{name}: {why}")
