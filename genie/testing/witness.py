"""Watches what a namespace in the simulated Redis holds, and puts each change into the history."""

from __future__ import annotations

import json

from genie.testing.history import STORE, Change, History, Message
from genie.testing.keys import Undo
from genie.testing.redis import SimRedis


class Witness:
    """Reads the records of one namespace as they are stored, without the code that wrote them."""

    def __init__(self, redis: SimRedis, history: History, namespace: str = "genie") -> None:
        self._keys = redis.keys
        self._history = history
        self._meta = f"{{{namespace}}}:meta".encode()
        self._pointer = b""
        self._epoch = 0
        self._counters = b""
        """Of the last batch that was stored."""
        self._writer = ""
        self._lost = False
        self.known: dict[int, Message] = {}
        """What was stored last, for as long as whoever stored it goes on."""
        redis.on_write = self._on_write

    def look(self) -> None:
        """The store may have lost writes. Whoever leads has not, and will write them anew."""
        meta = self._keys.hash(self._meta)
        if meta.get(b"counters", b"") != self._counters or meta.get(b"records", b"") != self._pointer:
            self._lost = True

    def stored(self) -> dict[int, Message]:
        """What is there now."""
        records = self._keys.hash(self._keys.hash(self._meta).get(b"records", b""))
        return {int(field): json.loads(record) for field, record in records.items()}

    def _on_write(self, group: list[Undo], who: str) -> None:
        meta = self._keys.hash(self._meta)
        if not meta or all(key != self._meta for key, _, _ in group):
            return
        pointer, epoch, counters = meta.get(b"records", b""), int(meta.get(b"epoch", b"0")), meta[b"counters"]
        anew = pointer != self._pointer or epoch != self._epoch
        forgotten = False
        if anew:
            forgotten, self._lost = self._lost and who != self._writer, False
            written, gone = self._compare()
        elif self._lost:
            # A batch fits to what is there: what was lost had not been answered, and was sent again.
            self._lost = False
            written, gone = self._compare()
        else:
            written, gone = self._changed(group, pointer)
        self._pointer, self._epoch, self._counters, self._writer = pointer, epoch, counters, who
        number, clock, next_id, next_fence = counters.split()[:4]
        self._history.note(
            STORE,
            who,
            Change(written, gone, epoch, (int(number), float(clock), int(next_id), int(next_fence)), anew, forgotten),
        )

    def _compare(self) -> tuple[dict[int, Message], dict[int, Message]]:
        now = self.stored()
        written = {id_: record for id_, record in now.items() if self.known.get(id_) != record}
        gone = {id_: record for id_, record in self.known.items() if id_ not in now}
        self.known = now
        return written, gone

    def _changed(self, group: list[Undo], pointer: bytes) -> tuple[dict[int, Message], dict[int, Message]]:
        records = self._keys.hash(pointer)
        written, gone = {}, {}
        for field in dict.fromkeys([field for key, field, _ in group if key == pointer and field is not None]):
            id_, record = int(field), records.get(field)
            if record is not None:
                written[id_] = self.known[id_] = json.loads(record)
            elif id_ in self.known:
                gone[id_] = self.known.pop(id_)
        return written, gone
