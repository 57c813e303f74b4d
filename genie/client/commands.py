"""The commands of the wire protocol as objects that check their arguments, and the public attributes of a lock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum, auto
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, NamedTuple, NoReturn

from genie.client.durations import to_seconds
from genie.client.errors import already_released, copy_lock_lost
from genie.errors import Code, GenieError, LockLost, RequestRejected
from genie.lock_modes import is_subtree
from genie.protocol import codec, messages
from genie.protocol.framing import MAX_LINE_BYTES
from genie.protocol.limits import MAX_DIGITS, MAX_NOTE, MAX_PRIORITY, MAX_ROWS, MAX_TIMEOUT_MS, MAX_TOKEN, MAX_WEIGHT
from genie.protocol.resources import (
    CONTROL_CHARACTERS,
    MAX_CHOICES,
    MAX_RESOURCES,
    check_name,
    merge,
    parse_resource,
    parse_resource_arg,
    split_checked,
)
from genie.version import VERSION


class LockInfo:
    """The attributes of a granted lock that `genie.Lock` and `genie.sync.Lock` have in common."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"lock {self.id} can't be pickled: call `detach`, and pass on the id. Another client can then extend and release "
            "the lock"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {' '.join(self.resources)}: {self._request.state.name.lower()}>"

    def _check_managed(self) -> None:
        """Raise RuntimeError if the lock was detached."""
        if self._request.state is RequestState.DETACHED:
            raise RuntimeError(
                f"lock {self.id} was detached: use client.extend({self.id}, seconds) and client.release({self.id})"
            )

    def _check_extended(self) -> None:
        """Raise LockLost if the lock that was just extended was lost or released in the meantime."""
        if self._request.error is not None:
            raise copy_lock_lost(self._request.error)
        if self._request.state not in (RequestState.HELD, RequestState.DETACHED):
            raise already_released(self.id)

    @property
    def id(self) -> int:
        """The id that the server assigned to the lock. Any client can release the lock by this id."""
        return self._request.id

    @property
    def fence(self) -> int:
        """The fencing token: a number that grows with every grant, by which a store can reject late writers."""
        return self._request.fence

    @property
    def resources(self) -> tuple[str, ...]:
        """The locked resources as `shared:NAME`, `exclusive:NAME` or `2/10:NAME`, in the order in which they were requested."""
        return self._request.resources


# -- Commands: each object checks its arguments, and encodes its line when it is made -----------------------------------

PROTOCOL: Final = 1
"""The version of the wire protocol that this client speaks."""
RELEASE: Final = messages.command("release")
"""An encoded `release`, to which the `ref` of a request is added."""
RESUMPTION_PING: Final = messages.command("ping", ref="resume")
"""Sent after `hello`. The server replies to it after it has sent the state of all requests of the session."""
BYE_TIMEOUT_S: Final = 3.0
"""How long a client that is being closed waits for the reply to `bye`."""
MAX_ID: Final = 1 << 53
"""Ids are less than this number, so that every JSON library can represent them exactly."""
SECRET_LENGTHS: Final = range(16, 129)
"""Allowed numbers of characters in the secret of a session."""


class RequestState(Enum):
    """The state of a lock request, as this client knows it."""

    WAITING = auto()
    """Not sent yet, or sent and not granted yet."""
    HELD = auto()
    RELEASING = auto()
    """The client has requested the release, and the server has not confirmed it yet."""
    DETACHED = auto()
    """Granted, and no longer managed by this client: the server may still hold the lock."""
    ENDED = auto()


class Call:
    """A command that expects a reply.

    `line` is the encoded command. `ref` identifies the command, and the reply has the same `ref`. Both are complete when the
    command is sent.
    """

    __slots__ = ("future", "line", "ref")

    fails_with_connection: ClassVar[bool] = True
    """True if the call fails when its connection ends before the reply. False if the call is then sent again, or needs no
    reply."""

    def __init__(self, line: bytes, ref: str = "") -> None:
        self.line = line
        self.ref = ref
        self.future: Any = None
        """The future that the I/O layer completes with the outcome. None if no caller waits."""

    def assign_ref(self, ref: str) -> None:
        """Set the `ref` that identifies this command, and add it to the encoded command."""
        self.ref = ref
        self.line = messages.with_ref(self.line, ref)


class Lease:
    """The time until which the server certainly does not end a lock, except for its transaction timeout."""

    __slots__ = ("ends_at",)

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        """The end of the lease, in seconds of the monotonic clock. Each renewal moves it."""


NO_LEASE: Final = Lease(math.inf)
"""The lease of locks that are not bound to the session: it never ends."""


OnDisconnect = Literal["keep", "release"]
"""What the server does with a held lock when the session of its client ends."""


class Outcome(NamedTuple):
    """The result or the error of a call. A second outcome of a `Request` means that its lock is lost."""

    call: Call
    result: Any = None
    error: GenieError | None = None
    """Why the call failed. None if it has succeeded."""


class Request(Call):
    """The command `request`, and the lock that results from it.

    All points in time are seconds of this client's monotonic clock, and infinite for "never". More than 16 fields, because
    objects for groups of fields would take more memory for each lock, and a client may hold 100,000 locks.
    """

    __slots__ = (
        "bound_to_session",
        "choices",
        "connection_number",
        "error",
        "expires_at",
        "fence",
        "first_sent_at",
        "id",
        "last_extension",
        "lease",
        "lost_event",
        "on_lost",
        "queue_timeout",
        "release",
        "renew_at",
        "resources",
        "response_deadline",
        "shortened_by",
        "state",
        "transaction",
        "transaction_timeout",
        "watchdog",
    )

    def __init__(
        self,
        line: bytes,
        ref: str,
        resources: tuple[str, ...],
        queue_timeout: float,
        transaction_timeout: float,
        transaction: str | None = None,
        watchdog: bool = False,
        bound_to_session: bool = False,
    ) -> None:
        super().__init__(line, ref)
        self.resources = resources
        """The resources as `shared:NAME`, `exclusive:NAME` or `2/10:NAME`. After the grant of an anyOf request, only the
        resources that the server has chosen."""
        self.choices: dict[str, str] = {}
        """The resources of an anyOf request, by name. Empty for any other request."""
        self.queue_timeout = queue_timeout
        """Seconds that the request may wait in the queue. Infinite without a limit."""
        self.transaction_timeout = transaction_timeout
        """Seconds that the lock is held, counted from the grant or the last extension."""
        self.transaction = transaction
        self.watchdog = watchdog
        """True if the client extends the lock automatically."""
        self.bound_to_session = bound_to_session
        """True if the server releases the lock when the session ends."""
        self.state = RequestState.WAITING
        self.first_sent_at: float | None = None
        """When the request was first sent. None until then."""
        self.response_deadline = math.inf
        """When the caller gives up if the server sends nothing about the request."""
        self.id = 0
        """The id that the server assigned. 0 until this client knows it."""
        self.fence = 0
        """The fencing token. 0 until the lock is granted. A granted lock may have to be extended while it is still WAITING."""
        self.connection_number = 0
        """The number of the last connection on which the server confirmed that the lock is held."""
        self.expires_at = math.inf
        """When the transaction timeout ends on this client's clock. An unanswered extension that shortens the lock counts."""
        self.last_extension = ""
        """The `ref` of the last extension that was sent, or empty."""
        self.shortened_by = ""
        """The `ref` of the last extension that shortened the lock when it was sent, or empty."""
        self.lease = NO_LEASE
        """The lease of the session to which the lock is bound. The lock also ends with this lease."""
        self.renew_at = math.inf
        """When the watchdog sends the next extension."""
        self.release: Release | None = None
        """The call that releases the request. None until the release is requested."""
        self.error: LockLost | None = None
        """Why the lock is lost. None while it is not lost."""
        self.on_lost: Callable[[], None] | None = None
        """The I/O layer's callback for the loss of the lock."""
        self.lost_event: Any = None
        """The I/O layer's event that is set when the lock is lost. None until a caller asks for the event."""

    @property
    def hold_ends_at(self) -> float:
        """When the lock ends on this client's clock, unless it is extended or its lease is renewed before."""
        return min(self.expires_at, self.lease.ends_at)

    def is_held(self, now: float) -> bool:
        """Return whether the lock is held, as this client knows it, and has not expired on this client's clock."""
        return self.state is RequestState.HELD and now < self.hold_ends_at

    def reencode(self, now: float) -> None:
        """Encode a waiting request again with the rest of its queue timeout, for a server that has lost the session.

        A request that was never sent is not changed, and neither is an anyOf request, which never waits in a queue.
        """
        if self.first_sent_at is None or self.choices:
            return
        self.queue_timeout = max(0.0, self.first_sent_at + self.queue_timeout - now)
        self.first_sent_at = now
        queue_timeout = None if self.queue_timeout == math.inf else self.queue_timeout
        payload = codec.loads(self.line)["payload"]
        self.line = make_line("request", **payload | {"queueTimeout": _queue_timeout_ms(queue_timeout)})

    def set_chosen(self, names: Sequence[str]) -> None:
        """Set `resources` to the resources that the server has locked for an anyOf request, in the requested order.

        `names` are the names of these resources, without modes.
        """
        chosen_names = set(names)
        self.resources = tuple([resource for name, resource in self.choices.items() if name in chosen_names])


request_type: type[Request] = Request
"""The class of the requests that clients make. `genie.otel` replaces it."""


class Release(Call):
    """The command `release`, of a lock or a waiting request of any client.

    If the id of a request of this client is not known yet, the release has the `ref` of the request instead of an id.
    """

    __slots__ = ("id", "maybe_executed", "query", "request")

    def __init__(self, id: int, request: Request | None = None) -> None:
        self.id = id
        """The id of the released request, or 0 if the release has the `ref` of the request instead."""
        self.request = request
        """The released request. None if only the id was given: any client may have made the request."""
        self.maybe_executed = False
        """True if the release was sent on a connection that was lost, so that the server may have executed it."""
        self.query: Inspect | None = None
        """The inspect that was sent before the release, because it may release a waiting request of this client. Otherwise None."""
        if request is not None and not id:
            super().__init__(messages.with_ref(RELEASE, request.ref), request.ref)
            return
        if request is None:  # the id is an argument of the program's call
            _check_id(id)
        super().__init__(b"")  # `assign_ref` encodes the line

    def assign_ref(self, ref: str) -> None:
        """Set the `ref` that identifies this command, and encode the command with the id."""
        self.ref = ref
        self.line = b'{"command":"release","payload":{"id":%d,"ref":"%b"}}\n' % (self.id, ref.encode())

    def use_id(self, id: int) -> None:
        """Release by id, because the server does not know the `ref` of the request. The release gets a new `ref`."""
        self.id = id
        self.ref = ""


class TimedCall(Call):
    """A command that records when it was sent, because its answer extends a lock, or the lease, from this time on."""

    __slots__ = ("sent_at",)

    def __init__(self, line: bytes) -> None:
        super().__init__(line)
        self.sent_at = math.inf
        """When the command was sent, in seconds of the monotonic clock. Infinite until then."""


class Extend(TimedCall):
    """The command `extend`, for a lock of any client."""

    __slots__ = ("id", "request", "transaction_timeout")

    def __init__(self, id: int, transaction_timeout: float, request: Request | None = None) -> None:
        timeout_ms = to_milliseconds(transaction_timeout, "an extension", min_ms=1)
        super().__init__(messages.command("extend", id=_check_id(id), transactionTimeout=timeout_ms))
        self.id = id
        self.request = request
        """The request of the lock. None if this client does not hold the lock."""
        self.transaction_timeout = transaction_timeout
        """The new remaining time of the lock in seconds."""


class Ping(TimedCall):
    """The command `ping`. The answer renews the lease of the session."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(messages.command("ping"))


class Bye(Call):
    """The command `bye`, which ends the session."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(messages.command("bye"))


class Inspect(Call):
    """The command `inspect`."""

    __slots__ = ("queue_total",)

    def __init__(
        self,
        resource: str | None = None,
        transaction: str | None = None,
        id: int | None = None,
        limit: int | None = None,
        only: Literal["holders", "queue"] | None = None,
    ) -> None:
        if resource is not None:
            check_name(resource, "the name of a resource")
        if transaction is not None:
            check_name(transaction, "the name of a transaction")
        if id is not None:
            _check_id(id)
        if limit is not None and not (type(limit) is int and 1 <= limit <= MAX_ROWS):
            raise ValueError(f"limit must be an integer from 1 to {MAX_ROWS}, not {limit!r}")
        if only not in (None, "holders", "queue"):
            raise ValueError(f'only must be "holders" or "queue", not {only!r}')
        super().__init__(
            make_line("inspect", resource=resource, transactionName=transaction, id=id, limit=limit, only=only)
        )
        self.queue_total: Any = None
        """The number of waiting requests in the reply. None without a reply."""


def make_request(
    ref: str,
    resources: Sequence[str],
    transaction: str | None = None,
    queue_timeout: float | timedelta | None = 10.0,
    transaction_timeout: float | timedelta = 10.0,
    priority: float = 0,
    watchdog: bool = False,
    on_disconnect: OnDisconnect = "keep",
    note: str | None = None,
) -> Request:
    """Make a request that locks all of the resources at once. `Client.acquire` describes the arguments.

    `ref` identifies the request in the protocol.

    Raises:
        ValueError, TypeError: if an argument is invalid.
        RequestRejected: if the encoded command is longer than the protocol allows.

    """
    if not 0 < len(resources) <= MAX_RESOURCES:
        raise ValueError(f"a request must name 1 to {MAX_RESOURCES} resources, not {len(resources)}")
    distinct_resources = _merge_duplicates(
        [parse_resource_arg(check_resource_type(resource)) for resource in resources]
    )
    option_fields, queue_timeout_s, transaction_timeout_s = _check_options(
        queue_timeout, transaction_timeout, priority, on_disconnect
    )
    payload = {"resources": distinct_resources, **option_fields, "ref": ref}
    if transaction is not None:
        payload["transactionName"] = check_name(transaction, "the name of a transaction")
    if note is not None:
        check_note(note)
        payload["note"] = note
    return request_type(
        make_request_line(payload),
        ref,
        distinct_resources,
        queue_timeout_s,
        transaction_timeout_s,
        transaction,
        watchdog,
        on_disconnect == "release",
    )


@lru_cache
def _check_options(
    queue_timeout: float | timedelta | None,
    transaction_timeout: float | timedelta,
    priority: float,
    on_disconnect: OnDisconnect,
) -> tuple[dict[str, Any], float, float]:
    """Check and convert the options of a request. Cached, because most requests of a program have the same options.

    Returns:
        The fields of the payload, the queue timeout and the transaction timeout. Both timeouts are in seconds, and a queue
        timeout of None becomes infinite.

    """
    queue_timeout_s = None if queue_timeout is None else to_seconds(queue_timeout, "queue_timeout")
    transaction_timeout_s = to_seconds(transaction_timeout, "transaction_timeout")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority must be a number from -2^31 to 2^31, not {priority!r}")
    fields: dict[str, Any] = {
        "queueTimeout": _queue_timeout_ms(queue_timeout_s),
        "transactionTimeout": to_milliseconds(transaction_timeout_s, "transaction_timeout", min_ms=1),
    }
    if priority:  # the default is not sent
        fields["priority"] = priority
    if is_bound_to_session(on_disconnect):
        fields["onDisconnect"] = on_disconnect
    if queue_timeout_s is None:
        queue_timeout_s = math.inf
    return fields, queue_timeout_s, transaction_timeout_s


def _merge_duplicates(resources: list[str]) -> tuple[str, ...]:
    """Return each resource once, in the order of the first occurrences.

    A name is exclusive if any of its occurrences is, and its units are added up. Raises ValueError if a name has units with
    several limits, or units and another mode, or if a subtree has too many levels.
    """
    if len(resources) == 1 and not resources[0].endswith("**"):
        return (resources[0],)
    split_checked(resources)  # raises the errors
    return tuple(merge(resources).values())


def _queue_timeout_ms(seconds: float | None) -> float:
    """Convert a queue timeout to milliseconds. None (no limit) becomes the longest timeout of the protocol."""
    if seconds is None:
        return MAX_TIMEOUT_MS
    return to_milliseconds(seconds, "queue_timeout", alternative=", or None for no limit")


def is_bound_to_session(on_disconnect: OnDisconnect) -> bool:
    """Return whether a lock ends with the client's session: True for "release", False for "keep".

    Raises ValueError if `on_disconnect` has any other value.
    """
    if on_disconnect not in ("keep", "release"):
        raise ValueError(f'on_disconnect must be "keep" or "release", not {on_disconnect!r}')
    return on_disconnect == "release"


def check_note(note: str | None) -> None:
    """Raise TypeError if a note is not a string, ValueError if it is empty, too long, or has control characters."""
    if note is None:
        return
    if not isinstance(note, str):
        raise TypeError(f"note must be a string, not {note!r}")
    if not 0 < len(note) <= MAX_NOTE or CONTROL_CHARACTERS.search(note):
        raise ValueError(f"note must have 1 to {MAX_NOTE} characters and no control characters, not {note[:300]!r}")


def make_request_line(payload: dict[str, Any]) -> bytes:
    """Encode a `request` command. Raises RequestRejected if the line exceeds the limit of the protocol.

    The server would close the connection on a longer line, which would fail all other calls of this client.
    """
    line = _encode("request", payload)
    if len(line) > MAX_LINE_BYTES:
        raise RequestRejected(
            Code.LINE_TOO_LONG, f"a request must have at most {MAX_LINE_BYTES} bytes, not {len(line)}"
        )
    return line


def make_hello(
    secret: str,
    session_timeout: float,
    token: str | None = None,
    namespace: str | None = None,
    note: str | None = None,
) -> bytes:
    """Encode the `hello` that opens every connection.

    `secret` identifies the session to the server. `session_timeout` is in seconds. Raises ValueError or TypeError if an
    argument is invalid.
    """
    if token is not None and not (isinstance(token, str) and 0 < len(token) <= MAX_TOKEN):
        raise ValueError(f"token must be a string of 1 to {MAX_TOKEN} characters")  # does not disclose the token
    if not isinstance(secret, str) or len(secret) not in SECRET_LENGTHS:
        raise ValueError(f"session must be a secret of {SECRET_LENGTHS[0]} to {SECRET_LENGTHS[-1]} characters")
    check_note(note)
    return make_line(
        "hello",
        protocol=PROTOCOL,
        client=f"genie-python/{VERSION}",
        quiet=True,
        session=secret,
        sessionTimeout=to_milliseconds(session_timeout, "session_timeout", min_ms=1),
        token=token,
        namespace=namespace,
        note=note,
        ref="hello",
    )


def to_milliseconds(seconds: float, name: str, *, min_ms: int = 0, alternative: str = "") -> float:
    """Convert a timeout in seconds to the protocol's milliseconds, rounded to microseconds.

    Raises:
        ValueError: if the timeout is not from `min_ms` to the longest timeout of the protocol. The message begins with
            `name`, the name of the argument. `alternative` names another allowed value, such as ", or None for no limit".

    """
    ms = round(seconds * 1000, 3) if math.isfinite(seconds) else seconds
    if not min_ms <= ms <= MAX_TIMEOUT_MS:
        allowed = f"{min_ms / 1000:g} to {MAX_TIMEOUT_MS / 1000} seconds{alternative}"
        raise ValueError(f"{name} must be {allowed}, not {seconds!r}")
    return int(ms) if ms == int(ms) else ms  # whole numbers are shorter on the wire


def make_line(command: str, **payload: Any) -> bytes:
    """Encode a command as a line, without fields that are None. Raises ValueError if the payload can't be encoded as JSON."""
    return _encode(command, {name: value for name, value in payload.items() if value is not None})


def _encode(command: str, payload: dict[str, Any]) -> bytes:
    """Encode a command as a line. Raises ValueError if the payload can't be encoded as JSON."""
    try:
        # Copy the line: the JSON library allocates 4 KB for each line, and a lock keeps its line while it is held.
        return bytes(memoryview(codec.message(command, payload)))
    except TypeError as error:  # a lone surrogate: valid in a Python string, but not in UTF-8
        raise ValueError(f"the command {command} can't be encoded: {error}") from None


def check_resource_type(resource: object) -> str:
    """Return the resource unchanged. Raises TypeError if it is not a string, for example if it is a list of resources."""
    if not isinstance(resource, str):
        raise TypeError(f"a resource must be a string, not {resource!r}; pass each resource as its own argument")
    return resource


def _check_id(id: int) -> int:
    """Return the id unchanged. Raises ValueError if it is not an integer whose absolute value is below 2^53."""
    if type(id) is not int or not -MAX_ID < id < MAX_ID:
        raise ValueError(f"an id must be an integer below 2^53, not {id!r}")
    return id


# -- anyOf requests: the server locks free resources of a list until their weights reach a target -------------------

MAX_AMOUNT: Final = 10**MAX_DIGITS
"""Weights and targets are less than this. If any exceeds `MAX_WEIGHT`, the request has decimal strings, not numbers."""


def make_any_request(
    ref: str,
    resources: Sequence[str],
    target: int,
    *,
    weights: Sequence[int] | None = None,
    transaction: str | None = None,
    transaction_timeout: float | timedelta = 10.0,
    on_disconnect: OnDisconnect = "keep",
    note: str | None = None,
) -> Request:
    """Make an anyOf request: the server locks free resources, in the given order, until their weights reach `target`.

    Without `weights` each resource has the weight 1. Weights are integers and are added exactly, however large. The
    request never waits: the server grants or rejects it at once. `ref` identifies the request in the protocol.

    Raises:
        ValueError, TypeError: if an argument is invalid.
        RequestRejected: if the encoded command is longer than the protocol allows.

    """
    choices = _parse_choices(resources)
    candidates = tuple(choices.values())
    if weights is not None and len(weights) != len(candidates):
        raise ValueError(f"weights must have as many entries as resources ({len(candidates)}), but has {len(weights)}")
    for weight in weights or ():
        _check_weight(weight, "a weight")
    _check_weight(target, "target")
    exceeds_64_bits = max([target, *(weights or ())]) > MAX_WEIGHT
    encode_amount = str if exceeds_64_bits else int
    if transaction is not None:
        check_name(transaction, "the name of a transaction")
    bound_to_session = is_bound_to_session(on_disconnect)
    transaction_timeout_s = to_seconds(transaction_timeout, "transaction_timeout")
    check_note(note)
    payload = {
        "anyOf": candidates,
        "weights": None if weights is None else [encode_amount(weight) for weight in weights],
        "target": encode_amount(target),
        "transactionTimeout": to_milliseconds(transaction_timeout_s, "transaction_timeout", min_ms=1),
        "transactionName": transaction,
        "onDisconnect": on_disconnect if bound_to_session else None,
        "note": note,
        "ref": ref,
    }
    request = request_type(
        make_request_line({name: value for name, value in payload.items() if value is not None}),
        ref,
        candidates,
        queue_timeout=0.0,
        transaction_timeout=transaction_timeout_s,
        transaction=transaction,
        bound_to_session=bound_to_session,
    )
    request.choices = choices
    return request


def _parse_choices(resources: Sequence[str]) -> dict[str, str]:
    """Return the resources of an anyOf request by name. Raises ValueError or TypeError if a resource is invalid."""
    if isinstance(resources, str) or not isinstance(resources, Sequence):
        raise TypeError(f"resources must be a list of strings, not {resources!r}; pass their amounts as weights")
    if not 0 < len(resources) <= MAX_CHOICES:
        raise ValueError(f"acquire_any takes 1 to {MAX_CHOICES} resources, not {len(resources)}")
    choices: dict[str, str] = {}
    for argument in resources:
        resource = parse_resource_arg(check_resource_type(argument))
        name = parse_resource(resource)[1]
        if name in choices:
            raise ValueError(f"resources must contain each name once, not {name!r} twice")
        if is_subtree(name):
            raise ValueError(f"acquire_any can't choose a subtree, such as {name!r}: use acquire")
        choices[name] = resource
    return choices


def _check_weight(weight: int, name: str) -> None:
    """Raise ValueError if a weight or target is not a positive integer of an allowed size. `name` begins the message."""
    if type(weight) is not int or not 0 < weight < MAX_AMOUNT:
        raise ValueError(f"{name} must be a positive integer of at most {MAX_DIGITS} digits, not {weight!r}")
