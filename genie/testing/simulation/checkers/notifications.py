"""Checkers of the messages to clients: in order, once, only what is stored, never early; and every command has its reply."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from genie.testing.simulation.checkers.model import (
    TOLERANCE_S,
    Checker,
    ConnectionHistory,
    Model,
    RequestHistory,
    modes,
    stored_modes,
)
from genie.testing.simulation.history import CLIENT_SENT, SERVER_SENT, Entry, Message

CLOSE_LIMIT_S = 10.0
"""How long after its reply to `bye` the server may leave the connection open: it gives the client time to read."""


class NotificationChecker(Checker):
    """Checks each `queued`, `locked` and `released`, the replies to `bye`, and what a resumed session is sent."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._notification_checks = {
            "queued": self._check_queued,
            "locked": self._check_locked,
            "released": self._check_released,
        }
        self._sent: dict[tuple[int, int], list[str]] = {}
        """The notifications about an id that were sent on a connection."""
        self._commands_by_id: dict[tuple[int, int], int] = {}
        """The number of releases (by id) and extensions of an id that a connection received."""
        self._releases_by_ref: dict[tuple[int, str], int] = {}
        """The number of releases by a ref that a connection received."""
        self._ended_by_bye: dict[str, int] = {}
        """Sessions that ended by `bye`, until another begins with the same secret; with `Model.lost_below` at that time."""
        self._repeats: dict[tuple[int, str], int] = {}
        """How often a request was repeated on a connection, by ref."""
        self._unstored: dict[int, float] = {}
        """Notified as locked or queued, but not stored so: `released` must be sent at the same time."""
        self._resumed: dict[int, tuple[float, set[int]]] = {}
        """Connections whose session has just been resumed, when, and the ids that were mentioned at that time."""

    def before(self, entry: Entry) -> None:
        """Check each message against the state before it."""
        self._check_unstored(entry.at)
        self._check_resumed(entry.at)
        if entry.kind == CLIENT_SENT:
            self._count_command(entry)
        elif entry.kind == SERVER_SENT:
            self._check_message(entry)

    def finish(self) -> None:
        """Check what is pending, that every request got its end, and that connections were closed after `bye`."""
        self._check_unstored(float("inf"))
        self._check_resumed(float("inf"))
        for request in self.model.requests.values():
            self._check_ended(request)
        for connection in self.model.connections.values():
            answered_at = connection.bye_answered_at
            if (
                answered_at is not None
                and answered_at + CLOSE_LIMIT_S < self.model.now
                and connection.closed_at is None
            ):
                self.model.violation(float("inf"), f"{connection.number} was not closed after the reply to bye")

    # -- commands and messages ----------------------------------------------------------------------------

    def _count_command(self, entry: Entry) -> None:
        command, payload = entry.data["command"], entry.data["payload"]
        if command in ("release", "extend") and "id" in payload:
            key = entry.connection, payload["id"]
            self._commands_by_id[key] = self._commands_by_id.get(key, 0) + 1
        elif command == "release":
            key = entry.connection, payload["ref"]
            self._releases_by_ref[key] = self._releases_by_ref.get(key, 0) + 1
        elif command == "request":
            key = entry.connection, payload["ref"]
            self._repeats[key] = self._repeats.get(key, -1) + 1

    def _check_message(self, entry: Entry) -> None:
        command, payload = entry.data["command"], entry.data["payload"]
        if command != "error" and self.model.leader not in ("", entry.node):
            self.model.violation(entry.at, f"{entry.node} sends {command}, but {self.model.leader} is the leader")
        if self.model.connections[entry.connection].bye_answered_at is not None:
            self.model.violation(entry.at, f"{command} is sent after bye on {entry.connection}")
        if command == "welcome":
            self._check_welcome(entry)
        elif command == "bye":
            self._check_bye(entry)
        elif command == "inspected":
            for row in [*payload["holders"], *payload["queue"]]:
                self._check_note(row, entry)
        elif command in self._notification_checks:
            self._check_notification(entry)

    def _check_notification(self, entry: Entry) -> None:
        command, id_ = entry.data["command"], entry.data["payload"]["id"]
        if entry.connection in self._resumed:
            self._resumed[entry.connection][1].add(id_)
        if self.model.exempt(id_):
            return
        sent = self._sent.setdefault((entry.connection, id_), [])
        self._notification_checks[command](entry, self.model.request(entry), sent)
        sent.append(command)

    def _check_welcome(self, entry: Entry) -> None:
        model, payload = self.model, entry.data["payload"]
        session = model.connections[entry.connection].session
        if payload["resumed"]:
            self._resumed[entry.connection] = entry.at, set()
            if session is not None and self._ended_by_bye.get(session) == model.lost_below:
                model.violation(entry.at, f"the session of {entry.connection} is resumed, after it ended by bye")
        elif session is not None:
            self._ended_by_bye.pop(session, None)

    def _check_bye(self, entry: Entry) -> None:
        """Check that no request of the session waits, and no lock is held that ends with the session."""
        model, connection = self.model, self.model.connections[entry.connection]
        if connection.session is not None:
            self._ended_by_bye[connection.session] = model.lost_below
        for request in model.requests.values():
            if request.generation != connection.generation or request.ended_at is not None or model.exempt(request.id):
                continue
            if request.locked_at is None or request.payload.get("onDisconnect") == "release":
                model.violation(entry.at, f"{request.id} has not ended with its session, which ended by bye")
        key = None if connection.session is None else blake2b(connection.session.encode(), digest_size=16).hexdigest()
        for id_, record in model.records.items():
            own = key is not None and record.get("session") == key
            if own and record.get("state") == "queued" and not model.exempt(id_):
                model.violation(entry.at, f"{id_} is queued in the store, and its session ended by bye")

    def _check_note(self, row: Message, entry: Entry) -> None:
        """Check that a row about a request has the `note` of the request."""
        request = self.model.requests.get(row["id"])
        if request is None or self.model.exempt(request.id):
            return
        if row.get("note") != request.payload.get("note"):
            note = request.payload.get("note")
            self.model.violation(entry.at, f"{request.id} has the note {note}, and is listed as {row}")

    # -- notifications ------------------------------------------------------------------------------------

    def _check_queued(self, entry: Entry, request: RequestHistory | None, sent: list[str]) -> None:
        id_, at = entry.data["payload"]["id"], entry.at
        if request is None:
            self.model.violation(at, f"queued is sent for {id_} to {entry.connection}, which did not request it")
            return
        connection = self.model.connections[entry.connection]
        if connection.quiet and "ref" in entry.data["payload"]:
            self.model.violation(at, f"queued is sent for {id_} to {entry.connection}, which is quiet")
        repetitions = self._allowed_repetitions(entry.connection, request)
        if sent.count("queued") > repetitions:
            self.model.violation(at, f"queued is sent twice for {id_}")
        if ("locked" in sent or "released" in sent) and not repetitions:
            self.model.violation(at, f"queued is sent for {id_} after {sent[-1]}")
        if request.ended_at is not None and request.ended_at < at and not repetitions:
            self.model.violation(at, f"queued is sent for {id_} after its end")
        if id_ >= self.model.next_id:
            self.model.violation(at, f"queued is sent for {id_}, which is not reserved: it may be given again")
        unstored = connection.session is not None and connection.welcomed and id_ not in self.model.records
        if unstored or request.ended_at is not None:
            self._unstored[id_] = at

    def _check_locked(self, entry: Entry, request: RequestHistory | None, sent: list[str]) -> None:
        payload, at = entry.data["payload"], entry.at
        id_ = payload["id"]
        if request is None:
            self.model.violation(at, f"locked is sent for {id_} to {entry.connection}, which did not request it")
            return
        if "released" in sent or (request.ended_at is not None and request.ended_at < at):
            self.model.violation(at, f"locked is sent for {id_} after its end")
        if sent.count("locked") > self._allowed_repetitions(entry.connection, request):
            self.model.violation(at, f"locked is sent twice for {id_}")
        quiet = self.model.connections[entry.connection].quiet
        if not sent and entry.connection not in self.model.resumed_at and not quiet:
            self.model.violation(at, f"locked is sent for {id_} before queued")
        if request.fence and request.fence != payload["fence"]:
            self.model.violation(at, f"{id_} has fence {payload['fence']}, and had {request.fence}")
        record = self.model.records.get(id_)
        self._check_granted_resources(entry, request)
        if record is None or "fence" not in record:
            self._unstored[id_] = at
        elif record["fence"] != payload["fence"]:
            self.model.violation(at, f"{id_} has fence {payload['fence']}, and {record['fence']} in the store")

    def _check_granted_resources(self, entry: Entry, request: RequestHistory) -> None:
        """Check that a request with `anyOf` got some of its resources, of sufficient weight, and the ones in the store."""
        payload, at, requested = entry.data["payload"], entry.at, request.payload
        if ("anyOf" in requested) != ("resources" in payload):
            self.model.violation(
                at, f"locked of {request.id} must list resources if it has anyOf, only then: {payload}"
            )
        if "anyOf" not in requested or "resources" not in payload:
            return
        granted = payload["resources"]
        numbers = [int(weight) for weight in requested.get("weights") or [1] * len(requested["anyOf"])]
        weights = dict(zip(modes(requested["anyOf"]), numbers, strict=True))
        target = int(requested["target"])
        if not granted or not set(granted) <= weights.keys() or sum(weights[name] for name in granted) < target:
            self.model.violation(at, f"{request.id} requested {target} of {weights}, and got {granted}")
        record = self.model.records.get(request.id, {})
        if "fence" in record and stored_modes(record) != {name: modes(requested["anyOf"])[name] for name in granted}:
            self.model.violation(at, f"{request.id} got {granted}, and the store has {stored_modes(record)}")

    def _check_released(self, entry: Entry, request: RequestHistory | None, sent: list[str]) -> None:
        payload, at = entry.data["payload"], entry.at
        id_, reason = payload["id"], payload["reason"]
        self._unstored.pop(id_, None)
        record = self.model.records.get(id_)
        if record is not None and record.get("state") != "ended":
            self.model.violation(at, f"released ({reason}) is sent for {id_}, which the store still has: {record}")
        commands = self._commands_by_id.get((entry.connection, id_), 0)
        count = sent.count("released") + 1
        for blocker in payload.get("blockers", ()):
            self._check_note(blocker, entry)
        if request is None:
            if count > commands:
                self.model.violation(at, f"released is sent for {id_} to {entry.connection}, which did not request it")
            return
        commands += self._releases_by_ref.get((entry.connection, request.payload["ref"]), 0)
        if count > commands + 1 + self._allowed_repetitions(entry.connection, request):
            self.model.violation(at, f"released is sent {count} times for {id_}, after {commands} commands")
        quiet = self.model.connections[entry.connection].quiet
        if not sent and entry.connection not in self.model.resumed_at and not commands and not quiet:
            self.model.violation(at, f"released is sent for {id_} before queued")
        if request.ended_at is not None and request.reason != reason:
            self.model.violation(at, f"released is sent for {id_} with {reason}, after {request.reason}")
        if request.ended_at is None:
            self._check_reason(request, payload, at)

    def _check_reason(self, request: RequestHistory, payload: Message, at: float) -> None:  # noqa: C901 - one branch each
        model, reason = self.model, payload["reason"]
        if reason == "queue-timeout":
            due = request.sent_at + request.payload.get("queueTimeout", 10_000) / 1000
            if at + 1e-6 < due:
                model.violation(at, f"{request.id} timed out in the queue {due - at:.6f} s too early")
            if request.id in model.locks:
                model.violation(at, f"{request.id} timed out in the queue, and was held")
        elif reason == "transaction-timeout":
            lock = model.locks.get(request.id)
            if lock is not None and at + TOLERANCE_S < lock.not_before:
                model.violation(at, f"{request.id} timed out {lock.not_before - at:.6f} s too early")
        elif reason == "success":
            if model.release_sent_at(request.id) > at:
                model.violation(at, f"{request.id} was released before a client sent release")
        elif reason == "disconnected":
            connection = request.connection
            is_open = connection.closed_at is None and connection.bye_sent_at is None
            if is_open and connection.session is None and connection.server == model.leader:
                model.violation(at, f"{request.id} ended as disconnected, and its connection is open")
        elif reason == "insufficient":
            self._check_insufficient(request, payload, at)
        elif reason != "deadlock":
            model.violation(at, f"{request.id} ended for the unknown reason {reason}")

    def _check_insufficient(self, request: RequestHistory, payload: Message, at: float) -> None:
        """Check that the sums have the type of the target, and that less than the target was free."""
        if "anyOf" not in request.payload or request.id in self.model.locks:
            self.model.violation(at, f"{request.id} ended as insufficient, and has no anyOf, or was held")
        if "anyOf" not in request.payload or "free" not in payload:
            return  # a repeated `released` has the reason only
        target = request.payload["target"]
        if type(payload["free"]) is not type(target) or type(payload["locked"]) is not type(target):
            self.model.violation(at, f"{request.id} has the target {target!r}, and sums of another type: {payload}")
        elif int(payload["free"]) >= int(target):
            self.model.violation(
                at, f"{request.id} ended as insufficient for {target}, and {payload['free']} were free"
            )

    def _allowed_repetitions(self, connection: int, request: RequestHistory) -> int:
        """Return how often a notification may be repeated: once for each repeated request, and for a resumed session."""
        repeats = max(0, self._repeats.get((connection, request.payload["ref"]), 0))
        resent = (connection, request.payload["ref"]) in self._repeats and request.connection.number != connection
        return repeats + (connection in self.model.resumed_at) + resent

    # -- checks that wait for the next time step, or the end ----------------------------------------------

    def _check_unstored(self, at: float) -> None:
        for id_, sent_at in list(self._unstored.items()):
            if sent_at < at:
                del self._unstored[id_]
                if not self.model.exempt(id_):
                    self.model.violation(sent_at, f"a notification is sent for {id_} that the store does not confirm")

    def _check_resumed(self, at: float) -> None:
        for number, (resumed_at, mentioned) in list(self._resumed.items()):
            if resumed_at < at:
                del self._resumed[number]
                self._check_complete(self.model.connections[number], resumed_at, mentioned)

    def _check_complete(self, connection: ConnectionHistory, at: float, mentioned: set[int]) -> None:
        """Check that a resumed session got the state of each live request, and of each whose end was not received."""
        model = self.model
        for request in model.requests.values():
            if request.client != connection.client or request.id in mentioned or model.exempt(request.id):
                continue
            if request.connection.session != connection.session:
                continue
            record = model.records.get(request.id)
            omitted = {"ended", "queued"} if connection.quiet else {"ended"}
            if record is not None and record.get("session") is not None and record.get("state") not in omitted:
                model.violation(at, f"{request.id} is live, and was not mentioned when its session was resumed")
            elif record is not None and record.get("line") and not request.end_received:
                model.violation(at, f"{request.id} has ended, which was not mentioned when its session was resumed")

    def _check_ended(self, request: RequestHistory) -> None:
        """Check that a request whose connection stayed open got its end."""
        model = self.model
        if request.ended_at is None and request.connection.closed_at is None and not model.exempt(request.id):
            model.violation(float("inf"), f"released was never sent for {request.id}, whose connection is open")


# -- Replies: one for each command of a connection, in order, with the `ref` of the command --------

REPLIES = {
    "pong": "ping",
    "inspected": "inspect",
    "welcome": "hello",
    "extended": "extend",
    "watching": "watch",
    "unwatched": "unwatch",
    "bye": "bye",
}
"""Reply to command."""
REPLY_LIMIT_S = 10.0
"""A command that is sent later than this before the end of the simulation may remain without a reply."""
WITH_ID = ("release", "extend")
"""Commands whose errors carry the id that they named."""


@dataclass(slots=True, eq=False)
class PendingCommand:
    """A command without a reply so far."""

    command: str
    ref: str | None
    id: int | None
    sent_at: float
    alone: bool = True
    """No other command with this ref was pending at the same time: their replies would be indistinguishable."""

    @property
    def by_ref(self) -> bool:
        """Whether it releases by `ref`: its reply looks like the end of the request for any other reason."""
        return self.command == "release" and self.id is None


class ReplyChecker(Checker):
    """Matches replies with the pending commands of each connection."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._pending: dict[int, list[PendingCommand]] = {}
        self._ambiguous: set[tuple[int, str | int]] = set()
        """Connections with ids or refs whose `released` was taken for a reply, and may have had another reason."""

    def before(self, entry: Entry) -> None:
        """Add a command, or match what may be a reply."""
        if entry.kind not in (CLIENT_SENT, SERVER_SENT) or entry.connection in self.model.diverged_connections:
            return
        pending = self._pending.setdefault(entry.connection, [])
        if entry.kind == CLIENT_SENT:
            command, payload = entry.data["command"], entry.data["payload"]
            id_ = payload.get("id") if command in WITH_ID else None
            pending.append(PendingCommand(command, payload.get("ref"), id_, entry.at))
            alike = [one for one in pending if one.ref is not None and one.ref == payload.get("ref")]
            for one in alike:
                one.alone = one.alone and len(alike) == 1
        else:
            self._match(entry, pending)

    def finish(self) -> None:
        """Check that the commands of open connections were replied to."""
        for number, pending in self._pending.items():
            connection = self.model.connections[number]
            until = self.model.now - REPLY_LIMIT_S
            missing = [one for one in pending if one.sent_at < until and self._has_own_reply(one, connection)]
            if missing and connection.closed_at is None:
                self.model.violation(float("inf"), f"{missing[0]} on {number} never got a reply")

    def _match(self, entry: Entry, pending: list[PendingCommand]) -> None:
        command, payload = entry.data["command"], entry.data["payload"]
        ref = payload.get("ref")
        if command in REPLIES:
            fitting = [one for one in pending if one.command == REPLIES[command] and one.ref == ref]
            self._settle(entry, pending, [one for one in fitting if one.id == payload.get("id")])
        elif command in ("queued", "locked"):
            found = [one for one in pending if one.command == "request" and one.ref == ref]
            if found and command == "queued":
                self._settle(entry, pending, found)
            elif found and self.model.connections[entry.connection].quiet:
                pending.remove(found[0])  # it may have been granted long after it was executed
        elif command == "released":
            self._match_released(entry, pending)
        elif command == "error":
            self._match_error(entry, pending)

    def _match_released(self, entry: Entry, pending: list[PendingCommand]) -> None:
        payload, request = entry.data["payload"], self.model.request(entry)
        ref, id_ = payload.get("ref"), payload["id"]
        by_id = [one for one in pending if one.command in WITH_ID and one.id == id_ and one.ref == ref]
        details = payload.keys() - {"id", "reason", "ref"}  # which no reply to `release` has
        if by_id and ref is not None:
            self._settle(entry, pending, by_id)
            return
        if request is not None and request.payload.get("ref") != ref and not by_id:
            self.model.violation(entry.at, f"{entry.data} is no reply, and lacks the ref of its request")
        if request is None and not by_id and not self.model.exempt(id_):  # exempt: it was first sent on a lost lineage
            self.model.violation(entry.at, f"{entry.data} replies to no command")
        connection = self.model.connections[entry.connection]
        of_request = [one for one in pending if one.command == "request" and one.ref == ref and ref is not None]
        if of_request and connection.quiet and not self._has_own_reply(of_request[0], connection):
            pending.remove(of_request.pop(0))  # it waited, and this is the first message about it
        found = by_id or [one for one in pending if one.by_ref and one.ref == ref]
        if connection.quiet and of_request:
            found = sorted([*found, of_request[0]], key=pending.index)
        if found and (found[0].command == "request" or not details):
            pending.remove(found[0])
            if request is not None and request.ended_at is None:
                self._ambiguous.add((entry.connection, id_ if by_id else str(ref)))

    def _match_error(self, entry: Entry, pending: list[PendingCommand]) -> None:
        payload = entry.data["payload"]
        ref, id_ = payload.get("ref"), payload.get("id")
        found = [one for one in pending if (one.ref, one.id) == (ref, id_)]
        for key in (id_, ref):
            if not found and key is not None and (entry.connection, key) in self._ambiguous:
                self._ambiguous.remove((entry.connection, key))
                return
        self._settle(entry, pending, found)

    def _settle(self, entry: Entry, pending: list[PendingCommand], found: list[PendingCommand]) -> None:
        if not found:
            self.model.violation(entry.at, f"{entry.data} replies to no command")
            return
        index, connection = pending.index(found[0]), self.model.connections[entry.connection]
        earlier = [one for one in pending[:index] if self._has_own_reply(one, connection)]
        if earlier:
            self.model.violation(entry.at, f"{entry.data} is sent before the reply to {earlier[0]}")
        pending.remove(found[0])

    def _has_own_reply(self, pending: PendingCommand, connection: ConnectionHistory) -> bool:
        """Return whether a command has a reply that can be recognized, and that precedes the replies to later commands."""
        if pending.command in WITH_ID:
            return pending.ref is not None and not pending.by_ref
        if pending.command != "request" or not connection.quiet or pending.ref is None:
            return True
        # A quiet connection gets no `queued`. A repeated request gets a reply if it was granted.
        model = self.model
        id_ = model.by_ref.get((connection.client, pending.ref))
        if id_ is None or not pending.alone or model.may_reuse_ref(id_, connection):
            return False
        request = model.requests[id_]
        notified = [at for at in (request.locked_at, request.ended_at) if at is not None]
        return bool(notified) and min(notified) < pending.sent_at
