"""The model that the checkers share: requests, locks, connections and records, reconstructed from the history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from genie.testing.simulation import history
from genie.testing.simulation.history import Entry, Message
from genie.testing.simulation.loop import EPOCH_S
from simulator import history as recorded
from simulator.history import Change

NEVER = float("inf")
TOLERANCE_S = 0.0021
"""Tolerance when times are compared: the store has wall time in whole milliseconds, and deadlines are rounded up."""


@dataclass(slots=True)
class ConnectionHistory:
    """A connection, as client and server observed it. A time is None if the event did not occur."""

    number: int
    client: str
    server: str
    opened_at: float
    session: str | None = None
    """The secret of the session, or None without a session."""
    welcomed: bool = False
    """True if the server has accepted the `hello`."""
    session_timeout_ms: float = 0.0
    quiet: bool = False
    generation: tuple[str | int, int] = ("", 0)
    """The scope of refs: the secret and the number of sessions with this secret, or the connection number and 0."""
    bye_sent_at: float | None = None
    bye_answered_at: float | None = None
    client_closed_at: float | None = None
    server_closed_at: float | None = None

    @property
    def closed_at(self) -> float | None:
        """When the first of the two sides ended the connection, or was notified of its end."""
        ends = [at for at in (self.client_closed_at, self.server_closed_at) if at is not None]
        return min(ends) if ends else None


@dataclass(slots=True)
class RequestHistory:
    """A request and its outcome, according to the messages. A time is None if the event did not occur."""

    id: int
    client: str
    payload: Message
    sent_at: float
    connection: ConnectionHistory
    generation: tuple[str | int, int]
    """The `generation` of the connection that got the first message about the request."""
    queued_at: float | None = None
    locked_at: float | None = None
    """When the first `locked` was sent."""
    fence: int = 0
    ended_at: float | None = None
    granted_resources: list[str] = field(default_factory=list)
    """The resources that `locked` lists for a request with `anyOf`."""
    reason: str = ""
    """The reason in the first `released`."""
    end_received: bool = False
    """True if the client has received a `released`."""
    notified_connections: set[int] = field(default_factory=set)
    """The numbers of the connections that got messages about the request."""

    @property
    def owner(self) -> str | int:
        """The transaction name or, without a transaction, the request id. Requests of the same owner do not conflict."""
        transaction = self.payload.get("transactionName")
        return self.id if transaction is None else str(transaction)

    @property
    def modes(self) -> dict[str, str]:
        """The mode of each resource; for a request with `anyOf` only of the granted resources."""
        if "anyOf" not in self.payload:
            return modes(self.payload["resources"])
        return {name: mode for name, mode in modes(self.payload["anyOf"]).items() if name in self.granted_resources}


@dataclass(slots=True)
class HeldLock:
    """A granted request, according to the store."""

    id: int
    record: Message
    granted_at: float
    """When the request was granted according to the record, but not later than `stored_at`."""
    stored_at: float
    earliest_timeout_at: float
    """The earliest time at which the lock may time out."""
    ended_at: float | None = None


class Model:
    """The state of the clients and the store after the entries that were applied so far.

    `violations` collects the time and the description of each violation. `diverged` maps the ids of requests that were changed
    on a diverged lineage to the time of the first such change. `diverged_connections` are the connections with messages that
    depend on a diverged state.
    """

    def __init__(self, diverged: dict[int, float], diverged_connections: set[int]) -> None:
        # More than 16 fields: the same history, indexed by what the checks ask for.
        self._diverged = diverged
        self.diverged_connections = diverged_connections
        self.now = 0.0
        self.violations: list[tuple[float, str]] = []
        self.connections: dict[int, ConnectionHistory] = {}
        self.requests_sent: dict[tuple[str, str], tuple[Message, float, ConnectionHistory]] = {}
        """By client and `ref`: the payload of a request, and when and on which connection the request was sent first."""
        self._requests_sent_in: dict[
            tuple[str, str, tuple[str | int, int]], tuple[Message, float, ConnectionHistory]
        ] = {}
        """By client, `ref` and generation: the same, for the first sending in this session. After a session has ended without
        a message about a request, the client sends the rest of the request's queue timeout."""
        self._requests_resent: dict[tuple[str, str], tuple[Message, float, ConnectionHistory]] = {}
        """By client and `ref`: the payload of a request, and when and on which connection the request was sent last."""
        self.requests: dict[int, RequestHistory] = {}
        """The requests by id."""
        self.latest_id_by_ref: dict[tuple[str, str], int] = {}
        """By client and `ref`: the id of the latest request."""
        self._releases: dict[int, float] = {}
        """When the first `release` of a request by id was sent, by id."""
        self._releases_by_ref: dict[tuple[str, str], float] = {}
        """When the first `release` of a request by ref was sent, by client and ref."""
        self._sessions: dict[str, int] = {}
        """How many sessions have begun with each secret."""
        self._stored_ids: set[int] = set()
        """The ids of all requests that were ever stored."""
        self._ended_with_session: set[int] = set()
        """The ids of the requests that the end of a session removed. A part of them may end before a session that is resumed."""
        self.extends: dict[int, list[tuple[float, float]]] = {}
        """The `extend` commands for each request id: when each was sent, and the new timeout in milliseconds."""
        self.records: dict[int, Message] = {}
        """The records in the store by request id."""
        self.locks: dict[int, HeldLock] = {}
        """The locks by request id, including ended locks."""
        self.next_id = 0
        """The least request id that is not reserved in the store."""
        self.leader_since = 0.0
        """When the current leader first wrote to the store."""
        self.leader = ""
        """The name of the node of the server that last wrote to the store."""
        self._epoch = 0
        self.leadership_acquired_at = 0.0
        """When a server last acquired leadership. Earlier requests that were not stored may be lost."""
        self.lost_below_id = 0
        """Records with an id below this may be lost: the store has lost records that no running server knew."""
        self.resumed_at: dict[int, float] = {}
        """When the session of a connection was resumed, by connection number."""

    def add_violation(self, at: float, text: str) -> None:
        """Record a violation."""
        self.violations.append((at, text))

    def is_loss_excused(self, id: int) -> bool:
        """Return whether the loss of a request or of its last change is excused, so that no checker reports the loss."""
        return id < self.lost_below_id or self._diverged.get(id, NEVER) <= self.now

    def release_sent_at(self, id: int) -> float:
        """Return when a client first sent a `release` of a request, by id or by ref; `NEVER` if no client did."""
        request = self.requests.get(id)
        if request is not None:
            by_ref = [self._releases_by_ref.get((request.client, request.payload["ref"]))]
        else:  # no message about the request was sent, so only the ref in the store is known
            ref = self.records.get(id, {}).get("ref")
            by_ref = [at for (_, released_ref), at in self._releases_by_ref.items() if released_ref == ref]
        return min(at for at in (*by_ref, self._releases.get(id), NEVER) if at is not None)

    def apply(self, entry: Entry) -> None:
        """Update the model by an entry of the history."""
        match entry.kind:
            case history.CONNECTED:
                number = entry.connection
                self.connections[number] = ConnectionHistory(
                    number, client=entry.node, server=entry.data, opened_at=entry.at, generation=(number, 0)
                )
            case history.DISCONNECTED:
                self._record_closed(entry)
            case history.CLIENT_SENT:
                self._record_command(entry)
            case history.SERVER_SENT:
                self._record_message(entry)
            case history.CLIENT_RECEIVED:
                self._record_received(entry)
            case recorded.STORE:
                self._apply_change(entry, entry.data)

    # -- kinds of entries --------------------------------------------------------------------------------

    def _record_closed(self, entry: Entry) -> None:
        """Record when the client or the server ended a connection, or was notified of its end."""
        connection = self.connections[entry.connection]
        if entry.data.startswith("client"):
            connection.client_closed_at = connection.client_closed_at or entry.at
        else:
            connection.server_closed_at = connection.server_closed_at or entry.at

    def _record_command(self, entry: Entry) -> None:
        """Record when a command was sent, so that checkers can find the cause of a later message."""
        command, payload = entry.data["command"], entry.data["payload"]
        connection = self.connections[entry.connection]
        if command == "request":
            sending, key = (payload, entry.at, connection), (connection.client, payload["ref"])
            self.requests_sent.setdefault(key, sending)
            self._requests_sent_in.setdefault((*key, connection.generation), sending)
            self._requests_resent[key] = sending
        elif command == "release" and "id" in payload:
            self._releases.setdefault(payload["id"], entry.at)
        elif command == "release":
            self._releases_by_ref.setdefault((connection.client, payload["ref"]), entry.at)
        elif command == "bye":
            connection.bye_sent_at = entry.at
        elif command == "extend":
            self.extends.setdefault(payload["id"], []).append((entry.at, payload["transactionTimeout"]))
        elif command == "hello":
            connection.session = payload.get("session")
            connection.session_timeout_ms = payload.get("sessionTimeout", 10_000)
            connection.quiet = payload.get("quiet", False)

    def _record_message(self, entry: Entry) -> None:
        """Update the connection and the request that a message of a server is about."""
        command, payload = entry.data["command"], entry.data["payload"]
        connection = self.connections[entry.connection]
        if command == "welcome":
            self._record_welcome(connection, payload["resumed"], entry.at)
        elif command == "bye":
            connection.bye_answered_at = entry.at
        request = self.resolve_request(entry)
        if request is None:
            return
        request.notified_connections.add(connection.number)
        if command == "queued" and request.queued_at is None:
            request.queued_at = entry.at
        elif command == "locked" and request.locked_at is None:
            request.locked_at, request.fence = entry.at, payload["fence"]
            request.granted_resources = payload.get("resources", [])
        elif command == "released" and request.ended_at is None:
            request.ended_at, request.reason = entry.at, payload["reason"]

    def _record_welcome(self, connection: ConnectionHistory, resumed: bool, at: float) -> None:
        """Record that a `hello` was accepted, and whether its session is resumed or new.

        A new session begins a new scope of refs (`generation`).
        """
        connection.welcomed = True
        if resumed:
            self.resumed_at[connection.number] = at
        elif connection.session is not None:
            self._sessions[connection.session] = self._sessions.get(connection.session, 0) + 1
        if connection.session is not None:
            connection.generation = connection.session, self._sessions.get(connection.session, 0)

    def resolve_request(self, entry: Entry) -> RequestHistory | None:
        """Return the request that a `queued`, `locked` or `released` is about. The first message about a request adds it.

        Returns None for any other message, and if the client that gets the message has not made the request.
        """
        payload, connection = entry.data["payload"], self.connections[entry.connection]
        if entry.data["command"] not in ("queued", "locked", "released"):
            return None
        id_, ref = payload["id"], payload.get("ref")
        request = self.requests.get(id_)
        if request is not None:
            return request if request.client == connection.client else None
        if self._diverged.get(id_, NEVER) <= self.now:
            return None  # the message belongs to a diverged lineage; on the surviving lineage the `ref` makes a new request
        key = connection.client, ref
        if key not in self.requests_sent:
            return None
        payload, sent_at, sent_on = self._requests_sent_in.get((*key, connection.generation), self.requests_sent[key])
        if key in self.latest_id_by_ref:
            if self.requests[self.latest_id_by_ref[key]].generation == connection.generation:
                payload, sent_at, sent_on = self._requests_resent[key]
            if sent_on.generation != connection.generation or not self.may_reuse_ref(
                self.latest_id_by_ref[key], connection
            ):
                return None
        self.latest_id_by_ref[key] = id_
        request = self.requests[id_] = RequestHistory(
            id_, connection.client, payload, sent_at=sent_at, connection=sent_on, generation=connection.generation
        )
        return request

    def may_reuse_ref(self, earlier_id: int, connection: ConnectionHistory) -> bool:
        """Return whether sending the ref of the request `earlier_id` again on a connection may create a new request.

        This is the case if the session has ended, or if the loss of the earlier request is excused. A session ends in parts,
        and another leader may resume the rest: so it is also the case if the earlier request was among the first parts. On
        another server it is also the case if the earlier request ended in the batch in which it arrived, so that the request
        was never stored.
        """
        request = self.requests[earlier_id]
        if self.is_loss_excused(earlier_id) or request.generation != connection.generation:
            return True
        if earlier_id in self._ended_with_session:
            return True
        if request.ended_at is not None and earlier_id not in self._stored_ids:
            return request.connection.server != connection.server or request.ended_at < self.leadership_acquired_at
        return False

    def _record_received(self, entry: Entry) -> None:
        request = self.resolve_request(entry)
        if request is not None and entry.data["command"] == "released":
            request.end_received = True

    def _apply_change(self, entry: Entry, change: Change) -> None:
        """Apply a change of the store to the records, the locks and the leader.

        If the change cannot restore lost writes, the loss of all requests known so far is excused.
        """
        self.next_id = change.counters[2]
        if entry.node != self.leader:
            self.leader = entry.node
            self.leader_since = entry.at
        if change.epoch != self._epoch or (change.state is not None and change.state.acquires_leadership):
            self.leadership_acquired_at = entry.at
            self._epoch = change.epoch
        if change.unrecoverable:
            self.lost_below_id = max([self.lost_below_id, *self.requests, *self.records, *self.locks]) + 1
        for id_, removed in change.removed.items():
            if "session" in removed and removed.get("state") != "ended":
                self._ended_with_session.add(id_)
            self.records.pop(id_, None)
            self._record_end(id_, entry.at)
        self._stored_ids.update(change.written)
        for id_, record in change.written.items():
            self.records[id_] = record
            if record.get("state") == "ended":
                self._record_end(id_, entry.at)
            elif record.get("state") != "queued":
                self._record_lock(id_, record, entry, change)

    def _record_end(self, id: int, at: float) -> None:
        lock = self.locks.get(id)
        if lock is not None and lock.ended_at is None:
            lock.ended_at = at

    def _record_lock(self, id: int, record: Message, entry: Entry, change: Change) -> None:
        """Record a lock in the store: a new lock with its earliest timeout, or an extension if the deadline has changed."""
        lock = self.locks.get(id)
        if lock is None or lock.ended_at is not None:
            granted_at = min(entry.at, record["since_unix_ms"] / 1000 - EPOCH_S)
            timeout_s = record.get("transaction_timeout_ms", 10_000) / 1000
            lock = self.locks[id] = HeldLock(
                id, record, granted_at=granted_at, stored_at=entry.at, earliest_timeout_at=granted_at + timeout_s
            )
            extension_ms = record["deadline"] - record["since"] - timeout_s * 1000
            # The deadline is rounded up by at most 1 ms. Any other difference means that the lock was granted and extended
            # in the same batch.
            if not -1e-3 <= extension_ms <= 1.001 + 1e-3:
                self._record_extension(lock, record, change)
        elif lock.record["deadline"] != record["deadline"]:
            self._record_extension(lock, record, change)
        lock.record = record

    def _record_extension(self, lock: HeldLock, record: Message, change: Change) -> None:
        """Record an extension of a lock.

        Checks that the deadline in the store matches an `extend` that a client has sent, unless a loss is excused.
        """
        remaining_ms = record["deadline"] - change.counters[1]
        timeouts_at = [
            sent_at + timeout_ms / 1000
            for sent_at, timeout_ms in self.extends.get(lock.id, ())
            # The deadline is rounded up by at most 1 ms. A batch may begin a little earlier than the clock that it stores.
            if -0.1 <= remaining_ms - timeout_ms <= 1.002
        ]
        if timeouts_at:
            lock.earliest_timeout_at = min(timeouts_at)
        elif not self.is_loss_excused(lock.id):
            self.add_violation(0.0, f"{lock.id} was extended to {remaining_ms} ms without a matching `extend`")


def modes(resources: Any) -> dict[str, str]:
    """Return the mode of each name in a list of `MODE:NAME`: `shared`, `exclusive`, or units and their limit as `2/10`.

    A name that is listed as shared and exclusive is exclusive.
    """
    modes_by_name: dict[str, str] = {}
    for resource in resources:
        mode, _, name = resource.partition(":")
        if modes_by_name.get(name) != "exclusive":
            modes_by_name[name] = mode
    return modes_by_name


def stored_modes(record: Message) -> dict[str, str]:
    """Return the mode of each resource in a stored record, like `modes`."""
    units = record.get("details", {}).get("units", {})
    return (
        dict.fromkeys(record.get("shared", ()), "shared")
        | dict.fromkeys(record.get("exclusive", ()), "exclusive")
        | {name: f"{count}/{limit}" for name, (count, limit) in units.items()}
    )


def units_of(mode: str) -> tuple[int, int]:
    """Return the units and the limit of a mode, or (0, 0) if it is `shared` or `exclusive`."""
    units, _, limit = mode.partition("/")
    return (int(units), int(limit)) if limit else (0, 0)


def overlap(one: str, other: str) -> bool:
    """Return whether two names are equal, or one of them is a subtree that contains the other."""
    return one == other or _contains(one, other) or _contains(other, one)


def _contains(subtree: str, name: str) -> bool:
    return (subtree == "**" or subtree.endswith("/**")) and name.startswith(subtree.removesuffix("**"))


def exclude(one: str, other: str) -> bool:
    """Return whether locks in two modes exclude each other where their names overlap. Units are counted instead."""
    return not (one == other == "shared" or (units_of(one)[0] and units_of(other)[0]))


class Checker:
    """Base class of the checkers, which are called with each entry before and after the model applies the entry."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def before(self, entry: Entry) -> None:
        """Check an entry before the model applies the entry."""

    def after(self, entry: Entry) -> None:
        """Check an entry after the model has applied the entry."""

    def finish(self) -> None:
        """Check the state at the end of the history."""
