"""Errors for commands that this server cannot execute: it does not lead the namespace, its store is unavailable, or the
connection belongs to another namespace.
"""

from __future__ import annotations

from genie.core import Extend, Release, Request, Take
from genie.errors import Code, RequestRejected
from genie.protocol import diagnostics
from genie.protocol.commands import (
    Hello,
    LargeRequest,
    Namespaced,
    ReleaseByRef,
    WireCommand,
    without_namespace,
)
from genie.protocol.framing import LongLine
from genie.server.peer import DETACHED, ConnectionState, Item, Peer

STORE_UNAVAILABLE = "the store is unavailable, try again later"

MALFORMED = (Code.BAD_JSON, Code.BAD_MESSAGE)
"""Error codes of lines that are not commands. These errors take precedence over `unavailable`."""


def reject_item(connection: Peer, item: Item, reason: str = STORE_UNAVAILABLE) -> RequestRejected | None:
    """Return the error for a submitted item that is not executed, or None if the item needs no error.

    If the item is a `hello`, the connection then accepts only another `hello`.
    """
    if connection.state is DETACHED:
        return None
    if isinstance(item, Hello):
        connection.enter_state(ConnectionState.HELLO_REJECTED)
    return unavailable(item, reason)


def unavailable(item: Item, reason: str) -> RequestRejected | None:
    """Return the error for an item that is not executed, or None for a blank line and the end of input.

    A malformed line, and an item that is an error, have their own error. All others have the code `unavailable`.
    """
    line = item.line if isinstance(item, LongLine) else item
    if isinstance(line, bytes):
        if not line or line.isspace():
            return None
        found = diagnostics.read_envelope(line)
        if isinstance(found, RequestRejected) and found.code in MALFORMED:
            return found
        return RequestRejected(Code.UNAVAILABLE, reason, ref=found.ref, id=found.id)
    if isinstance(item, RequestRejected):
        return item
    return error_for(item, Code.UNAVAILABLE, reason) if isinstance(item, (Hello, Namespaced)) else None


def error_for(command: WireCommand, code: Code, reason: str) -> RequestRejected:
    """Return the error of a command, with the command's `ref`, and for `release` and `extend` also with the `id`."""
    command = without_namespace(command)
    ref = command.request.ref if isinstance(command, Take) else command.ref
    id_ = command.id if isinstance(command, (Release, Extend)) else None
    return RequestRejected(code, reason, ref=ref, id=id_)


def wrong_namespace(command: Namespaced, namespace: str) -> RequestRejected:
    """Return the error for a command whose namespace differs from `namespace`, the namespace of its connection."""
    reason = (
        f"namespace must be {namespace!r}, the namespace of this connection, not {command.namespace!r}: requests cannot "
        "span namespaces, because deadlocks between them are not detected; use one connection for each namespace"
    )
    inner = command.command
    names = {Request: "request", LargeRequest: "request", Take: "request", ReleaseByRef: "release"}
    name = names.get(type(inner), type(inner).__name__.lower())
    return error_for(command, Code.BAD_REQUEST, f"{name}: {reason}")
