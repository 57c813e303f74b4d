"""Who is served before whom, and whether a deadlock was one."""

from __future__ import annotations

from genie.testing.history import STORE, TELL, Entry, Message
from genie.testing.judges.facts import LATE_S, Case, Facts, Hold, Judge, stored_modes


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
