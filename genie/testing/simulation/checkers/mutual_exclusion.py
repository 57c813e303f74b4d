"""Locks, as the store has them: never two that conflict, fences that grow, no end without a reason, none too early."""

from __future__ import annotations

from genie.testing.simulation.checkers.model import LATE_S, Case, Conversation, Facts, Hold, Judge, stored_modes
from genie.testing.simulation.history import STORE, TELL, Change, Entry, Message


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


# -- Who is served before whom, and whether a deadlock was one --------


class Turns(Judge):
    """Judges the order of grants by their fences, and each deadlock.

    Where transactions ask twice, the queue may be reordered, and no look at pairs can tell whether that was right; there
    only the deadlocks are judged.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._unjudged: list[tuple[Entry, Case]] = []

    def after(self, entry: Entry) -> None:
        """A deadlock is judged when the next batch is stored: others are told of the same one after its victim is."""
        if entry.kind == TELL and entry.what["command"] == "released" and "cycle" in entry.what["payload"]:
            case = self.facts.case(entry)
            if case is not None and not self.facts.exempt(case.id):
                self._unjudged.append((entry, case))
        elif entry.kind == STORE:
            self._deadlocks()

    def finish(self) -> None:
        """The deadlocks of the last batch, and the order of all grants."""
        self._deadlocks()
        owners = [case.payload.get("transactionName") for case in self.facts.cases.values()]
        named = [owner for owner in owners if owner is not None]
        if len(named) == len(set(named)):
            self._order()

    # -- the order of grants ------------------------------------------------------------------------------

    def _order(self) -> None:
        facts = self.facts
        waits = [
            (case, case.modes, facts.holds.get(case.id))
            for case in facts.cases.values()
            if not facts.exempt(case.id) and (case.queued_at is not None or case.conversation.quiet)
        ]
        waits.sort(key=lambda wait: wait[0].id)
        for place, (first, its_modes, its_hold) in enumerate(waits):
            for second, other_modes, other_hold in waits[place + 1 :]:
                if not _conflict(its_modes, other_modes):
                    continue
                if _priority(first) >= _priority(second):
                    self._in_turn(first, its_hold, second, other_hold, since=None)
                elif second.queued_at is not None:
                    self._in_turn(second, other_hold, first, its_hold, since=second.queued_at)

    def _in_turn(
        self, ahead: Case, its_hold: Hold | None, behind: Case, other_hold: Hold | None, since: float | None
    ) -> None:
        """One that stands ahead was not overtaken. `since` is when it came, where that is later than the other."""
        if other_hold is None:
            return
        granted = other_hold.granted_at
        if since is not None and granted <= since + LATE_S:
            return
        if its_hold is not None:
            if its_hold.record["fence"] > other_hold.record["fence"]:
                self._blame(ahead, behind, granted)
        elif ahead.ended_at is not None and ahead.reason == "queue-timeout":
            # Its end was told some time after it ended: only its timeout says when that was at the earliest.
            due = ahead.said_at + ahead.payload.get("queueTimeout", 10_000) / 1000
            if ahead.payload.get("queueTimeout") != 0 and granted + LATE_S < due:
                self._blame(ahead, behind, granted)

    def _blame(self, ahead: Case, behind: Case, at: float) -> None:
        self.facts.blame(at, f"{behind.id} was granted before {ahead.id}, which stood ahead of it and waited")

    # -- deadlocks ----------------------------------------------------------------------------------------

    def _deadlocks(self) -> None:
        for entry, case in self._unjudged:
            self._deadlock(entry, case)
        self._unjudged.clear()

    def _deadlock(self, entry: Entry, case: Case) -> None:
        payload = entry.what["payload"]
        cycle, waits = payload["cycle"], payload["waits"]
        if cycle[:1] != [case.payload.get("transactionName")] or len(cycle) != len(waits):
            self.facts.blame(entry.at, f"the deadlock of {case.id} is not its own: {payload}")
            return
        for place, step in enumerate(waits):
            wrong = self._step(step, cycle[place], cycle[(place + 1) % len(cycle)], case, entry.at)
            if wrong:
                self.facts.blame(entry.at, f"the deadlock of {case.id} is none: {wrong}")

    def _step(self, step: Message, waiter: str, holder: str, victim: Case, at: float) -> str:  # noqa: PLR0911 - one each
        facts, name = self.facts, step["resource"]
        waiting, hold = facts.cases.get(step["waiter"]), facts.holds.get(step["holder"])
        wanted = None if waiting is None else waiting.modes.get(name)
        if waiting is not None and (waiting.owner != waiter or wanted is None):
            return f"{step['waiter']} does not wait for {name} as {waiter}"
        if hold is None:
            if step["holder"] in facts.cases and facts.cases[step["holder"]].fence:
                return ""  # granted and released within this batch
            return f"{step['holder']} was never held"
        had = stored_modes(hold.record).get(name)
        if had is None or hold.record.get("transaction") != holder:
            return f"{step['holder']} does not hold {name} as {holder}"
        if wanted is not None and "exclusive" not in (wanted, had):
            return f"{step['waiter']} and {step['holder']} want {name} {wanted} and {had}"
        if hold.gone_at is not None and hold.gone_at < victim.said_at:
            return f"{step['holder']} was held no more"
        return "" if hold.stored_at <= at else f"{step['holder']} was held later"


def _conflict(one: dict[str, str], other: dict[str, str]) -> bool:
    return any("exclusive" in (mode, other[name]) for name, mode in one.items() if name in other)


def _priority(case: Case) -> float:
    return float(case.payload.get("priority", 0))
