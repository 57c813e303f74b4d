"""A model of one client: checks the messages that it receives against its commands, and against those of other clients."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import orjson

from fuzz.sent_commands import ALLOWED, MALFORMED, LineSplitter, SentCommand
from fuzz.shared_model import KnownRequest, SharedModel, Violation
from genie.core import Take

SLOW_CONSUMER = "slow consumer: "
TOO_MANY_CONNECTIONS = "too many connections"


class Phase(Enum):
    """The state of the handshake, according to the replies."""

    AWAIT = "await"
    REJECTED = "rejected"
    READY = "ready"


class ClientModel:
    """Checks the messages to one client. `coverage` counts the kinds of commands and messages."""

    def __init__(self, shared: SharedModel, coverage: Counter[str], max_line: int) -> None:
        self.shared, self.coverage = shared, coverage
        self.splitter = LineSplitter(max_line)
        self.pending: deque[SentCommand] = deque()
        """The sent commands without a reply, in order."""
        self.sent: Counter[int] = Counter()
        """The number of releases and extensions sent, by id."""
        self.replied: Counter[int] = Counter()
        """The number of `released` that were matched with these commands, by id."""
        self.received_ids: set[int] = set()
        """Ids in messages that it received."""
        self.notified_end_ids: set[int] = set()
        """Ids with a `released` that replied to no command: at most one each is allowed."""
        self.locked_ids: set[int] = set()
        """Ids with a `locked`."""
        self.ended_ids: set[int] = set()
        """Ids with a `released` of any kind."""
        self.owner: Any = self
        self.resuming = False
        self.repeated_id: int | None = None
        """The id of a repeated request whose `queued` was the last message."""
        self._state_due: int | None = None
        """The id of a repeated request with the reply `queued`, that was granted or has ended: this state must follow next."""
        self.watched: dict[str, None] = {}
        self.watched_locks: dict[tuple[str, int], str] = {}
        """The held locks according to the events that it received: resource and id to mode."""
        self.phase = Phase.AWAIT
        self.quiet = self.resumed = False
        self.unanswered_requests: dict[str, SentCommand] = {}
        """Requests of a quiet client that wait: a later command has got its reply."""
        self._ambiguous_refs: set[str] = set()
        """Refs of several requests, of which it is unknown which one was accepted."""
        self._sent_by_ref: Counter[str] = Counter()
        """The number of releases sent, by ref."""
        self._ambiguous_releases: Counter[str] = Counter()
        """Refs with a `released` that was matched with a release by ref, and may have had another cause."""
        self._ambiguous_repetitions: Counter[str | None] = Counter()
        """Refs with a `released` that was matched with a repeated request, and may have been a notification."""
        self.close_reason = ""
        """Why the server may close the connection; empty if it must not."""
        self.last_fence = 0

    def send(self, data: bytes, now_ms: float) -> list[SentCommand]:
        """Record bytes that the client sends; return the commands that they complete."""
        commands = self.splitter.feed(data, now_ms)
        for command in commands:
            self.coverage[f"sent {command.kind}"] += 1
            if command.kind == "hello" and command.decoded.session is not None:
                self.shared.claims.setdefault(command.decoded.session, []).append(self)
            if command.kind == "request" and command.ref is not None:
                command.needs_reply = self._was_granted(command.ref)
                repeated = self.shared.request_with_ref(self.owner, command.ref)
                if repeated is not None and (repeated.fence is not None or repeated.reason is not None):
                    command.settled_id = repeated.id
            if command.by_ref and command.ref is not None:
                self.coverage["sent release by ref"] += 1
                self._sent_by_ref[command.ref] += 1
                self.shared.releasers_by_ref.setdefault(command.ref, set()).add(self)
            elif command.kind in ("release", "extend"):
                self.sent[command.decoded.id] += 1
                known = self.shared.requests.get(command.decoded.id)
                if known is not None:
                    known.releasers.add(self)
                    known.extended = known.extended or command.kind == "extend"
        self.pending += commands
        return commands

    def receive(self, data: bytes) -> None:
        """Check complete lines that the server has written."""
        if not data.endswith(b"\n"):
            raise Violation(f"an incomplete line was written: {data[-80:]!r}")
        for line in data[:-1].split(b"\n"):
            message = orjson.loads(line)
            if message.keys() != {"command", "payload"}:
                raise Violation(f"malformed message: {line!r}")
            method = getattr(self, f"_{message['command']}", None)
            if method is None:
                raise Violation(f"unknown message: {line!r}")
            try:
                self.coverage[f"received {message['command']}"] += 1
                self._check_state_due(message["payload"])
                method(message["payload"])
                if self.phase is Phase.AWAIT:
                    self.phase = Phase.READY  # its first command was no `hello`
                if message["command"] != "queued":
                    self.repeated_id = None  # the state of a repeated request follows immediately, or never
            except (Violation, KeyError) as violation:
                raise Violation(
                    f"{violation!r}: {line[:500].decode()} while {list(self.pending)[:2]} is pending"
                ) from violation

    def _check_state_due(self, payload: dict[str, Any]) -> None:
        """Check that the state of a repeated request follows its `queued`."""
        if self._state_due is not None and self._state_due != payload.get("id"):
            raise Violation(f"the state of {self._state_due}, which was requested again, did not follow")
        self._state_due = None

    # -- replies ------------------------------------------------------------------------------------------

    @property
    def is_taken_over(self) -> bool:
        """True if another client has used the secret of its session."""
        return isinstance(self.owner, tuple) and len(self.shared.claims[self.owner[0]]) > 1

    def may_be_unanswered(self, command: SentCommand) -> bool:
        """Return whether a command may get no reply: a request of a quiet client gets none while it waits."""
        return self.quiet and command.kind == "request" and command.ref is not None and not command.needs_reply

    def _was_granted(self, ref: str) -> bool:
        """Return whether a request with this ref was granted, so that repeating it must get a reply."""
        known = self.shared.request_with_ref(self.owner, ref)
        if known is None:
            return False
        return known.fence is not None or (self.owner is self and known.reason is not None)

    def _next(self, matches: Callable[[SentCommand], bool]) -> SentCommand | None:
        """Remove and return the first matching pending command; None if an earlier one must get its reply before."""
        for index, command in enumerate(self.pending):
            if matches(command):
                for _ in range(index):
                    earlier = self.pending.popleft()
                    if (
                        earlier.ref not in self._ambiguous_refs
                        and self.shared.request_with_ref(self.owner, earlier.ref or "") is None
                    ):
                        self.unanswered_requests.setdefault(earlier.ref or "", earlier)
                return self.pending.popleft()
            if not self.may_be_unanswered(command):
                break
        return None

    def _next_request(self, ref: str | None) -> SentCommand | None:
        """Remove and return the request of a quiet client to which a message with its ref replies."""
        if not self.quiet or ref is None:
            return None
        return self._next(lambda command: command.kind == "request" and command.ref == ref)

    def _take_reply_to(self, kind: str, payload: dict[str, Any]) -> SentCommand:
        """Remove and return the command to which a message with its ref replies."""
        if self.phase is Phase.REJECTED and kind != "hello":
            raise Violation("the hello of this connection was rejected")
        command = self._next(lambda command: command.kind == kind and command.ref == payload.get("ref"))
        if command is None:
            raise Violation(f"no reply to the pending command, {self.pending[0].kind if self.pending else 'none'}")
        return command

    def _pong(self, payload: dict[str, Any]) -> None:
        self._take_reply_to("ping", payload)
        self.resuming = False

    def _bye(self, payload: dict[str, Any]) -> None:
        self._take_reply_to("bye", payload)
        self.pending.clear()  # later commands are not executed
        self.close_reason = "bye"

    def _welcome(self, payload: dict[str, Any]) -> None:
        if self.phase is Phase.READY:
            raise Violation("welcome is sent twice, or late")
        command = self._take_reply_to("hello", payload)
        secret = command.decoded.session
        if payload["resumed"] and secret is None:
            raise Violation("resumed without a session")
        if payload["quiet"] != command.decoded.quiet or payload["protocol"] != 1:
            raise Violation("welcome differs from hello")
        self.phase, self.quiet, self.resumed = Phase.READY, payload["quiet"], payload["resumed"]
        self.coverage["quiet"] += self.quiet
        if secret is not None:
            self.coverage["resumed" if payload["resumed"] else "begun"] += 1
            if payload["resumed"] and secret not in self.shared.generations:
                # The client that began the session reads its welcome later than the one that took it over.
                self.shared.generations[secret] = 1
                self.shared.begun_late.add(secret)
            elif not payload["resumed"] and secret in self.shared.begun_late:
                self.shared.begun_late.remove(secret)
            elif not payload["resumed"]:
                self.shared.generations[secret] = self.shared.generations.get(secret, 0) + 1
            self.owner = (secret, self.shared.generations.get(secret))
            self.resuming = True

    def _inspected(self, payload: dict[str, Any]) -> None:
        command = self._take_reply_to("inspect", payload)
        rows = len(payload["holders"]) + len(payload["queue"])
        if rows > command.decoded.limit or rows > payload["holdersTotal"] + payload["queueTotal"]:
            raise Violation("too many rows")

    def _extended(self, payload: dict[str, Any]) -> None:
        command = self._take_reply_to("extend", payload)
        if (
            payload["id"] != command.decoded.id
            or abs(payload["transactionTimeout"] - command.decoded.transaction_timeout_ms) > 1e-3
        ):
            raise Violation("extended differs from extend")

    def _error(self, payload: dict[str, Any]) -> None:
        code, why = payload["code"], payload["message"]
        self.coverage[f"received error {code}"] += 1
        if code == "too-many" and why.startswith(SLOW_CONSUMER):
            self.close_reason = "cut off"
        elif code == "too-many" and why.startswith(TOO_MANY_CONNECTIONS):
            self.close_reason = "full"
            self.pending.clear()
        elif code == "session-taken-over":
            if not isinstance(self.owner, tuple) or len(self.shared.claims[self.owner[0]]) < 2:
                raise Violation("no other client has sent the secret of the session")
            self.close_reason = "stolen"
            self.pending.clear()  # they are not executed
        elif code == "unavailable" and self._matches_earlier_release(payload):
            return
        elif not self.pending:
            raise Violation("no command is pending")
        else:
            self._on_rejection(code, payload)

    def _matches_earlier_release(self, payload: dict[str, Any]) -> bool:
        """Return whether an error replies to a release with which a `released` was matched before.

        That `released` was a notification with another cause, and this error is the reply.
        """
        id_, ref = payload.get("id"), payload.get("ref")
        if any((command.id, command.ref) == (id_, ref) for command in self.pending):
            return False
        if id_ is not None and self.replied[id_] > 0 and id_ not in self.notified_end_ids:
            self.notified_end_ids.add(id_)
            return True
        if id_ is None and ref is not None and self._ambiguous_releases[ref] > 0:
            self._ambiguous_releases[ref] -= 1
            return True
        return False

    def _on_rejection(self, code: str, payload: dict[str, Any]) -> None:
        if code == "ref-conflict" and self.quiet:
            self._on_ref_conflict(payload.get("ref") or "")
        command = self._next(lambda command: self._may_reply(command, code, payload))
        if command is None and code == "ref-conflict":
            ref = payload["ref"]
            if ref in self._ambiguous_refs:
                return
            if self._ambiguous_repetitions[ref] > 0:  # `released` was a notification, and this is the reply
                self._ambiguous_repetitions[ref] -= 1
                return
        if command is None:
            raise Violation("the error fits no pending command")
        if command.kind == "ping":
            self.resuming = False
        elif command.kind == "http":
            self.close_reason = "http"
        elif command.kind == "too long":
            self.close_reason = "too long"
        if self.phase is not Phase.READY:
            self.phase = Phase.REJECTED if command.is_hello_attempt else self.phase

    def _on_ref_conflict(self, ref: str) -> None:
        """Decide which of two pending requests with the same ref was rejected, on a quiet client: the first one waits.

        On a resumed connection it is unknown: the first may also conflict with a request of an earlier connection.
        """
        same_ref = [command for command in self.pending if command.kind == "request" and command.ref == ref]
        if (
            len(same_ref) < 2
            or ref in self.unanswered_requests
            or self.shared.request_with_ref(self.owner, ref) is not None
        ):
            return
        if self.resumed:
            self._ambiguous_refs.add(ref)
        else:
            self._next(lambda command: command is same_ref[0])
            self.unanswered_requests[ref] = same_ref[0]

    def _may_reply(self, command: SentCommand, code: str, payload: dict[str, Any]) -> bool:
        """Return whether an error may be the reply to a command."""
        if command.kind == "http":
            return code == "bad-message"
        if command.kind == "too long":
            return code == "line-too-long"
        if (payload.get("ref"), payload.get("id")) != (command.ref, command.id):
            return False
        if self.phase is Phase.REJECTED and not command.is_hello_attempt:
            malformed = command.rejection is not None and command.rejection.code in MALFORMED
            return code == (command.rejection.code if malformed and command.rejection is not None else "unavailable")
        if command.rejection is not None:
            is_expected = (code, payload["message"]) == (command.rejection.code, command.rejection.message)
            return is_expected or (code == "unavailable" and command.rejection.code not in MALFORMED)
        return code in ALLOWED[command.kind]

    # -- requests -----------------------------------------------------------------------------------------

    def _queued(self, payload: dict[str, Any]) -> None:
        id_, ref, shared = payload["id"], payload.get("ref"), self.shared
        known = shared.requests.get(id_)
        self.received_ids.add(id_)
        self.repeated_id = None
        if self.quiet and ref is not None:
            raise Violation("queued is sent to a quiet connection")
        if self.resuming:
            self._check_owner(known or shared.new(id_, self.owner, None, ref), ref)
            return
        command = self._take_reply_to("request", payload)
        if known is None:
            self._check_ref_unused(ref)
            if shared.order and id_ <= max(self.received_ids - {id_}, default=0):
                raise Violation("ids must grow")
            shared.new(id_, self.owner, command, ref)
        elif ref is None:
            # Only if another connection has taken over the session, and received the request first when it resumed.
            if known.command is not None or known.owner != self.owner:
                raise Violation("a new request has an old id")
            known.command, known.modes = command, command.modes
        else:
            self._check_owner(known, ref)
            self.coverage["repeated"] += 1
            self.repeated_id = id_
            # Another client may have received a grant or an end first that followed the execution of this command.
            if id_ in self.locked_ids or id_ in self.ended_ids or id_ == command.settled_id:
                self._state_due = id_

    def _check_ref_unused(self, ref: str | None) -> None:
        """Check that no earlier request with this ref was granted: its ref remains in use after its end and a restart."""
        earlier = None if ref is None else self.shared.request_with_ref(self.owner, ref)
        if earlier is not None and earlier.fence is not None:
            raise Violation(f"{earlier.id} had this ref and was granted")

    def _check_owner(self, known: KnownRequest, ref: str | None) -> None:
        """Check that a request belongs to this client, and has this ref."""
        if known.owner != self.owner or known.ref != ref:
            raise Violation(f"{known.id} belongs to another client, or has another ref")

    def _first(self, id_: int, ref: str | None) -> KnownRequest | None:
        """Return the request that the first message to a quiet client is about; None if it sent none with this ref."""
        if not self.quiet or ref is None:
            return None
        command = self.unanswered_requests.pop(ref, None) or self._next_request(ref)
        if ref in self._ambiguous_refs:
            command = None
        elif command is None and not self.resumed:  # else it may have been sent on an earlier connection
            return None
        self._check_ref_unused(ref)
        return self.shared.new(id_, self.owner, command, ref)

    def _locked(self, payload: dict[str, Any]) -> None:
        known, is_repetition = self.shared.requests.get(payload["id"]), "expiresIn" in payload
        ref, first = payload.get("ref"), False
        if known is None and self.resuming:
            known = self.shared.new(payload["id"], self.owner, None, ref)
        elif known is None:
            known, first = self._first(payload["id"], ref), True
        if known is None:
            raise Violation("no request fits")
        self._check_owner(known, ref)
        expected = first or self.resuming or self.repeated_id == known.id
        if is_repetition and not expected and self._next_request(ref) is None:
            raise Violation("no repeated request fits")
        if self.replied[known.id] and not self.resuming:
            raise Violation(f"its end ({known.reason}) was sent before")
        # The connection that took over the session may have received the grant first.
        is_late = self.is_taken_over and known.fence is not None and known.id not in self.locked_ids
        self.received_ids.add(known.id)
        self.locked_ids.add(known.id)
        self.shared.locked(known, payload, is_repetition=is_repetition or is_late)
        if not is_repetition:
            if payload["fence"] <= self.last_fence:
                raise Violation(f"fences must grow, and {self.last_fence} was sent before")
            self.last_fence = payload["fence"]
        command = known.command
        if command is not None and isinstance(command.decoded, Take):
            taken = payload["resources"]
            weights = {
                name: weight for (name, _), weight in zip(command.decoded.choices, command.decoded.weights, strict=True)
            }
            if len(set(taken)) != len(taken) or sum(weights[name] for name in taken) < command.decoded.target:
                raise Violation("the granted resources are not among those requested, or insufficient")
            known.modes = {name: command.modes[name] for name in taken}
        elif command is not None and "resources" in payload:
            raise Violation("resources are sent for a request without anyOf")
        if "blockers" in payload:
            self._check_blockers(command, is_repetition)

    def _check_blockers(self, command: SentCommand | None, is_repetition: bool) -> None:
        self.coverage["received locked with blockers"] += 1
        if is_repetition:
            raise Violation("blockers are sent again")
        if command is not None and (isinstance(command.decoded, Take) or command.decoded.context.traceparent is None):
            raise Violation("blockers are sent for a request without traceparent")

    def _released(self, payload: dict[str, Any]) -> None:
        id_, ref, reason, shared = payload["id"], payload.get("ref"), payload["reason"], self.shared
        self.coverage[f"received released {reason}"] += 1
        known = shared.requests.get(id_)
        command = self._pending_by_id(id_, ref)
        if known is None and not self.resuming and command is None:
            known = self._first(id_, ref)
        is_own = known is not None and known.owner == self.owner
        details = payload.keys() - {"id", "reason", "ref"}
        if command is None and is_own:
            command = self._peek(lambda pending: pending.by_ref and pending.ref == ref)
        if self.resuming:
            known = known or shared.new(id_, self.owner, None, ref)
            self._check_owner(known, ref)
        elif self.repeated_id == id_ and (id_ in self.ended_ids or (is_own and self.owner is not self and not command)):
            self.repeated_id = None
        elif command is not None and not details:
            self._next(lambda pending: pending is command)
            self.replied[id_] += 1
            if command.by_ref:
                self._ambiguous_releases[ref or ""] += 1
        elif known is not None and known.reason is not None and self._take_repeated_request(id_, ref):
            pass
        elif is_own and id_ not in self.notified_end_ids:
            self.notified_end_ids.add(id_)
            self.replied[id_] += 1
        else:
            raise Violation("released is sent too often, or to an unrelated client")
        self.ended_ids.add(id_)
        if known is not None:
            if known.ref != ref and (command is None or command.by_ref):
                raise Violation(f"released has the ref {ref}, and the request {known.ref}")
            self._check_timing(known, payload)
            shared.ended(known, reason)
            releasers = known.releasers | shared.releasers_by_ref.get(known.ref or "", set())
            sent = self.sent[id_] + self._sent_by_ref[known.ref or ""]
            if reason == "success" and releasers <= {self} and self.replied[id_] > sent:
                raise Violation("more replies than releases")

    def _take_repeated_request(self, id_: int, ref: str | None) -> bool:
        """Remove the pending request that repeats an ended one; return whether there is one.

        Only if this client has received the end before, or never a message about it. In the second case `released` may
        also be a notification, so that the reply to the pending request is still to come.
        """
        was_received = id_ in self.ended_ids
        if (not was_received and id_ in self.received_ids) or self._next_request(ref) is None:
            return False
        if not was_received:
            self._ambiguous_repetitions[ref] += 1
        return True

    def _peek(self, matches: Callable[[SentCommand], bool]) -> SentCommand | None:
        """Return the first matching pending command, if all earlier ones may get no reply."""
        for command in self.pending:
            if matches(command):
                return command
            if not self.may_be_unanswered(command):
                break
        return None

    def _pending_by_id(self, id_: int, ref: str | None) -> SentCommand | None:
        """Return the pending release or extension of an id to which a `released` with this ref replies."""
        return self._peek(
            lambda command: command.kind in ("release", "extend") and command.id == id_ and command.ref == ref
        )

    def _check_timing(self, known: KnownRequest, payload: dict[str, Any]) -> None:
        """Check that the request did not time out early, or by a timeout of another state."""
        reason, command = payload["reason"], known.command
        if reason == "queue-timeout" and known.fence is not None:
            raise Violation("the request was granted")
        if reason == "transaction-timeout" and known.state == "queued" and known.owner is self:
            raise Violation("the request was never granted")
        if command is None or known.extended:
            return
        early = payload.get("waited", 2.0**40) < command.request.queue_timeout_ms - 1e-3
        if early or payload.get("held", 2.0**40) < command.request.transaction_timeout_ms - 1e-3:
            raise Violation("the request timed out too early")

    # -- subscriptions ------------------------------------------------------------------------------------

    def _watching(self, payload: dict[str, Any]) -> None:
        command, prefix = self._take_reply_to("watch", payload), payload["prefix"]
        if command.decoded.prefix != prefix:
            raise Violation("another prefix")
        held = {(row["resource"], row["id"]): _mode(row) for row in payload["held"]}
        if any(not _is_watched(name, prefix) for name, _ in held):
            raise Violation("a lock has another prefix")
        for key, mode in self.watched_locks.items():
            if _is_watched(key[0], prefix) and held.get(key) != mode:
                raise Violation(f"according to the events {key} is held")
        if any(key not in self.watched_locks for key in held if self._watches(key[0])):
            raise Violation("an event is missing")
        self.watched[prefix] = None
        self.watched_locks.update(held)

    def _unwatched(self, payload: dict[str, Any]) -> None:
        command = self._take_reply_to("unwatch", payload)
        if command.decoded.prefix != payload["prefix"]:
            raise Violation("another prefix")
        self.watched.pop(command.decoded.prefix, None)
        self.watched_locks = {key: mode for key, mode in self.watched_locks.items() if self._watches(key[0])}

    def _watches(self, name: str) -> bool:
        return any(_is_watched(name, prefix) for prefix in self.watched)

    def _event(self, payload: dict[str, Any]) -> None:
        state = payload["state"]
        self.coverage[f"received event {state}"] += 1
        if state == "lagged":
            self.watched.clear()
            self.watched_locks.clear()
            return
        key = payload["resource"], payload["id"]
        if not self._watches(key[0]) or (state == "locked") != (key not in self.watched_locks):
            raise Violation("an event changes nothing, or has no subscription")
        if state == "locked":
            self.watched_locks[key] = _mode(payload)
        elif self.watched_locks.pop(key) != _mode(payload):
            raise Violation("another mode")


def _is_watched(name: str, prefix: str) -> bool:
    """Return whether a lock on a name, or below a subtree, is seen by the watchers of a prefix."""
    is_subtree = name == "**" or name.endswith("/**")
    return name.startswith(prefix) or (is_subtree and prefix.startswith(name[:-2]))


def _mode(row: dict[str, Any]) -> str:
    """Return the mode of a row or an event, units as `2/10`."""
    return f"{row['units']}/{row['of']}" if row["mode"] == "units" else row["mode"]
