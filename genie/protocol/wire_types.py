"""The types of the lines that clients send: they decide what is accepted.

`diagnostics.py` explains why a line was rejected. `commands.py` builds the commands. The types have a module of their own
because mypyc cannot compile them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from genie.core.size import SHORT_NAMES, SHORT_REF, SHORT_TEXT
from genie.protocol import limits
from genie.protocol.messages import Id
from genie.protocol.resources import EXCLUSIVE, MAX_CHOICES, MAX_NAME, MAX_RESOURCES

Ref = Annotated[str, Meta(min_length=1, max_length=limits.MAX_REF, description="Echoed by the answer.")]
Timeout = Annotated[float, Meta(ge=1, le=limits.MAX_TIMEOUT_MS, description="Milliseconds.")]
_QueueTimeout = Annotated[
    float, Meta(ge=0, le=limits.MAX_TIMEOUT_MS, description=f"Milliseconds; {limits.MAX_TIMEOUT_MS} is no limit.")
]
_NO_CONTROL_CHARACTERS = {"pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, extra_json_schema=_NO_CONTROL_CHARACTERS)]
Note = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NOTE, extra_json_schema=_NO_CONTROL_CHARACTERS)]
Traceparent = Annotated[
    str,
    Meta(
        pattern=rf"^{limits.TRACEPARENT_PATTERN}$(?!\n)",
        max_length=limits.TRACEPARENT_LENGTH,
        description="Trace context of the request, in the format of W3C Trace Context.",
    ),
]
_Prefix = Annotated[str, Meta(max_length=MAX_NAME, extra_json_schema=_NO_CONTROL_CHARACTERS)]
Namespace = Annotated[str, Meta(pattern=rf"^{limits.NAMESPACE_PATTERN}$(?!\n)", max_length=limits.MAX_NAMESPACE)]
_Resource = Annotated[str, Meta(extra_json_schema={"pattern": "^(shared|exclusive|[0-9]{1,7}/[0-9]{1,7}):"})]
Weight = (
    Annotated[int, Meta(gt=0, le=limits.MAX_WEIGHT)]
    | Annotated[
        str,  # its digits are checked for all weights together: a pattern takes a microsecond for each
        Meta(
            min_length=1,
            max_length=limits.MAX_DIGITS,
            extra_json_schema={"pattern": rf"^{limits.DECIMAL_PATTERN}$(?!\n)"},
        ),
    ]
)


class RequestPayload(Struct, forbid_unknown_fields=True, gc=False):
    """Payload of `request`: either `resources`, or `anyOf` with `target` and optional `weights`."""

    resources: Annotated[list[_Resource], Meta(min_length=1, max_length=MAX_RESOURCES)] | None = None
    queueTimeout: _QueueTimeout | None = None  # noqa: N815 - the wire's names
    transactionTimeout: Timeout | None = None  # noqa: N815
    transactionName: Name | None = None  # noqa: N815
    priority: Annotated[float, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = None
    ref: Ref | None = None
    onDisconnect: Literal["keep", "release"] | None = None  # noqa: N815
    note: Note | None = None
    traceparent: Traceparent | None = None
    anyOf: Annotated[list[_Resource], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None  # noqa: N815
    weights: Annotated[list[Weight], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    target: Weight | None = None
    namespace: Namespace | None = None


class ReleasePayload(Struct, forbid_unknown_fields=True, gc=False):
    """Payload of `release`: the `id` of a request, or else the `ref` of one of the session."""

    id: Id | None = None
    ref: Ref | None = None
    namespace: Namespace | None = None


class ExtendPayload(Struct, forbid_unknown_fields=True, gc=False):
    """Payload of `extend`."""

    id: Id
    transactionTimeout: Timeout  # noqa: N815
    ref: Ref | None = None
    namespace: Namespace | None = None


class HelloPayload(Struct, forbid_unknown_fields=True, gc=False):
    """Payload of `hello`."""

    protocol: int | None = None
    client: (
        Annotated[str, Meta(min_length=1, max_length=limits.MAX_CLIENT, extra_json_schema=_NO_CONTROL_CHARACTERS)]
        | None
    ) = None
    quiet: bool | None = None
    session: Annotated[str, Meta(min_length=limits.MIN_SECRET, max_length=limits.MAX_SECRET)] | None = None
    sessionTimeout: Timeout | None = None  # noqa: N815
    token: Annotated[str, Meta(min_length=1, max_length=limits.MAX_TOKEN)] | None = None
    namespace: Namespace | None = None
    note: Note | None = None
    ref: Ref | None = None


class BarePayload(Struct, forbid_unknown_fields=True, gc=False):
    """Payload of `ping` and `bye`."""

    ref: Ref | None = None


class InspectPayload(Struct, forbid_unknown_fields=True, gc=False):
    """Payload of `inspect`."""

    resource: Name | None = None
    id: Id | None = None
    transactionName: Name | None = None  # noqa: N815
    limit: Annotated[int, Meta(ge=1, le=limits.MAX_ROWS)] | None = None
    only: Literal["holders", "queue"] | None = None
    ref: Ref | None = None
    namespace: Namespace | None = None


class WatchPayload(Struct, forbid_unknown_fields=True, gc=False):
    """Payload of `watch` and `unwatch`."""

    prefix: _Prefix
    ref: Ref | None = None
    namespace: Namespace | None = None


class RequestLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="request"):
    """Requests locks."""

    payload: RequestPayload


class ReleaseLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="release"):
    """Releases a held lock, or cancels a waiting request."""

    payload: ReleasePayload


class ExtendLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="extend"):
    """Sets a new deadline for a held lock."""

    payload: ExtendPayload


class HelloLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="hello"):
    """Opens a connection."""

    payload: HelloPayload | None = None


class ByeLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="bye"):
    """Ends the session and the connection."""

    payload: BarePayload | None = None


class PingLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="ping"):
    """Asks whether the server can execute commands."""

    payload: BarePayload | None = None


class InspectLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="inspect"):
    """Lists holders and waiters."""

    payload: InspectPayload | None = None


class WatchLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="watch"):
    """Subscribes to the locks on names with a prefix."""

    payload: WatchPayload


class UnwatchLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="unwatch"):
    """Ends a subscription."""

    payload: WatchPayload


# -- Requests with short texts: nearly all requests --------------------------------------------------------

_ShortResource = Annotated[str, Meta(max_length=len(EXCLUSIVE) + SHORT_TEXT)]
_ShortText = Annotated[str, Meta(min_length=1, max_length=SHORT_TEXT)]
_ShortRef = Annotated[str, Meta(min_length=1, max_length=SHORT_REF)]


class ShortRequestPayload(RequestPayload, forbid_unknown_fields=True, gc=False):
    """Payload of a `request` with few names, whose texts have few characters."""

    resources: Annotated[list[_ShortResource], Meta(min_length=1, max_length=SHORT_NAMES)] | None = None
    transactionName: _ShortText | None = None  # noqa: N815
    ref: _ShortRef | None = None
    note: _ShortText | None = None
    anyOf: None = None  # noqa: N815 - its thousands of entries are decoded once, like other long requests
    weights: None = None


class ShortRequestLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="request"):
    """Requests few locks, with few characters."""

    payload: ShortRequestPayload


ShortLine = (
    ShortRequestLine | ReleaseLine | ExtendLine | HelloLine | ByeLine | PingLine | InspectLine | WatchLine | UnwatchLine
)
"""Any line, but a `request` only with few and short texts. Decoding rejects others at no cost to these."""

Line = RequestLine | ReleaseLine | ExtendLine | HelloLine | ByeLine | PingLine | InspectLine | WatchLine | UnwatchLine
