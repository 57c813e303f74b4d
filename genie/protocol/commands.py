"""Decodes lines from clients into typed commands, on the server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec

from genie.core import Context, Extend, Release, Request, Take, context_of
from genie.core.model import Details, details_of
from genie.core.size import SHORT_TEXT_BYTES, is_large, text_bytes
from genie.errors import Code, RequestRejected
from genie.lock_modes import X, is_subtree
from genie.protocol import codec, diagnostics, limits
from genie.protocol.limits import DEFAULT_TIMEOUT_MS
from genie.protocol.resources import Names, check_name, parse_choices, parse_resource, split_by_mode, split_checked
from genie.protocol.wire_types import (
    ByeLine,
    ExtendLine,
    HelloLine,
    HelloPayload,
    InspectLine,
    InspectPayload,
    Line,
    PingLine,
    ReleaseLine,
    ReleasePayload,
    RequestLine,
    RequestPayload,
    ShortLine,
    ShortRequestLine,
    ShortRequestPayload,
    UnwatchLine,
    WatchLine,
    WatchPayload,
)

HTTP_REQUEST = re.compile(
    rb"(?:GET|POST|PUT|HEAD|DELETE|OPTIONS|PATCH|CONNECT|TRACE) |[!#$%&'*+.^_`|~0-9A-Z-]+ .*HTTP/[0-9]", re.IGNORECASE
)
"""The beginning of an HTTP request, with any method in any case. No command begins like this."""


# -- Commands that the server executes without the lock manager ----------------------


@dataclass(slots=True)
class ReleaseByRef:
    """Release the session's request with this `ref`. The reply contains the same `ref`."""

    ref: str


@dataclass(slots=True)
class Ping:
    """Ask whether the server can execute commands."""

    ref: str | None = None


@dataclass(slots=True)
class Hello:
    """Choose the protocol version, the namespace and the session of a connection.

    Clients may omit `hello`, and may send it only as the first command.
    """

    session: str | None = None
    """The client's secret that identifies the session. Without it, the session ends with the connection."""
    session_timeout_ms: float = 10_000
    namespace: str | None = None
    """The namespace of the connection. Without it, the server's default namespace."""
    protocol: int = limits.PROTOCOL
    client: str | None = None
    """Name and version of the client library, for the log."""
    quiet: bool = False
    """Omit `queued` for requests with a `ref`."""
    note: str | None = None
    """The note of all requests of the session that have no `note` of their own."""
    ref: str | None = None


@dataclass(slots=True)
class Bye:
    """End the session and the connection immediately."""

    ref: str | None = None


@dataclass(slots=True)
class Inspect:
    """List held and waiting requests. `core.inspect` describes the fields."""

    resource: str | None = None
    id: int | None = None
    transaction: str | None = None
    limit: int = 100
    only: str | None = None
    ref: str | None = None


@dataclass(slots=True)
class Watch:
    """Subscribe to an `event` for every lock that is granted or released on a name with this prefix."""

    prefix: str
    ref: str | None = None


@dataclass(slots=True)
class Unwatch:
    """End the subscription to a prefix."""

    prefix: str
    ref: str | None = None


@dataclass(slots=True)
class LargeRequest:
    """A request with many names, with subtrees, or with long texts (`size.is_large`), whose size the server must compute.

    The decoder marks such requests, so that the server need not check each request.
    """

    request: Request


@dataclass(slots=True)
class Namespaced:
    """A command with an explicit namespace, which must equal the namespace of its connection."""

    namespace: str
    command: Request | LargeRequest | Take | Release | ReleaseByRef | Extend | Inspect | Watch | Unwatch


PlainCommand = Request | Take | Release | ReleaseByRef | Extend | Ping | Inspect | Hello | Bye | Watch | Unwatch
WireCommand = PlainCommand | LargeRequest | Namespaced


def without_namespace(command: WireCommand) -> PlainCommand:
    """Return a command without its namespace, and without the mark of a large request."""
    command = command.command if isinstance(command, Namespaced) else command
    return command.request if isinstance(command, LargeRequest) else command


# -- Decoding ----------------------------------------------------------------------------

_decode = msgspec.json.Decoder(Line).decode
_decode_short = msgspec.json.Decoder(ShortLine).decode
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)


class _NeedsLongDecoding(Exception):
    """A request must be decoded again as a long one.

    A text takes many bytes although it has few characters, or a name is a subtree.
    """


def read(line: bytes) -> WireCommand:
    """Decode one line, given without its line end.

    Raises:
        RequestRejected: the line is invalid; the message explains why.
    """
    # The typed decoders alone decide which lines are valid. The first one accepts only requests with short texts, as
    # nearly all are. Other lines are decoded a second time. So the usual line needs no checks of its lengths.
    try:
        decoded = _decode_short(line)
        payload = decoded.payload
        if type(payload) is ShortRequestPayload:
            if payload.namespace is None:
                return _build_request(payload)
        elif type(payload) is ReleasePayload and payload.namespace is None and payload.id is not None:
            return Release(payload.id, payload.ref)
        return _build_command(decoded)
    except _NeedsLongDecoding:
        pass
    except _DECODE_ERRORS as error:
        reason = codec.malformed_reason(error)
        if reason is not None:  # it names the position: no second decoding is needed
            raise diagnostics.bad_json(reason) from None
    return _read_again(line)


def read_long(line: bytes) -> WireCommand:
    """Decode a line like `read`, but first count its values, because the line may be long.

    Raises:
        RequestRejected: the line is invalid, or has too many values.

    """
    if diagnostics.has_too_many_values(line):
        raise diagnostics.too_many_values()
    return read(line)


def _read_again(line: bytes) -> WireCommand:
    """Decode a line that the decoder for short texts did not accept. Raises RequestRejected if the line is invalid."""
    if diagnostics.has_too_many_values(line):
        raise diagnostics.too_many_values()
    try:
        return _build_command(_decode(line))
    except _DECODE_ERRORS:
        pass
    try:
        # Only the last value of a duplicate key counts. Decode again without the earlier values, which may be invalid.
        return _build_command(_decode(codec.dumps(codec.loads(line))))
    except (*_DECODE_ERRORS, codec.EncodeError) as error:  # 255 to 1,024 levels can be decoded, but not encoded again
        rejection = diagnostics.explain(line) or RequestRejected(Code.BAD_REQUEST, str(error))
    try:
        raise rejection
    finally:
        # Break the cycle of the error, its traceback and this frame, which only the garbage collector would free.
        del rejection


def _build_command(line: Line | ShortLine) -> WireCommand:
    """Build the command for a decoded line, and wrap it in `Namespaced` if its payload names a namespace."""
    payload = line.payload
    command: Any = _BUILDERS[type(line)](payload)
    # A `Hello` contains its namespace itself. Some types of payloads have no namespace.
    namespace = None if payload is None or type(line) is HelloLine else getattr(payload, "namespace", None)
    return command if namespace is None else Namespaced(namespace, command)


def _build_request(payload: RequestPayload, long_names: Names | None = None) -> Request | Take:
    """Return a `Request` if the payload has `resources`. Otherwise return a `Take`, which chooses from `anyOf`.

    If the request was decoded as a long one, `long_names` are its names. Otherwise raises `_NeedsLongDecoding` if a
    text takes many bytes, or if a name is a subtree. Raises ValueError for invalid input that the decoder cannot
    detect, such as `resources` together with `anyOf`.
    """
    resources = payload.resources
    if resources is None:
        return _build_take(payload)
    if payload.anyOf is not None or payload.weights is not None or payload.target is not None:
        raise ValueError("resources and anyOf are mutually exclusive")
    names = _single_resource_cache.get(resources[0]) if len(resources) == 1 else None
    if names is None:
        names = _split_and_cache(resources) if long_names is None else long_names
    shared, exclusive, units = names
    name, queue_timeout, transaction_timeout = payload.transactionName, payload.queueTimeout, payload.transactionTimeout
    if name is not None:
        check_name(name)
        if long_names is None and not name.isascii():
            _check_short(name)
    request = Request(  # positional arguments: twice as fast as keywords in CPython (measured)
        shared,
        exclusive,
        DEFAULT_TIMEOUT_MS if queue_timeout is None else queue_timeout,
        DEFAULT_TIMEOUT_MS if transaction_timeout is None else transaction_timeout,
        name,
        payload.priority or 0.0,
        payload.ref,
        payload.onDisconnect == "release",
    )
    if units is not None:
        request.details = Details(units)
    if payload.note is not None or payload.traceparent is not None:
        request.context = _context(payload)
        if long_names is None and payload.note is not None and not payload.note.isascii():
            _check_short(payload.note)
    return request


def _context(payload: RequestPayload, choice_digest: str | None = None) -> Context:
    """Return the context of a request, without its principal. Raises ValueError if its note is invalid."""
    if payload.note is not None:
        diagnostics.check_note(payload.note)
    return context_of(None, payload.note, payload.traceparent, choice_digest)


def _check_short(text: str) -> None:
    """Raise `_NeedsLongDecoding` if a text takes many bytes."""
    if text_bytes(text) > SHORT_TEXT_BYTES:
        raise _NeedsLongDecoding


def _build_long_request(payload: RequestPayload) -> Request | LargeRequest | Take:
    """Return the command of a `request` that was decoded as a long one: a `LargeRequest` if it is large.

    Raises ValueError for invalid input that the decoder cannot detect.
    """
    if payload.resources is None:
        return _build_request(payload)
    names = split_checked(payload.resources)
    request = _build_request(payload, names)
    if type(request) is not Request:
        return request
    request.details = details_of(*names)
    return LargeRequest(request) if is_large(request) else request


def _build_take(payload: RequestPayload) -> Take:
    """Return the command of a `request` with `anyOf`.

    Raises ValueError for invalid input that the decoder cannot detect.
    """
    any_of, target, timeout = payload.anyOf, payload.target, payload.transactionTimeout
    if any_of is None or target is None:
        raise ValueError("anyOf and target must be given together")
    if payload.weights is not None:
        diagnostics.check_weights(payload.weights)
    diagnostics.check_weights([target])
    weights = [1] * len(any_of) if payload.weights is None else [int(weight) for weight in payload.weights]
    if len(weights) != len(any_of):
        raise ValueError("weights must have as many entries as anyOf")
    if payload.transactionName is not None:
        check_name(payload.transactionName)
    digest = "" if payload.ref is None else _digest_choices(any_of, weights, int(target))
    request = Request(
        transaction_timeout_ms=DEFAULT_TIMEOUT_MS if timeout is None else timeout,
        transaction=payload.transactionName,
        ref=payload.ref,
        release_on_disconnect=payload.onDisconnect == "release",
        context=_context(payload, digest),
    )
    try:
        choices, units = parse_choices(any_of)
    except ValueError as error:  # no other field is invalid: so `explain` need not parse thousands of choices again
        raise diagnostics.invalid_choices(error, payload.ref) from None
    return Take(request, choices, weights, int(target), units, as_strings=type(target) is str)


def _digest_choices(any_of: list[str], weights: list[int], target: int) -> str:
    """Return a digest of the choices of a request, by which a retry is recognized."""
    return blake2b(repr((any_of, weights, target)).encode(), digest_size=16).hexdigest()


def _build_release(payload: ReleasePayload) -> Release | ReleaseByRef:
    """Return the command of a `release`, by `id` or else by `ref`."""
    if payload.id is not None:
        return Release(payload.id, payload.ref)
    if payload.ref is None:
        raise ValueError("id is missing")
    return ReleaseByRef(payload.ref)


def _build_hello(payload: HelloPayload | None) -> Hello:
    """Return the command of a `hello`, with defaults for omitted fields."""
    if payload is None:
        return Hello()
    if payload.client is not None:
        diagnostics.check_client(payload.client)
    if payload.note is not None:
        diagnostics.check_note(payload.note)
    return Hello(
        session=payload.session,
        session_timeout_ms=DEFAULT_TIMEOUT_MS if payload.sessionTimeout is None else payload.sessionTimeout,
        namespace=payload.namespace,
        protocol=limits.PROTOCOL if payload.protocol is None else payload.protocol,
        client=payload.client,
        quiet=bool(payload.quiet),
        note=payload.note,
        ref=payload.ref,
    )


def _build_inspect(payload: InspectPayload | None) -> Inspect:
    """Return the command of an `inspect`, with defaults for omitted fields."""
    if payload is None:
        return Inspect()
    for name in (payload.resource, payload.transactionName):
        if name is not None:
            check_name(name)
    limit = 100 if payload.limit is None else payload.limit
    return Inspect(
        resource=payload.resource,
        id=payload.id,
        transaction=payload.transactionName,
        limit=limit,
        only=payload.only,
        ref=payload.ref,
    )


def _checked_prefix(payload: WatchPayload) -> str:
    """Return the prefix of a `watch` or `unwatch`. Raises ValueError unless it is empty or a valid name."""
    return payload.prefix and check_name(payload.prefix)


_UNRECOGNIZED = (Code.BAD_JSON, Code.BAD_MESSAGE, Code.UNKNOWN_COMMAND)
"""Error codes of lines whose command is unknown."""


def read_hello(line: bytes) -> Hello | RequestRejected | None:
    """Decode a line that may be a `hello`. Return None if the line is another command.

    Return the error of an invalid `hello`, and of any invalid line that contains the word `hello`: the client may have
    tried to start a session, on which later lines depend.
    """
    contains_hello = b"hello" in line.lower()
    if not contains_hello and b"\\u" not in line:  # with `\u`, JSON can encode the word `hello` in another way
        return None
    try:
        command = read_long(line)
    except RequestRejected as rejection:
        may_be_hello = (contains_hello and rejection.code in _UNRECOGNIZED) or diagnostics.is_hello(line)
        # A copy without the traceback, whose frames refer to the line of up to a MiB, and to the error itself.
        return copy_of(rejection) if may_be_hello else None
    if type(command) is not Hello:
        return None
    if command.protocol != limits.PROTOCOL:
        reason = f"protocol {command.protocol} is not supported; this server supports {limits.PROTOCOL}"
        return RequestRejected(Code.UNSUPPORTED_PROTOCOL, reason, ref=command.ref)
    return command


MAX_CACHED_RESOURCES = 10_000

_single_resource_cache: dict[str, Names] = {}
"""The names of requests for one resource, by resource, without subtrees. Services lock the same names repeatedly. A
cached name is the same string object each time: it is compared by identity, hashed once, and stored once for any number
of waiters."""


def _split_and_cache(resources: list[str]) -> Names:
    """Return the names of a request by mode. If it names one resource, cache the result.

    Raises `_NeedsLongDecoding` if a name takes many bytes, or is a subtree. The decoder has limited the characters of
    each name, so only names that are not ASCII may take many bytes.
    """
    if len(resources) != 1:
        names = shared, exclusive, unit_counts = split_by_mode(resources)
        is_ascii = "".join(resources).isascii()
        for name in chain(shared, exclusive, unit_counts or ()):
            if is_subtree(name):
                raise _NeedsLongDecoding
            if not is_ascii:
                _check_short(name)
        return names
    # Optimized: if a large service locks a million names, the cache has one in 100 of them, so nearly all requests take
    # this path.
    mode, name, units = parse_resource(resources[0])
    if name[-2:] == "**" and is_subtree(name):  # the comparison takes less time than the call
        raise _NeedsLongDecoding
    if not name.isascii():
        _check_short(name)
    if units is not None:
        names = ((), (), {name: units})
    elif mode == X:
        names = ((), (name,), None)
    else:
        names = ((name,), (), None)
    if len(_single_resource_cache) >= MAX_CACHED_RESOURCES:
        _single_resource_cache.clear()
    _single_resource_cache[resources[0]] = names
    return names


_BUILDERS: dict[type, Any] = {
    ShortRequestLine: _build_request,
    RequestLine: _build_long_request,
    ReleaseLine: _build_release,
    ExtendLine: lambda payload: Extend(payload.id, payload.transactionTimeout, payload.ref),
    HelloLine: _build_hello,
    ByeLine: lambda payload: Bye(None if payload is None else payload.ref),
    PingLine: lambda payload: Ping(None if payload is None else payload.ref),
    InspectLine: _build_inspect,
    WatchLine: lambda payload: Watch(_checked_prefix(payload), payload.ref),
    UnwatchLine: lambda payload: Unwatch(_checked_prefix(payload), payload.ref),
}


def copy_of(rejection: RequestRejected) -> RequestRejected:
    """Return the same error without its traceback.

    A kept traceback would make a reference cycle of the error and its frames.
    """
    return RequestRejected(rejection.code, rejection.message, ref=rejection.ref, id=rejection.id)


def is_http(line: bytes) -> bool:
    """Return whether the first line of a connection is from an HTTP client."""
    return HTTP_REQUEST.match(line) is not None


def http_rejection() -> RequestRejected:
    """Return the error for an HTTP client."""
    return RequestRejected(Code.BAD_MESSAGE, "this is not an HTTP server: send one JSON object per line")
