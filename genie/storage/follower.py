"""Follow a namespace until this node leads it: what others commit is taken in as it comes, so that nothing has to be
loaded when the leader is gone.

The leader has a lease: it leads for so long from each of its commits on, and commits something now and then even if it is
idle. No clock is compared with another. A follower counts from when it read a commit, which is later than when the leader
sent it; the leader counts from the sending. The script that takes over refuses where the leader has committed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil

import structlog

from genie.storage.base import Batch, Change, Replica, Superseded
from genie.storage.journal import AT_ONCE, Began, Committed, Gap, Journal
from genie.storage.namespace import Meta, Namespace, Position
from genie.storage.node import Node
from genie.storage.records import Reader

log = structlog.get_logger()

LONGEST_WAIT_MS = 1_000
"""How long one call may wait for news: Redis, or the network to it, may die without a word."""
BREATH_S = 0.01
"""Between two calls, where there is news all the time: so that they don't cost Redis what the commits do."""
POLL_S = 0.1
"""How often a namespace is looked at that says nothing of itself."""


class Follower:
    """What one node knows of a namespace that it does not lead.

    `following` is told who leads, whenever that changes. `known` is what it knows from the time when it led.
    """

    def __init__(
        self,
        namespace: Namespace,
        journal: Journal,
        node: Node,
        following: Callable[[str | None], None],
        known: tuple[Position, Batch] | None = None,
    ) -> None:
        self._namespace = namespace
        self._journal = journal
        self._node = node
        self._following = following
        self._loop = asyncio.get_running_loop()
        self._known = known
        """How far this node has led the namespace itself before, and everything that there was then."""
        self._replica: Replica | None = None
        """None where nothing was loaded yet, or it fell behind the journal."""
        self._heard_at = self._loop.time()
        """When there was news of a leader, or of Redis, last."""
        self._leads = False
        self.since = 0.0
        """Since when this node leads: when it began to take over."""
        self._nobody_since: float | None = None
        """Since when the namespace says nothing of itself."""

    def interrupted(self) -> None:
        """Redis could not be reached. Perhaps the leader can't reach it either, so its lease begins anew."""
        self._heard_at = self._loop.time()
        self._nobody_since = None
        self._following(None)

    async def lead(self) -> Replica:
        """Follow until this node leads. To be called again after an error: it goes on where it was."""
        while True:
            meta = await self._namespace.read()
            if meta is None:
                replica = await self._nobody()
            else:
                self._nobody_since = None
                replica = await self._follow(meta)
            if replica is not None:
                await self._namespace.unlink_others()
                return replica

    async def _nobody(self) -> Replica | None:
        """The namespace is new, or Redis has lost everything. A leader that lives will write it anew: wait a lease."""
        self._following(None)
        lost = await self._namespace.wait()
        now = self._loop.time()
        if lost or self._nobody_since is None:  # somebody may have led it since the last look, and live
            self._nobody_since = now
        left_s = self._nobody_since + self._node.lease_ms / 1000 - now
        if left_s > 0:
            await asyncio.sleep(min(left_s, POLL_S))
            return None
        if self._furthest() > (0, 0):
            return await self._write_anew()
        return await self._take_over(None, unmoved=False)

    async def _follow(self, meta: Meta) -> Replica | None:
        """Follow one leader. Returns the replica where this node leads now, None where there is something new to see."""
        if meta.node is None or self._node.succeeds(meta.node):
            return await self._take_over(meta, unmoved=False)
        self._following(meta.node.address)
        if self._replica is None:
            await self._load()
            return None  # another may lead by now
        lease_s = meta.node.lease_ms / 1000
        while True:
            left_s = self._heard_at + lease_s - self._loop.time()
            found = await self._read(min(ceil(left_s * 1000), LONGEST_WAIT_MS) if left_s > 0 else None)
            if found is None:
                return None
            if not found and left_s <= 0:
                log.warning("the leader has not been heard of for its lease", leader=meta.node.address)
                return await self._lapsed(meta.tenure)
            for news in found:
                self._heard_at = self._loop.time()
                self._known = None  # a leader that lives has the last word
                if isinstance(news, Began) or news.resigned:
                    return None
            if not found and await self._moved_on(meta):
                return None
            if 0 < len(found) < AT_ONCE:
                await asyncio.sleep(BREATH_S)

    async def _lapsed(self, tenure: object) -> Replica | None:
        """Take over, unless the leader has committed since what was read last."""
        meta = await self._namespace.read()
        if meta is None or meta.tenure != tenure:
            return None
        if meta.position > self._journal.position:
            await self._load()  # the journal is lost, or cut off
            return None
        replica = await self._take_over(meta, unmoved=True)
        self._heard_at = self._loop.time()
        return replica

    async def _moved_on(self, meta: Meta) -> bool:
        """Whether Redis has gone back behind what was read, or another way: the journal would not say so."""
        seen = await self._namespace.read()
        return seen is None or seen.tenure != meta.tenure or seen.number < self._journal.position[1]

    async def _read(self, wait_ms: int | None) -> list[Began | Committed] | None:
        """Take in what the journal has. None where the records had to be read: another may lead by now."""
        try:
            found = await self._journal.read(wait_ms)
        except Gap:
            log.info("the journal does not go back to where this node is; reading the records")
            await self._load()
            return None
        for news in found:
            if isinstance(news, Committed) and self._replica is not None:
                self._replica.apply(news.batch)
        return found

    async def _load(self) -> None:
        """Read the records, and the journal on from before that, for they may have changed meanwhile.

        Where that is broken off there is no replica: the old one does not fit where the journal is read by then.
        """
        self._replica = None
        while True:
            meta = await self._namespace.read()
            if meta is None:
                return
            state, reader = meta.state, Reader()
            loaded: dict[int, Change] = {}
            self._journal.start(meta.position)
            async for records in self._namespace.load():
                for field, record in records.items():
                    loaded[int(field)] = reader.read(int(field), record)
            state.changes = loaded
            try:
                if await self._catch_up(state):
                    break
            except Gap:
                log.warning("the journal does not go back to where loading began; loading again")
        if self._known is not None and self._known[0] <= self._journal.position:
            self._known = None
        self._heard_at = self._loop.time()  # what was read may be news
        self._replica = Replica()
        state.changes = {id_: state.changes[id_] for id_ in sorted(state.changes)}
        self._replica.apply(state)
        if not self._leads:
            log.info("caught up, and following", held=len(self._replica.manager.table.held))

    async def _catch_up(self, state: Batch) -> bool:
        """Bring loaded records to one point in time. False where somebody has written them anew meanwhile."""
        meta = await self._namespace.read()
        while meta is not None and self._journal.position < meta.position:
            found = await self._journal.read(None)
            for news in found:
                if isinstance(news, Committed):
                    state.changes |= news.batch.changes
                    state.next_id, state.next_fence = news.batch.next_id, news.batch.next_fence
                    state.clock_ms = news.batch.clock_ms
            if not found:
                raise Gap
        return meta is not None and self._journal.position >= meta.position

    async def _take_over(self, meta: Meta | None, *, unmoved: bool) -> Replica | None:
        """Lead, if nobody else was faster. Nobody commits any more then, and what is missing here can be read."""
        self.since = self._loop.time()
        base = await self._namespace.take_over(self._node, meta, unmoved=unmoved)
        if base is None:
            return None
        self._leads = True
        if self._furthest() > base:
            return await self._write_anew()
        if self._replica is None or not await self._reached(base):
            await self._load()
        return self._replica or Replica()

    async def _reached(self, base: Position) -> bool:
        """Whether the journal has led here to where the last leader stopped."""
        while self._journal.position < base:
            if await self._read(None) == []:
                return False
        return True

    def _furthest(self) -> Position:
        """How far this node has seen the namespace come, of what it could still write."""
        return max(
            (0, 0) if self._known is None else self._known[0],
            (0, 0) if self._replica is None else self._journal.position,
        )

    async def _write_anew(self) -> Replica | None:
        """Redis has lost what a leader had told already; but we have seen it. None where somebody else was faster."""
        log.warning("Redis has lost commits that this node has seen; writing the whole state anew")
        replica = self._replica
        if replica is None or (self._known is not None and self._known[0] > self._journal.position):
            replica = Replica()
            replica.apply(self._known[1] if self._known is not None else Batch())
        self.since = self._loop.time()
        try:
            await self._namespace.write_anew(self._node, replica.whole())
        except Superseded as error:
            log.info("another node was faster", why=str(error))
            return None
        self._leads = True
        return replica
