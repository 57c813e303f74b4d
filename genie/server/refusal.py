"""What a line is answered that is not carried out because this server can't: `unavailable`, unless it is wrong in itself."""

from __future__ import annotations

from genie.core import Extend, Release, Request, Take
from genie.errors import Code, RequestRejected
from genie.protocol.commands import Hello, read
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
            request = command.request if isinstance(command, Take) else command
            ref = request.ref if isinstance(request, Request) else None
            id_ = command.id if isinstance(command, (Release, Extend)) else None
            return RequestRejected(Code.UNAVAILABLE, why, ref=ref, id=id_)
    return rejected if isinstance(rejected, RequestRejected) else None


def refuse(connection: Connection, item: Item, why: str = AWAY) -> RequestRejected | None:
    """The same for what a connection brings. One whose `hello` is refused must say it again before anything else.

    One whose session somebody else has by now is answered nothing more.
    """
    if connection.parted:
        return None
    connection.snubbed = connection.snubbed or (connection.fresh and _is_hello(item))
    return refusal(item, why)


def _is_hello(item: Item) -> bool:
    """Whether a line asks for a session."""
    try:
        return isinstance(item, bytes) and type(read(item)) is Hello
    except RequestRejected:
        return False
