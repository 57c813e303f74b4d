"""Durability with several Redises, which may diverge: what was acknowledged survives, unless a fault excuses its loss.

The *surviving lineage* is the path through the tree of store states to the final one. The other checkers see only what was
stored on it, and what servers sent that depends on it. For the requests that a diverged state was about, they excuse from
then on that the messages no longer hold. This checker asks whether the lineages had to diverge:

- A server that restores a snapshot does so over a Redis that rolled back, and never over the state of another leader.
- A server that continues from a rolled-back state knew of no later state that some client was notified of.
- A server sends nothing before as many replicas have acknowledged it as must.
- A fencing token is given once, on whichever lineage.
"""

from __future__ import annotations

from genie.testing.simulation.history import (
    SERVER_SENT,
    STORE,
    Change,
    Entry,
    History,
    StoreState,
    before_takeover,
)

LEASE_S = 3.0
"""Of the servers of a simulation. Impairments of hosts are sampled less often than they occur."""

NOTIFICATIONS = ("queued", "locked", "released")


class SurvivingLineage:
    """The history without the entries that belong to diverged states, and the violations among the lineages."""

    def __init__(self, history: History) -> None:
        self.entries: list[Entry] = []
        self.diverged: dict[int, float] = {}
        """Requests that a diverged state was about, and since when."""
        self.diverged_connections: set[int] = set()
        """Connections on which a server sent something that did not survive."""
        self.violations: list[tuple[float, str]] = []
        """Times and texts."""
        self._stored_last: dict[str, StoreState] = {}
        """The state that each server has stored last: its messages depend on it."""
        self._fences: dict[int, int] = {}
        self._path: set[StoreState] = set()
        self._next: dict[StoreState | None, StoreState] = {}
        state = history.final
        while state is not None:
            self._path.add(state)
            self._next[state.parent] = state
            state = state.parent
        self._impaired = history.impaired
        self._lifetimes = history.lifetimes.values()
        for entry in history.entries:
            if history.final is None or self._survives(entry):
                self.entries.append(entry)

    def _survives(self, entry: Entry) -> bool:
        if entry.kind == STORE:
            return self._check_change(entry, entry.data)
        if entry.kind != SERVER_SENT or entry.node not in self._stored_last:
            return True
        return self._check_message(entry, self._stored_last[entry.node])

    def _check_change(self, entry: Entry, change: Change) -> bool:
        state, last = change.state, self._stored_last.get(entry.node)
        assert state is not None
        if last is None or state.position > last.position:  # else it came late, from a connection that was given up
            self._stored_last[entry.node] = state
            self.violations += [(entry.at, text) for text in _lineage_violations(state)]
        for id_, record in change.written.items():
            if "fence" in record and self._fences.setdefault(record["fence"], id_) != id_:
                text = f"{id_} has fence {record['fence']}, as had {self._fences[record['fence']]}"
                self.violations.append((entry.at, text))
        if state not in self._path:
            for id_ in [*change.written, *change.removed]:
                self.diverged.setdefault(id_, entry.at)
        return state in self._path

    def _check_message(self, entry: Entry, state: StoreState) -> bool:
        is_notification = entry.data["command"] in NOTIFICATIONS
        if entry.data["payload"].get("code") != "unavailable":  # which does not depend on the state
            state.mark_observed()
        if is_notification and (state.acknowledged_at is None or state.acknowledged_at > entry.at):
            self.violations.append((entry.at, f"{entry.node} sends {entry.data}, and too few replicas have {state}"))
        if state not in self._path:
            self.diverged_connections.add(entry.connection)
            if is_notification:
                self._check_excuse(entry, state)
                self.diverged.setdefault(entry.data["payload"]["id"], entry.at)
        return state in self._path

    def _check_excuse(self, entry: Entry, state: StoreState) -> None:
        """Check that a lost notification has an excuse: its server was impaired, or no server survived that knew it."""
        fork: StoreState | None = state
        while fork is not None and fork not in self._path:
            fork = fork.parent
        other = self._next.get(fork)
        while other is not None and other.late:
            other = self._next.get(other)
        at = entry.at if other is None else other.at
        if not any(started <= entry.at and at <= ended for started, ended in self._lifetimes):
            return  # no server was left that could have known
        host, first, last = entry.node.partition(".")[0], min(at, entry.at) - LEASE_S, max(at, entry.at)
        if not any(first <= seen <= last for seen in self._impaired.get(host, ())):
            self.violations.append(
                (entry.at, f"{entry.node} sends {entry.data}, which {other} lacks, though the host was not impaired")
            )


def _lineage_violations(state: StoreState) -> list[str]:
    """Return what is wrong with storing a state where it was stored."""
    had, known = before_takeover(state.replaced), before_takeover(state.known_to_writer)
    while known is not None and known is not had and (known.acknowledged_at is None or not known.observed):
        known = before_takeover(known.parent)  # no client was notified of it, so it may be lost
    if state.is_snapshot:
        if had is None or (state.parent is not None and state.parent.descends_from(had)):
            return []
        return [f"{state.writer} restores a snapshot over {had}, which is no ancestor of {state.parent}"]
    if had is None or known is None or state.position[1] == 0:
        return []
    if state.descends_from(known) or not known.descends_from(had):
        return []
    if state.position < known.position:
        return []  # it was sent earlier, to a Redis that was stopped; a server that continues has a new epoch
    return [f"{state.writer} continues from {had}, and knew {known}"]
