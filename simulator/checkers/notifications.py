"""Checkers of the messages to clients: notifications are in order, unique and stored before they are sent; replies match."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from genie.errors import Code
from genie.testing.simulation.history import CLIENT_SENT, SERVER_SENT, Entry, Message
from simulator.checkers.model import TOLERANCE_S, Checker, ConnectionHistory, Model, RequestHistory, modes, stored_modes

CLOSE_LIMIT_S = 10.0
"""How long the server may leave a connection open after the reply to `bye`, so that the client can read the reply."""


class NotificationChecker(Checker):
    """Checks each `queued`, `locked` and `released`, the replies to `bye`, and the messages to a resumed session."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._notification_checks = {
            "queued": self._check_queued,
            "locked": self._check_locked,
            "released": self._check_released,
        }
        self._sent_notifications: dict[tuple[int, int], list[str]] = {}
        """The notifications that were sent, by connection number and request id."""
        self._commands_by_id: dict[tuple[int, int], int] = {}
        """How many `release` commands by id and `extend` commands were sent, by connection number and request id."""
        self._releases_by_ref: dict[tuple[int, str], int] = {}
        """How many `release` commands by ref were sent, by connection number and ref."""
        self._ended_by_bye: dict[str, int] = {}
        """`Model.lost_below_id` at the end of a session that ended by `bye`, by secret, until the next session begins."""
        self._repeats: dict[tuple[int, str], int] = {}
        """How often a request was repeated, by connection number and ref."""
        self._unconfirmed: dict[int, float] = {}
        """When a `locked` or `queued` was sent that the store does not confirm, by id. `released` must follow at that time."""
        self._notified_ids: dict[int, set[int]] = {}
        """The ids in the notifications since `welcome`, by connection with a resumed session, until its first `pong`."""
        self._ponged_at: dict[int, float] = {}
        """The time of the first `pong` after `welcome`, by connection with a resumed session that is not checked yet."""

    def before(self, entry: Entry) -> None:
        """Check a message before the model applies it, and do the delayed checks that are due."""
        self._check_unstored(entry.at)
        self._check_resumed(entry.at)
        if entry.kind == CLIENT_SENT:
            self._count_command(entry)
        elif entry.kind == SERVER_SENT:
            self._check_message(entry)

    def finish(self) -> None:
        """Do all delayed checks, and check that every request got its end and that connections were closed after `bye`."""
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
                self.model.add_violation(float("inf"), f"{connection.number} was not closed after the reply to bye")

    # -- commands and messages ----------------------------------------------------------------------------

    def _count_command(self, entry: Entry) -> None:
        """Count the commands to which a notification may reply. The counts tell later how often a notification may be repeated."""
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
        """Check a message of a server, then do the checks of its kind.

        Only the leader may send messages other than `error`. After the reply to `bye`, nothing may be sent.
        """
        command, payload = entry.data["command"], entry.data["payload"]
        if command != "error" and self.model.leader not in ("", entry.node):
            self.model.add_violation(entry.at, f"{entry.node} sends {command}, but {self.model.leader} is the leader")
        if self.model.connections[entry.connection].bye_answered_at is not None:
            self.model.add_violation(entry.at, f"{command} is sent after bye on {entry.connection}")
        if command == "welcome":
            self._check_welcome(entry)
        elif command == "pong" and entry.connection in self._notified_ids:
            self._ponged_at.setdefault(entry.connection, entry.at)
        elif command == "bye":
            self._check_bye(entry)
        elif command == "inspected":
            for row in [*payload["holders"], *payload["queue"]]:
                self._check_note(row, entry)
        elif command in self._notification_checks:
            self._check_notification(entry)

    def _check_notification(self, entry: Entry) -> None:
        """Check and record a `queued`, `locked` or `released`. Nothing is checked if the loss of the request is excused."""
        command, id_ = entry.data["command"], entry.data["payload"]["id"]
        if entry.connection in self._notified_ids:
            self._notified_ids[entry.connection].add(id_)
        if self.model.is_loss_excused(id_):
            return
        sent = self._sent_notifications.setdefault((entry.connection, id_), [])
        self._notification_checks[command](entry, self.model.resolve_request(entry), sent)
        sent.append(command)

    def _check_welcome(self, entry: Entry) -> None:
        """Check a `welcome`: a session that has ended by `bye` is not resumed. Also schedule the check of a resumed session."""
        model, payload = self.model, entry.data["payload"]
        session = model.connections[entry.connection].session
        if payload["resumed"]:
            self._notified_ids[entry.connection] = set()
            # If records were lost since the `bye`, the store may have lost the end of the session as well.
            if session is not None and self._ended_by_bye.get(session) == model.lost_below_id:
                model.add_violation(entry.at, f"the session of {entry.connection} is resumed after it ended by bye")
        elif session is not None:
            self._ended_by_bye.pop(session, None)

    def _check_bye(self, entry: Entry) -> None:
        """Check the reply to `bye`: no request of the session waits, and no lock that ends with the session is held."""
        model, connection = self.model, self.model.connections[entry.connection]
        if connection.session is not None:
            self._ended_by_bye[connection.session] = model.lost_below_id
        for request in model.requests.values():
            if (
                request.generation != connection.generation
                or request.ended_at is not None
                or model.is_loss_excused(request.id)
                or model.release_sent_at(request.id) <= entry.at  # its reply may be lost with an earlier connection
            ):
                continue
            if request.locked_at is None or request.payload.get("onDisconnect") == "release":
                model.add_violation(entry.at, f"{request.id} has not ended with its session, which ended by bye")
        # The store has a hash of the secret.
        key = None if connection.session is None else blake2b(connection.session.encode(), digest_size=16).hexdigest()
        for id_, record in model.records.items():
            is_of_session = key is not None and record.get("session") == key
            if is_of_session and record.get("state") == "queued" and not model.is_loss_excused(id_):
                model.add_violation(entry.at, f"{id_} is queued in the store after its session ended by bye")

    def _check_note(self, row: Message, entry: Entry) -> None:
        """Check that a row of `inspected`, or a blocker in `released`, has the note of its request."""
        request = self.model.requests.get(row["id"])
        if request is None or self.model.is_loss_excused(request.id):
            return
        if row.get("note") != request.payload.get("note"):
            note = request.payload.get("note")
            self.model.add_violation(entry.at, f"{request.id} has the note {note}, but is listed as {row}")

    # -- notifications ------------------------------------------------------------------------------------

    def _check_queued(self, entry: Entry, request: RequestHistory | None, sent: list[str]) -> None:
        """Check a `queued`: it is the first message about a request, is not repeated, and has a reserved id.

        A quiet connection must not get `queued`. `sent` are the earlier notifications about the request on this connection.
        """
        id_, at = entry.data["payload"]["id"], entry.at
        if request is None:
            self.model.add_violation(at, f"queued is sent for {id_} to {entry.connection}, which did not request it")
            return
        connection = self.model.connections[entry.connection]
        if connection.quiet and "ref" in entry.data["payload"]:
            self.model.add_violation(at, f"queued is sent for {id_} to the quiet connection {entry.connection}")
        repetitions = self._allowed_repetitions(entry.connection, request)
        if sent.count("queued") > repetitions:
            self.model.add_violation(at, f"queued is sent twice for {id_}")
        if ("locked" in sent or "released" in sent) and not repetitions:
            self.model.add_violation(at, f"queued is sent for {id_} after {sent[-1]}")
        if request.ended_at is not None and request.ended_at < at and not repetitions:
            self.model.add_violation(at, f"queued is sent for {id_} after its end")
        if id_ >= self.model.next_id:
            self.model.add_violation(
                at, f"queued is sent for {id_}, which is not reserved, so it may be assigned again"
            )
        is_not_stored = connection.session is not None and connection.welcomed and id_ not in self.model.records
        if is_not_stored or request.ended_at is not None:
            self._unconfirmed[id_] = at

    def _check_locked(self, entry: Entry, request: RequestHistory | None, sent: list[str]) -> None:
        """Check a `locked`: it is sent once, after `queued`, before the end, and agrees with the store.

        `sent` are the earlier notifications about the request on this connection.
        """
        payload, at = entry.data["payload"], entry.at
        id_ = payload["id"]
        if request is None:
            self.model.add_violation(at, f"locked is sent for {id_} to {entry.connection}, which did not request it")
            return
        if "released" in sent or (request.ended_at is not None and request.ended_at < at):
            self.model.add_violation(at, f"locked is sent for {id_} after its end")
        if sent.count("locked") > self._allowed_repetitions(entry.connection, request):
            self.model.add_violation(at, f"locked is sent twice for {id_}")
        quiet = self.model.connections[entry.connection].quiet
        if not sent and entry.connection not in self.model.resumed_at and not quiet:
            self.model.add_violation(at, f"locked is sent for {id_} before queued")
        if request.fence and request.fence != payload["fence"]:
            self.model.add_violation(at, f"{id_} has fence {payload['fence']}, but had {request.fence}")
        record = self.model.records.get(id_)
        self._check_granted_resources(entry, request)
        if record is None or "fence" not in record:
            self._unconfirmed[id_] = at
        elif record["fence"] != payload["fence"]:
            self.model.add_violation(at, f"{id_} has fence {payload['fence']}, but {record['fence']} in the store")

    def _check_granted_resources(self, entry: Entry, request: RequestHistory) -> None:
        """Check the resources that `locked` lists for a request with `anyOf`.

        The resources must be requested, their weights must reach the target, and the store must have the same resources.
        """
        payload, at, requested = entry.data["payload"], entry.at, request.payload
        if ("anyOf" in requested) != ("resources" in payload):
            self.model.add_violation(
                at, f"locked of {request.id} must list resources if and only if it has anyOf: {payload}"
            )
        if "anyOf" not in requested or "resources" not in payload:
            return
        granted = payload["resources"]
        weight_list = [int(weight) for weight in requested.get("weights") or [1] * len(requested["anyOf"])]
        weights = dict(zip(modes(requested["anyOf"]), weight_list, strict=True))
        target = int(requested["target"])
        if not granted or not set(granted) <= weights.keys() or sum(weights[name] for name in granted) < target:
            self.model.add_violation(at, f"{request.id} requested {target} of {weights}, but got {granted}")
        record = self.model.records.get(request.id, {})
        if "fence" in record and stored_modes(record) != {name: modes(requested["anyOf"])[name] for name in granted}:
            self.model.add_violation(at, f"{request.id} got {granted}, but the store has {stored_modes(record)}")

    def _check_released(self, entry: Entry, request: RequestHistory | None, sent: list[str]) -> None:
        """Check a `released`: the request is not live in the store, the reason is justified, and the message is not repeated.

        A `released` may be sent once, and again as the reply to each command about the request. `sent` are the earlier
        notifications about the request on this connection.
        """
        payload, at = entry.data["payload"], entry.at
        id_, reason = payload["id"], payload["reason"]
        self._unconfirmed.pop(id_, None)
        record = self.model.records.get(id_)
        if record is not None and record.get("state") != "ended":
            self.model.add_violation(at, f"released ({reason}) is sent for {id_}, which is still stored: {record}")
        command_count = self._commands_by_id.get((entry.connection, id_), 0)
        released_count = sent.count("released") + 1  # including this message
        for blocker in payload.get("blockers", ()):
            self._check_note(blocker, entry)
        if request is None:
            if released_count > command_count:
                self.model.add_violation(
                    at, f"released is sent for {id_} to {entry.connection}, which did not request it"
                )
            return
        command_count += self._releases_by_ref.get((entry.connection, request.payload["ref"]), 0)
        # Allowed are one notification, one reply to each command, and the repetitions.
        if released_count > command_count + 1 + self._allowed_repetitions(entry.connection, request):
            self.model.add_violation(
                at, f"released is sent {released_count} times for {id_}, after {command_count} commands"
            )
        quiet = self.model.connections[entry.connection].quiet
        if not sent and entry.connection not in self.model.resumed_at and not command_count and not quiet:
            self.model.add_violation(at, f"released is sent for {id_} before queued")
        if request.ended_at is not None and request.reason != reason:
            self.model.add_violation(at, f"released is sent for {id_} with {reason}, after {request.reason}")
        if request.ended_at is None:
            self._check_reason(request, payload, at)

    def _check_reason(self, request: RequestHistory, payload: Message, at: float) -> None:  # noqa: C901 - one branch each
        """Check that the history justifies the reason in the first `released` of a request."""
        model, reason = self.model, payload["reason"]
        if reason == "queue-timeout":
            times_out_at = request.sent_at + request.payload.get("queueTimeout", 10_000) / 1000
            if at + 1e-6 < times_out_at:  # the tolerance is for rounding of floats
                model.add_violation(at, f"{request.id} timed out in the queue {times_out_at - at:.6f} s too early")
            if request.id in model.locks:
                model.add_violation(at, f"{request.id} timed out in the queue, but was held")
        elif reason == "transaction-timeout":
            lock = model.locks.get(request.id)
            if lock is not None and at + TOLERANCE_S < lock.earliest_timeout_at:
                model.add_violation(at, f"{request.id} timed out {lock.earliest_timeout_at - at:.6f} s too early")
        elif reason == "success":
            if model.release_sent_at(request.id) > at:
                model.add_violation(at, f"{request.id} ended by release, but no client has sent one")
        elif reason == "disconnected":
            connection = request.connection
            is_open = connection.closed_at is None and connection.bye_sent_at is None
            if is_open and connection.session is None and connection.server == model.leader:
                model.add_violation(at, f"{request.id} ended as disconnected, but its connection is open")
        elif reason == "insufficient":
            self._check_insufficient(request, payload, at)
        elif reason != "deadlock":
            model.add_violation(at, f"{request.id} ended for the unknown reason {reason}")

    def _check_insufficient(self, request: RequestHistory, payload: Message, at: float) -> None:
        """Check a `released` with the reason `insufficient`, which only requests with `anyOf` get.

        The sums must have the type of the target (a number or a string), and less than the target must have been free.
        """
        if "anyOf" not in request.payload or request.id in self.model.locks:
            self.model.add_violation(at, f"{request.id} ended as insufficient, but has no anyOf, or was held")
        if "anyOf" not in request.payload or "free" not in payload:
            return  # a repeated `released` has no sums
        target = request.payload["target"]
        if type(payload["free"]) is not type(target) or type(payload["locked"]) is not type(target):
            self.model.add_violation(at, f"{request.id} has the target {target!r}, but sums of another type: {payload}")
        elif int(payload["free"]) >= int(target):
            self.model.add_violation(
                at, f"{request.id} ended as insufficient for {target}, but {payload['free']} were free"
            )

    def _allowed_repetitions(self, connection: int, request: RequestHistory) -> int:
        """Return how often a notification about a request may be repeated on a connection.

        The notification may be repeated once for each repetition of the request, even if the request was first sent on
        another connection, and once more if the session was resumed.
        """
        repeats = max(0, self._repeats.get((connection, request.payload["ref"]), 0))
        resent = (connection, request.payload["ref"]) in self._repeats and request.connection.number != connection
        return repeats + (connection in self.model.resumed_at) + resent

    # -- checks that wait for the next time step, or the end ----------------------------------------------

    def _check_unstored(self, at: float) -> None:
        """Report the notifications before the time `at` that the store did not confirm, unless a `released` followed."""
        for id_, sent_at in list(self._unconfirmed.items()):
            if sent_at < at:
                del self._unconfirmed[id_]
                if not self.model.is_loss_excused(id_):
                    self.model.add_violation(sent_at, f"a notification is sent for {id_}, but not stored")

    def _check_resumed(self, at: float) -> None:
        """Check the resumed sessions that were sent the first `pong` before the time `at`: the whole state precedes it."""
        for number, ponged_at in list(self._ponged_at.items()):
            if ponged_at < at:
                del self._ponged_at[number]
                self._check_complete(self.model.connections[number], ponged_at, self._notified_ids.pop(number))

    def _check_complete(self, connection: ConnectionHistory, at: float, notified_ids: set[int]) -> None:
        """Check that a resumed session got the notifications that it needs.

        It needs one about each live request, and one about each ended request whose `released` the client has not received.
        A quiet session needs none about requests that wait. `notified_ids` are the ids in the notifications from `welcome`
        to the time `at` of the first `pong`.
        """
        model = self.model
        for request in model.requests.values():
            if request.client != connection.client or request.id in notified_ids or model.is_loss_excused(request.id):
                continue
            if request.connection.session != connection.session:
                continue
            record = model.records.get(request.id)
            omitted_states = {"ended", "queued"} if connection.quiet else {"ended"}
            if record is not None and record.get("session") is not None and record.get("state") not in omitted_states:
                model.add_violation(at, f"{request.id} is live, but got no notification when its session was resumed")
            elif (
                record is not None and record.get("line") and not request.end_received
            ):  # "line" is the retained `released`
                model.add_violation(at, f"{request.id} has ended, but got no notification when its session was resumed")

    def _check_ended(self, request: RequestHistory) -> None:
        """Check that `released` was sent for a request, unless its connection has ended or its loss is excused."""
        model = self.model
        if request.ended_at is None and request.connection.closed_at is None and not model.is_loss_excused(request.id):
            model.add_violation(float("inf"), f"released was never sent for {request.id}, whose connection is open")


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
"""The command to which each kind of reply belongs."""
REPLY_LIMIT_S = 10.0
"""A command may remain without a reply if it is sent less than this time before the end of the simulation."""
WITH_ID = ("release", "extend")
"""Commands whose replies and errors have the id of the command."""


@dataclass(slots=True, eq=False)
class PendingCommand:
    """A command that has no reply yet. `id` is the request id that a `release` or `extend` names, or None."""

    name: str
    ref: str | None
    id: int | None
    sent_at: float
    has_unique_ref: bool = True
    """True if no other pending command has the same ref, so that the reply can be recognized."""

    @property
    def is_release_by_ref(self) -> bool:
        """True if the command is a `release` by `ref`. Its reply looks like a `released` with another cause."""
        return self.name == "release" and self.id is None


class ReplyChecker(Checker):
    """Matches replies with the pending commands of each connection: each command gets one reply, in order."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._pending_commands: dict[int, list[PendingCommand]] = {}
        self._before_replies: set[int] = set()
        """Connections with a resumed session that were sent no reply after `welcome`: they may be sent its state, in slices."""
        self._ambiguous: set[tuple[int, str | int]] = set()
        """Connection numbers and ids or refs of each `released` that was matched with a command, perhaps wrongly."""
        self._takeovers: list[Entry] = []
        """The errors about a takeover that are not checked yet."""

    def before(self, entry: Entry) -> None:
        """Add a command to the pending commands of its connection, or match a message with these commands."""
        self._check_takeovers(entry.at)
        if entry.kind not in (CLIENT_SENT, SERVER_SENT) or entry.connection in self.model.diverged_connections:
            return
        pending = self._pending_commands.setdefault(entry.connection, [])
        if entry.kind == CLIENT_SENT:
            command, payload = entry.data["command"], entry.data["payload"]
            id_ = payload.get("id") if command in WITH_ID else None
            pending.append(PendingCommand(command, payload.get("ref"), id_, entry.at))
            same_ref = [other for other in pending if other.ref is not None and other.ref == payload.get("ref")]
            for other in same_ref:
                other.has_unique_ref = other.has_unique_ref and len(same_ref) == 1
        else:
            self._match(entry, pending)

    def finish(self) -> None:
        """Check that the commands of open connections have got replies, except the latest commands."""
        self._check_takeovers(float("inf"))
        for number, pending in self._pending_commands.items():
            connection = self.model.connections[number]
            latest_sent_at = self.model.now - REPLY_LIMIT_S
            unanswered = [
                command
                for command in pending
                if command.sent_at < latest_sent_at and self._is_answered_in_order(command, connection)
            ]
            if unanswered and connection.closed_at is None:
                self.model.add_violation(float("inf"), f"{unanswered[0]} on {number} never got a reply")

    def _match(self, entry: Entry, pending: list[PendingCommand]) -> None:
        """If a message is a reply, remove the command to which it replies from the pending commands."""
        message, payload = entry.data["command"], entry.data["payload"]
        ref = payload.get("ref")
        if message == "welcome" and payload["resumed"]:
            self._before_replies.add(entry.connection)
        elif message in REPLIES or message == "error":
            self._before_replies.discard(entry.connection)
        if message in REPLIES:
            expected = REPLIES[message], ref, payload.get("id")
            matching = [command for command in pending if (command.name, command.ref, command.id) == expected]
            self._remove_in_order(entry, pending, matching)
        elif message in ("queued", "locked"):
            matching = [command for command in pending if command.name == "request" and command.ref == ref]
            if matching and message == "queued":
                is_state = entry.connection in self._before_replies and self._unanswered_before(
                    matching[0], entry, pending
                )
                if not is_state:
                    self._remove_in_order(entry, pending, matching)
            elif matching and self.model.connections[entry.connection].quiet:
                pending.remove(matching[0])  # the lock may have been granted long after the request was executed
                self._note_repeated(entry)
        elif message == "released":
            self._match_released(entry, pending)
        elif message == "error":
            self._match_error(entry, pending)

    def _note_repeated(self, entry: Entry) -> None:
        """Note that a message about a request, which the client has repeated, may be older than the repetition.

        It is then no reply, and the reply is still to come.
        """
        request = self.model.resolve_request(entry)
        if request is not None and request.connection is not self.model.connections[entry.connection]:
            self._ambiguous.add((entry.connection, str(entry.data["payload"].get("ref"))))

    def _match_released(self, entry: Entry, pending: list[PendingCommand]) -> None:
        """Remove the command to which a `released` replies, if it is a reply.

        A `released` may reply to a `release` or `extend` by id, to a `release` by ref, and on a quiet connection also to the
        `request`. It may also be a notification, which often looks like a reply.
        """
        payload, request = entry.data["payload"], self.model.resolve_request(entry)
        ref, id_ = payload.get("ref"), payload["id"]
        by_id = [command for command in pending if command.name in WITH_ID and (command.id, command.ref) == (id_, ref)]
        notification_fields = payload.keys() - {"id", "reason", "ref"}  # no reply to `release` has other fields
        if by_id and ref is not None:
            self._remove_in_order(entry, pending, by_id)
            return
        if request is not None and request.payload.get("ref") != ref and not by_id:
            self.model.add_violation(entry.at, f"{entry.data} is not a reply, but lacks the ref of its request")
        # The loss is excused if the request was first sent on a diverged lineage.
        if request is None and not by_id and not self.model.is_loss_excused(id_):
            self.model.add_violation(entry.at, f"{entry.data} replies to no command")
        connection = self.model.connections[entry.connection]
        requests = [
            command for command in pending if command.name == "request" and ref is not None and command.ref == ref
        ]
        matching = by_id or [command for command in pending if command.is_release_by_ref and command.ref == ref]
        is_known_end = request is not None and request.ended_at is not None and not notification_fields
        replies_to_release = (
            is_known_end and matching and requests and pending.index(matching[0]) < pending.index(requests[0])
        )
        if (
            requests
            and connection.quiet
            and not replies_to_release
            and not self._is_answered_in_order(requests[0], connection)
        ):
            pending.remove(requests.pop(0))  # the request waited, and this is the first message about the request
            if request is not None and request.ended_at is None:
                self._note_repeated(entry)
        if connection.quiet and requests:
            matching = sorted([*matching, requests[0]], key=pending.index)
        if matching and (matching[0].name == "request" or not notification_fields):
            pending.remove(matching[0])
            # The first `released` is perhaps a notification. A repeated request has the same reply as the one before it if it
            # waited, and a reply of its own if it had ended.
            is_repeated = matching[0].name == "request" and not matching[0].has_unique_ref
            if request is not None and (request.ended_at is None or is_repeated):
                self._ambiguous.add((entry.connection, id_ if by_id else str(ref)))

    def _match_error(self, entry: Entry, pending: list[PendingCommand]) -> None:
        """Remove the command to which an error replies.

        If no such command is pending, or only a later one, then the command may have been removed by an earlier `released` that
        was in fact a notification (`_ambiguous`). Then there is nothing to remove.
        """
        payload = entry.data["payload"]
        if payload["code"] == Code.SESSION_TAKEN_OVER:
            self._takeovers.append(entry)
            pending.clear()  # these commands are not executed
            return
        ref, id_ = payload.get("ref"), payload.get("id")
        matching = [command for command in pending if (command.ref, command.id) == (ref, id_)]
        is_next = bool(matching) and not self._unanswered_before(matching[0], entry, pending)
        for key in (id_, ref):
            if not is_next and key is not None and (entry.connection, key) in self._ambiguous:
                self._ambiguous.remove((entry.connection, key))
                return
        self._remove_in_order(entry, pending, matching)

    def _check_takeovers(self, at: float) -> None:
        """Check the errors about a takeover that were sent before the time `at`.

        The `welcome` to the other connection may follow the error at the same time.
        """
        while self._takeovers and self._takeovers[0].at < at:
            self._check_takeover(self._takeovers.pop(0))

    def _check_takeover(self, error: Entry) -> None:
        """Check that another connection has resumed the session.

        It is a later connection, or one that was opened before and whose `hello` was executed later.
        """
        model, closed = self.model, self.model.connections[error.connection]
        resumed_at = model.resumed_at.get(closed.number, closed.opened_at)
        if not any(
            other.session == closed.session
            and (other.number > closed.number or model.resumed_at.get(other.number, -1.0) >= resumed_at)
            for other in model.connections.values()
            if closed.session is not None and other is not closed
        ):
            model.add_violation(error.at, f"{error.data} although no other connection has resumed the session")

    def _remove_in_order(self, entry: Entry, pending: list[PendingCommand], matching: list[PendingCommand]) -> None:
        """Remove the first matching command.

        Reports a violation if no command matches, or if an earlier command should have got its reply before.
        """
        if not matching:
            self.model.add_violation(entry.at, f"{entry.data} replies to no command")
            return
        earlier = self._unanswered_before(matching[0], entry, pending)
        if earlier:
            self.model.add_violation(entry.at, f"{entry.data} is sent before the reply to {earlier[0]}")
        pending.remove(matching[0])

    def _unanswered_before(
        self, command: PendingCommand, entry: Entry, pending: list[PendingCommand]
    ) -> list[PendingCommand]:
        """Return the pending commands that should have got their replies before the reply to a command."""
        connection = self.model.connections[entry.connection]
        return [
            earlier for earlier in pending[: pending.index(command)] if self._is_answered_in_order(earlier, connection)
        ]

    def _is_answered_in_order(self, pending: PendingCommand, connection: ConnectionHistory) -> bool:
        """Return whether a command gets a recognizable reply, and gets it before the replies to all later commands."""
        if pending.name in WITH_ID:
            return pending.ref is not None and not pending.is_release_by_ref
        if pending.name != "request" or not connection.quiet or pending.ref is None:
            return True
        # A quiet connection gets no `queued`. A repeated request gets an immediate reply only if it was granted before.
        model = self.model
        id_ = model.latest_id_by_ref.get((connection.client, pending.ref))
        if id_ is None or not pending.has_unique_ref or model.may_reuse_ref(id_, connection):
            return False
        request = model.requests[id_]
        notified = [at for at in (request.locked_at, request.ended_at) if at is not None]
        return bool(notified) and min(notified) < pending.sent_at
