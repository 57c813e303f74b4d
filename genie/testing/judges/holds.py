"""Locks, as the store has them: never two that conflict, fences that grow, no end without a reason, none too early."""

from __future__ import annotations

from genie.testing.history import STORE, Change, Entry, Message
from genie.testing.judges.facts import LATE_S, Conversation, Facts, Judge, stored_modes


class Holds(Judge):
    """Judges every change of the store."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._holders: dict[str, dict[int, tuple[str | int, str]]] = {}
        """Resource to ids to owner and mode."""
        self._fence = 0
        """The greatest so far."""
        self._granted: set[int] = set()

    def before(self, entry: Entry) -> None:
        """A change: is what goes gone for a reason?"""
        if entry.kind != STORE:
            return
        change: Change = entry.what
        ends = [*change.gone, *[id_ for id_, record in change.written.items() if record.get("state") == "ended"]]
        for id_, record in change.written.items():
            if "fence" in self.facts.known.get(id_, {}) and record.get("state") == "queued":
                self._drop(id_, record)
                if not change.forgotten and not self.facts.exempt(id_):
                    self.facts.blame(entry.at, f"{id_} was held, and waits again")
        for id_ in ends:
            before = self.facts.known.get(id_)
            if before is None or before.get("state") == "ended":
                continue
            self._drop(id_, before)
            if not change.forgotten and not self.facts.exempt(id_):
                self._reasoned(id_, before, entry)

    def after(self, entry: Entry) -> None:
        """The change is made: is what is held now right?"""
        if entry.kind != STORE:
            return
        change: Change = entry.what
        held = {id_: record for id_, record in change.written.items() if "fence" in record}
        for id_, record in sorted(held.items(), key=lambda item: item[1]["fence"]):
            self._add(id_, record, entry)
            if id_ not in self._granted:
                self._granted.add(id_)
                if record["fence"] <= self._fence:
                    self.facts.blame(entry.at, f"{id_} was granted with fence {record['fence']} after {self._fence}")
                self._fence = max(self._fence, record["fence"])
                if record["fence"] >= change.counters[3]:
                    self.facts.blame(entry.at, f"{id_} has fence {record['fence']}, which the store may give again")

    # -- inside -------------------------------------------------------------------------------------------

    def _add(self, id: int, record: Message, entry: Entry) -> None:
        owner = record.get("transaction", id)
        for name, mode in stored_modes(record).items():
            holders = self._holders.setdefault(name, {})
            for other, (its_owner, its_mode) in holders.items():
                if other != id and its_owner != owner and "exclusive" in (mode, its_mode):
                    self.facts.blame(entry.at, f"{id} and {other} both hold {name}, {mode} and {its_mode}")
            holders[id] = owner, mode

    def _drop(self, id: int, record: Message) -> None:
        for name in stored_modes(record):
            self._holders.get(name, {}).pop(id, None)

    def _reasoned(self, id: int, record: Message, entry: Entry) -> None:
        facts = self.facts
        if facts.release_sent_at(id) <= entry.at:
            return
        hold = facts.holds.get(id)
        if record.get("state") == "queued":
            if self._waited_long(id, record, entry.at) or self._alone(id, record, entry):
                return
            facts.blame(entry.at, f"{id} waits no more, and nobody knows why: {record}")
        elif hold is not None:
            if hold.not_before <= entry.at + LATE_S:
                return
            if record.get("release_on_disconnect") and self._alone(id, record, entry):
                return
            facts.blame(entry.at, f"{id} is held no more, {hold.not_before - entry.at:.3f} s too early: {record}")

    def _waited_long(self, id: int, record: Message, at: float) -> bool:
        case = self.facts.cases.get(id)
        since = case.said_at if case is not None else self._said_at(record)
        return since is not None and since + record.get("queue_timeout_ms", 10_000) / 1000 <= at + LATE_S

    def _said_at(self, record: Message) -> float | None:
        found = [said_at for (_, ref), (_, said_at, _) in self.facts.asked.items() if ref == record.get("ref")]
        return min(found) if found else None

    def _alone(self, id: int, record: Message, entry: Entry) -> bool:
        """Whether its connection has ended or, with a session, all that session's connections did long enough ago."""
        facts, case = self.facts, self.facts.cases.get(id)
        if case is None:
            return True  # nobody was told of it, so its connection ended
        if case.conversation.session is None or record.get("session") is None:
            where = case.conversation
            return where.left is not None or where.server != entry.who or where.bye_sent_at is not None
        if any(one.life == case.life and one.bye_sent_at is not None for one in facts.conversations.values()):
            return True
        return all(
            self._over(conversation, entry)
            for conversation in facts.conversations.values()
            if conversation.session == case.conversation.session and conversation.welcomed
        )

    def _over(self, conversation: Conversation, entry: Entry) -> bool:
        """Another server's connections ended for this one when it began."""
        left = conversation.left if conversation.server == entry.who else self.facts.led_since
        return left is not None and left + conversation.timeout_ms / 1000 <= entry.at + LATE_S
