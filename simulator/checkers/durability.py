"""Durability with several Redis servers: acknowledged changes survive failovers, unless a fault excuses their loss.

The states of the store form a tree. The *surviving lineage* is the path through this tree to the final state. The other
checkers get only the changes on the surviving lineage, and the messages that depend on these changes. Once a request was
changed on a diverged lineage, they excuse lost messages about this request. `SurvivingLineage` verifies that the divergence
was justified:

- A server restores a snapshot only over a Redis that rolled back, and never over the state of another leader.
- A server that continues from a rolled-back state did not know a later state of which a client was notified.
- A server sends a notification only after the required number of replicas have acknowledged the cause.
- A fencing token is assigned only once, even on different lineages.
"""

from __future__ import annotations

from itertools import pairwise

from genie.testing.simulation.history import SERVER_SENT, Entry
from simulator.history import STORE, Change, ClusterHistory, StoreState
from simulator.lineage import skip_takeovers

LEASE_S = 3.0
"""The lease of the simulated servers, with a margin because most impairments of hosts are recorded only at intervals."""
RESTORE_S = 1.0
"""A server that has taken over, and that can reach Redis, restores in this time what Redis has lost."""

NOTIFICATIONS = ("queued", "locked", "released")

STATELESS_ERRORS = ("unavailable", "unknown-namespace")
"""Codes of errors that a server sends whatever its state is, even while it has none."""


class SurvivingLineage:
    """The entries of a history that belong to the surviving lineage, and the violations of durability."""

    def __init__(self, history: ClusterHistory) -> None:
        self.entries: list[Entry] = []
        self.diverged: dict[int, float] = {}
        """The ids of requests that were changed on a diverged lineage, each with the time of the first such change."""
        self.diverged_connections: set[int] = set()
        """The connections on which a server sent a message that depends on a diverged state."""
        self.violations: list[tuple[float, str]] = []
        """The time and the description of each violation."""
        self._last_stored: dict[str, StoreState] = {}
        """The state that each server has stored last, by server. The messages of the server depend on this state."""
        self._fences: dict[int, int] = {}
        """The request id of each fencing token."""
        self._path: set[StoreState] = set()
        """The states on the surviving lineage."""
        self._next: dict[StoreState | None, StoreState] = {}
        """The state after each state on the surviving lineage."""
        state = history.final
        while state is not None:
            self._path.add(state)
            self._next[state.parent] = state
            state = state.parent
        self._impaired = history.impaired
        self._lifetimes = history.lifetimes
        for entry in history.entries:
            if history.final is None or self._survives(entry):
                self.entries.append(entry)

    def _survives(self, entry: Entry) -> bool:
        """Check an entry, and return whether it belongs to the surviving lineage."""
        if entry.kind == STORE:
            return self._check_change(entry, entry.data)
        if entry.kind != SERVER_SENT or entry.node not in self._last_stored:
            return True
        return self._check_message(entry, self._last_stored[entry.node])

    def _check_change(self, entry: Entry, change: Change) -> bool:
        """Check that a change of the store loses no data and reuses no fencing token.

        Returns whether the state after the change is on the surviving lineage. If it is not, the changed requests are recorded
        as diverged.
        """
        state, last_stored = change.state, self._last_stored.get(entry.node)
        assert state is not None
        if (
            last_stored is None or state.position > last_stored.position
        ):  # otherwise the write came late, from a replaced connection
            self._last_stored[entry.node] = state
            self.violations += [(entry.at, text) for text in _lineage_violations(state)]
        for id_, record in change.written.items():
            if "fence" in record and self._fences.setdefault(record["fence"], id_) != id_:
                other_id = self._fences[record["fence"]]
                self.violations.append((entry.at, f"{id_} has fence {record['fence']}, which {other_id} had before"))
        if state not in self._path:
            for id_ in [*change.written, *change.removed]:
                self.diverged.setdefault(id_, entry.at)
        return state in self._path

    def _check_message(self, entry: Entry, state: StoreState) -> bool:
        """Check a message of a server, whose last stored state is `state`.

        A notification needs enough acknowledgements of `state` and, if `state` is diverged, an excuse. Returns whether `state`
        is on the surviving lineage.
        """
        is_notification = entry.data["command"] in NOTIFICATIONS
        if entry.data["payload"].get("code") not in STATELESS_ERRORS:
            state.mark_observed()
        if is_notification and (state.acknowledged_at is None or state.acknowledged_at > entry.at):
            self.violations.append((entry.at, f"{entry.node} sends {entry.data} before enough replicas have {state}"))
        if state not in self._path:
            self.diverged_connections.add(entry.connection)
            if is_notification:
                self._check_excuse(entry, state)
                self.diverged.setdefault(entry.data["payload"]["id"], entry.at)
        return state in self._path

    def _check_excuse(self, entry: Entry, state: StoreState) -> None:
        """Check that a fault excuses the loss of a notification, which depends on the diverged `state`.

        Two times matter: when the notification was sent, and when enough replicas had a state of the surviving lineage that
        does not descend from `state`. The latter may be long after that state was written: a leader that is cut off with a
        minority of the Redis servers writes states that survive only if a later failover elects its Redis. Takeovers that were
        abandoned do not count. The loss is excused if no server ran during the whole time between the two times. It is also
        excused if the host of the sender was impaired between them, or within a lease before the earlier one.
        """
        fork: StoreState | None = state
        while fork is not None and fork not in self._path:
            fork = fork.parent
        survivor = self._next.get(fork)  # the state that continues the fork on the surviving lineage
        abandoned_at: float | None = None
        while survivor is not None:
            if not survivor.is_late:
                ended_at = self._abandoned_at(survivor, state)
                if ended_at is None:
                    break
                abandoned_at = ended_at
            survivor = self._next.get(survivor)
        forked_at = entry.at if survivor is None else survivor.acknowledged_at or survivor.at
        if not any(started <= entry.at and forked_at <= ended for started, ended in self._lifetimes.values()):
            return  # no server ran from the notification until the fork, so no server could have preserved the state
        host = entry.node.partition(".")[0]
        earliest, latest = min(forked_at, entry.at) - LEASE_S, max(forked_at, entry.at)
        if abandoned_at is not None:  # a sender that is unimpaired then takes over itself, after a lease
            latest = max(abandoned_at + LEASE_S, entry.at)
        if not any(earliest <= impaired_at <= latest for impaired_at in self._impaired.get(host, ())):
            self.violations.append(
                (entry.at, f"{entry.node} sends {entry.data}, which {survivor} lacks, though the host was not impaired")
            )

    def _abandoned_at(self, takeover: StoreState, state: StoreState) -> float | None:
        """Return when the writer of a takeover ended, or another server took over, if it had no time to restore `state`.

        None if the state is not a takeover whose writer knew the diverged `state`, or if there was time to restore it.

        `takeover` is on the surviving lineage. Its writer wrote nothing else before it ended or another server took over, and
        until then neither its host nor Redis was unimpaired for `RESTORE_S`. So `state` was not lost by the takeover, but later.
        """
        known = takeover.known_to_writer
        if takeover.writer != state.writer and (known is None or not known.descends_from(state)):
            return None
        following: StoreState | None = takeover
        while following is not None and following.writer == takeover.writer:
            if following.is_batch or following.is_snapshot:
                return None
            following = self._next.get(following)
        if following is None:
            return None
        begin, end = takeover.at, min(following.at, self._lifetimes[takeover.writer][1])
        hosts = takeover.writer.partition(".")[0], takeover.host
        impaired = sorted(at for host in hosts for at in self._impaired.get(host, ()) if begin <= at <= end)
        had_time = any(later - earlier > RESTORE_S for earlier, later in pairwise((begin, *impaired, end)))
        return None if had_time else end


def _lineage_violations(state: StoreState) -> list[str]:
    """Return a list with one description if a write has lost data that the Redis or the writer had.

    The list is empty if the write has lost nothing. `state` is the state after the write.
    """
    replaced, writer_knew = skip_takeovers(state.replaced), skip_takeovers(state.known_to_writer)
    while (
        writer_knew is not None
        and writer_knew is not replaced
        and (writer_knew.acknowledged_at is None or not writer_knew.observed)
    ):
        writer_knew = skip_takeovers(writer_knew.parent)  # no client was notified of this state, so it may be lost
    if state.is_snapshot:
        # A snapshot may be written only over a state that it continues, or over a batch that its writer has not acknowledged.
        while (
            replaced is not None
            and replaced.writer == state.writer
            and (replaced.acknowledged_at is None or not replaced.observed)
        ):
            replaced = skip_takeovers(replaced.parent)
        if replaced is None or (state.parent is not None and state.parent.descends_from(replaced)):
            return []
        return [f"{state.writer} restores a snapshot over {replaced}, which is not an ancestor of {state.parent}"]
    if replaced is None or writer_knew is None or not state.is_batch:
        return []
    # Data is lost only if the writer knew a descendant of the replaced state that the new state does not continue.
    if state.descends_from(writer_knew) or not writer_knew.descends_from(replaced):
        return []
    if state.position < writer_knew.position:
        return []  # the batch was sent earlier, to a Redis that was stopped; a server that continues has a new epoch
    return [f"{state.writer} continues from {replaced}, though it knew {writer_knew}"]
