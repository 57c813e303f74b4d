"""Where several Redises went different ways: which was the way that lasted, and what of the others is forgiven.

The way that lasted led to what there was at the end. The other judges see what was stored on it, and what was told by it, as
if there had been no other. Of what was told on another way only this is forgiven: that it is not so any more, for the
requests that it was about, from then on. It is asked here whether there had to be another way:

- Who writes a whole state anew does so where the Redis has gone back behind what it knows, and over nobody else's state.
- Who goes on from where a Redis has gone back had not known of anything later that somebody was told.
- Nothing is told before as many replicas have it as must.
- No fence is given twice, whichever way it was given on.
"""

from __future__ import annotations

from genie.testing.simulation.history import STORE, TELL, Change, Entry, History, Place, before_it_led

LEASE_S = 3.0
"""Of the servers of simulated worlds; and what is seen of hosts is as old as they are looked at seldom."""

TOLD = ("queued", "locked", "released")


class Lasting:
    """The way that lasted: `entries` without what did not last. `wrong` is what was wrong with the ways."""

    def __init__(self, history: History) -> None:
        self.entries: list[Entry] = []
        self.tainted: dict[int, float] = {}
        """Requests that another way was about, and since when."""
        self.forsaken: set[int] = set()
        """Connections in which something was told that did not last."""
        self.wrong: list[tuple[float, str]] = []
        self._basis: dict[str, Place] = {}
        """What each server has stored last: what it tells rests on that."""
        self._fences: dict[int, int] = {}
        self._path: set[Place] = set()
        self._next: dict[Place | None, Place] = {}
        place = history.final
        while place is not None:
            self._path.add(place)
            self._next[place.parent] = place
            place = place.parent
        self._hindered = history.hindered
        self._lives = history.lives.values()
        for entry in history.entries:
            if history.final is None or self._lasts(entry):
                self.entries.append(entry)

    def _lasts(self, entry: Entry) -> bool:
        if entry.kind == STORE:
            return self._stored(entry, entry.what)
        return entry.kind != TELL or entry.who not in self._basis or self._told(entry, self._basis[entry.who])

    def _stored(self, entry: Entry, change: Change) -> bool:
        place, basis = change.place, self._basis.get(entry.who)
        assert place is not None
        if basis is None or place.batch > basis.batch:  # else it came late, from a connection that was given up
            self._basis[entry.who] = place
            self.wrong += [(entry.at, text) for text in _rightly(place)]
        for id_, record in change.written.items():
            if "fence" in record and self._fences.setdefault(record["fence"], id_) != id_:
                text = f"{id_} has fence {record['fence']}, as had {self._fences[record['fence']]}"
                self.wrong.append((entry.at, text))
        if place not in self._path:
            for id_ in [*change.written, *change.gone]:
                self.tainted.setdefault(id_, entry.at)
        return place in self._path

    def _told(self, entry: Entry, place: Place) -> bool:
        about = entry.what["command"] in TOLD
        if entry.what["payload"].get("code") != "unavailable":  # which says nothing of what there is
            place.tell()
        if about and (place.confirmed_at is None or place.confirmed_at > entry.at):
            self.wrong.append((entry.at, f"{entry.who} says {entry.what}, and too few replicas have {place}"))
        if place not in self._path:
            self.forsaken.add(entry.connection)
            if about:
                self._excused(entry, place)
                self.tainted.setdefault(entry.what["payload"]["id"], entry.at)
        return place in self._path

    def _excused(self, entry: Entry, place: Place) -> None:
        """What was told did not last: was its server held up, so that another took over in good faith; or did all die?"""
        fork: Place | None = place
        while fork is not None and fork not in self._path:
            fork = fork.parent
        other = self._next.get(fork)
        while other is not None and other.late:
            other = self._next.get(other)
        at = entry.at if other is None else other.at
        if not any(begun <= entry.at and at <= ended for begun, ended in self._lives):
            return  # nobody was left who could have seen it
        host, first, last = entry.who.partition(".")[0], min(at, entry.at) - LEASE_S, max(at, entry.at)
        if not any(first <= seen <= last for seen in self._hindered.get(host, ())):
            self.wrong.append(
                (entry.at, f"{entry.who} says {entry.what}; {other} made nothing of that, and it was well")
            )


def _rightly(place: Place) -> list[str]:
    """What is wrong with writing this there."""
    had, knew = before_it_led(place.before), before_it_led(place.knew)
    while knew is not None and knew is not had and (knew.confirmed_at is None or not knew.told):
        knew = before_it_led(knew.parent)  # nobody was told, so it may as well be lost
    if place.anew:
        if had is None or (place.parent is not None and place.parent.follows(had)):
            return []
        return [f"{place.who} writes anew over {had}, which does not lead to {place.parent}"]
    if had is None or knew is None or place.batch[1] == 0 or place.follows(knew) or not knew.follows(had):
        return []
    if place.batch < knew.batch:
        return []  # it was sent before that was known, to a Redis that was stalled; who goes on has a new epoch
    return [f"{place.who} goes on from {had}, and had known {knew}"]
