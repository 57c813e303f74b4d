"""Watches what a namespace in the simulated Redis holds, and puts each change into the history."""

from __future__ import annotations

import json

from genie.testing.history import STORE, Change, History, Message
from genie.testing.redis.keys import Undo
from genie.testing.redis.server import SimRedis


class Witness:
    """Reads the records of one namespace as they are stored, without the code that wrote them."""

    def __init__(self, redis: SimRedis, history: History, namespace: str = "genie") -> None:
        self._keys = redis.keys
        self._history = history
        self._meta = f"{{{namespace}}}:meta".encode()
        self._pointer = b""
        self._nonce = b""
        self._counters = b""
        """Of the last batch that was stored."""
        self._writer = ""
        self._served = False
        """Whether the writer has committed a batch."""
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
        return {int(field): json.loads(record) for field, record in records.items() if record}

    def _on_write(self, group: list[Undo], who: str) -> None:
        meta = self._keys.hash(self._meta)
        if not meta or all(key != self._meta for key, _, _ in group):
            return
        pointer, nonce, counters = meta.get(b"records", b""), meta.get(b"nonce", b""), meta[b"counters"]
        number, clock, next_id, next_fence = counters.split()[:4]
        if self._lost and int(number) == 0 and meta.get(b"base", b""):
            return  # somebody leads from what is left, and may yet see that it is too little
        # Who has served must not forget, even if it has stood down meanwhile. Others can't know.
        forgotten = self._lost and (who != self._writer or not self._served)
        anew = self._lost or pointer != self._pointer or nonce != self._nonce
        written, gone = self._compare() if anew else self._changed(group, pointer)
        self._lost = False
        # Who has just taken over may not have read the records yet.
        self._served = int(number) > 0 or (self._served and who == self._writer and not forgotten)
        self._pointer, self._nonce, self._counters, self._writer = pointer, nonce, counters, who
        epoch = int(meta.get(b"epoch", b"0"))
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
