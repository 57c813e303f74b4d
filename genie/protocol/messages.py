"""Encodes the commands of a client and decodes the messages of a server.

Fields have their wire names. Unknown messages and fields are ignored, so that an older client works
with a newer server.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from genie.errors import Blocker, CycleStep
from genie.protocol import codec, limits

Id = Annotated[int, Meta(ge=-limits.MAX_ID, le=limits.MAX_ID)]
UnixTime = Annotated[int, Meta(ge=-limits.MAX_ID, le=limits.MAX_ID)]
"""A Unix time in ms. The bounds permit the conversion to seconds, which would fail for an integer with 400 digits."""
WeightSum = Annotated[str, Meta(pattern="^[0-9]{1,100}$")]
"""A sum of weights as decimal digits. 100 digits suffice for the sum of all weights of a request."""


class BlockerRow(Struct, gc=False):
    """A request that blocks another request."""

    id: int
    resource: str
    mode: str
    state: str
    since: UnixTime
    transactionName: str | None = None  # noqa: N815 - the wire's name
    note: str | None = None
    traceparent: str | None = None
    units: int | None = None
    of: int | None = None

    def to_blocker(self) -> Blocker:
        """Return the blocker as exceptions of the client contain it, with its time in seconds."""
        return Blocker(
            self.id,
            self.resource,
            self.mode,
            self.state,
            self.since / 1000,
            self.transactionName,
            self.note,
            self.traceparent,
            self.units,
            self.of,
        )


class Welcome(Struct, tag="welcome", tag_field="command"):
    """Reply to `hello`."""

    class Payload(Struct):
        """Payload of `welcome`."""

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
    """A request arrived and has an id."""

    class Payload(Struct, gc=False):
        """Payload of `queued`."""

        id: Id
        ref: str | None = None

    payload: Payload


class Locked(Struct, tag="locked", tag_field="command", gc=False):
    """A request is granted. If the message is sent again, `expiresIn` is the time until the lock expires, in ms.

    `resources` are the names that a request with `anyOf` acquired. `blockers` are the first requests for which a request with
    `traceparent` had to wait.
    """

    class Payload(Struct, gc=False):
        """Payload of `locked`."""

        id: Id
        fence: Id
        ref: str | None = None
        expiresIn: float | None = None  # noqa: N815
        resources: list[str] | None = None
        blockers: list[BlockerRow] | None = None
        blockersTotal: int = 0  # noqa: N815

    payload: Payload


class Released(Struct, tag="released", tag_field="command"):
    """A request ended. Times are in ms; `free` and `locked` are sums of weights.

    The sums are decimal strings if the target was one.
    """

    class Payload(Struct):
        """Payload of `released`."""

        id: Id
        reason: str
        ref: str | None = None
        waited: float = 0.0
        held: float = 0.0
        blockers: list[BlockerRow] = []
        blockersTotal: int = 0  # noqa: N815
        cycle: list[str] = []
        cycleTotal: int = 0  # noqa: N815
        waits: list[CycleStep] = []
        free: int | WeightSum | None = None
        locked: int | WeightSum | None = None

    payload: Payload


class Extended(Struct, tag="extended", tag_field="command"):
    """A held lock has a new deadline."""

    class Payload(Struct):
        """Payload of `extended`."""

        id: Id
        transactionTimeout: float  # noqa: N815
        ref: str | None = None

    payload: Payload


class Answer(Struct):
    """Payload of a reply that only acknowledges a command."""

    ref: str | None = None


class Pong(Struct, tag="pong", tag_field="command"):
    """Reply to `ping`."""

    payload: Answer


class Bye(Struct, tag="bye", tag_field="command"):
    """Reply to `bye`."""

    payload: Answer


class Inspected(Struct, tag="inspected", tag_field="command"):
    """Reply to `inspect`. The payload stays plain data, which `InspectedRows` decodes."""

    payload: dict[str, Any]


class InspectedRow(Struct):
    """A row of `inspected`: a holder with its `fence`, or a waiter with its `blockers`.

    Times are in ms.
    """

    id: int
    resources: list[str]
    resourcesTotal: int  # noqa: N815
    priority: float
    since: float
    expiresIn: float | None = None  # noqa: N815
    transactionName: str | None = None  # noqa: N815
    note: str | None = None
    traceparent: str | None = None
    fence: int = 0
    blockers: list[BlockerRow] = []
    blockersTotal: int = 0  # noqa: N815


class InspectedRows(Struct):
    """Payload of `inspected`."""

    holders: list[InspectedRow]
    holdersTotal: int  # noqa: N815
    queue: list[InspectedRow]
    queueTotal: int  # noqa: N815
    ref: str | None = None


class HeldRow(Struct, gc=False):
    """One lock on one resource; the name has no mode prefix.

    Locks with the mode `units` have their `units` and the limit `of`.
    """

    resource: str
    mode: str
    id: int
    transactionName: str | None = None  # noqa: N815
    units: int | None = None
    of: int | None = None


class Watching(Struct, tag="watching", tag_field="command"):
    """Reply to `watch`: the held locks on names with the prefix, or if `truncated` a part of them."""

    class Payload(Struct):
        """Payload of `watching`."""

        prefix: str
        held: list[HeldRow]
        truncated: bool = False
        ref: str | None = None

    payload: Payload


class Unwatched(Struct, tag="unwatched", tag_field="command"):
    """Reply to `unwatch`."""

    class Payload(Struct):
        """Payload of `unwatched`."""

        prefix: str = ""
        ref: str | None = None

    payload: Payload


class Event(Struct, tag="event", tag_field="command", gc=False):
    """A watched lock was granted or released. With the state `lagged` it names no resource."""

    class Payload(Struct, gc=False):
        """Payload of `event`."""

        state: str
        resource: str = ""
        mode: str = ""
        id: int = 0
        transactionName: str | None = None  # noqa: N815
        units: int | None = None
        of: int | None = None

    payload: Payload


class Error(Struct, tag="error", tag_field="command"):
    """A command was rejected."""

    class Payload(Struct):
        """Payload of `error`."""

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
    """Decode one line, given without its line end. Return None for a message that this version does not know.

    Raises:
        ValueError: the line is not a valid message.
    """
    try:
        message: Message = _decode(line)
    except msgspec.ValidationError:
        message = codec.loads(line)
        command = message.get("command") if isinstance(message, dict) else None
        known_commands = {kind.__struct_config__.tag for kind in Message.__args__}
        if not isinstance(command, str) or command in known_commands:
            raise
        return None
    except RecursionError as error:
        raise ValueError("the message is nested too deeply") from error
    return message


def command(name: str, **payload: Any) -> bytes:
    """Encode a command as a line. Fields that are None are left out."""
    fields = {key: value for key, value in payload.items() if value is not None}
    return codec.message(name, fields)


def with_ref(line: bytes, ref: str) -> bytes:
    """Add a `ref` to an encoded command that has none. The `ref` may have letters, digits, `-` and `_`."""
    head = line[:-3]  # without `}}` and the line end
    separator = b"" if head.endswith(b"{") else b","
    return b'%b%b"ref":"%b"}}\n' % (head, separator, ref.encode())
