"""Checkers of the locks in the store: mutual exclusion, fencing tokens, reasons for each end, fairness and deadlocks."""

from __future__ import annotations

from genie.testing.simulation.checkers.model import (
    TOLERANCE_S,
    Checker,
    ConnectionHistory,
    HeldLock,
    Model,
    RequestHistory,
    stored_modes,
)
from genie.testing.simulation.history import SERVER_SENT, STORE, Change, Entry, Message


class LockChecker(Checker):
    """Checks every change of the store: conflicting locks, growing fencing tokens, and ends without a reason."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._holders: dict[str, dict[int, tuple[str | int, str]]] = {}
        """Resource to id to owner and mode."""
        self._fence = 0
        """The greatest fencing token that was granted."""
        self._granted: set[int] = set()

    def before(self, entry: Entry) -> None:
        """Check that every request that ends, ends for a reason."""
        if entry.kind != STORE:
            return
        change: Change = entry.data
        ends = [*change.removed, *[id_ for id_, record in change.written.items() if record.get("state") == "ended"]]
        for id_, record in change.written.items():
            if "fence" in self.model.records.get(id_, {}) and record.get("state") == "queued":
                self._drop(id_, record)
                if not change.unrecoverable and not self.model.exempt(id_):
                    self.model.violation(entry.at, f"{id_} was held, and is queued again")
        for id_ in ends:
            before = self.model.records.get(id_)
            if before is None or before.get("state") == "ended":
                continue
            self._drop(id_, before)
            if not change.unrecoverable and not self.model.exempt(id_):
                self._check_reason(id_, before, entry)

    def after(self, entry: Entry) -> None:
        """Check the locks that are held after the change."""
        if entry.kind != STORE:
            return
        change: Change = entry.data
        held = {id_: record for id_, record in change.written.items() if "fence" in record}
        for id_, record in sorted(held.items(), key=lambda item: item[1]["fence"]):
            self._add(id_, record, entry)
            if id_ not in self._granted:
                self._granted.add(id_)
                if record["fence"] <= self._fence:
                    self.model.violation(
                        entry.at, f"{id_} was granted with fence {record['fence']} after {self._fence}"
                    )
                self._fence = max(self._fence, record["fence"])
                if record["fence"] >= change.counters[3]:
                    self.model.violation(
                        entry.at, f"{id_} has fence {record['fence']}, which is not reserved: it may be given again"
                    )

    # -- inside -------------------------------------------------------------------------------------------

    def _add(self, id: int, record: Message, entry: Entry) -> None:
        owner = record.get("transaction", id)
        for name, mode in stored_modes(record).items():
            holders = self._holders.setdefault(name, {})
            for other, (its_owner, its_mode) in holders.items():
                if other != id and its_owner != owner and "exclusive" in (mode, its_mode):
                    self.model.violation(entry.at, f"{id} and {other} both hold {name}, {mode} and {its_mode}")
            holders[id] = owner, mode

    def _drop(self, id: int, record: Message) -> None:
        for name in stored_modes(record):
            self._holders.get(name, {}).pop(id, None)

    def _check_reason(self, id: int, record: Message, entry: Entry) -> None:
        model = self.model
        if model.release_sent_at(id) <= entry.at:
            return
        hold = model.locks.get(id)
        if record.get("state") == "queued":
            if self._queue_timed_out(id, record, entry.at) or self._disconnected(id, record, entry):
                return
            model.violation(entry.at, f"{id} left the queue without a reason: {record}")
        elif hold is not None:
            if hold.not_before <= entry.at + TOLERANCE_S:
                return
            if record.get("release_on_disconnect") and self._disconnected(id, record, entry):
                return
            model.violation(
                entry.at,
                f"{id} ended without a reason, {hold.not_before - entry.at:.3f} s before its timeout: {record}",
            )

    def _queue_timed_out(self, id: int, record: Message, at: float) -> bool:
        request = self.model.requests.get(id)
        since = request.sent_at if request is not None else self._sent_at(record)
        return since is not None and since + record.get("queue_timeout_ms", 10_000) / 1000 <= at + TOLERANCE_S

    def _sent_at(self, record: Message) -> float | None:
        found = [sent_at for (_, ref), (_, sent_at, _) in self.model.requests_sent.items() if ref == record.get("ref")]
        return min(found) if found else None

    def _disconnected(self, id: int, record: Message, entry: Entry) -> bool:
        """Return whether its connection has ended or, with a session, whether the session has."""
        model, request = self.model, self.model.requests.get(id)
        if request is None:
            return True  # no message about it was sent, so its connection ended
        if request.connection.session is None or record.get("session") is None:
            where = request.connection
            return where.closed_at is not None or where.server != entry.node or where.bye_sent_at is not None
        if any(
            one.generation == request.generation and one.bye_sent_at is not None for one in model.connections.values()
        ):
            return True
        return all(
            self._session_timed_out(connection, entry)
            for connection in model.connections.values()
            if connection.session == request.connection.session and connection.welcomed
        )

    def _session_timed_out(self, connection: ConnectionHistory, entry: Entry) -> bool:
        """Return whether a connection ended long enough ago; those to other servers ended when this one took over."""
        left = connection.closed_at if connection.server == entry.node else self.model.leader_since
        return left is not None and left + connection.session_timeout_ms / 1000 <= entry.at + TOLERANCE_S


# -- Fairness and deadlocks --------


class FairnessChecker(Checker):
    """Checks that waiters are granted in queue order, by their fencing tokens, and that each deadlock was one.

    Where a transaction makes two requests, the queue may be rearranged, which no comparison of pairs can verify. Then only
    the deadlocks are checked.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._unchecked: list[tuple[Entry, RequestHistory]] = []

    def after(self, entry: Entry) -> None:
        """Check deadlocks when the next batch is stored: other waiters of the cycle are notified after the victim."""
        if entry.kind == SERVER_SENT and entry.data["command"] == "released" and "cycle" in entry.data["payload"]:
            request = self.model.request(entry)
            if request is not None and not self.model.exempt(request.id):
                self._unchecked.append((entry, request))
        elif entry.kind == STORE:
            self._check_deadlocks()

    def finish(self) -> None:
        """Check the deadlocks of the last batch, and the order of all grants."""
        self._check_deadlocks()
        owners = [request.payload.get("transactionName") for request in self.model.requests.values()]
        named = [owner for owner in owners if owner is not None]
        if len(named) == len(set(named)):
            self._check_order()

    # -- the order of grants ------------------------------------------------------------------------------

    def _check_order(self) -> None:
        model = self.model
        waits = [
            (request, request.modes, model.locks.get(request.id))
            for request in model.requests.values()
            if not model.exempt(request.id) and (request.queued_at is not None or request.connection.quiet)
        ]
        waits.sort(key=lambda wait: wait[0].id)
        for place, (first, first_modes, earlier_lock) in enumerate(waits):
            for second, second_modes, later_lock in waits[place + 1 :]:
                if not _conflict(first_modes, second_modes):
                    continue
                if _priority(first) >= _priority(second):
                    self._check_pair(first, earlier_lock, second, later_lock, since=None)
                elif second.queued_at is not None:
                    self._check_pair(second, later_lock, first, earlier_lock, since=second.queued_at)

    def _check_pair(
        self,
        earlier: RequestHistory,
        earlier_lock: HeldLock | None,
        later: RequestHistory,
        later_lock: HeldLock | None,
        since: float | None,
    ) -> None:
        """Check that `earlier` was not overtaken. `since` is when it was queued, if that was after `later` was."""
        if later_lock is None:
            return
        granted = later_lock.granted_at
        if since is not None and granted <= since + TOLERANCE_S:
            return
        if earlier_lock is not None:
            if earlier_lock.record["fence"] > later_lock.record["fence"]:
                self._overtaken(earlier, later, granted)
        elif earlier.ended_at is not None and earlier.reason == "queue-timeout":
            # The message was sent some time after the end: only the timeout bounds when that was.
            due = earlier.sent_at + earlier.payload.get("queueTimeout", 10_000) / 1000
            if earlier.payload.get("queueTimeout") != 0 and granted + TOLERANCE_S < due:
                self._overtaken(earlier, later, granted)

    def _overtaken(self, earlier: RequestHistory, later: RequestHistory, at: float) -> None:
        self.model.violation(at, f"{later.id} was granted before {earlier.id}, which was ahead of it in the queue")

    # -- deadlocks ----------------------------------------------------------------------------------------

    def _check_deadlocks(self) -> None:
        for entry, request in self._unchecked:
            self._check_deadlock(entry, request)
        self._unchecked.clear()

    def _check_deadlock(self, entry: Entry, request: RequestHistory) -> None:
        payload = entry.data["payload"]
        cycle, waits = payload["cycle"], payload["waits"]
        if cycle[:1] != [request.payload.get("transactionName")] or len(cycle) != len(waits):
            self.model.violation(
                entry.at, f"the deadlock of {request.id} does not begin with its own transaction: {payload}"
            )
            return
        for place, step in enumerate(waits):
            wrong = self._check_step(step, cycle[place], cycle[(place + 1) % len(cycle)], request, entry.at)
            if wrong:
                self.model.violation(entry.at, f"the deadlock of {request.id} is no deadlock: {wrong}")

    def _check_step(self, step: Message, waiter: str, holder: str, victim: RequestHistory, at: float) -> str:  # noqa: PLR0911 - one each
        model, name = self.model, step["resource"]
        waiting, hold = model.requests.get(step["waiter"]), model.locks.get(step["holder"])
        wanted = None if waiting is None else waiting.modes.get(name)
        if waiting is not None and (waiting.owner != waiter or wanted is None):
            return f"{step['waiter']} does not wait for {name} as {waiter}"
        if hold is None:
            if step["holder"] in model.requests and model.requests[step["holder"]].fence:
                return ""  # granted and released within this batch
            return f"{step['holder']} was never held"
        had = stored_modes(hold.record).get(name)
        if had is None or hold.record.get("transaction") != holder:
            return f"{step['holder']} does not hold {name} as {holder}"
        if wanted is not None and "exclusive" not in (wanted, had):
            return f"{step['waiter']} and {step['holder']} want {name} {wanted} and {had}"
        if hold.ended_at is not None and hold.ended_at < victim.sent_at:
            return f"{step['holder']} had ended"
        return "" if hold.stored_at <= at else f"{step['holder']} was held later"


def _conflict(one: dict[str, str], other: dict[str, str]) -> bool:
    return any("exclusive" in (mode, other[name]) for name, mode in one.items() if name in other)


def _priority(request: RequestHistory) -> float:
    return float(request.payload.get("priority", 0))
