"""What clients are told of their requests: in order, once, only what is stored, and never too early."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from genie.testing.simulation.checkers.model import LATE_S, Case, Conversation, Facts, Judge, modes, stored_modes
from genie.testing.simulation.history import SAY, TELL, Entry, Message

CLOSED_S = 10.0
"""How long before the end of a world `bye` must have been answered for the connection to be closed by then: the server
gives the client some seconds to read."""


class Words(Judge):
    """Judges each `queued`, `locked` and `released`."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._told: dict[tuple[int, int], list[str]] = {}
        """What was told of an id in a conversation."""
        self._asks: dict[tuple[int, int], int] = {}
        """How many releases (by id) and extensions of an id were said in a conversation."""
        self._asks_by_ref: dict[tuple[int, str], int] = {}
        """How many releases by a ref were said in a conversation."""
        self._ended_by_bye: dict[str, int] = {}
        """Sessions whose `bye` was answered, until another one begins with the same secret; and below which id the store
        had forgotten everything by then.
        """
        self._repeats: dict[tuple[int, str], int] = {}
        self._unstored: dict[int, float] = {}
        """Told as locked or queued, but not stored as that: it must be told as released in the same moment."""
        self._resumed: dict[int, tuple[float, set[int]]] = {}
        """Conversations that have just been resumed, and the ids that were mentioned in that moment."""

    def before(self, entry: Entry) -> None:
        """Each message is judged by what was so before it."""
        self._check_unstored(entry.at)
        self._check_resumed(entry.at)
        if entry.kind == SAY:
            self._said(entry)
        elif entry.kind == TELL:
            self._tell(entry)

    def finish(self) -> None:
        """What is still open."""
        self._check_unstored(float("inf"))
        self._check_resumed(float("inf"))
        for case in self.facts.cases.values():
            self._end(case)
        for conversation in self.facts.conversations.values():
            answered_at = conversation.bye_answered_at
            if answered_at is not None and answered_at + CLOSED_S < self.facts.now and conversation.left is None:
                self.facts.blame(float("inf"), f"bye was answered on {conversation.number}, which goes on")

    # -- inside -------------------------------------------------------------------------------------------

    def _said(self, entry: Entry) -> None:
        command, payload = entry.what["command"], entry.what["payload"]
        if command in ("release", "extend") and "id" in payload:
            key = entry.connection, payload["id"]
            self._asks[key] = self._asks.get(key, 0) + 1
        elif command == "release":
            key = entry.connection, payload["ref"]
            self._asks_by_ref[key] = self._asks_by_ref.get(key, 0) + 1
        elif command == "request":
            key = entry.connection, payload["ref"]
            self._repeats[key] = self._repeats.get(key, -1) + 1

    def _tell(self, entry: Entry) -> None:
        command, payload = entry.what["command"], entry.what["payload"]
        if command != "error" and self.facts.leader not in ("", entry.who):
            self.facts.blame(entry.at, f"{entry.who} says {command}, and {self.facts.leader} leads")
        if self.facts.conversations[entry.connection].bye_answered_at is not None:
            self.facts.blame(entry.at, f"{command} is told behind bye on {entry.connection}")
        if command == "welcome":
            self._welcome(entry)
        elif command == "bye":
            self._bye(entry)
        elif command == "inspected":
            for row in [*payload["holders"], *payload["queue"]]:
                self._note(row, entry)
        if command not in ("queued", "locked", "released"):
            return
        id_ = payload["id"]
        if entry.connection in self._resumed:
            self._resumed[entry.connection][1].add(id_)
        if self.facts.exempt(id_):
            return
        case = self.facts.case(entry)
        told = self._told.setdefault((entry.connection, id_), [])
        getattr(self, f"_{command}")(entry, case, told)
        told.append(command)

    def _welcome(self, entry: Entry) -> None:
        facts, payload = self.facts, entry.what["payload"]
        session = facts.conversations[entry.connection].session
        if payload["resumed"]:
            self._resumed[entry.connection] = entry.at, set()
            if session is not None and self._ended_by_bye.get(session) == facts.forgotten_below:
                facts.blame(entry.at, f"the session of {entry.connection} goes on, and its bye was answered")
        elif session is not None:
            self._ended_by_bye.pop(session, None)

    def _bye(self, entry: Entry) -> None:
        """Nothing of the session waits any more, and nothing is held that was to end with it."""
        facts, conversation = self.facts, self.facts.conversations[entry.connection]
        if conversation.session is not None:
            self._ended_by_bye[conversation.session] = facts.forgotten_below
        for case in facts.cases.values():
            if case.life != conversation.life or case.ended_at is not None or facts.exempt(case.id):
                continue
            if case.locked_at is None or case.payload.get("onDisconnect") == "release":
                facts.blame(entry.at, f"{case.id} goes on, and the bye of its session was answered")
        key = (
            None if conversation.session is None else blake2b(conversation.session.encode(), digest_size=16).hexdigest()
        )
        for id_, record in facts.known.items():
            mine = key is not None and record.get("session") == key
            if mine and record.get("state") == "queued" and not facts.exempt(id_):
                facts.blame(entry.at, f"{id_} waits in the store, and the bye of its session was answered")

    def _note(self, row: Message, entry: Entry) -> None:
        """Whether a row about a request has the `note` that its maker gave it."""
        case = self.facts.cases.get(row["id"])
        if case is not None and not self.facts.exempt(case.id) and row.get("note") != case.payload.get("note"):
            self.facts.blame(entry.at, f"{case.id} has the note {case.payload.get('note')}, and is shown as {row}")

    def _queued(self, entry: Entry, case: Case | None, told: list[str]) -> None:
        id_, at = entry.what["payload"]["id"], entry.at
        if case is None:
            self.facts.blame(at, f"{id_} is told as queued to {entry.connection}, where nobody asked for it")
            return
        conversation = self.facts.conversations[entry.connection]
        if conversation.quiet and "ref" in entry.what["payload"]:
            self.facts.blame(at, f"{id_} is told as queued to {entry.connection}, which is quiet")
        again = told.count("queued") - self._again(entry.connection, case)
        if again > 0:
            self.facts.blame(at, f"{id_} is told as queued twice")
        if ("locked" in told or "released" in told) and not self._again(entry.connection, case):
            self.facts.blame(at, f"{id_} is told as queued behind {told[-1]}")
        if case.ended_at is not None and case.ended_at < at and not self._again(entry.connection, case):
            self.facts.blame(at, f"{id_} is told as queued after its end")
        if id_ >= self.facts.next_id:
            self.facts.blame(at, f"{id_} is told, and the store may give it again")
        unstored = conversation.session is not None and conversation.welcomed and id_ not in self.facts.known
        if unstored or case.ended_at is not None:
            self._unstored[id_] = at

    def _locked(self, entry: Entry, case: Case | None, told: list[str]) -> None:
        payload, at = entry.what["payload"], entry.at
        id_ = payload["id"]
        if case is None:
            self.facts.blame(at, f"{id_} is told as locked where nobody asked for it")
            return
        if "released" in told or (case.ended_at is not None and case.ended_at < at):
            self.facts.blame(at, f"{id_} is told as locked after its end")
        if told.count("locked") > self._again(entry.connection, case):
            self.facts.blame(at, f"{id_} is told as locked twice")
        quiet = self.facts.conversations[entry.connection].quiet
        if not told and entry.connection not in self.facts.at_resume and not quiet:
            self.facts.blame(at, f"{id_} is told as locked before queued")
        if case.fence and case.fence != payload["fence"]:
            self.facts.blame(at, f"{id_} has fence {payload['fence']}, and had {case.fence}")
        record = self.facts.known.get(id_)
        self._chosen(entry, case)
        if record is None or "fence" not in record:
            self._unstored[id_] = at
        elif record["fence"] != payload["fence"]:
            self.facts.blame(at, f"{id_} is told with fence {payload['fence']}, stored with {record['fence']}")

    def _chosen(self, entry: Entry, case: Case) -> None:
        """What a request took must be what it could use, be worth what it wanted, and be what the store has."""
        payload, at, asked = entry.what["payload"], entry.at, case.payload
        if ("anyOf" in asked) != ("resources" in payload):
            self.facts.blame(at, f"{case.id} is told what it took if, and only if, it chose: {payload}")
        if "anyOf" not in asked or "resources" not in payload:
            return
        took = payload["resources"]
        weights = [int(weight) for weight in asked.get("weights") or [1] * len(asked["anyOf"])]
        worth = dict(zip(modes(asked["anyOf"]), weights, strict=True))
        if not took or not set(took) <= worth.keys() or sum(worth[name] for name in took) < int(asked["target"]):
            self.facts.blame(at, f"{case.id} wanted {asked['target']} of {worth}, and took {took}")
        record = self.facts.known.get(case.id, {})
        if "fence" in record and stored_modes(record) != {name: modes(asked["anyOf"])[name] for name in took}:
            self.facts.blame(at, f"{case.id} is told that it took {took}, and the store has {stored_modes(record)}")

    def _released(self, entry: Entry, case: Case | None, told: list[str]) -> None:
        payload, at = entry.what["payload"], entry.at
        id_, reason = payload["id"], payload["reason"]
        self._unstored.pop(id_, None)
        record = self.facts.known.get(id_)
        if record is not None and record.get("state") != "ended":
            self.facts.blame(at, f"{id_} is told as released ({reason}), and the store holds it: {record}")
        asks = self._asks.get((entry.connection, id_), 0)
        count = told.count("released") + 1
        for blocker in payload.get("blockers", ()):
            self._note(blocker, entry)
        if case is None:
            if count > asks:
                self.facts.blame(at, f"{id_} is told as released where nobody asked about it")
            return
        asks += self._asks_by_ref.get((entry.connection, case.payload["ref"]), 0)
        if count > asks + 1 + self._again(entry.connection, case):
            self.facts.blame(at, f"{id_} is told as released {count} times, and it was asked for {asks} times")
        quiet = self.facts.conversations[entry.connection].quiet
        if not told and entry.connection not in self.facts.at_resume and not asks and not quiet:
            self.facts.blame(at, f"{id_} is told as released before queued")
        if case.ended_at is not None and case.reason != reason:
            self.facts.blame(at, f"{id_} is told as released by {reason}, and was by {case.reason}")
        if case.ended_at is None:
            self._first_end(case, payload, at)

    def _first_end(self, case: Case, payload: Message, at: float) -> None:  # noqa: C901 - one branch for each reason
        facts, reason = self.facts, payload["reason"]
        if reason == "queue-timeout":
            due = case.said_at + case.payload.get("queueTimeout", 10_000) / 1000
            if at + 1e-6 < due:
                facts.blame(at, f"{case.id} timed out in the queue {due - at:.6f} s too early")
            if case.id in facts.holds:
                facts.blame(at, f"{case.id} timed out in the queue, and was held")
        elif reason == "transaction-timeout":
            hold = facts.holds.get(case.id)
            if hold is not None and at + LATE_S < hold.not_before:
                facts.blame(at, f"{case.id} timed out {hold.not_before - at:.6f} s too early")
        elif reason == "success":
            if facts.release_sent_at(case.id) > at:
                facts.blame(at, f"{case.id} was released, and nobody asked for that")
        elif reason == "disconnected":
            where = case.conversation
            goes_on = where.left is None and where.bye_sent_at is None
            if goes_on and where.session is None and where.server == facts.leader:
                facts.blame(at, f"{case.id} ended with its connection, which goes on")
        elif reason == "insufficient":
            self._insufficient(case, payload, at)
        elif reason != "deadlock":
            facts.blame(at, f"{case.id} ended for the unknown reason {reason}")

    def _insufficient(self, case: Case, payload: Message, at: float) -> None:
        """The sums are strings where the target was one, and too little is free."""
        if "anyOf" not in case.payload or case.id in self.facts.holds:
            self.facts.blame(at, f"{case.id} got too little, and did not choose, or was held")
        if "anyOf" not in case.payload or "free" not in payload:
            return  # or it is told again, with nothing but the reason
        target = case.payload["target"]
        if type(payload["free"]) is not type(target) or type(payload["locked"]) is not type(target):
            self.facts.blame(at, f"{case.id} asked for {target!r}, and got {payload}")
        elif int(payload["free"]) >= int(target):
            self.facts.blame(at, f"{case.id} asked for {target}, and {payload['free']} were free")

    def _again(self, connection: int, case: Case) -> int:
        """How often something may be told again in a conversation, because it was asked again or resumed."""
        again = max(0, self._repeats.get((connection, case.payload["ref"]), 0))
        resent = (connection, case.payload["ref"]) in self._repeats and case.conversation.number != connection
        return again + (connection in self.facts.at_resume) + resent

    def _check_unstored(self, at: float) -> None:
        for id_, told_at in list(self._unstored.items()):
            if told_at < at:
                del self._unstored[id_]
                if not self.facts.exempt(id_):
                    self.facts.blame(told_at, f"{id_} was told, and the store does not have it so")

    def _check_resumed(self, at: float) -> None:
        for number, (resumed_at, mentioned) in list(self._resumed.items()):
            if resumed_at < at:
                del self._resumed[number]
                self._complete(self.facts.conversations[number], resumed_at, mentioned)

    def _complete(self, conversation: Conversation, at: float, mentioned: set[int]) -> None:
        """Whether a resume told the last word on each living request, and on each that ended unheard."""
        facts = self.facts
        for case in facts.cases.values():
            if case.client != conversation.client or case.id in mentioned or facts.exempt(case.id):
                continue
            if case.conversation.session != conversation.session:
                continue
            record = facts.known.get(case.id)
            left_out = {"ended", "queued"} if conversation.quiet else {"ended"}
            if record is not None and record.get("session") is not None and record.get("state") not in left_out:
                facts.blame(at, f"{case.id} lives, and the resume of its session did not mention it")
            elif record is not None and record.get("line") and not case.heard_end:
                facts.blame(at, f"{case.id} ended unheard, and the resume of its session did not mention it")

    def _end(self, case: Case) -> None:
        """Whether a request whose connection lived on was told its end."""
        facts = self.facts
        if case.ended_at is None and case.conversation.left is None and not facts.exempt(case.id):
            facts.blame(float("inf"), f"{case.id} was never told its end, and its connection goes on")


# -- Answers come in the order of the commands of a connection, and each carries the `ref` of the command that it answers --------

ANSWERS = {
    "pong": "ping",
    "inspected": "inspect",
    "welcome": "hello",
    "extended": "extend",
    "watching": "watch",
    "unwatched": "unwatch",
    "bye": "bye",
}
ANSWERED_BY_S = 10.0
"""How long before the end of a world a command must have been sent to be missed if it was not answered."""
WITH_ID = ("release", "extend")
"""Commands whose errors carry the id that they named."""


@dataclass(slots=True, eq=False)
class Due:
    """A command that was not answered yet."""

    command: str
    ref: str | None
    id: int | None
    sent_at: float
    alone: bool = True
    """No other command with this ref was due at the same time: their answers could not be told apart."""

    @property
    def by_ref(self) -> bool:
        """Whether it releases by `ref`: its answer looks like the end of the request by any other cause."""
        return self.command == "release" and self.id is None


class Answers(Judge):
    """Keeps what each connection has still to be answered."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._due: dict[int, list[Due]] = {}
        self._unsure: set[tuple[int, str | int]] = set()
        """Connections and ids or refs of which `released` was taken for an answer, and may have come because of another
        cause."""

    def before(self, entry: Entry) -> None:
        """A command, or what may be an answer."""
        if entry.kind not in (SAY, TELL) or entry.connection in self.facts.forsaken:
            return
        due = self._due.setdefault(entry.connection, [])
        if entry.kind == SAY:
            command, payload = entry.what["command"], entry.what["payload"]
            id_ = payload.get("id") if command in WITH_ID else None
            due.append(Due(command, payload.get("ref"), id_, entry.at))
            alike = [one for one in due if one.ref is not None and one.ref == payload.get("ref")]
            for one in alike:
                one.alone = one.alone and len(alike) == 1
        else:
            self._told(entry, due)

    def finish(self) -> None:
        """Whether connections that go on were answered."""
        for number, due in self._due.items():
            conversation = self.facts.conversations[number]
            until = self.facts.now - ANSWERED_BY_S
            missing = [one for one in due if one.sent_at < until and self._sure(one, conversation)]
            if missing and conversation.left is None:
                self.facts.blame(float("inf"), f"{missing[0]} on {number} was never answered")

    def _told(self, entry: Entry, due: list[Due]) -> None:
        command, payload = entry.what["command"], entry.what["payload"]
        ref = payload.get("ref")
        if command in ANSWERS:
            fits = [one for one in due if one.command == ANSWERS[command] and one.ref == ref]
            self._answered(entry, due, [one for one in fits if one.id == payload.get("id")])
        elif command in ("queued", "locked"):
            found = [one for one in due if one.command == "request" and one.ref == ref]
            if found and command == "queued":
                self._answered(entry, due, found)
            elif found and self.facts.conversations[entry.connection].quiet:
                due.remove(found[0])  # it may have been granted long after it was executed
        elif command == "released":
            self._released(entry, due)
        elif command == "error":
            self._refused(entry, due)

    def _released(self, entry: Entry, due: list[Due]) -> None:
        payload, case = entry.what["payload"], self.facts.case(entry)
        ref, id_ = payload.get("ref"), payload["id"]
        by_id = [one for one in due if one.command in WITH_ID and one.id == id_ and one.ref == ref]
        unasked = payload.keys() - {"id", "reason", "ref"}  # the details, which no answer has
        if by_id and ref is not None:
            self._answered(entry, due, by_id)
            return
        if case is not None and case.payload.get("ref") != ref and not by_id:
            self.facts.blame(entry.at, f"{entry.what} answers nothing, and has not the ref of the request")
        if case is None and not by_id and not self.facts.exempt(id_):  # exempt: heard first on a branch that was lost
            self.facts.blame(entry.at, f"{entry.what} answers nothing that was asked")
        conversation = self.facts.conversations[entry.connection]
        of_request = [one for one in due if one.command == "request" and one.ref == ref and ref is not None]
        if of_request and conversation.quiet and not self._sure(of_request[0], conversation):
            due.remove(of_request.pop(0))  # it waited, and this is the first message about it
        answered = by_id or [one for one in due if one.by_ref and one.ref == ref]
        if conversation.quiet and of_request:
            answered = sorted([*answered, of_request[0]], key=due.index)
        if answered and (answered[0].command == "request" or not unasked):
            due.remove(answered[0])
            if case is not None and case.ended_at is None:
                self._unsure.add((entry.connection, id_ if by_id else str(ref)))

    def _refused(self, entry: Entry, due: list[Due]) -> None:
        payload = entry.what["payload"]
        ref, id_ = payload.get("ref"), payload.get("id")
        found = [one for one in due if (one.ref, one.id) == (ref, id_)]
        for key in (id_, ref):
            if not found and key is not None and (entry.connection, key) in self._unsure:
                self._unsure.remove((entry.connection, key))
                return
        self._answered(entry, due, found)

    def _answered(self, entry: Entry, due: list[Due], found: list[Due]) -> None:
        if not found:
            self.facts.blame(entry.at, f"{entry.what} answers nothing that was asked")
            return
        place, conversation = due.index(found[0]), self.facts.conversations[entry.connection]
        before = [one for one in due[:place] if self._sure(one, conversation)]
        if before:
            self.facts.blame(entry.at, f"{entry.what} overtakes the answer to {before[0]}")
        due.remove(found[0])

    def _sure(self, due: Due, conversation: Conversation) -> bool:
        """Whether a command has an answer that looks like one, and that must have come before that to a later one."""
        if due.command in WITH_ID:
            return due.ref is not None and not due.by_ref
        if due.command != "request" or not conversation.quiet or due.ref is None:
            return True
        # A quiet connection is told nothing of what waits. It is told of what it asks for again once that was granted.
        facts = self.facts
        id_ = facts.by_ref.get((conversation.client, due.ref))
        if id_ is None or not due.alone or facts.may_be_new(id_, conversation):
            return False
        case = facts.cases[id_]
        told = [at for at in (case.locked_at, case.ended_at) if at is not None]
        return bool(told) and min(told) < due.sent_at
