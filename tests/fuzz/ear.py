"""What one client hears, held against what it said and what the others were told."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import orjson

from fuzz.book import Book, Known, Wrong
from fuzz.said import ALLOWED, Mouth, Said
from genie.core import Take

CUT_OFF = "and more: the connection ends here"
FULL = "this server takes "


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
        self.watched: dict[str, None] = {}
        self.mirror: dict[tuple[str, int], str] = {}
        """The locks that it knows of by watching."""
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
            if said.kind in ("release", "extend"):
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
                method(message["payload"])
                if message["command"] != "queued":
                    self.repeated = None  # how it stands is told right behind
            except (Wrong, KeyError) as wrong:
                raise Wrong(f"{wrong!r}: {line[:500].decode()} while {list(self.due)[:2]} is due") from wrong

    # -- answers ------------------------------------------------------------------------------------------

    def _answers(self, kind: str) -> Said:
        if not self.due or self.due[0].kind != kind:
            raise Wrong(f"that is no answer to what is due, a {self.due[0].kind if self.due else 'nothing'}")
        return self.due.popleft()

    def _pong(self, _payload: dict[str, Any]) -> None:
        self._answers("ping")
        self.resuming = False

    def _welcome(self, payload: dict[str, Any]) -> None:
        said = self._answers("hello")
        secret = said.command.session
        if payload["resumed"] and secret is None:
            raise Wrong("nothing can be resumed without a session")
        if secret is not None:
            self.seen["resumed" if payload["resumed"] else "begun"] += 1
            if not payload["resumed"]:
                self.book.generations[secret] = self.book.generations.get(secret, 0) + 1
            self.owner = (secret, self.book.generations.get(secret))
            self.resuming = True

    def _inspected(self, payload: dict[str, Any]) -> None:
        said = self._answers("inspect")
        rows = len(payload["holders"]) + len(payload["queue"])
        if rows > said.command.limit or rows > payload["holdersTotal"] + payload["queueTotal"]:
            raise Wrong("too many rows")

    def _extended(self, payload: dict[str, Any]) -> None:
        said = self._answers("extend")
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
        elif code == "unavailable" and self._was_unasked(payload.get("id")):
            self.unasked.add(payload["id"])
        elif not self.due:
            raise Wrong("nothing is due")
        else:
            self._refused(self.due.popleft(), code, payload)

    def _was_unasked(self, id_: int | None) -> bool:
        """Whether a `released` that was taken for the answer to a release was told of itself; this one is the answer."""
        fits = bool(self.due) and self.due[0].id == id_
        return id_ is not None and not fits and self.told[id_] > 0 and id_ not in self.unasked

    def _refused(self, said: Said, code: str, payload: dict[str, Any]) -> None:
        if said.kind == "ping":
            self.resuming = False
        if said.kind == "http":
            self.ends = "http"
            fits = code == "bad-message" or (self.mouth.blank and code == "bad-json")
        elif said.kind == "too long":
            self.ends = "too long"
            fits = code == "line-too-long"
        elif said.wrong is not None:
            fits = (code, payload["message"]) == (said.wrong.code, said.wrong.message)
            fits = fits or (said.foreign and code == "unavailable")
            fits = fits and (payload.get("ref"), payload.get("id")) == (said.ref, said.id)
        else:
            about = payload.get("ref") == said.ref and (code == "ref-conflict" or payload.get("id") == said.id)
            fits = code in ALLOWED[said.kind] and about
        if not fits:
            raise Wrong("that error does not fit")

    # -- requests -----------------------------------------------------------------------------------------

    def _queued(self, payload: dict[str, Any]) -> None:
        id_, ref, book = payload["id"], payload.get("ref"), self.book
        known = book.requests.get(id_)
        self.here.add(id_)
        self.repeated = None
        if self.resuming:
            self._mine(known or book.new(id_, self.owner, None, ref), ref)
            return
        said = self._answers("request")
        if said.ref != ref:
            raise Wrong("another ref")
        if known is None:
            if book.order and id_ <= max(self.here - {id_}, default=0):
                raise Wrong("ids must grow")
            book.new(id_, self.owner, said, ref)
        else:
            if ref is None:
                raise Wrong("an old id for a new request")
            self._mine(known, ref)
            self.seen["repeated"] += 1
            self.repeated = id_

    def _mine(self, known: Known, ref: str | None) -> None:
        if known.owner != self.owner or known.ref != ref:
            raise Wrong(f"{known.id} is not this client's, or has another ref")

    def _locked(self, payload: dict[str, Any]) -> None:
        known, again = self.book.requests.get(payload["id"]), "expiresIn" in payload
        if known is None and self.resuming:
            known = self.book.new(payload["id"], self.owner, None, payload.get("ref"))
        if known is None:
            raise Wrong("nobody has asked for it")
        self._mine(known, payload.get("ref"))
        if again and not self.resuming and self.repeated != known.id:
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
        id_, reason, book = payload["id"], payload["reason"], self.book
        self.seen[f"told released {reason}"] += 1
        known = book.requests.get(id_)
        mine = known is not None and known.owner == self.owner
        details = payload.keys() - {"id", "reason", "ref"}
        answers = bool(self.due) and self.due[0].kind in ("release", "extend") and self.due[0].command.id == id_
        if self.resuming:
            known = known or book.new(id_, self.owner, None, payload.get("ref"))
            self._mine(known, payload.get("ref"))
        elif self.repeated == id_ and (id_ in self.over or (mine and self.owner is not self and not answers)):
            self.repeated = None
        elif answers and not details:
            self.due.popleft()
            self.told[id_] += 1
        elif mine and id_ not in self.unasked:
            self.unasked.add(id_)
            self.told[id_] += 1
        else:
            raise Wrong("told once too often, or to a stranger")
        self.over.add(id_)
        if known is not None:
            if known.ref != payload.get("ref"):
                raise Wrong("another ref")
            self._in_time(known, payload)
            book.ended(known, reason)
            if reason == "success" and known.releasers <= {self} and self.told[id_] > self.sent[id_]:
                raise Wrong("more answers than releases")

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
        said, prefix = self._answers("watch"), payload["prefix"]
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
        said = self._answers("unwatch")
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
