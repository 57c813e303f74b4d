"""Errors for commands that this server cannot execute, because it does not lead, its store is unavailable, or the
connection has another namespace.
"""

from __future__ import annotations

from genie.core import Extend, Release, Request, Take
from genie.errors import Code, RequestRejected
from genie.protocol.commands import Hello, Namespaced, ReleaseByRef, WireCommand, read
from genie.server.peer import DETACHED, ConnectionState, Item, Peer

STORE_UNAVAILABLE = "the store is unavailable, try again later"

MALFORMED = (Code.BAD_JSON, Code.BAD_MESSAGE)
"""Errors of lines that are not commands. They take precedence over `unavailable`."""


def reject_item(connection: Peer, item: Item, why: str = STORE_UNAVAILABLE) -> RequestRejected | None:
    """Return the error for a submitted item that is not executed, or None if no error is sent for it.

    After a rejected `hello` the connection accepts only another `hello`.
    """
    if connection.state is DETACHED:
        return None
    if isinstance(item, Hello):
        connection.enter_state(ConnectionState.HELLO_REJECTED)
    return unavailable(item, why)


def unavailable(item: Item, why: str) -> RequestRejected | None:
    """Return the error for an item: `unavailable`, unless it is invalid. None for blank lines and the end of input."""
    if isinstance(item, bytes):
        if not item or item.isspace():
            return None
        try:
            return error_for(read(item), Code.UNAVAILABLE, why)
        except RequestRejected as invalid:
            if invalid.code in MALFORMED:
                return invalid
            return RequestRejected(Code.UNAVAILABLE, why, ref=invalid.ref, id=invalid.id)
    if isinstance(item, RequestRejected):
        return item
    return error_for(item, Code.UNAVAILABLE, why) if isinstance(item, (Hello, Namespaced)) else None


def error_for(command: WireCommand, code: Code, why: str) -> RequestRejected:
    """Return an error for a command, which echoes its `ref`, and the `id` of a `release` or `extend`."""
    if isinstance(command, Namespaced):
        command = command.command
    ref = command.request.ref if isinstance(command, Take) else command.ref
    id_ = command.id if isinstance(command, (Release, Extend)) else None
    return RequestRejected(code, why, ref=ref, id=id_)


def wrong_namespace(command: Namespaced, namespace: str) -> RequestRejected:
    """Return the error for a command with another namespace than that of its connection."""
    why = (
        f"namespace must be {namespace!r}, the namespace of this connection, not {command.namespace!r}: requests cannot "
        "span namespaces, because deadlocks between them are not detected; use one connection for each namespace"
    )
    inner = command.command
    names = {Request: "request", Take: "request", ReleaseByRef: "release"}
    name = names.get(type(inner), type(inner).__name__.lower())
    return error_for(command, Code.BAD_REQUEST, f"{name}: {why}")
