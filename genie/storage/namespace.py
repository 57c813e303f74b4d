"""A namespace in Redis: who owns it, what is in it, and how it is written anew.

Keys, all in one hash slot by the tag `{namespace}`:

- `{namespace}:meta`, a hash: `epoch` and `nonce` of the server that owns the namespace, its `counters` (the number of
  its last batch, its clock in ms, its next id and next fence), and `records`, the key of
- `{namespace}:records:…`, a hash from id to record (`records.py`);
- `{namespace}:copies`, a set of every records key that was ever begun, so that one left over is found and unlinked.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from importlib.resources import files

from redis.asyncio import Redis

from genie.storage.base import Batch, Change, Superseded
from genie.storage.records import Reader, encode

CHUNK = 1000
"""Records read or written in one call: Redis serves nobody else meanwhile."""

_BEGIN = files("genie.storage").joinpath("lua/begin.lua").read_text()


@dataclass(frozen=True, slots=True)
class Tenure:
    """Who owns the namespace: an epoch that only grows, a nonce in case two reach for the same, and its records."""

    epoch: int
    nonce: str
    records: str


class Namespace:
    """One server's hold on a namespace. `tenure` is its own, once it has taken the namespace over."""

    def __init__(self, client: Redis, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", name):
            raise ValueError(f"namespace must be 1 to 128 letters, digits or any of _.:- , not {name!r}")
        self._client = client
        self._prefix = f"{{{name}}}:"
        self._copies = f"{self._prefix}copies"
        self._attempted: Tenure | None = None
        self.meta = f"{self._prefix}meta"
        self.tenure = Tenure(0, "", "")

    async def take_over(self) -> Batch:
        """Own it from here on: whoever owned it before can't commit any more. Returns what it holds."""
        while True:
            before, _ = await self._read()
            tenure = _next(before, self._prefix)
            if before is not None:
                tenure = Tenure(tenure.epoch, tenure.nonce, before.records)
            if await self._begin(tenure, before, b""):
                break
        _, state = await self._read()  # whoever owned it may have gone on until just now
        state.changes = await self._load()
        await self._unlink_others()
        return state

    async def write_anew(self, state: Batch) -> None:
        """Write a whole state, where the namespace lost what it had acknowledged.

        Into new keys, and the pointer to them is turned last: who dies midway leaves nothing half. Superseded where
        the namespace is another server's; any other error leaves it to be tried again.
        """
        before, _ = await self._read()
        if before is not None and before == self._attempted:
            self.tenure = before  # it was done, and only the answer was lost
            return
        if before is not None and before.epoch >= self.tenure.epoch and before != self.tenure:
            raise Superseded(f"{self.meta} is another server's")
        self._attempted = tenure = _next(self.tenure, self._prefix)
        await self._client.sadd(self._copies, tenure.records)
        stored = list(state.changes.items())
        for start in range(0, len(stored), CHUNK):
            chunk = {str(id_): encode(what) for id_, what in stored[start : start + CHUNK] if what is not None}
            await self._client.hset(tenure.records, mapping=chunk)  # type: ignore[arg-type]
        numbers = counters(0, state.clock_ms, state.next_id, state.next_fence)
        if not await self._begin(tenure, before, numbers):
            raise Superseded(f"{self.meta} changed hands while it was written")
        await self._unlink_others()

    async def _read(self) -> tuple[Tenure | None, Batch]:
        stored: dict[bytes, bytes] = await self._client.hgetall(self.meta)  # type: ignore[assignment]
        meta = {field.decode(): value.decode() for field, value in stored.items()}
        if "epoch" not in meta:
            return None, Batch()
        if "counters" not in meta:
            raise ValueError(
                f"{self.meta} was not written by this version of Genie; let the one that wrote it serve it"
            )
        _, clock_ms, next_id, next_fence = meta["counters"].split()
        state = Batch({}, int(next_id), int(next_fence), float(clock_ms))
        return Tenure(int(meta["epoch"]), meta["nonce"], meta["records"]), state

    async def _begin(self, tenure: Tenure, before: Tenure | None, numbers: bytes) -> bool:
        expected = ("", "") if before is None else (before.epoch, before.nonce)
        await self._client.sadd(self._copies, tenure.records)
        answer = await self._client.eval(
            _BEGIN, 2, self.meta, tenure.records, tenure.epoch, tenure.nonce, *expected, numbers
        )
        if answer != b"ok":
            return False
        self.tenure = tenure
        return True

    async def _load(self) -> dict[int, Change]:
        loaded: dict[int, Change] = {}  # a scan may show a record twice
        reader = Reader()
        cursor, first = 0, True
        while cursor or first:
            found: dict[bytes, bytes]
            cursor, found = await self._client.hscan(self.tenure.records, cursor, count=CHUNK)  # type: ignore[assignment]
            for field, record in found.items():
                id_ = int(field)
                loaded[id_] = reader.read(id_, record)
            first = False
        return {id_: loaded[id_] for id_ in sorted(loaded)}

    async def _unlink_others(self) -> None:
        """Remove records that nothing points to: from before they were written anew, or of an attempt that died."""
        for key in await self._client.smembers(self._copies):
            if key != self.tenure.records.encode():
                await self._client.unlink(key)
                await self._client.srem(self._copies, key)


def counters(sequence: int, clock_ms: float, next_id: int, next_fence: int) -> bytes:
    """The field of that name: the number of a batch, and what the lock manager counts, as it is stored with it."""
    return b"%d %.3f %d %d" % (sequence, clock_ms, next_id, next_fence)


def _next(before: Tenure | None, prefix: str) -> Tenure:
    """The next owner. Its epoch is new even where Redis lost the last one."""
    epoch = max((0 if before is None else before.epoch) + 1, int(time.time()))
    nonce = secrets.token_hex(8)
    return Tenure(epoch, nonce, f"{prefix}records:{epoch}-{nonce}")
