"""The other side: from a call to a line, and from a line to a typed message, for the clients.

Fields are named as on the wire. A message or a field that this version doesn't know is skipped, so that a newer server
can talk to an older client.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from genie.errors import Blocker, CycleStep
from genie.protocol import codec


class BlockerRow(Struct, gc=False):
    """Who stood in the way."""

    id: int
    resource: str
    mode: str
    state: str
    since: int
    transactionName: str | None = None  # noqa: N815 - the wire's word
    note: str | None = None

    def blocker(self) -> Blocker:
        """As the errors carry it."""
        return Blocker(
            self.id, self.resource, self.mode, self.state, self.since / 1000, self.transactionName, self.note
        )


class Welcome(Struct, tag="welcome", tag_field="command"):
    """`welcome`"""

    class Payload(Struct):
        """Its payload."""

        protocol: int = 0
        server: str = ""
        features: list[str] = []
        resumed: bool = False
        namespace: str | None = None
        pingInterval: float = 0  # noqa: N815
        quiet: bool = False
        ref: str | None = None

    payload: Payload


class Queued(Struct, tag="queued", tag_field="command", gc=False):
    """`queued`"""

    class Payload(Struct, gc=False):
        """Its payload."""

        id: int
        ref: str | None = None

    payload: Payload


class Locked(Struct, tag="locked", tag_field="command", gc=False):
    """`locked`; where it is told again, with the ms that are left of the hold.

    `resources` are the names that were taken, where the request left it to the server which.
    """

    class Payload(Struct, gc=False):
        """Its payload."""

        id: int
        fence: int
        ref: str | None = None
        expiresIn: float | None = None  # noqa: N815
        resources: list[str] | None = None

    payload: Payload


class Released(Struct, tag="released", tag_field="command"):
    """`released`; times are ms. `free` and `locked` are sums of weights, as decimal strings where the target was one."""

    class Payload(Struct):
        """Its payload."""

        id: int
        reason: str
        ref: str | None = None
        waited: float = 0.0
        held: float = 0.0
        blockers: list[BlockerRow] = []
        blockersTotal: int = 0  # noqa: N815
        cycle: list[str] = []
        waits: list[CycleStep] = []
        free: int | str | None = None
        locked: int | str | None = None

    payload: Payload


class Extended(Struct, tag="extended", tag_field="command"):
    """`extended`"""

    class Payload(Struct):
        """Its payload."""

        id: int
        transactionTimeout: float  # noqa: N815
        ref: str | None = None

    payload: Payload


class Answer(Struct):
    """The payload of an answer that says nothing but which command it answers."""

    ref: str | None = None


class Pong(Struct, tag="pong", tag_field="command"):
    """`pong`"""

    payload: Answer


class Bye(Struct, tag="bye", tag_field="command"):
    """`bye`"""

    payload: Answer


class Inspected(Struct, tag="inspected", tag_field="command"):
    """`inspected`; the payload stays as plain data, which `InspectedRows` reads."""

    payload: dict[str, Any]


class InspectedRow(Struct):
    """A row of `inspected`: of `holders`, with a `fence`, or of `queue`, with `blockers`. Times are ms."""

    id: int
    resources: list[str]
    resourcesTotal: int  # noqa: N815
    priority: float
    since: float
    expiresIn: float | None = None  # noqa: N815
    transactionName: str | None = None  # noqa: N815
    note: str | None = None
    fence: int = 0
    blockers: list[BlockerRow] = []
    blockersTotal: int = 0  # noqa: N815


class InspectedRows(Struct):
    """The payload of `inspected`."""

    holders: list[InspectedRow]
    holdersTotal: int  # noqa: N815
    queue: list[InspectedRow]
    queueTotal: int  # noqa: N815
    ref: str | None = None


class HeldRow(Struct, gc=False):
    """One lock on one resource, without the mode in its name."""

    resource: str
    mode: str
    id: int
    transactionName: str | None = None  # noqa: N815


class Watching(Struct, tag="watching", tag_field="command"):
    """`watching`: what is held of the names that begin so, or where `truncated` a part of it."""

    class Payload(Struct):
        """Its payload."""

        prefix: str
        held: list[HeldRow]
        truncated: bool = False
        ref: str | None = None

    payload: Payload


class Unwatched(Struct, tag="unwatched", tag_field="command"):
    """`unwatched`"""

    class Payload(Struct):
        """Its payload."""

        prefix: str = ""
        ref: str | None = None

    payload: Payload


class Event(Struct, tag="event", tag_field="command", gc=False):
    """`event`; one that is `lagged` names no resource."""

    class Payload(Struct, gc=False):
        """Its payload."""

        state: str
        resource: str = ""
        mode: str = ""
        id: int = 0
        transactionName: str | None = None  # noqa: N815

    payload: Payload


class Error(Struct, tag="error", tag_field="command"):
    """`error`"""

    class Payload(Struct):
        """Its payload."""

        code: str
        message: str
        ref: str | None = None
        id: int | None = None
        leader: str | None = None
        supported: list[int] | None = None

    payload: Payload


Message = (
    Welcome | Queued | Locked | Released | Extended | Pong | Bye | Inspected | Watching | Unwatched | Event | Error
)

_decode = msgspec.json.Decoder(Message).decode


def read(line: bytes) -> Message | None:
    """One line (without its end) as a message; None for one that this version doesn't know. ValueError if it is none."""
    try:
        message: Message = _decode(line)
    except msgspec.ValidationError:
        message = codec.loads(line)
        command = message.get("command") if isinstance(message, dict) else None
        if not isinstance(command, str) or command in {kind.__struct_config__.tag for kind in Message.__args__}:
            raise
        return None
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return message


def command(name: str, **payload: Any) -> bytes:
    """A line for the server; a field that is None is left out."""
    fields = {key: value for key, value in payload.items() if value is not None}
    return codec.message(name, fields)


def with_ref(line: bytes, ref: str) -> bytes:
    """A line of `command` without a `ref`, with this one: of letters, digits, `-` and `_`."""
    head = line[:-3]
    return b'%b%b"ref":"%b"}}\n' % (head, b"" if head.endswith(b"{") else b",", ref.encode())
