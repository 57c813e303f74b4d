"""A model of one client: checks what the server sends against what the client sent, and what other clients got."""

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
        self.due: deque[SentCommand] = deque()
        """The commands without a reply, in the order in which they were sent."""
        self.sent: Counter[int] = Counter()
        """The number of releases and extensions sent, by id."""
        self.told: Counter[int] = Counter()
        """The number of `released` received that reply to them, by id."""
        self.here: set[int] = set()
        """Ids in messages that it received."""
        self.unasked: set[int] = set()
        self.over: set[int] = set()
        """Ids of which it received the end."""
        self.owner: Any = self
        self.resuming = False
        self.repeated: int | None = None
        self._state_due: int | None = None
        """The id of a repeated request, acknowledged by `queued`: its state, granted or ended, must follow next."""
        self.watched: dict[str, None] = {}
        self.watched_locks: dict[tuple[str, int], str] = {}
        """The held locks, according to the events that it received."""
        self.phase = Phase.AWAIT
        self.quiet = self.resumed = False
        self.silent: dict[str, SentCommand] = {}
        """Requests of a quiet client that were executed without a message so far: a later command got its reply."""
        self._ambiguous_refs: set[str] = set()
        """Refs that belong to one of several requests, it is unknown to which."""
        self._sent_by_ref: Counter[str] = Counter()
        """The number of releases sent, by ref."""
        self._ambiguous_releases: Counter[str] = Counter()
        """Refs of releases with a `released` that was taken for the reply, and may have had another cause."""
        self.ends = ""
        """Why the server closes the connection."""
        self.last_fence = 0

    def send(self, data: bytes, now_ms: float) -> list[SentCommand]:
        """Record bytes that the client sends; return the commands that they complete."""
        found = self.splitter.say(data, now_ms)
        for said in found:
            self.coverage[f"sent {said.kind}"] += 1
            if said.kind == "hello" and said.command.session is not None:
                self.shared.claims.setdefault(said.command.session, []).append(self)
            if said.kind == "request" and said.ref is not None:
                said.must = self._was_granted(said.ref)
            if said.by_ref and said.ref is not None:
                self.coverage["sent release by ref"] += 1
                self._sent_by_ref[said.ref] += 1
                self.shared.releasers_by_ref.setdefault(said.ref, set()).add(self)
            elif said.kind in ("release", "extend"):
                self.sent[said.command.id] += 1
                known = self.shared.requests.get(said.command.id)
                if known is not None:
                    known.releasers.add(self)
                    known.extended = known.extended or said.kind == "extend"
        self.due += found
        return found

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
                    self.repeated = None  # how it stands is told right behind
            except (Violation, KeyError) as wrong:
                raise Violation(f"{wrong!r}: {line[:500].decode()} while {list(self.due)[:2]} is pending") from wrong

    def _check_state_due(self, payload: dict[str, Any]) -> None:
        if self._state_due is not None and self._state_due != payload.get("id"):
            raise Violation(f"the state of {self._state_due}, which was requested again, did not follow")
        self._state_due = None

    # -- replies ------------------------------------------------------------------------------------------

    def may_be_unanswered(self, said: SentCommand) -> bool:
        """Return whether a command may remain without a reply: a waiting request of a quiet client does."""
        return self.quiet and said.kind == "request" and said.ref is not None and not said.must

    def _was_granted(self, ref: str) -> bool:
        known = self.shared.named(self.owner, ref)
        if known is None:
            return False
        return known.fence is not None or (self.owner is self and known.reason is not None)

    def _next(self, fits: Callable[[SentCommand], bool]) -> SentCommand | None:
        """Remove and return the first fitting command, if all earlier ones may remain without a reply."""
        for place, said in enumerate(self.due):
            if fits(said):
                for _ in range(place):
                    before = self.due.popleft()
                    if (
                        before.ref not in self._ambiguous_refs
                        and self.shared.named(self.owner, before.ref or "") is None
                    ):
                        self.silent.setdefault(before.ref or "", before)
                return self.due.popleft()
            if not self.may_be_unanswered(said):
                break
        return None

    def _next_request(self, ref: str | None) -> SentCommand | None:
        """Remove and return the request of a quiet client to which a message with its ref replies."""
        if not self.quiet or ref is None:
            return None
        return self._next(lambda said: said.kind == "request" and said.ref == ref)

    def _take_reply_to(self, kind: str, payload: dict[str, Any]) -> SentCommand:
        """Remove and return the command to which a message with its ref replies."""
        if self.phase is Phase.REJECTED and kind != "hello":
            raise Violation("the hello of this connection was rejected")
        said = self._next(lambda said: said.kind == kind and said.ref == payload.get("ref"))
        if said is None:
            raise Violation(f"no reply to the pending command, {self.due[0].kind if self.due else 'none'}")
        return said

    def _pong(self, payload: dict[str, Any]) -> None:
        self._take_reply_to("ping", payload)
        self.resuming = False

    def _bye(self, payload: dict[str, Any]) -> None:
        self._take_reply_to("bye", payload)
        self.due.clear()  # nothing behind it is executed
        self.ends = "bye"

    def _welcome(self, payload: dict[str, Any]) -> None:
        if self.phase is Phase.READY:
            raise Violation("welcome is sent twice, or late")
        said = self._take_reply_to("hello", payload)
        secret = said.command.session
        if payload["resumed"] and secret is None:
            raise Violation("resumed without a session")
        if payload["quiet"] != said.command.quiet or payload["protocol"] != 1:
            raise Violation("welcome differs from hello")
        self.phase, self.quiet, self.resumed = Phase.READY, payload["quiet"], payload["resumed"]
        self.coverage["quiet"] += self.quiet
        if secret is not None:
            self.coverage["resumed" if payload["resumed"] else "begun"] += 1
            if not payload["resumed"]:
                self.shared.generations[secret] = self.shared.generations.get(secret, 0) + 1
            self.owner = (secret, self.shared.generations.get(secret))
            self.resuming = True

    def _inspected(self, payload: dict[str, Any]) -> None:
        said = self._take_reply_to("inspect", payload)
        rows = len(payload["holders"]) + len(payload["queue"])
        if rows > said.command.limit or rows > payload["holdersTotal"] + payload["queueTotal"]:
            raise Violation("too many rows")

    def _extended(self, payload: dict[str, Any]) -> None:
        said = self._take_reply_to("extend", payload)
        if (
            payload["id"] != said.command.id
            or abs(payload["transactionTimeout"] - said.command.transaction_timeout_ms) > 1e-3
        ):
            raise Violation("extended differs from extend")

    def _error(self, payload: dict[str, Any]) -> None:
        code, why = payload["code"], payload["message"]
        self.coverage[f"received error {code}"] += 1
        if code == "too-many" and why.startswith(SLOW_CONSUMER):
            self.ends = "cut off"
        elif code == "too-many" and why.startswith(TOO_MANY_CONNECTIONS):
            self.ends = "full"
            self.due.clear()
        elif code == "unavailable" and self._matches_earlier_release(payload):
            return
        elif not self.due:
            raise Violation("no command is pending")
        else:
            self._on_rejection(code, payload)

    def _matches_earlier_release(self, payload: dict[str, Any]) -> bool:
        """Whether a `released` that was taken for the answer to a release was told of itself; this one is the answer."""
        id_, ref = payload.get("id"), payload.get("ref")
        if any((said.id, said.ref) == (id_, ref) for said in self.due):
            return False
        if id_ is not None and self.told[id_] > 0 and id_ not in self.unasked:
            self.unasked.add(id_)
            return True
        if id_ is None and ref is not None and self._ambiguous_releases[ref] > 0:
            self._ambiguous_releases[ref] -= 1
            return True
        return False

    def _on_rejection(self, code: str, payload: dict[str, Any]) -> None:
        if code == "ref-conflict" and self.quiet:
            self._on_ref_conflict(payload.get("ref") or "")
        said = self._next(lambda said: self._fits(said, code, payload))
        if said is None and code == "ref-conflict" and payload["ref"] in self._ambiguous_refs:
            return
        if said is None:
            raise Violation("the error fits no pending command")
        if said.kind == "ping":
            self.resuming = False
        elif said.kind == "http":
            self.ends = "http"
        elif said.kind == "too long":
            self.ends = "too long"
        if self.phase is not Phase.READY:
            self.phase = Phase.REJECTED if said.greets else self.phase

    def _on_ref_conflict(self, ref: str) -> None:
        """Two requests of a quiet client have one ref: which of them waits, and which is refused?"""
        mine = [said for said in self.due if said.kind == "request" and said.ref == ref]
        if len(mine) < 2 or ref in self.silent or self.shared.named(self.owner, ref) is not None:
            return
        if self.resumed:  # the first may conflict with one of an earlier connection
            self._ambiguous_refs.add(ref)
        else:
            self._next(lambda said: said is mine[0])
            self.silent[ref] = mine[0]

    def _fits(self, said: SentCommand, code: str, payload: dict[str, Any]) -> bool:
        """Whether an error may be the answer to a command."""
        if said.kind == "http":
            return code == "bad-message"
        if said.kind == "too long":
            return code == "line-too-long"
        if (payload.get("ref"), payload.get("id")) != (said.ref, said.id):
            return False
        if self.phase is Phase.REJECTED and not said.greets:
            malformed = said.wrong is not None and said.wrong.code in MALFORMED
            return code == (said.wrong.code if malformed and said.wrong is not None else "unavailable")
        if said.wrong is not None:
            as_it_is = (code, payload["message"]) == (said.wrong.code, said.wrong.message)
            return as_it_is or (code == "unavailable" and said.wrong.code not in MALFORMED)
        return code in ALLOWED[said.kind]

    # -- requests -----------------------------------------------------------------------------------------

    def _queued(self, payload: dict[str, Any]) -> None:
        id_, ref, shared = payload["id"], payload.get("ref"), self.shared
        known = shared.requests.get(id_)
        self.here.add(id_)
        self.repeated = None
        if self.quiet and ref is not None:
            raise Violation("queued is sent to a quiet connection")
        if self.resuming:
            self._check_owner(known or shared.new(id_, self.owner, None, ref), ref)
            return
        said = self._take_reply_to("request", payload)
        if known is None:
            self._check_ref_unused(ref)
            if shared.order and id_ <= max(self.here - {id_}, default=0):
                raise Violation("ids must grow")
            shared.new(id_, self.owner, said, ref)
        else:
            if ref is None:
                raise Violation("a new request has an old id")
            self._check_owner(known, ref)
            self.coverage["repeated"] += 1
            self.repeated = id_
            if known.fence is not None or known.reason is not None:
                self._state_due = id_

    def _check_ref_unused(self, ref: str | None) -> None:
        """A request that was granted is the only one with its ref, also after its end and after a restart."""
        before = None if ref is None else self.shared.named(self.owner, ref)
        if before is not None and before.fence is not None:
            raise Violation(f"{before.id} had this ref and was granted")

    def _check_owner(self, known: KnownRequest, ref: str | None) -> None:
        if known.owner != self.owner or known.ref != ref:
            raise Violation(f"{known.id} belongs to another client, or has another ref")

    def _first(self, id_: int, ref: str | None) -> KnownRequest | None:
        """The request that the first message to a quiet client is about; None if it asked for none with this ref."""
        if not self.quiet or ref is None:
            return None
        said = self.silent.pop(ref, None) or self._next_request(ref)
        if ref in self._ambiguous_refs:
            said = None
        elif said is None and not self.resumed:  # else it may have been asked for on an earlier connection
            return None
        self._check_ref_unused(ref)
        return self.shared.new(id_, self.owner, said, ref)

    def _locked(self, payload: dict[str, Any]) -> None:
        known, again = self.shared.requests.get(payload["id"]), "expiresIn" in payload
        ref, first = payload.get("ref"), False
        if known is None and self.resuming:
            known = self.shared.new(payload["id"], self.owner, None, ref)
        elif known is None:
            known, first = self._first(payload["id"], ref), True
        if known is None:
            raise Violation("no request fits")
        self._check_owner(known, ref)
        expected = first or self.resuming or self.repeated == known.id
        if again and not expected and self._next_request(ref) is None:
            raise Violation("no repeated request fits")
        if self.told[known.id] and not self.resuming:
            raise Violation(f"its end ({known.reason}) was sent before")
        self.here.add(known.id)
        self.shared.locked(known, payload, again=again)
        if not again:
            if payload["fence"] <= self.last_fence:
                raise Violation(f"fences must grow, and {self.last_fence} was before")
            self.last_fence = payload["fence"]
        said = known.said
        if said is not None and isinstance(said.command, Take):
            taken = payload["resources"]
            weights = {
                name: weight for (name, _), weight in zip(said.command.choices, said.command.weights, strict=True)
            }
            if len(set(taken)) != len(taken) or sum(weights[name] for name in taken) < said.command.target:
                raise Violation("the granted resources are not among those requested, or insufficient")
            known.names = {name: said.names[name] for name in taken}
        elif said is not None and "resources" in payload:
            raise Violation("resources are sent for a request without anyOf")

    def _released(self, payload: dict[str, Any]) -> None:
        id_, ref, reason, shared = payload["id"], payload.get("ref"), payload["reason"], self.shared
        self.coverage[f"received released {reason}"] += 1
        known = shared.requests.get(id_)
        answered = self._answered_by_id(id_, ref)
        if known is None and not self.resuming and answered is None:
            known = self._first(id_, ref)
        mine = known is not None and known.owner == self.owner
        details = payload.keys() - {"id", "reason", "ref"}
        if answered is None and mine:
            answered = self._peek(lambda said: said.by_ref and said.ref == ref)
        if self.resuming:
            known = known or shared.new(id_, self.owner, None, ref)
            self._check_owner(known, ref)
        elif self.repeated == id_ and (id_ in self.over or (mine and self.owner is not self and not answered)):
            self.repeated = None
        elif answered is not None and not details:
            self._next(lambda said: said is answered)
            self.told[id_] += 1
            if answered.by_ref:
                self._ambiguous_releases[ref or ""] += 1
        elif known is not None and known.reason is not None and self._asked_again(id_, ref):
            pass
        elif mine and id_ not in self.unasked:
            self.unasked.add(id_)
            self.told[id_] += 1
        else:
            raise Violation("released is sent too often, or to an unrelated client")
        self.over.add(id_)
        if known is not None:
            if known.ref != ref and (answered is None or answered.by_ref):
                raise Violation("another ref")
            self._check_timing(known, payload)
            shared.ended(known, reason)
            releasers = known.releasers | shared.releasers_by_ref.get(known.ref or "", set())
            sent = self.sent[id_] + self._sent_by_ref[known.ref or ""]
            if reason == "success" and releasers <= {self} and self.told[id_] > sent:
                raise Violation("more replies than releases")

    def _asked_again(self, id_: int, ref: str | None) -> bool:
        """Take the request that repeats one that ended, where this client knows of the end, or it was before its time."""
        return (id_ in self.over or id_ not in self.here) and self._next_request(ref) is not None

    def _peek(self, fits: Callable[[SentCommand], bool]) -> SentCommand | None:
        """The first command that fits, if all before it may have no answer."""
        for said in self.due:
            if fits(said):
                return said
            if not self.may_be_unanswered(said):
                break
        return None

    def _answered_by_id(self, id_: int, ref: str | None) -> SentCommand | None:
        """The release or extension of an id that a `released` with its ref answers."""
        return self._peek(lambda said: said.kind in ("release", "extend") and said.id == id_ and said.ref == ref)

    def _check_timing(self, known: KnownRequest, payload: dict[str, Any]) -> None:
        reason, said = payload["reason"], known.said
        if reason == "queue-timeout" and known.fence is not None:
            raise Violation("the request was granted")
        if reason == "transaction-timeout" and known.state == "queued" and known.owner is self:
            raise Violation("the request was never granted")
        if said is None or known.extended:
            return
        early = payload.get("waited", 2.0**40) < said.request.queue_timeout_ms - 1e-3
        if early or payload.get("held", 2.0**40) < said.request.transaction_timeout_ms - 1e-3:
            raise Violation("too early")

    # -- subscriptions ------------------------------------------------------------------------------------

    def _watching(self, payload: dict[str, Any]) -> None:
        said, prefix = self._take_reply_to("watch", payload), payload["prefix"]
        if said.command.prefix != prefix:
            raise Violation("another prefix")
        held = {(row["resource"], row["id"]): row["mode"] for row in payload["held"]}
        if any(not name.startswith(prefix) for name, _ in held):
            raise Violation("a lock has another prefix")
        for key, mode in self.watched_locks.items():
            if key[0].startswith(prefix) and held.get(key) != mode:
                raise Violation(f"according to the events {key} is held")
        if any(key not in self.watched_locks for key in held if self._watches(key[0])):
            raise Violation("an event is missing")
        self.watched[prefix] = None
        self.watched_locks.update(held)

    def _unwatched(self, payload: dict[str, Any]) -> None:
        said = self._take_reply_to("unwatch", payload)
        if said.command.prefix != payload["prefix"]:
            raise Violation("another prefix")
        self.watched.pop(said.command.prefix, None)
        self.watched_locks = {key: mode for key, mode in self.watched_locks.items() if self._watches(key[0])}

    def _watches(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix in self.watched)

    def _event(self, payload: dict[str, Any]) -> None:
        state = payload["state"]
        self.coverage[f"received event {state}"] += 1
        if state == "lagged":
            self.watched.clear()
            self.watched_locks.clear()
            return
        key = payload["resource"], payload["id"]
        if not self._watches(key[0]) or (state == "locked") != (key not in self.watched_locks):
            raise Violation("an event changes nothing, or was not subscribed to")
        if state == "locked":
            self.watched_locks[key] = payload["mode"]
        elif self.watched_locks.pop(key) != payload["mode"]:
            raise Violation("another mode")
