"""What is to be known of a lock, whichever shell it came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Literal

from genie.errors import Code, GenieError, LockLost, RequestRejected
from genie.protocol import codec, messages
from genie.protocol.framing import MAX_LINE_BYTES
from genie.protocol.limits import MAX_DIGITS, MAX_NOTE, MAX_PRIORITY, MAX_ROWS, MAX_TIMEOUT_MS, MAX_TOKEN, MAX_WEIGHT
from genie.protocol.resources import (
    CONTROL_CHARACTERS,
    EXCLUSIVE,
    MAX_CHOICES,
    MAX_RESOURCES,
    SHARED,
    check_name,
    parse_resource,
    parse_resource_arg,
)


class LockInfo:
    """The facts of a lock that was granted."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {' '.join(self.resources)}: {self._request.state.name.lower()}>"

    def _check_managed(self) -> None:
        if self._request.state is State.DETACHED:
            raise RuntimeError(
                f"lock {self.id} was detached: use client.extend({self.id}, seconds) and client.release({self.id})"
            )

    @property
    def id(self) -> int:
        """The server's number for this lock; whoever has it can release the lock."""
        return self._request.id

    @property
    def fence(self) -> int:
        """The fencing token: a number that grows with every grant, by which a store can refuse a late writer."""
        return self._request.fence

    @property
    def resources(self) -> tuple[str, ...]:
        """What is locked, as on the wire (`shared:NAME`, `exclusive:NAME`) and in the order it was asked for."""
        return self._request.resources


# -- What can be asked of a server: every call checks its arguments and makes its line before anything is sent --------

PROTOCOL: Final = 1
"""The version of the wire protocol that this client speaks."""
RELEASE: Final = messages.command("release")
"""A release without its `ref`."""
RESUME: Final = messages.command("ping", ref="resume")
"""Sent after `hello`: its answer comes after everything that the server sends about the session's requests."""
BYE_TIMEOUT_S: Final = 3.0
"""A client that closes waits so long at most for the answer to `bye`: the server may be gone."""
MAX_ID: Final = 1 << 53
"""Ids are below this, so that every JSON library reads them right."""
SECRET_LENGTHS: Final = range(16, 129)
"""Characters of a session's secret."""


class State(Enum):
    """The state of a request for locks, as far as this client knows."""

    WAITING = auto()
    """It waits, or it has not arrived yet."""
    HELD = auto()
    RELEASING = auto()
    """Its release is due."""
    DETACHED = auto()
    """It was granted, and this client does not manage it any longer: it may still be held at the server."""
    ENDED = auto()


class Call:
    """A command and the answer that is due.

    `ref` is the command's own, by which the answer is matched; empty until it is sent. `waiter` belongs to the shell: a
    future, or None where nothing waits for the answer (any more).
    """

    __slots__ = ("line", "ref", "waiter")

    def __init__(self, line: bytes, ref: str = "") -> None:
        self.line = line
        self.ref = ref
        self.waiter: Any = None

    def assign_ref(self, ref: str) -> None:
        """Give it its `ref`."""
        self.ref = ref
        self.line = messages.with_ref(self.line, ref)


OnDisconnect = Literal["keep", "release"]
"""What becomes of held locks when the session of their client ends."""

Outcome = tuple[Call, Any, GenieError | None]
"""A call with its value, or its error. A second one for a `Request` means that its lock is lost."""


class Request(Call):
    """`request`, and the lock that comes of it.

    `wait` (seconds) is what it may wait in the queue (inf: no limit), `transaction` its name, `first_sent_at` when its line
    first went out (None: not yet), `response_deadline` when its caller stops waiting for a server that sends nothing. `hold`
    (seconds) is what its hold lasts from the grant or the last extension, `deadline` when that ends on this client's clock.
    `choices` are the resources by their names, where the server takes what it needs of them: then it never waits. `id` is 0
    until the server sends it. `connection` is the number of the last one on which the server sent that it is held.
    `release` is the call that releases it, once there is one. `error` says why it is not held any more where that is not
    our doing. `bound`: the server releases it when the session ends; `session_ends` is when that is, at the earliest,
    while there is no connection.
    """

    __slots__ = (
        "bound",
        "choices",
        "connection",
        "deadline",
        "error",
        "fence",
        "first_sent_at",
        "hold",
        "id",
        "lost",
        "on_lost",
        "release",
        "renew_at",
        "resources",
        "response_deadline",
        "session_ends",
        "state",
        "transaction",
        "wait",
        "watchdog",
    )

    def __init__(
        self,
        line: bytes,
        ref: str,
        resources: tuple[str, ...],
        wait: float,
        hold: float,
        transaction: str | None = None,
        watchdog: bool = False,
        bound: bool = False,
    ) -> None:
        super().__init__(line, ref)
        self.resources = resources
        self.wait = wait
        self.hold = hold
        self.transaction = transaction
        self.watchdog = watchdog
        self.bound = bound
        self.state = State.WAITING
        self.first_sent_at: float | None = None
        self.choices: dict[str, str] = {}
        self.response_deadline = math.inf
        self.id = 0
        self.fence = 0
        self.connection = 0
        self.deadline = math.inf
        self.session_ends = math.inf
        self.renew_at = math.inf
        self.release: Release | None = None
        self.error: LockLost | None = None
        self.on_lost: Callable[[], None] | None = None
        """What the shell does when the lock is lost."""
        self.lost: Any = None
        """The shell's event, set when the lock is lost; None until it is asked for."""

    @property
    def ends(self) -> float:
        """When the hold ends on this client's clock, unless it is extended or the connection is made again before."""
        return min(self.deadline, self.session_ends)

    def held(self, now: float) -> bool:
        """Whether it is held, as far as this client knows; never beyond its end by this client's clock."""
        return self.state is State.HELD and now < self.ends

    def reissue(self, now: float) -> None:
        """Prepare its line for a server that does not know it: it may wait for what is left of its wait."""
        if self.first_sent_at is None or self.choices:
            return
        self.wait = max(0.0, self.first_sent_at + self.wait - now)
        self.first_sent_at = now
        wait = None if self.wait == math.inf else self.wait
        payload = codec.loads(self.line)["payload"]
        self.line = make_line("request", **payload | {"queueTimeout": _queue_timeout(wait)})

    def set_chosen(self, names: Sequence[str]) -> None:
        """The server has chosen these, each in the mode and the place in which it was asked for."""
        taken = set(names)
        self.resources = tuple([resource for name, resource in self.choices.items() if name in taken])


class Release(Call):
    """`release` of any id. `request` is the one that it releases, where that is one of this client.

    While the `id` of that is not known (0), it is released by its `ref`. `repeated`: a release of a request of this client
    may have been carried out already, on a connection that is lost.
    """

    __slots__ = ("id", "repeated", "request")

    def __init__(self, id: int, request: Request | None = None) -> None:
        self.id = id
        self.request = request
        self.repeated = False
        if request is not None and not id:
            super().__init__(messages.with_ref(RELEASE, request.ref), request.ref)
        else:
            super().__init__(messages.command("release", id=_check_id(id)))

    def by_id(self, id: int) -> None:
        """Prepare its line for a server that does not know the `ref` of the request."""
        self.id = id
        self.ref = ""
        self.line = messages.command("release", id=id)


class Extend(Call):
    """`extend` of any id. `request` is the lock, where this client holds it."""

    __slots__ = ("hold", "id", "request", "sent_at")

    def __init__(self, id: int, hold: float, request: Request | None = None) -> None:
        super().__init__(
            messages.command(
                "extend", id=_check_id(id), transactionTimeout=milliseconds(hold, "an extension", least_ms=1)
            )
        )
        self.id = id
        self.request = request
        self.hold = hold
        self.sent_at = math.inf


class Ping(Call):
    """`ping`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(messages.command("ping"))


class Bye(Call):
    """`bye`, which ends the session."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(messages.command("bye"))


class Inspect(Call):
    """`inspect`."""

    __slots__ = ()

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


def request(
    ref: str,
    resources: Sequence[str],
    *,
    transaction: str | None = None,
    queue_timeout: float | None = 10.0,
    transaction_timeout: float = 10.0,
    priority: float = 0,
    watchdog: bool = False,
    on_disconnect: OnDisconnect = "keep",
    note: str | None = None,
) -> Request:
    """A request for resources as people name them; timeouts in seconds.

    A resource that is named twice is locked once, in the stronger mode. ValueError or TypeError says what is wrong with
    an argument.
    """
    if not 0 < len(resources) <= MAX_RESOURCES:
        raise ValueError(f"a request names 1 to {MAX_RESOURCES} resources, not {len(resources)}")
    names = _stronger([parse_resource_arg(check_str(resource)) for resource in resources])
    if transaction is not None:
        check_name(transaction, "the name of a transaction")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority must be a number from -2^31 to 2^31, not {priority!r}")
    bound = check_on_disconnect(on_disconnect)
    check_note(note)
    line = request_line(
        resources=names,
        queueTimeout=_queue_timeout(queue_timeout),
        transactionTimeout=milliseconds(transaction_timeout, "transaction_timeout", least_ms=1),
        transactionName=transaction,
        priority=priority or None,
        onDisconnect=on_disconnect if bound else None,
        note=note,
        ref=ref,
    )
    wait = math.inf if queue_timeout is None else queue_timeout
    return Request(line, ref, names, wait, transaction_timeout, transaction, watchdog, bound)


def _stronger(resources: list[str]) -> tuple[str, ...]:
    """Each resource once, in the order of first mention: exclusive where any mention is."""
    if len(resources) == 1:
        return (resources[0],)
    modes: dict[str, bool] = {}
    for resource in resources:
        exclusive, name = parse_resource(resource)
        modes[name] = exclusive or modes.get(name, False)
    return tuple([(EXCLUSIVE if exclusive else SHARED) + name for name, exclusive in modes.items()])


def _queue_timeout(seconds: float | None) -> float:
    """Seconds as the wire has them; None, no limit, is the greatest timeout there is."""
    return MAX_TIMEOUT_MS if seconds is None else milliseconds(seconds, "queue_timeout", also=", or None for no limit")


def check_on_disconnect(on_disconnect: OnDisconnect) -> bool:
    """Whether a lock is released when its client's session ends; ValueError if it is neither of the two."""
    if on_disconnect not in ("keep", "release"):
        raise ValueError(f'on_disconnect must be "keep" or "release", not {on_disconnect!r}')
    return on_disconnect == "release"


def check_note(note: str | None) -> None:
    """TypeError or ValueError, if it is no note."""
    if note is None:
        return
    if not isinstance(note, str):
        raise TypeError(f"note must be a string, not {note!r}")
    if not 0 < len(note) <= MAX_NOTE or CONTROL_CHARACTERS.search(note):
        raise ValueError(f"note must have 1 to {MAX_NOTE} characters and no control characters, not {note[:300]!r}")


def request_line(**payload: Any) -> bytes:
    """The line of a request; RequestRejected, if it is too long.

    The server would close the connection, and with it what everybody else waits for.
    """
    line = make_line("request", **payload)
    if len(line) > MAX_LINE_BYTES:
        raise RequestRejected(
            Code.LINE_TOO_LONG, f"a line has at most {MAX_LINE_BYTES} bytes, this request {len(line)}"
        )
    return line


def hello(secret: str, session_timeout: float, token: str | None = None, namespace: str | None = None) -> bytes:
    """The first line of every connection; `session_timeout` in seconds."""
    if token is not None and not (isinstance(token, str) and 0 < len(token) <= MAX_TOKEN):
        raise ValueError(f"token must be a string of 1 to {MAX_TOKEN} characters")  # its value is a secret
    if not isinstance(secret, str) or len(secret) not in SECRET_LENGTHS:
        raise ValueError(f"session must be a secret of {SECRET_LENGTHS[0]} to {SECRET_LENGTHS[-1]} characters")
    return make_line(
        "hello",
        protocol=PROTOCOL,
        client=f"genie-python/{_version()}",
        quiet=True,
        session=secret,
        sessionTimeout=milliseconds(session_timeout, "session_timeout", least_ms=1),
        token=token,
        namespace=namespace,
        ref="hello",
    )


@cache
def _version() -> str:
    try:
        return version("genie-lock")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def milliseconds(seconds: float, what: str, *, least_ms: int = 0, also: str = "") -> float:
    """Seconds as the wire has them, or a ValueError; not finer than a microsecond. `also` is what else would be right."""
    ms = round(seconds * 1000, 3) if math.isfinite(seconds) else seconds
    if not least_ms <= ms <= MAX_TIMEOUT_MS:
        raise ValueError(
            f"{what} must be {least_ms / 1000:g} to {MAX_TIMEOUT_MS / 1000} seconds{also}, not {seconds!r}"
        )
    return int(ms) if ms == int(ms) else ms


def make_line(command: str, **payload: Any) -> bytes:
    """Any line; ValueError, if something in it can't be said in JSON."""
    try:
        # A copy: the library leaves each line in a block of 4 KB, and a request's is kept for as long as it is held.
        return bytes(memoryview(messages.command(command, **payload)))
    except TypeError as error:  # a lone surrogate, which a Python string may hold and UTF-8 may not
        raise ValueError(f"{command}: {error}") from None


def check_str(resource: object) -> str:
    """A resource, which must be a string; else a TypeError."""
    if not isinstance(resource, str):
        raise TypeError(f"a resource is a string, not {resource!r}; several are several arguments")
    return resource


def _check_id(id: int) -> int:
    if type(id) is not int or not -MAX_ID < id < MAX_ID:
        raise ValueError(f"an id is an integer below 2^53, not {id!r}")
    return id


# -- A request that leaves it to the server which of many resources to lock: what is free, until it is enough --------

MAX_AMOUNT: Final = 10**MAX_DIGITS
"""Weights and targets are below this. Those above `MAX_WEIGHT` are sent as decimal strings, and so are the others then."""


def any_request(
    ref: str,
    resources: Sequence[str],
    target: int,
    *,
    weights: Sequence[int] | None = None,
    transaction: str | None = None,
    transaction_timeout: float = 10.0,
    on_disconnect: OnDisconnect = "keep",
    note: str | None = None,
) -> Request:
    """A request for as many of the resources, as people name them and in this order, as reach the target.

    Amounts are integers and are added exactly, however large. It never waits. ValueError or TypeError says what is wrong with
    an argument, RequestRejected that the line would be too long.
    """
    if isinstance(resources, str) or not isinstance(resources, Sequence):
        raise TypeError(f"resources are a list of strings, not {resources!r}; what each is worth are the weights")
    if not 0 < len(resources) <= MAX_CHOICES:
        raise ValueError(f"1 to {MAX_CHOICES} resources can be chosen from, not {len(resources)}")
    names = tuple([parse_resource_arg(check_str(resource)) for resource in resources])
    choices = {parse_resource(name)[1]: name for name in names}
    if len(choices) < len(names):
        raise ValueError("each resource can be named once among those that are chosen from")
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"weights must be as many as the resources, {len(names)}, not {len(weights)}")
    for weight in weights or ():
        _check_weight(weight, "a weight")
    _check_weight(target, "target")
    as_text = max(target, *(weights or ())) > MAX_WEIGHT if weights else target > MAX_WEIGHT
    if transaction is not None:
        check_name(transaction, "the name of a transaction")
    bound = check_on_disconnect(on_disconnect)
    check_note(note)
    line = request_line(
        anyOf=names,
        weights=None if weights is None else [str(weight) if as_text else weight for weight in weights],
        target=str(target) if as_text else target,
        transactionTimeout=milliseconds(transaction_timeout, "transaction_timeout", least_ms=1),
        transactionName=transaction,
        onDisconnect=on_disconnect if bound else None,
        note=note,
        ref=ref,
    )
    request = Request(line, ref, names, 0.0, transaction_timeout, transaction, bound=bound)
    request.choices = choices
    return request


def _check_weight(weight: int, what: str) -> None:
    if type(weight) is not int or not 0 < weight < MAX_AMOUNT:
        raise ValueError(f"{what} must be an integer from 1, of at most {MAX_DIGITS} digits, not {weight!r}")
