"""The checker of beliefs: no client considers a lock held for longer than the server does."""

from __future__ import annotations

from genie.testing.simulation.history import Entry, Message
from simulator.beliefs import Belief
from simulator.checkers.model import Checker, Model, exclude, overlap, stored_modes
from simulator.history import BELIEF, STORE


class BeliefChecker(Checker):
    """Checks at each instant that every lock that a library client considers held is held according to the store.

    Then no other owner can have been granted a conflicting lock, because `LockChecker` finds conflicts within the store. The
    store is the reference, because a server notifies a client of a grant only after the grant was stored. There is no tolerance:
    the client counts each timeout from the sending of a command, the server from its arrival, and both have the same clock.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._beliefs: dict[int, tuple[str, Belief]] = {}
        """The locks that a client considers held: the client and its last entry, by request id."""
        self._reported: set[int] = set()
        """The ids of the requests whose violation was added."""

    def after(self, entry: Entry) -> None:
        """Check a lock that a client begins to consider held, or all of them after a change of the store."""
        if entry.kind == BELIEF:
            belief: Belief = entry.data
            if belief.held or belief.in_block:
                self._beliefs[belief.id] = entry.node, belief
                self._check(belief.id, entry)
            else:
                self._beliefs.pop(belief.id, None)
        elif entry.kind == STORE:
            for id_ in self._beliefs.keys() & {*entry.data.written, *entry.data.removed}:
                self._check(id_, entry)

    def _check(self, id: int, entry: Entry) -> None:
        """Check that the store has the lock of a client. Excuses a lock that was changed on a diverged lineage."""
        record = self.model.records.get(id)
        if (record is not None and _is_held(record)) or id in self._reported or self.model.is_loss_excused(id):
            return
        self._reported.add(id)
        client, belief = self._beliefs[id]
        how = "lock.held is true" if belief.held else "its block is running"
        lock = self.model.locks.get(id)
        others = "" if lock is None else self._conflicting(id, lock.record)
        self.model.add_violation(entry.at, f"{client} considers {id} held ({how}), which the server has ended{others}")

    def _conflicting(self, id: int, record: Message) -> str:
        """Return a text about the requests of other owners that hold a resource of the record in a conflicting mode."""
        modes, owner = stored_modes(record), record.get("transaction", id)
        holders = [
            other_id
            for other_id, other in self.model.records.items()
            if _is_held(other)
            and other.get("transaction", other_id) != owner
            and any(
                overlap(name, own_name) and exclude(mode, own_mode)
                for name, mode in stored_modes(other).items()
                for own_name, own_mode in modes.items()
            )
        ]
        return f", and {', '.join(map(str, holders))} holds its resources" if holders else ""


def _is_held(record: Message) -> bool:
    return "fence" in record and record.get("state") not in ("queued", "ended")
