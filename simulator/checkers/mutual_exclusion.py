"""Checkers of the locks in the store: mutual exclusion, fencing tokens, the cause of each end, fairness and deadlocks."""

from __future__ import annotations

from genie.testing.simulation.history import SERVER_SENT, Entry, Message
from simulator.checkers.model import (
    TOLERANCE_S,
    Checker,
    ConnectionHistory,
    HeldLock,
    Model,
    RequestHistory,
    exclude,
    overlap,
    stored_modes,
    units_of,
)
from simulator.history import STORE, Change


class LockChecker(Checker):
    """Checks every change of the store: no conflicting locks, growing fencing tokens, and a cause for each end."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._holders: dict[str, dict[int, tuple[str | int, str, int]]] = {}
        """The holders of each resource: the owner, the mode and the fencing token by request id."""
        self._highest_fence = 0
        """The greatest fencing token so far."""
        self._granted: set[int] = set()
        """The ids of all requests that were ever granted."""
        self._granted_late: set[int] = set()
        """Of these, the requests whose connection or session had ended before, so that they end with it in a later slice."""

    def before(self, entry: Entry) -> None:
        """Check that every request that a change of the store ends had a cause to end.

        Also checks that no held request is stored as queued again. Ended requests are removed from the holders.
        """
        if entry.kind != STORE:
            return
        change: Change = entry.data
        ends = [*change.removed, *[id_ for id_, record in change.written.items() if record.get("state") == "ended"]]
        for id_, record in change.written.items():
            if "fence" in self.model.records.get(id_, {}) and record.get("state") == "queued":
                self._remove_holder(id_, record)
                if not change.unrecoverable and not self.model.is_loss_excused(id_):
                    self.model.add_violation(entry.at, f"{id_} was held, and is stored as queued again")
        for id_ in ends:
            last_record = self.model.records.get(id_)
            if last_record is None or last_record.get("state") == "ended":
                continue
            self._remove_holder(id_, last_record)
            if not change.unrecoverable and not self.model.is_loss_excused(id_):
                self._check_cause(id_, last_record, entry)

    def after(self, entry: Entry) -> None:
        """Check the locks that a change of the store has granted or changed: no conflicts, and growing fencing tokens."""
        if entry.kind != STORE:
            return
        change: Change = entry.data
        held = {id_: record for id_, record in change.written.items() if "fence" in record}
        for id_, record in sorted(held.items(), key=lambda item: item[1]["fence"]):
            self._add_holder(id_, record, entry)
            if id_ not in self._granted:
                self._granted.add(id_)
                if self._is_disconnected(id_, record, entry):
                    self._granted_late.add(id_)
                if record["fence"] <= self._highest_fence:
                    self.model.add_violation(
                        entry.at, f"{id_} was granted with fence {record['fence']} after {self._highest_fence}"
                    )
                self._highest_fence = max(self._highest_fence, record["fence"])
                if record["fence"] >= change.counters[3]:
                    self.model.add_violation(
                        entry.at,
                        f"{id_} has fence {record['fence']}, which is not reserved, so it may be assigned again",
                    )

    # -- inside -------------------------------------------------------------------------------------------

    def _add_holder(self, id: int, record: Message, entry: Entry) -> None:
        """Add a request to the holders of its resources, and check that the request conflicts with no other holder.

        Its units must fit beside those of the holders that were granted before. Later ones may have a greater limit.
        """
        owner, fence = record.get("transaction", id), record["fence"]
        for name, mode in stored_modes(record).items():
            others = [(other_name, *item) for other_name, held in self._holders.items() for item in held.items()]
            for other_name, other_id, (other_owner, other_mode, _) in others:
                if other_id != id and other_owner != owner and overlap(name, other_name) and exclude(mode, other_mode):
                    self.model.add_violation(
                        entry.at, f"{id} and {other_id} both hold {name}, {mode} and {other_mode} of {other_name}"
                    )
            holders = self._holders.setdefault(name, {})
            units, limit = units_of(mode)
            in_use = sum(
                units_of(other_mode)[0] for _, other_mode, other_fence in holders.values() if other_fence < fence
            )
            if units and id not in self._granted and in_use + units > limit:
                self.model.add_violation(entry.at, f"{id} holds {mode} of {name}, of which {in_use} were in use")
            holders[id] = owner, mode, fence

    def _remove_holder(self, id: int, record: Message) -> None:
        """Remove a request from the holders of the resources in its record."""
        for name in stored_modes(record):
            self._holders.get(name, {}).pop(id, None)

    def _check_cause(self, id: int, record: Message, entry: Entry) -> None:
        """Check that a request that ended was released, has timed out, or lost its connection or session.

        `record` is the last record of the request.
        """
        model = self.model
        if model.release_sent_at(id) <= entry.at:
            return
        lock = model.locks.get(id)
        if record.get("state") == "queued":
            if self._has_queue_timed_out(id, record, entry.at) or self._is_disconnected(id, record, entry):
                return
            model.add_violation(entry.at, f"{id} left the queue without a cause: {record}")
        elif lock is not None:
            if lock.earliest_timeout_at <= entry.at + TOLERANCE_S:
                return
            ends_with_session = record.get("release_on_disconnect") or id in self._granted_late
            if ends_with_session and self._is_disconnected(id, record, entry):
                return
            model.add_violation(
                entry.at,
                f"{id} ended without a cause, {lock.earliest_timeout_at - entry.at:.3f} s before its timeout: {record}",
            )

    def _has_queue_timed_out(self, id: int, record: Message, at: float) -> bool:
        """Return whether the queue timeout of a request had passed at the time `at`, counted from the sending."""
        request = self.model.requests.get(id)
        sent_at = request.sent_at if request is not None else self._sent_at(record)
        return sent_at is not None and sent_at + record.get("queue_timeout_ms", 10_000) / 1000 <= at + TOLERANCE_S

    def _sent_at(self, record: Message) -> float | None:
        """Return when a request with the ref of a stored record was first sent; None if no client sent this ref."""
        times = [sent_at for (_, ref), (_, sent_at, _) in self.model.requests_sent.items() if ref == record.get("ref")]
        return min(times, default=None)

    def _is_disconnected(self, id: int, record: Message, entry: Entry) -> bool:
        """Return whether the session of a request has ended or, without a session, the connection.

        A connection without a session also ends when another server becomes the leader.
        """
        model, request = self.model, self.model.requests.get(id)
        if request is None:
            return True  # no message about the request was sent, so its connection has ended
        if request.connection.session is None or record.get("session") is None:
            connection = request.connection
            leader_changed = connection.server != entry.node
            return connection.closed_at is not None or leader_changed or connection.bye_sent_at is not None
        if any(
            connection.generation == request.generation and connection.bye_sent_at is not None
            for connection in model.connections.values()
        ):
            return True
        return all(
            self._has_session_timed_out(connection, entry)
            for connection in model.connections.values()
            if connection.session == request.connection.session and connection.welcomed
        )

    def _has_session_timed_out(self, connection: ConnectionHistory, entry: Entry) -> bool:
        """Return whether a connection ended at least a session timeout before an entry.

        Connections to other servers than the writer of the entry count as ended when the writer became the leader.
        """
        ended_at = connection.closed_at if connection.server == entry.node else self.model.leader_since
        return ended_at is not None and ended_at + connection.session_timeout_ms / 1000 <= entry.at + TOLERANCE_S


# -- Fairness and deadlocks --------


class FairnessChecker(Checker):
    """Checks that waiters are granted in queue order, and that reported deadlocks are real.

    Fencing tokens tell the order of grants. If any transaction makes two requests, queues may be rearranged, and a comparison
    of pairs of requests cannot verify the order. In this case only the deadlocks are checked.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._unchecked: list[tuple[Entry, RequestHistory]] = []
        """The reported deadlocks that are not checked yet: the `released` and the request of the victim."""
        self._stored_ids: dict[str, set[int]] = {}
        """The ids of the stored requests of each transaction, also of those about which no client got a message."""

    def after(self, entry: Entry) -> None:
        """Collect reported deadlocks, and check them when the next batch is stored.

        The other waiters of a cycle may be notified after the victim, so their requests are not known earlier.
        """
        if entry.kind == SERVER_SENT and entry.data["command"] == "released" and "cycle" in entry.data["payload"]:
            request = self.model.resolve_request(entry)
            if request is not None and not self.model.is_loss_excused(request.id):
                self._unchecked.append((entry, request))
        elif entry.kind == STORE:
            self._check_deadlocks()
            for id_, record in entry.data.written.items():
                if "transaction" in record:
                    self._stored_ids.setdefault(record["transaction"], set()).add(id_)

    def finish(self) -> None:
        """Check the deadlocks of the last batch, and the order of all grants."""
        self._check_deadlocks()
        ids = self._stored_ids
        for request in self.model.requests.values():
            if "transactionName" in request.payload:
                ids.setdefault(request.payload["transactionName"], set()).add(request.id)
        if all(len(of_transaction) == 1 for of_transaction in ids.values()):
            self._check_order()

    # -- the order of grants ------------------------------------------------------------------------------

    def _check_order(self) -> None:
        """Check the order of grants for all pairs of conflicting requests that waited.

        The queue order is by priority, then by id, which is the order of arrival.
        """
        model = self.model
        # A quiet connection gets no `queued`, so all its requests may have waited.
        waits = [
            (request, request.modes, model.locks.get(request.id))
            for request in model.requests.values()
            if not model.is_loss_excused(request.id) and (request.queued_at is not None or request.connection.quiet)
        ]
        waits.sort(key=lambda wait: wait[0].id)
        for index, (first, first_modes, earlier_lock) in enumerate(waits):
            for second, second_modes, later_lock in waits[index + 1 :]:
                # A later request for units may be granted first if it leaves room, but not before one that needs nothing else.
                ahead = first_modes if _priority(first) >= _priority(second) else second_modes
                if not _conflict(first_modes, second_modes, count_units=len(ahead) == 1):
                    continue
                by_units = not _conflict(first_modes, second_modes)
                if _priority(first) >= _priority(second):
                    self._check_pair(first, earlier_lock, second, later_lock, None, by_units)
                elif second.queued_at is not None:
                    self._check_pair(second, later_lock, first, earlier_lock, second.queued_at, by_units)

    def _check_pair(
        self,
        earlier: RequestHistory,
        earlier_lock: HeldLock | None,
        later: RequestHistory,
        later_lock: HeldLock | None,
        since: float | None,
        by_units: bool,
    ) -> None:
        """Check that the request `later` did not overtake the request `earlier`, which is ahead in the queue.

        If `earlier` arrived after `later` and is ahead only because of its priority, `since` is the time at which `earlier`
        was queued. A grant before `since` is not overtaking. `by_units`: they only conflict by the number of units. Then both may
        fit, and one release may grant them in any order, also in several steps.
        """
        if later_lock is None:
            return
        granted_at = later_lock.granted_at
        if since is not None and granted_at <= since + TOLERANCE_S:
            return
        if earlier_lock is not None:
            together = by_units and not self._has_freed(earlier, later_lock.stored_at, earlier_lock.stored_at)
            if earlier_lock.record["fence"] > later_lock.record["fence"] and not together:
                self._report_overtaking(earlier, later, granted_at)
        elif earlier.ended_at is not None and earlier.reason == "queue-timeout":
            # The message was sent some time after the request ended. The end was not before the timeout.
            times_out_at = earlier.sent_at + earlier.payload.get("queueTimeout", 10_000) / 1000
            if earlier.payload.get("queueTimeout") != 0 and granted_at + TOLERANCE_S < times_out_at:
                self._report_overtaking(earlier, later, granted_at)

    def _has_freed(self, request: RequestHistory, after: float, until: float) -> bool:
        """Return whether a lock that left less room for the request ended after the first and until the second time."""
        return any(
            lock.ended_at is not None
            and after < lock.ended_at <= until
            and _conflict(stored_modes(lock.record), request.modes, count_units=True)
            for lock in self.model.locks.values()
        )

    def _report_overtaking(self, earlier: RequestHistory, later: RequestHistory, at: float) -> None:
        self.model.add_violation(at, f"{later.id} was granted before {earlier.id}, which was ahead of it in the queue")

    # -- deadlocks ----------------------------------------------------------------------------------------

    def _check_deadlocks(self) -> None:
        for entry, request in self._unchecked:
            self._check_deadlock(entry, request)
        self._unchecked.clear()

    def _check_deadlock(self, entry: Entry, request: RequestHistory) -> None:
        """Check a reported deadlock: `cycle` begins with the transaction of the victim `request`, and each wait is real."""
        payload = entry.data["payload"]
        cycle, waits = payload["cycle"], payload["waits"]
        if cycle[:1] != [request.payload.get("transactionName")] or len(cycle) != len(waits):
            self.model.add_violation(
                entry.at, f"the deadlock of {request.id} does not begin with its own transaction: {payload}"
            )
            return
        for index, wait in enumerate(waits):
            problem = self._check_wait(
                wait, waiter=cycle[index], holder=cycle[(index + 1) % len(cycle)], victim=request, at=entry.at
            )
            if problem:
                self.model.add_violation(entry.at, f"the deadlock of {request.id} is not real: {problem}")

    def _check_wait(self, wait: Message, waiter: str, holder: str, victim: RequestHistory, at: float) -> str:  # noqa: PLR0911 - one each
        """Return why a wait in a reported deadlock is impossible, or "" if the wait is possible.

        `waiter` and `holder` are the transactions of the two requests that `wait` names.
        """
        model, name, waiter_id, holder_id = self.model, wait["resource"], wait["waiter"], wait["holder"]
        waiting, lock = model.requests.get(waiter_id), model.locks.get(holder_id)
        wanted = None if waiting is None else _overlapping(waiting.modes, name)
        if waiting is not None and (waiting.owner != waiter or not wanted):
            return f"{waiter_id} does not wait for {name} as {waiter}"
        if waiter == holder:
            alone = waiting is None or units_of(waiting.modes.get(name, ""))[0]
            return "" if alone else f"{waiter_id} waits for its own {name}"
        if lock is None:
            if holder_id in model.requests and model.requests[holder_id].fence:
                return ""  # granted and released within this batch
            return f"{holder_id} was never held"
        held = _overlapping(stored_modes(lock.record), name)
        if not held or lock.record.get("transaction") != holder:
            return f"{holder_id} does not hold {name} as {holder}"
        if wanted is not None and not _conflict(wanted, held, count_units=True):
            return f"{waiter_id} and {holder_id} do not conflict on {name}: {wanted} and {held}"
        if lock.ended_at is not None and lock.ended_at < victim.sent_at:
            return f"{holder_id} had ended before"
        return "" if lock.stored_at <= at else f"{holder_id} was granted later"


def _conflict(one: dict[str, str], other: dict[str, str], *, count_units: bool = False) -> bool:
    """Return whether two requests conflict; the arguments are the modes of their resources.

    `count_units`: units of the same resource count as a conflict.
    """
    return any(
        overlap(name, other_name) and (exclude(mode, other_mode) or (count_units and "/" in mode and "/" in other_mode))
        for name, mode in one.items()
        for other_name, other_mode in other.items()
    )


def _overlapping(modes: dict[str, str], name: str) -> dict[str, str]:
    """Return those of the modes whose resources overlap with `name`."""
    return {each: mode for each, mode in modes.items() if overlap(each, name)}


def _priority(request: RequestHistory) -> float:
    return float(request.payload.get("priority", 0))
