"""Answers come in the order of the commands of a connection, and each carries the `ref` of the command that it answers."""

from __future__ import annotations

from dataclasses import dataclass

from genie.testing.history import SAY, TELL, Entry
from genie.testing.judges.facts import Conversation, Facts, Judge

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
