"""Watches what a namespace holds on several Redises, of which each may go back, or another way than the others.

So what was stored is a tree. Whatever is written follows on what that Redis has; only who writes a whole state anew follows
on what it knew itself: on what it stored, or on what it had read when it asked for what comes behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from genie.storage.history import History as HistoryOfEpochs
from genie.storage.history import read_ends
from genie.testing.history import STORE, Change, History, Message, Place, before_it_led
from genie.testing.redis.keys import Undo
from genie.testing.redis.reads import Read
from genie.testing.redis.replicated import ReplicatedRedis
from genie.testing.redis.upstream import Write


class Branches:
    """Reads the records of one namespace as they are stored on each of them. A batch must be on `min_replicas` replicas."""

    def __init__(
        self, redises: list[ReplicatedRedis], history: History, min_replicas: int, namespace: str = "genie"
    ) -> None:
        self._history = history
        self._min_replicas = min_replicas
        self._meta = f"{{{namespace}}}:meta".encode()
        self._journal = f"{{{namespace}}}:journal".encode()
        self._knows: dict[str, Place] = {}
        """The latest that each server is known to know, of what it still goes on from."""
        self._stored: dict[str, Place] = {}
        """What each server has stored last, though it may not know that it has."""
        self._batches: dict[tuple[tuple[int, int], str], Place] = {}
        self._count = 0
        for redis in redises:
            redis.on_write = self._watch(redis)
            redis.on_listen = self._listened(redis)
            redis.on_copy = self._copied

    def head(self, redis: ReplicatedRedis) -> Place | None:
        """What a Redis has."""
        for write in reversed(redis.log):
            if write.noted is not None:
                return write.noted  # type: ignore[no-any-return]
        return None

    def stored(self, redis: ReplicatedRedis) -> dict[int, Message]:
        """The records that a Redis has."""
        return _records(redis, redis.keys.hash(self._meta).get(b"records", b""))

    # -- inside -------------------------------------------------------------------------------------------

    def _watch(self, redis: ReplicatedRedis) -> Callable[[list[Undo], str], None]:
        def wrote(group: list[Undo], who: str) -> None:
            if any(key == self._meta for key, _, _ in group):
                self._wrote(redis, redis.log[-1], group, who)

        return wrote

    def _listened(self, redis: ReplicatedRedis) -> Callable[[str, Read], None]:
        def listened(who: str, read: Read) -> None:
            epoch, rest = read.after.get(self._journal, (0, 0))
            place = self.head(redis)
            while place is not None and place.batch > (epoch, rest // 1000):
                place = place.parent
            knew = self._knows.get(who)
            if place is None or place.batch != (epoch, rest // 1000) or (knew is not None and knew.follows(place)):
                return  # it must not forget what it has read, though Redis may
            self._knows[who] = place

        return listened

    def _copied(self, write: Write) -> None:
        place: Place | None = write.noted
        if place is not None and place.confirmed_at is None and len(write.on) > self._min_replicas:
            place.confirmed_at = self._history.clock()

    def _wrote(self, redis: ReplicatedRedis, write: Write, group: list[Undo], who: str) -> None:
        meta, before = redis.keys.hash(self._meta), self.head(redis)
        number, clock, next_id, next_fence = meta[b"counters"].split()
        batch, records = (int(meta[b"epoch"]), int(number)), meta[b"records"]
        if before is not None and before.records == records:
            known = dict(before.known)
            for field in {field: None for key, field, _ in group if key == records and field not in (None, b"0")}:
                record = redis.keys.hash(records).get(field or b"")
                if record is None:
                    known.pop(int(field or b""), None)
                else:
                    known[int(field or b"")] = json.loads(record)
        else:
            known = _records(redis, records)
        again = self._batches.get((batch, who))
        if again is not None and before in (again, again.parent) and again.known == known:
            write.noted = again  # the same batch, sent again
            return
        anew, knew = number == b"0" and not meta.get(b"base"), self._knows.get(who)
        led_by = HistoryOfEpochs(read_ends(meta.get(b"history", b"")))
        parent = self._source(who, knew, before, known, led_by) if anew else before
        self._count += 1
        place = Place(
            self._count, self._history.clock(), who, redis.host, batch, records, parent, before, knew, anew, known
        )
        write.noted = self._batches[batch, who] = place
        self._copied(write)
        self._learnt(place)
        old = {} if parent is None else parent.known
        written = {id_: record for id_, record in known.items() if old.get(id_) != record}
        gone = {id_: record for id_, record in old.items() if id_ not in known}
        counters = int(number), float(clock), int(next_id), int(next_fence)
        self._history.note(STORE, who, Change(written, gone, batch[0], counters, anew, place=place))

    def _learnt(self, place: Place) -> None:
        """What its writer knows now. (One that came too late, from a connection that it has given up, tells it nothing.)"""
        who, before, knew, stored = place.who, place.before, place.knew, self._stored.get(place.who)
        if stored is not None and place.batch < stored.batch:
            place.late = True
            return
        if place.batch[1] > 0 and before is not None:  # it does not know yet that this one is stored
            self._knows[who] = before if before.who == who else place
        elif place.anew or knew is None or before is None or not knew.follows(before_it_led(before, who) or before):
            self._knows[who] = place
        if place.batch[1] > 0 or place.anew:
            self._stored[who] = place

    def _source(
        self, who: str, knew: Place | None, before: Place | None, known: dict[int, Message], led_by: HistoryOfEpochs
    ) -> Place | None:
        """What a whole state follows on. Who has read on since it was last seen to know something wrote just that.

        A batch that too few replicas had was told to nobody: its writer may leave it out, and says which it has done.
        """
        had, stored = before_it_led(before, who), self._stored.get(who)
        if knew is not None and stored is not None and stored.follows(knew):
            knew = stored if stored.confirmed_at is not None or led_by.includes(stored.batch) else knew
        if knew is not None and knew.known == known:
            return knew
        least = had if knew is None or (had is not None and had.follows(knew)) else before_it_led(knew, who)
        if least is None or least.known == known:
            return least
        later = [place for place in self._batches.values() if place.known == known and place.follows(least)]
        return max(later, key=lambda place: place.number, default=least)


def _records(redis: ReplicatedRedis, key: bytes) -> dict[int, Message]:
    return {int(field): json.loads(record) for field, record in redis.keys.hash(key).items() if record}
