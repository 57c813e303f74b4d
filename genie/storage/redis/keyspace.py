"""A namespace in Redis: who leads it, what is in it, and how it is taken over and written anew.

Keys, all in one hash slot by the tag `{namespace}`:

- `{namespace}:meta`, a hash: `epoch` and `nonce` of the server that leads it, or led it last; the `node` that this is
  (empty: it has resigned); its `counters` (the number of its last batch, its clock in ms, its next id and next fence); the
  `base` from which it went on, and the `history` of the epochs before (`history.py`); and `records`, the key of
- `{namespace}:records:…`, a hash from id to record (`records.py`), and a field `0` that keeps it from vanishing;
- `{namespace}:journal`, a stream of the last batches (`journal.py`);
- `{namespace}:waiting`, a set of those who wait to see whether somebody leads it;
- `{namespace}:furthest`, a hash from each of those who wait to lead it to how far it has come, until one leads it;
- `{namespace}:wish`, who asks its leader for it and how many that one leads (`balancer.py`), for a moment;
- `{namespace}:copies`, a set of every records key that was ever begun, so that one left over is found and unlinked.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.resources import files

from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.log import EpochHistory, Position, ends, read_ends, read_position
from genie.storage.redis.primary import Primary
from genie.storage.redis.records import encode
from genie.storage.store import Batch, LeadershipLost, Node, decode_node, encode_node

WISH_MS = 3_000
"""How long a wish counts that is not repeated."""
WAITS_S = 1.0
"""How long it counts how far somebody has come who does not repeat it."""
CHUNK = 1000
"""Records read or written in one call: Redis serves nobody else meanwhile."""

_BEGIN = files("genie.storage").joinpath("lua/begin.lua").read_bytes()
_RESIGN = files("genie.storage").joinpath("lua/resign.lua").read_bytes()
_COPY = files("genie.storage").joinpath("lua/copy.lua").read_bytes()
_UNLINK = files("genie.storage").joinpath("lua/unlink.lua").read_bytes()

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""What a namespace may be called."""


@dataclass(frozen=True, slots=True)
class LeaderEpoch:
    """Who leads the namespace: an epoch that only grows, a nonce in case two reach for the same, and its records."""

    epoch: int
    nonce: str
    records: str


@dataclass(frozen=True, slots=True)
class Meta:
    """What a namespace says of itself. `state` has its counters, and no changes."""

    tenure: LeaderEpoch
    node: Node | None
    number: int
    state: Batch
    before: tuple[Position, ...]

    @property
    def history(self) -> EpochHistory:
        """By which epochs it has come there."""
        return EpochHistory((*self.before, self.position))

    @property
    def position(self) -> Position:
        """How far it has come."""
        return self.tenure.epoch, self.number


class Keyspace:
    """One server's view of a namespace, and its hold on it: `tenure` is its own, once it has taken it over."""

    def __init__(self, master: Primary, name: str) -> None:
        self._master = master
        prefix = f"{{{name}}}:"
        self._prefix = prefix
        self._copies = f"{prefix}copies"
        self._waiting = f"{prefix}waiting"
        self._furthest = f"{prefix}furthest"
        self._wish = f"{prefix}wish"
        self.name = name
        self._mark = secrets.token_hex(8)
        self._turn = 0
        self._others: dict[bytes, tuple[bytes, float]] = {}
        """Who else waits to lead it: what was read of each last, and since when it says so."""
        self._attempted: LeaderEpoch | None = None
        self._seen = 0
        """The highest epoch that was ever read here."""
        self.meta = meta_key(name)
        self.journal = f"{prefix}journal"
        self.tenure = LeaderEpoch(0, "", "")
        self.history = EpochHistory()
        """By which epochs the own tenure was come to, which is at its beginning."""

    @property
    def replaceable(self) -> bool:
        """Whether another Redis may become the master, which may lack what the one before had."""
        return self._master.replaceable

    async def read(self) -> Meta | None:
        """What it says of itself; None where it says nothing: it is new, or all is lost."""
        stored = await self._master.look([self.meta, self.journal], "HGETALL")
        meta = {field.decode(): value for field, value in zip(stored[::2], stored[1::2], strict=True)}
        if "epoch" not in meta:
            if self._master.asking:
                raise RedisFailure("the slot is being moved, and this key is not there yet")
            return None
        if "counters" not in meta or "node" not in meta:
            raise ValueError(
                f"{self.meta} was not written by this version of Genie; let the one that wrote it serve it"
            )
        tenure = LeaderEpoch(int(meta["epoch"]), meta["nonce"].decode(), meta["records"].decode())
        self._seen = max(self._seen, tenure.epoch)
        number, state = read_counters(meta["counters"])
        return Meta(tenure, decode_node(meta["node"]), number, state, read_ends(meta.get("history", b"")))

    async def take_over(self, node: Node, before: Meta | None, *, unmoved: bool) -> Position | None:
        """Lead it from here on: whoever led it before can't commit any more.

        Returns how far it had come. None where it is not as it was `before`: somebody else has taken it over, or (where
        it must be `unmoved`) its leader has committed since.
        """
        tenure, self._attempted = self._next(), None
        if before is not None:
            tenure = LeaderEpoch(tenure.epoch, tenure.nonce, before.tenure.records)
        return await self._begin(node, tenure, before, unmoved=unmoved)

    async def verify(self) -> None:
        """RedisFailure where the Redis that is asked is the master no more, though it does not know."""
        await self._master.verify()

    async def findable(self) -> bool:
        """Whether this node could lead it: whoever leads makes connections of its own."""
        return await self._master.findable()

    async def wait(self) -> bool:
        """Leave a mark that this node waits. Returns whether it had to be left: Redis may have lost more than the mark."""
        return bool(await self._master.write("SADD", self._waiting, self._mark))

    async def outdone(self, position: Position) -> bool:
        """Whether another that waits to lead it has come further. The others see how far this one has come.

        To be repeated more often than once in `WAITS_S`: who is silent for so long does not count any more.
        """
        now, self._turn = asyncio.get_running_loop().time(), self._turn + 1
        await self._master.write("HSET", self._furthest, self._mark, f"{position[0]}-{position[1]} {self._turn}")
        stored = await self._master.call("HGETALL", self._furthest)
        said = dict(zip(stored[::2], stored[1::2], strict=True))
        self._others = {
            other: self._others[other] if self._others.get(other, (b"", 0.0))[0] == what else (what, now)
            for other, what in said.items()
            if other != self._mark.encode()
        }
        return any(
            now - heard_at < WAITS_S and read_position(what.partition(b" ")[0]) > position
            for what, heard_at in self._others.values()
        )

    async def wish(self, address: str, leads: int) -> None:
        """Ask the leader for the namespace, as a node that leads so many."""
        await self._master.write("SET", self._wish, f"{leads} {address}", "PX", WISH_MS)

    async def wished(self) -> tuple[str, int] | None:
        """Who asks for it, and how many that node leads."""
        stored = await self._master.call("GET", self._wish)
        if stored is None:
            return None
        leads, _, address = stored.decode().partition(" ")
        return address, int(leads)

    async def unwish(self) -> None:
        """Forget who asks for it."""
        await self._master.call("UNLINK", self._wish)

    async def load(self) -> AsyncIterator[dict[bytes, bytes]]:
        """The records, some at a time. Some may be shown twice, and each as it was at some time meanwhile."""
        meta = await self.read()
        cursor, more = b"0", meta is not None
        while meta is not None and more:
            keys = [meta.tenure.records, self.meta, self.journal]
            cursor, found = await self._master.look(keys, "HSCAN", cursor, "COUNT", CHUNK)
            records = dict(zip(found[::2], found[1::2], strict=True))
            records.pop(b"0", None)
            yield records
            more = cursor != b"0"

    async def write_anew(self, node: Node, state: Batch, history: EpochHistory) -> None:
        """Write a whole state, which `history` has led to, where the namespace lost what it had acknowledged.

        Into new keys, and the pointer to them is turned last: who dies midway leaves nothing half. LeadershipLost where
        the namespace is another server's; any other error leaves it to be tried again.
        """
        meta = await self.read()
        if meta is not None and meta.tenure == self._attempted:
            self._began(meta.tenure, meta.before)  # it was done, and only the answer was lost, or what comes behind it
            await self._written()
            return
        if meta is not None and not history.includes(meta.position):
            raise LeadershipLost(f"{self.meta} is another server's")
        self._attempted = tenure = self._next()
        await self._note_copy(tenure)
        stored = [(id_, what) for id_, what in state.changes.items() if what is not None]
        for start in range(0, len(stored), CHUNK):
            chunk = [part for id_, what in stored[start : start + CHUNK] for part in (id_, encode(what))]
            await self._master.write("HSET", tenure.records, *chunk)
        numbers = counters(0, state.clock_ms, state.next_id, state.next_fence)
        anew = (numbers, len(stored), ends(history))
        if await self._begin(node, tenure, meta, unmoved=True, anew=anew) is None:
            raise LeadershipLost(f"{self.meta} changed hands while it was written")
        await self._written()

    async def _written(self) -> None:
        """An error leads to another attempt, which must know its own work."""
        await self.unlink_others()
        self._attempted = None

    async def resign(self, sent: int) -> None:
        """Let somebody else lead it at once; not where Redis lacks the batch that was sent last.

        That may be on another Redis, where followers have read it: the resignation must not have its number.
        """
        await self._master.eval(_RESIGN, [self.meta, self.journal], self.tenure.epoch, self.tenure.nonce, sent)

    async def unlink_others(self) -> None:
        """Remove records that nothing points to: from before they were written anew, or of an attempt that died."""
        for key in (self._waiting, self._furthest):  # one by one: while a slot moves, several need not be in one place
            await self._master.call("UNLINK", key)
        copies = sorted(key.decode() for key in await self._master.call("SMEMBERS", self._copies))
        if copies != [self.tenure.records]:
            keys = [self.meta, self._copies, *copies]
            await self._master.eval(_UNLINK, keys, self.tenure.epoch, self.tenure.nonce)

    async def _begin(
        self,
        node: Node,
        tenure: LeaderEpoch,
        before: Meta | None,
        *,
        unmoved: bool,
        anew: tuple[bytes, int, str] = (b"", 0, ""),
    ) -> Position | None:
        expected: tuple[object, object, object] = ("", "", "")
        if before is not None:
            expected = (before.tenure.epoch, before.tenure.nonce, before.number if unmoved else "")
        await self._note_copy(tenure)
        answer, base, before_it = await self._master.eval(
            _BEGIN,
            [self.meta, tenure.records, self.journal],
            *(tenure.epoch, tenure.nonce, *expected, encode_node(node), *anew),
        )
        if answer == b"lost":
            raise RedisFailure("Redis has lost what was being written")
        if answer != b"ok":
            return None
        self._began(tenure, read_ends(before_it))
        return read_position(base)

    async def _note_copy(self, tenure: LeaderEpoch) -> None:
        """Note a records key before it is begun. (With the other key, so that it is not done where only some keys are.)"""
        await self._master.eval(_COPY, [self.meta, self._copies], tenure.records)

    def _began(self, tenure: LeaderEpoch, before: tuple[Position, ...]) -> None:
        self.tenure = tenure
        self.history = EpochHistory((*before, (tenure.epoch, 0)))

    def _next(self) -> LeaderEpoch:
        """The next leader. Its epoch is new even where Redis lost the last one, and the clock was set back."""
        self._seen = max(
            self._seen + 1, time.time_ns() // 1000
        )  # two that are cut off from each other don't choose the same
        nonce = secrets.token_hex(8)
        return LeaderEpoch(self._seen, nonce, f"{self._prefix}records:{self._seen}-{nonce}")


def meta_key(name: str) -> str:
    """The key of a namespace's meta. ValueError where nothing may be called so."""
    if not NAME.fullmatch(name):
        raise ValueError(f"a namespace must be 1 to 128 letters, digits or any of _.:- , not {name!r}")
    return f"{{{name}}}:meta"


def counters(number: int, clock_ms: float, next_id: int, next_fence: int) -> bytes:
    """The field of that name: the number of a batch, and what the lock manager counts, as it is stored with it."""
    return b"%d %.3f %d %d" % (number, clock_ms, next_id, next_fence)


def read_counters(stored: bytes) -> tuple[int, Batch]:
    """The number of a batch, and a batch with what was counted, and no changes."""
    number, clock_ms, next_id, next_fence = stored.split()
    return int(number), Batch({}, int(next_id), int(next_fence), float(clock_ms))
