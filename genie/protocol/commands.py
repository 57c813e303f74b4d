"""From a line to a command, for the server."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from genie.core import Extend, Release, Request, Take, Weight
from genie.errors import Code, RequestRejected
from genie.protocol import fields
from genie.protocol.resources import MAX_CHOICES, MAX_NAME, MAX_RESOURCES, check_name, choices, split

HTTP = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"TRACE ")
"""How a line begins that a web client sends."""


@dataclass(slots=True)
class Ping:
    """Is anybody there?"""


@dataclass(slots=True)
class Hello:
    """Whose requests these are; the first command of a connection, if it comes at all."""

    session: str | None = None
    session_timeout_ms: float = 10_000
    namespace: str | None = None
    """What the connection is for. None: the server's first."""


@dataclass(slots=True)
class Inspect:
    """Who holds and who waits; see `core.inspect`."""

    resource: str | None = None
    id: int | None = None
    transaction: str | None = None
    limit: int = 100
    only: str | None = None


@dataclass(slots=True)
class Watch:
    """Tell of every lock that is taken or given back on names that begin so."""

    prefix: str


@dataclass(slots=True)
class Unwatch:
    """No longer."""

    prefix: str


@dataclass(slots=True)
class Within:
    """A command that says its namespace, which must be that of its connection."""

    namespace: str
    command: Request | Take | Release | Extend | Inspect | Watch | Unwatch


WireCommand = Request | Take | Release | Extend | Ping | Inspect | Hello | Watch | Unwatch | Within

_Timeout = Annotated[float, Meta(ge=1, le=fields.MAX_TIMEOUT_MS)]
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


_MOST = float(2**63 - 1024)  # the greatest double below 2^63
_Weight = Annotated[int, Meta(gt=0, le=fields.MAX_WEIGHT)] | Annotated[float, Meta(gt=0, le=_MOST)]


class _Request(Struct, forbid_unknown_fields=True, gc=False):
    resources: Annotated[list[str], Meta(min_length=1, max_length=MAX_RESOURCES)] | None = None
    queueTimeout: Annotated[float, Meta(ge=0, le=fields.MAX_TIMEOUT_MS)] = 10_000  # noqa: N815 - the wire's words
    transactionTimeout: _Timeout = 10_000  # noqa: N815
    transactionName: _Name | None = None  # noqa: N815
    priority: Annotated[float, Meta(ge=-fields.MAX_PRIORITY, le=fields.MAX_PRIORITY)] = 0
    ref: Annotated[str, Meta(min_length=1, max_length=fields.MAX_REF)] | None = None
    onDisconnect: Literal["keep", "release"] = "keep"  # noqa: N815
    anyOf: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None  # noqa: N815
    weights: Annotated[list[_Weight], Meta(min_length=1)] | None = None
    target: _Weight | None = None


class _Release(Struct, forbid_unknown_fields=True, gc=False):
    id: Annotated[int, Meta(ge=-fields.MAX_ID, le=fields.MAX_ID)]


class _RequestLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="request"):
    payload: _Request


class _ReleaseLine(Struct, forbid_unknown_fields=True, gc=False, tag_field="command", tag="release"):
    payload: _Release


_decode = msgspec.json.Decoder(_RequestLine | _ReleaseLine).decode


def read(line: bytes) -> WireCommand:
    """One line (without its end) as a command; RequestRejected says what is wrong with it.

    Nearly every line is a good `request` or `release`, and those are read in one go by a typed decoder. Whatever it
    does not accept is read again, slowly and field by field (`fields.py`), to be taken or to be explained.
    """
    try:
        payload = _decode(line).payload
        if type(payload) is _Release:
            return Release(payload.id)
        return _request(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return _slowly(line)


def _slowly(line: bytes) -> WireCommand:
    command, known = fields.read(line)
    namespace = None if command == "hello" else known.pop("namespace", None)
    read: Any = _COMMANDS[command](known)
    within: WireCommand = read if namespace is None else Within(namespace, read)
    return within


def _request(payload: _Request) -> Request | Take:
    resources = payload.resources
    if resources is None:
        return _take(payload)
    if payload.anyOf is not None or payload.weights is not None or payload.target is not None:
        raise ValueError("resources and anyOf exclude each other")
    one = _ones.get(resources[0]) if len(resources) == 1 else None
    shared, exclusive = one or _split(resources)
    if payload.transactionName is not None:
        check_name(payload.transactionName)
    return Request(
        shared,
        exclusive,
        payload.queueTimeout,
        payload.transactionTimeout,
        payload.transactionName,
        payload.priority,
        payload.ref,
        payload.onDisconnect == "release",
    )


def _take(payload: _Request) -> Take:
    any_of, target = payload.anyOf, payload.target
    if any_of is None or target is None:
        raise ValueError("anyOf and target go together")
    weights: list[Weight] = payload.weights or [1] * len(any_of)
    if len(weights) != len(any_of):
        raise ValueError("weights must be as many as anyOf")
    if payload.transactionName is not None:
        check_name(payload.transactionName)
    request = Request(
        transaction_timeout_ms=payload.transactionTimeout,
        transaction=payload.transactionName,
        ref=payload.ref,
        release_on_disconnect=payload.onDisconnect == "release",
        chosen="" if payload.ref is None else _digest(any_of, payload.weights, target),
    )
    return Take(request, choices(any_of), weights, target)


def _digest(any_of: list[str], weights: list[Weight] | None, target: Weight) -> str:
    """What a request chooses from, so that the same one is known when it comes again."""
    return blake2b(repr((any_of, weights, target)).encode(), digest_size=16).hexdigest()


Names = tuple[tuple[str, ...], tuple[str, ...]]

MAX_ONES = 10_000

_ones: dict[str, Names] = {}
"""Names of single resources that were checked before. Services lock the same ones over and over, and a name that comes
again is the very same string: compared at a glance, hashed once, and kept once however many wait for it."""


def _split(resources: list[str]) -> Names:
    names = split(resources)
    if len(resources) == 1:
        if len(_ones) >= MAX_ONES:
            _ones.clear()
        _ones[resources[0]] = names
    return names


_COMMANDS: dict[str, Any] = {
    "request": lambda known: _request(_Request(**known)),
    "release": lambda known: Release(known["id"]),
    "extend": lambda known: Extend(known["id"], known["transactionTimeout"]),
    "hello": lambda known: Hello(
        known.get("session"), float(known.get("sessionTimeout", 10_000)), known.get("namespace")
    ),
    "ping": lambda known: Ping(),  # noqa: ARG005
    "watch": lambda known: Watch(known["prefix"]),
    "unwatch": lambda known: Unwatch(known["prefix"]),
    "inspect": lambda known: Inspect(
        known.get("resource"), known.get("id"), known.get("transactionName"), known.get("limit", 100), known.get("only")
    ),
}


def is_http(line: bytes) -> bool:
    """Whether a web client talks to us."""
    return line.startswith(HTTP)


def http_refused() -> RequestRejected:
    """What it is told."""
    return RequestRejected(Code.BAD_MESSAGE, "this is no web server: send one JSON object a line")
