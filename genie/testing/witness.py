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
        self._redis = redis
        self._history = history
        self._meta = f"{{{namespace}}}:meta".encode()
        self._pointer = b""
        self._epoch = 0
        self._lost = False
        self._alive_then = ""
        self.held: dict[int, Message] = {}
        """What was stored last, as long as whoever stored it knows."""
        redis.on_write = self._on_write

    def lost(self) -> None:
        """The store has lost writes. Whoever leads has not, and will write it anew."""
        self._lost = True
        self._alive_then = self._leader()

    def stored(self) -> dict[int, Message]:
        """What is there now."""
        records = self._keys.hash(self._keys.hash(self._meta).get(b"records", b""))
        return {int(field): json.loads(record) for field, record in records.items()}

    def _leader(self) -> str:
        return self._keys.hash(self._meta).get(b"nonce", b"").decode()

    def _on_write(self, group: list[Undo], who: str) -> None:
        meta = self._keys.hash(self._meta)
        if not meta:
            return
        pointer, epoch = meta.get(b"records", b""), int(meta.get(b"epoch", b"0"))
        anew = pointer != self._pointer or epoch != self._epoch
        forgotten = False
        if anew:
            # A server that writes anew what the store lost keeps nothing of its name: its process says who it is.
            forgotten, self._lost = self._lost and who != self._writer, False
            written, gone = self._compare()
        elif self._lost:
            return  # nobody has noticed yet
        else:
            written, gone = self._changed(group, pointer)
        self._pointer, self._epoch, self._writer = pointer, epoch, who
        number, clock, next_id, next_fence = meta[b"counters"].split()[:4]
        counters = int(number), float(clock), int(next_id), int(next_fence)
        self._history.note(STORE, who, Change(written, gone, epoch, counters, anew, forgotten))

    _writer = ""

    def _compare(self) -> tuple[dict[int, Message], dict[int, Message]]:
        now = self.stored()
        written = {id_: record for id_, record in now.items() if self.held.get(id_) != record}
        gone = {id_: record for id_, record in self.held.items() if id_ not in now}
        self.held = now
        return written, gone

    def _changed(self, group: list[Undo], pointer: bytes) -> tuple[dict[int, Message], dict[int, Message]]:
        records = self._keys.hash(pointer)
        written, gone = {}, {}
        for field in dict.fromkeys([field for key, field, _ in group if key == pointer and field is not None]):
            id_, record = int(field), records.get(field)
            if record is not None:
                written[id_] = self.held[id_] = json.loads(record)
            elif id_ in self.held:
                gone[id_] = self.held.pop(id_)
        return written, gone
