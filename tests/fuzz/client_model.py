"""What one client hears, held against what it said and what the others were told."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import orjson

from fuzz.sent_commands import ALLOWED, MALFORMED, Mouth, Said
from fuzz.shared_model import Book, Known, Wrong
from genie.core import Take

CUT_OFF = "and more: the connection ends here"
FULL = "this server takes "


class Phase(Enum):
    """How far a client has come with `hello`, by what it was answered."""

    AWAIT = "await"
    REJECTED = "rejected"
    READY = "ready"


class Ear:
    """A client of the wire. `seen` counts what is heard, in words; `now_ms` is set from outside."""

    def __init__(self, book: Book, seen: Counter[str], max_line: int) -> None:
        self.book, self.seen = book, seen
        self.mouth = Mouth(max_line)
        self.due: deque[Said] = deque()
        """What was said and is not answered."""
        self.sent: Counter[int] = Counter()
        """How often each id was asked to be released or extended."""
        self.told: Counter[int] = Counter()
        """How often it was told of the end of each."""
        self.here: set[int] = set()
        """Ids of which it was told."""
        self.unasked: set[int] = set()
        self.over: set[int] = set()
        """Ids of whose end it was told."""
        self.owner: Any = self
        self.resuming = False
        self.repeated: int | None = None
        self._stands: int | None = None
        """It asked for this again, and was told that it has: how it stands, granted or ended, must be told next."""
        self.watched: dict[str, None] = {}
        self.mirror: dict[tuple[str, int], str] = {}
        """The locks that it knows of by watching."""
        self.phase = Phase.AWAIT
        self.quiet = self.resumed = False
        self.silent: dict[str, Said] = {}
        """Requests of a quiet client that were executed before something that was answered, and of which it was not told."""
        self._vague: set[str] = set()
        """Refs of which it is not known which of several requests has them."""
        self._sent_by_ref: Counter[str] = Counter()
        """How often it released by each ref."""
        self._unsure: Counter[str] = Counter()
        """Refs of releases of which an ending was taken for the answer that may have come because of somebody else."""
        self.ends = ""
        """Why the server will end the connection."""
        self.last_fence = 0

    def says(self, data: bytes, now_ms: float) -> list[Said]:
        """It says something; returns the commands that this completes."""
        found = self.mouth.say(data, now_ms)
        for said in found:
            self.seen[f"say {said.kind}"] += 1
            if said.kind == "hello" and said.command.session is not None:
                self.book.claims.setdefault(said.command.session, []).append(self)
            if said.kind == "request" and said.ref is not None:
                said.must = self._was_granted(said.ref)
            if said.by_ref and said.ref is not None:
                self.seen["say release by ref"] += 1
                self._sent_by_ref[said.ref] += 1
                self.book.releasers_by_ref.setdefault(said.ref, set()).add(self)
            elif said.kind in ("release", "extend"):
                self.sent[said.command.id] += 1
                known = self.book.requests.get(said.command.id)
                if known is not None:
                    known.releasers.add(self)
                    known.extended = known.extended or said.kind == "extend"
        self.due += found
        return found

    def hears(self, data: bytes) -> None:
        """Whole lines, as the server writes them."""
        if not data.endswith(b"\n"):
            raise Wrong(f"half a line was written: {data[-80:]!r}")
        for line in data[:-1].split(b"\n"):
            message = orjson.loads(line)
            if message.keys() != {"command", "payload"}:
                raise Wrong(f"no message: {line!r}")
            method = getattr(self, f"_{message['command']}", None)
            if method is None:
                raise Wrong(f"no message that anybody knows: {line!r}")
            try:
                self.seen[f"told {message['command']}"] += 1
                self._check_stands(message["payload"])
                method(message["payload"])
                if self.phase is Phase.AWAIT:
                    self.phase = Phase.READY  # its first command was no `hello`
                if message["command"] != "queued":
                    self.repeated = None  # how it stands is told right behind
            except (Wrong, KeyError) as wrong:
                raise Wrong(f"{wrong!r}: {line[:500].decode()} while {list(self.due)[:2]} is due") from wrong

    def _check_stands(self, payload: dict[str, Any]) -> None:
        if self._stands is not None and self._stands != payload.get("id"):
            raise Wrong(f"it was not told how {self._stands} stands, which it asked for again")
        self._stands = None

    # -- answers ------------------------------------------------------------------------------------------

    def silent_now(self, said: Said) -> bool:
        """Whether a command may have no answer, because it is a request of a quiet client that waits."""
        return self.quiet and said.kind == "request" and said.ref is not None and not said.must

    def _was_granted(self, ref: str) -> bool:
        known = self.book.named(self.owner, ref)
        if known is None:
            return False
        return known.fence is not None or (self.owner is self and known.reason is not None)

    def _next(self, fits: Callable[[Said], bool]) -> Said | None:
        """Take the first command that fits, if all before it may have no answer."""
        for place, said in enumerate(self.due):
            if fits(said):
                for _ in range(place):
                    before = self.due.popleft()
                    if before.ref not in self._vague and self.book.named(self.owner, before.ref or "") is None:
                        self.silent.setdefault(before.ref or "", before)
                return self.due.popleft()
            if not self.silent_now(said):
                break
        return None

    def _next_request(self, ref: str | None) -> Said | None:
        """Take the request of a quiet client that a message with its ref answers."""
        if not self.quiet or ref is None:
            return None
        return self._next(lambda said: said.kind == "request" and said.ref == ref)

    def _answers(self, kind: str, payload: dict[str, Any]) -> Said:
        """Take the command that a message with its ref answers."""
        if self.phase is Phase.REJECTED and kind != "hello":
            raise Wrong("its hello was rejected")
        said = self._next(lambda said: said.kind == kind and said.ref == payload.get("ref"))
        if said is None:
            raise Wrong(f"that is no answer to what is due, a {self.due[0].kind if self.due else 'nothing'}")
        return said

    def _pong(self, payload: dict[str, Any]) -> None:
        self._answers("ping", payload)
        self.resuming = False

    def _bye(self, payload: dict[str, Any]) -> None:
        self._answers("bye", payload)
        self.due.clear()  # nothing behind it is executed
        self.ends = "bye"

    def _welcome(self, payload: dict[str, Any]) -> None:
        if self.phase is Phase.READY:
            raise Wrong("it is welcomed twice, or late")
        said = self._answers("hello", payload)
        secret = said.command.session
        if payload["resumed"] and secret is None:
            raise Wrong("nothing can be resumed without a session")
        if payload["quiet"] != said.command.quiet or payload["protocol"] != 1:
            raise Wrong("it asked for something else")
        self.phase, self.quiet, self.resumed = Phase.READY, payload["quiet"], payload["resumed"]
        self.seen["quiet"] += self.quiet
        if secret is not None:
            self.seen["resumed" if payload["resumed"] else "begun"] += 1
            if not payload["resumed"]:
                self.book.generations[secret] = self.book.generations.get(secret, 0) + 1
            self.owner = (secret, self.book.generations.get(secret))
            self.resuming = True

    def _inspected(self, payload: dict[str, Any]) -> None:
        said = self._answers("inspect", payload)
        rows = len(payload["holders"]) + len(payload["queue"])
        if rows > said.command.limit or rows > payload["holdersTotal"] + payload["queueTotal"]:
            raise Wrong("too many rows")

    def _extended(self, payload: dict[str, Any]) -> None:
        said = self._answers("extend", payload)
        if (
            payload["id"] != said.command.id
            or abs(payload["transactionTimeout"] - said.command.transaction_timeout_ms) > 1e-3
        ):
            raise Wrong("that is not what was asked for")

    def _error(self, payload: dict[str, Any]) -> None:
        code, why = payload["code"], payload["message"]
        self.seen[f"told error {code}"] += 1
        if code == "too-many" and why.endswith(CUT_OFF):
            self.ends = "cut off"
        elif code == "too-many" and why.startswith(FULL):
            self.ends = "full"
            self.due.clear()
        elif code == "unavailable" and self._was_unasked(payload):
            return
        elif not self.due:
            raise Wrong("nothing is due")
        else:
            self._refused(code, payload)

    def _was_unasked(self, payload: dict[str, Any]) -> bool:
        """Whether a `released` that was taken for the answer to a release was told of itself; this one is the answer."""
        id_, ref = payload.get("id"), payload.get("ref")
        if any((said.id, said.ref) == (id_, ref) for said in self.due):
            return False
        if id_ is not None and self.told[id_] > 0 and id_ not in self.unasked:
            self.unasked.add(id_)
            return True
        if id_ is None and ref is not None and self._unsure[ref] > 0:
            self._unsure[ref] -= 1
            return True
        return False

    def _refused(self, code: str, payload: dict[str, Any]) -> None:
        if code == "ref-conflict" and self.quiet:
            self._conflicted(payload.get("ref") or "")
        said = self._next(lambda said: self._fits(said, code, payload))
        if said is None and code == "ref-conflict" and payload["ref"] in self._vague:
            return
        if said is None:
            raise Wrong("that error does not fit")
        if said.kind == "ping":
            self.resuming = False
        elif said.kind == "http":
            self.ends = "http"
        elif said.kind == "too long":
            self.ends = "too long"
        if self.phase is not Phase.READY:
            self.phase = Phase.REJECTED if said.greets else self.phase

    def _conflicted(self, ref: str) -> None:
        """Two requests of a quiet client have one ref: which of them waits, and which is refused?"""
        mine = [said for said in self.due if said.kind == "request" and said.ref == ref]
        if len(mine) < 2 or ref in self.silent or self.book.named(self.owner, ref) is not None:
            return
        if self.resumed:  # the first may conflict with one of an earlier connection
            self._vague.add(ref)
        else:
            self._next(lambda said: said is mine[0])
            self.silent[ref] = mine[0]

    def _fits(self, said: Said, code: str, payload: dict[str, Any]) -> bool:
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
        id_, ref, book = payload["id"], payload.get("ref"), self.book
        known = book.requests.get(id_)
        self.here.add(id_)
        self.repeated = None
        if self.quiet and ref is not None:
            raise Wrong("it is quiet")
        if self.resuming:
            self._mine(known or book.new(id_, self.owner, None, ref), ref)
            return
        said = self._answers("request", payload)
        if known is None:
            self._only_once(ref)
            if book.order and id_ <= max(self.here - {id_}, default=0):
                raise Wrong("ids must grow")
            book.new(id_, self.owner, said, ref)
        else:
            if ref is None:
                raise Wrong("an old id for a new request")
            self._mine(known, ref)
            self.seen["repeated"] += 1
            self.repeated = id_
            if known.fence is not None or known.reason is not None:
                self._stands = id_

    def _only_once(self, ref: str | None) -> None:
        """A request that was granted is the only one with its ref, also after its end and after a restart."""
        before = None if ref is None else self.book.named(self.owner, ref)
        if before is not None and before.fence is not None:
            raise Wrong(f"{before.id} had this ref, and was granted")

    def _mine(self, known: Known, ref: str | None) -> None:
        if known.owner != self.owner or known.ref != ref:
            raise Wrong(f"{known.id} is not this client's, or has another ref")

    def _first(self, id_: int, ref: str | None) -> Known | None:
        """The request that the first message to a quiet client is about; None if it asked for none with this ref."""
        if not self.quiet or ref is None:
            return None
        said = self.silent.pop(ref, None) or self._next_request(ref)
        if ref in self._vague:
            said = None
        elif said is None and not self.resumed:  # else it may have been asked for on an earlier connection
            return None
        self._only_once(ref)
        return self.book.new(id_, self.owner, said, ref)

    def _locked(self, payload: dict[str, Any]) -> None:
        known, again = self.book.requests.get(payload["id"]), "expiresIn" in payload
        ref, first = payload.get("ref"), False
        if known is None and self.resuming:
            known = self.book.new(payload["id"], self.owner, None, ref)
        elif known is None:
            known, first = self._first(payload["id"], ref), True
        if known is None:
            raise Wrong("nobody has asked for it")
        self._mine(known, ref)
        expected = first or self.resuming or self.repeated == known.id
        if again and not expected and self._next_request(ref) is None:
            raise Wrong("nobody has asked again")
        if self.told[known.id] and not self.resuming:
            raise Wrong(f"it was told before that it ended by {known.reason}")
        self.here.add(known.id)
        self.book.locked(known, payload, again=again)
        if not again:
            if payload["fence"] <= self.last_fence:
                raise Wrong(f"fences must grow, and {self.last_fence} was before")
            self.last_fence = payload["fence"]
        said = known.said
        if said is not None and isinstance(said.command, Take):
            taken = payload["resources"]
            weights = {
                name: weight for (name, _), weight in zip(said.command.choices, said.command.weights, strict=True)
            }
            if len(set(taken)) != len(taken) or sum(weights[name] for name in taken) < said.command.target:
                raise Wrong("that is not what it may take, or too little")
            known.names = {name: said.names[name] for name in taken}
        elif said is not None and "resources" in payload:
            raise Wrong("it chose nothing")

    def _released(self, payload: dict[str, Any]) -> None:
        id_, ref, reason, book = payload["id"], payload.get("ref"), payload["reason"], self.book
        self.seen[f"told released {reason}"] += 1
        known = book.requests.get(id_)
        answered = self._answered_by_id(id_, ref)
        if known is None and not self.resuming and answered is None:
            known = self._first(id_, ref)
        mine = known is not None and known.owner == self.owner
        details = payload.keys() - {"id", "reason", "ref"}
        if answered is None and mine:
            answered = self._peek(lambda said: said.by_ref and said.ref == ref)
        if self.resuming:
            known = known or book.new(id_, self.owner, None, ref)
            self._mine(known, ref)
        elif self.repeated == id_ and (id_ in self.over or (mine and self.owner is not self and not answered)):
            self.repeated = None
        elif answered is not None and not details:
            self._next(lambda said: said is answered)
            self.told[id_] += 1
            if answered.by_ref:
                self._unsure[ref or ""] += 1
        elif known is not None and known.reason is not None and self._asked_again(id_, ref):
            pass
        elif mine and id_ not in self.unasked:
            self.unasked.add(id_)
            self.told[id_] += 1
        else:
            raise Wrong("told once too often, or to a stranger")
        self.over.add(id_)
        if known is not None:
            if known.ref != ref and (answered is None or answered.by_ref):
                raise Wrong("another ref")
            self._in_time(known, payload)
            book.ended(known, reason)
            releasers = known.releasers | book.releasers_by_ref.get(known.ref or "", set())
            sent = self.sent[id_] + self._sent_by_ref[known.ref or ""]
            if reason == "success" and releasers <= {self} and self.told[id_] > sent:
                raise Wrong("more answers than releases")

    def _asked_again(self, id_: int, ref: str | None) -> bool:
        """Take the request that repeats one that ended, where this client knows of the end, or it was before its time."""
        return (id_ in self.over or id_ not in self.here) and self._next_request(ref) is not None

    def _peek(self, fits: Callable[[Said], bool]) -> Said | None:
        """The first command that fits, if all before it may have no answer."""
        for said in self.due:
            if fits(said):
                return said
            if not self.silent_now(said):
                break
        return None

    def _answered_by_id(self, id_: int, ref: str | None) -> Said | None:
        """The release or extension of an id that a `released` with its ref answers."""
        return self._peek(lambda said: said.kind in ("release", "extend") and said.id == id_ and said.ref == ref)

    def _in_time(self, known: Known, payload: dict[str, Any]) -> None:
        reason, said = payload["reason"], known.said
        if reason == "queue-timeout" and known.fence is not None:
            raise Wrong("it was held")
        if reason == "transaction-timeout" and known.state == "queued" and known.owner is self:
            raise Wrong("it was never held")
        if said is None or known.extended:
            return
        early = payload.get("waited", 2.0**40) < said.request.queue_timeout_ms - 1e-3
        if early or payload.get("held", 2.0**40) < said.request.transaction_timeout_ms - 1e-3:
            raise Wrong("too early")

    # -- what it watches ----------------------------------------------------------------------------------

    def _watching(self, payload: dict[str, Any]) -> None:
        said, prefix = self._answers("watch", payload), payload["prefix"]
        if said.command.prefix != prefix:
            raise Wrong("another prefix")
        held = {(row["resource"], row["id"]): row["mode"] for row in payload["held"]}
        if any(not name.startswith(prefix) for name, _ in held):
            raise Wrong("of another prefix")
        for key, mode in self.mirror.items():
            if key[0].startswith(prefix) and held.get(key) != mode:
                raise Wrong(f"the events so far say that {key} is held")
        if any(key not in self.mirror for key in held if self._watches(key[0])):
            raise Wrong("an event was missing")
        self.watched[prefix] = None
        self.mirror.update(held)

    def _unwatched(self, payload: dict[str, Any]) -> None:
        said = self._answers("unwatch", payload)
        if said.command.prefix != payload["prefix"]:
            raise Wrong("another prefix")
        self.watched.pop(said.command.prefix, None)
        self.mirror = {key: mode for key, mode in self.mirror.items() if self._watches(key[0])}

    def _watches(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix in self.watched)

    def _event(self, payload: dict[str, Any]) -> None:
        state = payload["state"]
        self.seen[f"told event {state}"] += 1
        if state == "lagged":
            self.watched.clear()
            self.mirror.clear()
            return
        key = payload["resource"], payload["id"]
        if not self._watches(key[0]) or (state == "locked") != (key not in self.mirror):
            raise Wrong("no news, or not asked for")
        if state == "locked":
            self.mirror[key] = payload["mode"]
        elif self.mirror.pop(key) != payload["mode"]:
            raise Wrong("another mode")
