"""What a line is answered that is not carried out because this server can't: `unavailable`, unless it is wrong in itself."""

from __future__ import annotations

from genie.core import Extend, Release, Request, Take
from genie.errors import Code, RequestRejected
from genie.protocol.commands import WireCommand, Within, read
from genie.protocol.fields import is_hello
from genie.server.connection import Connection, Item

AWAY = "the store can't be reached, try again later"


def refusal(item: Item, why: str = AWAY) -> RequestRejected | None:
    """The answer to a line, or to an error that is to be told in its place; None where there is none."""
    rejected = item
    if isinstance(item, bytes):
        try:
            command = read(item)
        except RequestRejected as wrong:
            if not item or item.isspace():
                return None
            rejected = wrong
        else:
            return about(command, Code.UNAVAILABLE, why)
    return rejected if isinstance(rejected, RequestRejected) else None


def about(command: WireCommand, code: Code, why: str) -> RequestRejected:
    """An error with the `ref` or the `id` of the command that it is about."""
    if isinstance(command, Within):
        command = command.command
    request = command.request if isinstance(command, Take) else command
    ref = request.ref if isinstance(request, Request) else None
    id_ = command.id if isinstance(command, (Release, Extend)) else None
    return RequestRejected(code, why, ref=ref, id=id_)


def spanning(command: Within, namespace: str) -> RequestRejected:
    """The answer to a command for another namespace than that of its connection."""
    why = (
        f"namespace must be {namespace!r}, which this connection is for, not {command.namespace!r}: a request can't span "
        "namespaces, since nobody would see deadlocks between them; use one connection for each"
    )
    inner = command.command
    name = "request" if isinstance(inner, (Request, Take)) else type(inner).__name__.lower()
    return about(command, Code.BAD_REQUEST, f"{name}: {why}")


def refuse(connection: Connection, item: Item, why: str = AWAY) -> RequestRejected | None:
    """The same for what a connection brings. One whose `hello` is refused must say it again before anything else.

    One whose session somebody else has by now is answered nothing more.
    """
    if connection.parted:
        return None
    connection.snubbed = connection.snubbed or (connection.fresh and _is_hello(item))
    return refusal(item, why)


def _is_hello(item: Item) -> bool:
    """Whether a line says whose requests these are, and for which namespace."""
    return isinstance(item, bytes) and is_hello(item)
