"""A namespace in Redis: who leads it, what is in it, and how it is taken over and written anew.

Keys, all in one hash slot by the tag `{namespace}`:

- `{namespace}:meta`, a hash: `epoch` and `nonce` of the server that leads it, or led it last; the `node` that this is
  (empty: it has resigned); its `counters` (the number of its last batch, its clock in ms, its next id and next fence); the
  `base` from which it went on; and `records`, the key of
- `{namespace}:records:…`, a hash from id to record (`records.py`);
- `{namespace}:journal`, a stream of the last batches (`journal.py`);
- `{namespace}:waiting`, a set of those who wait to see whether somebody leads it;
- `{namespace}:copies`, a set of every records key that was ever begun, so that one left over is found and unlinked.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.resources import files

from redis.asyncio import Redis

from genie.storage.base import Batch, Superseded
from genie.storage.link import LinkError
from genie.storage.node import Node, pack, unpack
from genie.storage.records import encode

CHUNK = 1000
"""Records read or written in one call: Redis serves nobody else meanwhile."""

_BEGIN = files("genie.storage").joinpath("lua/begin.lua").read_text()
_RESIGN = files("genie.storage").joinpath("lua/resign.lua").read_text()
_UNLINK = files("genie.storage").joinpath("lua/unlink.lua").read_text()

Position = tuple[int, int]
"""How far the batches have come: the epoch, and the number of the batch within it."""


@dataclass(frozen=True, slots=True)
class Tenure:
    """Who leads the namespace: an epoch that only grows, a nonce in case two reach for the same, and its records."""

    epoch: int
    nonce: str
    records: str


@dataclass(frozen=True, slots=True)
class Meta:
    """What a namespace says of itself. `state` has its counters, and no changes."""

    tenure: Tenure
    node: Node | None
    number: int
    state: Batch

    @property
    def position(self) -> Position:
        """How far it has come."""
        return self.tenure.epoch, self.number


class Namespace:
    """One server's view of a namespace, and its hold on it: `tenure` is its own, once it has taken it over."""

    def __init__(self, client: Redis, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", name):
            raise ValueError(f"namespace must be 1 to 128 letters, digits or any of _.:- , not {name!r}")
        self._client = client
        self._prefix = f"{{{name}}}:"
        self._copies = f"{self._prefix}copies"
        self._waiting = f"{self._prefix}waiting"
        self._name = secrets.token_hex(8)
        self._attempted: Tenure | None = None
        self._seen = 0
        """The highest epoch that was ever read here."""
        self.meta = f"{self._prefix}meta"
        self.journal = f"{self._prefix}journal"
        self.tenure = Tenure(0, "", "")

    async def read(self) -> Meta | None:
        """What it says of itself; None where it says nothing: it is new, or all is lost."""
        stored: dict[bytes, bytes] = await self._client.hgetall(self.meta)  # type: ignore[assignment]
        meta = {field.decode(): value for field, value in stored.items()}
        if "epoch" not in meta:
            return None
        if "counters" not in meta or "node" not in meta:
            raise ValueError(
                f"{self.meta} was not written by this version of Genie; let the one that wrote it serve it"
            )
        tenure = Tenure(int(meta["epoch"]), meta["nonce"].decode(), meta["records"].decode())
        self._seen = max(self._seen, tenure.epoch)
        number, state = read_counters(meta["counters"])
        return Meta(tenure, unpack(meta["node"]), number, state)

    async def take_over(self, node: Node, before: Meta | None, *, unmoved: bool) -> Position | None:
        """Lead it from here on: whoever led it before can't commit any more.

        Returns how far it had come. None where it is not as it was `before`: somebody else has taken it over, or (where
        it must be `unmoved`) its leader has committed since.
        """
        tenure = self._next()
        if before is not None:
            tenure = Tenure(tenure.epoch, tenure.nonce, before.tenure.records)
        return await self._begin(node, tenure, before, before.number if unmoved and before is not None else "", b"")

    async def wait(self) -> bool:
        """Leave a mark that this node waits. Returns whether it had to be left: Redis may have lost more than the mark."""
        return bool(await self._client.sadd(self._waiting, self._name))

    async def load(self) -> AsyncIterator[dict[bytes, bytes]]:
        """The records, some at a time. Some may be shown twice, and each as it was at some time meanwhile."""
        meta = await self.read()
        cursor, first = 0, True
        while meta is not None and (cursor or first):
            found: dict[bytes, bytes]
            cursor, found = await self._client.hscan(meta.tenure.records, cursor, count=CHUNK)  # type: ignore[assignment]
            yield found
            first = False

    async def write_anew(self, node: Node, state: Batch) -> None:
        """Write a whole state, where the namespace lost what it had acknowledged.

        Into new keys, and the pointer to them is turned last: who dies midway leaves nothing half. Superseded where
        the namespace is another server's; any other error leaves it to be tried again.
        """
        meta = await self.read()
        before = None if meta is None else meta.tenure
        if before is not None and before == self._attempted:
            self.tenure, self._attempted = before, None  # it was done, and only the answer was lost
            return
        if before is not None and before.epoch >= self.tenure.epoch and before != self.tenure:
            raise Superseded(f"{self.meta} is another server's")
        self._attempted = tenure = self._next()
        await self._client.sadd(self._copies, tenure.records)
        stored = [(id_, what) for id_, what in state.changes.items() if what is not None]
        for start in range(0, len(stored), CHUNK):
            chunk = {str(id_): encode(what) for id_, what in stored[start : start + CHUNK]}
            await self._client.hset(tenure.records, mapping=chunk)  # type: ignore[arg-type]
        numbers = counters(0, state.clock_ms, state.next_id, state.next_fence)
        if await self._begin(node, tenure, meta, "", numbers, len(stored)) is None:
            raise Superseded(f"{self.meta} changed hands while it was written")
        await self.unlink_others()

    async def resign(self) -> None:
        """Let somebody else lead it at once."""
        await self._client.eval(_RESIGN, 2, self.meta, self.journal, self.tenure.epoch, self.tenure.nonce)

    async def unlink_others(self) -> None:
        """Remove records that nothing points to: from before they were written anew, or of an attempt that died."""
        await self._client.unlink(self._waiting)
        found: set[bytes] = await self._client.smembers(self._copies)  # type: ignore[assignment]
        copies = sorted(key.decode() for key in found)
        if copies != [self.tenure.records]:
            keys = (self.meta, self._copies, *copies)
            await self._client.eval(_UNLINK, len(keys), *keys, self.tenure.epoch, self.tenure.nonce)

    async def _begin(
        self, node: Node, tenure: Tenure, before: Meta | None, number: int | str, numbers: bytes, records: int = 0
    ) -> Position | None:
        expected = ("", "") if before is None else (before.tenure.epoch, before.tenure.nonce)
        await self._client.sadd(self._copies, tenure.records)
        answer, base = await self._client.eval(
            *(_BEGIN, 3, self.meta, tenure.records, self.journal),
            *(tenure.epoch, tenure.nonce, *expected, number, pack(node), numbers, records),
        )
        if answer == b"lost":
            raise LinkError("Redis has lost what was being written")
        if answer != b"ok":
            return None
        self.tenure, self._attempted = tenure, None
        return read_position(base)

    def _next(self) -> Tenure:
        """The next leader. Its epoch is new even where Redis lost the last one, and the clock was set back."""
        self._seen = max(self._seen + 1, int(time.time()))
        nonce = secrets.token_hex(8)
        return Tenure(self._seen, nonce, f"{self._prefix}records:{self._seen}-{nonce}")


def read_position(stored: bytes) -> Position:
    """A position as it is stored; of what was written anew it is nothing."""
    epoch, _, number = stored.partition(b"-")
    return int(epoch or 0), int(number or 0)


def counters(number: int, clock_ms: float, next_id: int, next_fence: int) -> bytes:
    """The field of that name: the number of a batch, and what the lock manager counts, as it is stored with it."""
    return b"%d %.3f %d %d" % (number, clock_ms, next_id, next_fence)


def read_counters(stored: bytes) -> tuple[int, Batch]:
    """The number of a batch, and a batch with what was counted, and no changes."""
    number, clock_ms, next_id, next_fence = stored.split()
    return int(number), Batch({}, int(next_id), int(next_fence), float(clock_ms))
