"""Follow a namespace until this node leads it: what others commit is taken in as it comes, so that nothing has to be
loaded when the leader is gone.

The leader has a lease: it leads for so long from each of its commits on, and commits something now and then even if it is
idle. No clock is compared with another. A follower counts from when it read a commit, which is later than when the leader
sent it; the leader counts from the sending. The script that takes over refuses where the leader has committed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from math import ceil, inf

import structlog

from genie.storage.base import Batch, Replica, Superseded
from genie.storage.history import History, Position
from genie.storage.journal import AT_ONCE, Began, Committed, Gap, Journal
from genie.storage.loading import load
from genie.storage.mirror import Mirror
from genie.storage.namespace import Meta, Namespace, Tenure
from genie.storage.node import Node
from genie.storage.spread import Spread

log = structlog.get_logger()

LONGEST_WAIT_MS = 1_000
"""How long one call may wait for news: Redis, or the network to it, may die without a word."""
BREATH_S = 0.01
"""Between two calls, where there is news all the time: so that they don't cost Redis what the commits do."""
WISH_S = 1.0
"""How often a wish for the namespace is repeated."""
RESPECT_S = 1.0
"""What the last leader is given to come back first, where Redis has lost something: as long as it may pause by then."""
POLL_S = 0.1
"""How often a namespace is looked at that says nothing of itself."""


class Follower:
    """What one node knows of a namespace that it does not lead.

    `following` is told who leads, whenever that changes. `known` is what it knows from the time when it led, and `untold`
    are the batches that it sent as a leader and told nobody of: some Redis may have them, and another may not.
    """

    def __init__(
        self,
        namespace: Namespace,
        journal: Journal,
        node: Node,
        spread: Spread,
        following: Callable[[str | None], None],
        known: tuple[History, Batch, Position] | None = None,
        untold: Collection[Position] = (),
    ) -> None:
        self._log = log.bind(namespace=namespace.name)
        self._namespace = namespace
        self._journal = journal
        self._node = node
        self._spread = spread
        self._tell = following
        self._wished_at = -inf
        self._loop = asyncio.get_running_loop()
        self._known = None if known is None else known[:2]
        """How far this node has led the namespace itself before, and everything that there was then."""
        self._told = None if known is None else known[2]
        """How far of that it has told: what came behind may as well be lost."""
        self._untold = untold
        self._behind: tuple[Tenure, int] | None = None
        """Where Redis stands since it was seen to have gone back behind what is known here."""
        self._mirror: Mirror | None = None
        """None where nothing was loaded yet, or it fell behind the journal."""
        self._heard_at = self._loop.time()
        """When there was news of a leader, or of Redis, last."""
        self._newcomer = namespace.replaceable
        """No leader was heard to live at this Redis, and it may know less than was told by one that it lacks."""
        self._leads = False
        self.since = 0.0
        """Since when this node leads: when it began to take over."""
        self._nobody_since: float | None = None
        """Since when the namespace says nothing of itself."""

    def interrupted(self) -> None:
        """Redis could not be reached. Perhaps the leader can't reach it either, so its lease begins anew."""
        self._heard_at = self._loop.time()
        self._nobody_since = None
        self._newcomer = self._namespace.replaceable
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
                self._spread.leads(self._namespace.name, self._node.address)
                return replica

    def _following(self, leader: str | None) -> None:
        self._spread.leads(self._namespace.name, leader)
        self._tell(leader)

    async def _nobody(self) -> Replica | None:
        """The namespace is new, or Redis has lost everything. A leader that lives will write it anew: wait a lease."""
        self._following(None)
        lost = await self._namespace.wait()
        now = self._loop.time()
        if lost or self._nobody_since is None:  # somebody may have led it since the last look, and live
            self._nobody_since = now
        if await self._waits(self._nobody_since + self._node.lease_ms / 1000 + self._respect_s(None)):
            return None
        if await self._hesitates(None):
            return None
        best = self._best()
        if best is not None and best[0].position > (0, 0):
            await self._namespace.verify()
            return await self._write_anew(*best)
        return await self._take_over(None, unmoved=False)

    async def _follow(self, meta: Meta) -> Replica | None:
        """Follow whoever leads. Returns the replica where this node leads now, None where there is something new to see."""
        succeeds = meta.node is not None and self._node.succeeds(meta.node)
        lacks = self._journal.position > (0, 0) and not meta.history.includes(self._journal.position)
        if meta.node is None or (succeeds and not self._newcomer):
            return await self._unled(meta, lacks=lacks)
        self._following(None if succeeds else meta.node.address)
        if self._mirror is None:
            await self._load()
            return None  # another may lead by now
        lease_s = meta.node.lease_ms / 1000
        known = self._furthest()
        if lacks or (self._newcomer and known is not None and known.knows_more_than(meta.history)):
            return await self._other_way(meta, lease_s)
        return await self._listen(meta, meta.node.address, lease_s)

    async def _unled(self, meta: Meta, *, lacks: bool) -> Replica | None:
        """Nobody leads, by what Redis says; or this node did before it was started again."""
        if self._newcomer and self._mirror is None:
            await self._load()
            return None
        if (lacks or self._newcomer) and await self._waits_for_who_led(meta, self._node.lease_ms / 1000):
            return None  # who led what Redis lacks may live, and not know yet that there is another master
        if meta.node is None and await self._hesitates(meta):
            return None
        return await self._take_over(meta, unmoved=False)

    async def _listen(self, meta: Meta, leader: str, lease_s: float) -> Replica | None:
        """Take in what one leader commits, until it has not been heard of for its lease, or another begins."""
        respect_s = self._respect_s(meta)
        while True:
            left_s = self._heard_at + lease_s + respect_s - self._loop.time()
            found = await self._read(min(ceil(left_s * 1000), LONGEST_WAIT_MS) if left_s > 0 else None)
            if found is None:
                return None
            if not found and left_s <= 0:
                return await self._lapsed(meta.tenure, leader)
            for news in found:
                self._heard_at = self._loop.time()
                if news.position > meta.position:  # else it may have come with the state of another Redis
                    self._newcomer, respect_s = False, 0.0
                    self._known = None  # a leader that lives has the last word
                if isinstance(news, Began) or news.resigned:
                    return None
            if not found and await self._moved_on(meta):
                return None
            await self._wish()
            if 0 < len(found) < AT_ONCE:
                await asyncio.sleep(BREATH_S)

    async def _other_way(self, meta: Meta, lease_s: float) -> Replica | None:
        """Redis has gone back behind what was read here, or has come by another way to where it is.

        In the first case whoever leads has lost commits, and writes them anew; if nobody does so for a lease, we do. In
        the second two have led, cut off from each other, and the Redis that is left has the last word.
        """
        known = self._furthest()
        if known is None or not known.knows_more_than(meta.history):
            self._log.warning("Redis is led on from another state than this node has seen; reading the records")
            self._mirror = self._known = None
            return None
        if await self._waits_for_who_led(meta, lease_s):
            return None
        return await self._take_over(meta, unmoved=True)

    async def _waits_for_who_led(self, meta: Meta, lease_s: float) -> bool:
        """Leave a Redis that lacks what was read here to whoever led then, for a lease; whether it has not ended yet."""
        now = self._loop.time()
        if self._behind != (meta.tenure, meta.number):
            self._behind = meta.tenure, meta.number
            self._heard_at = now
        return await self._waits(self._heard_at + lease_s + self._respect_s(meta))

    async def _waits(self, until: float) -> bool:
        """Leave the lead to whoever may live until then, and to who waits beside this node and has come further."""
        history = self._furthest()
        outdone = await self._namespace.outdone((0, 0) if history is None else history.settled)
        left_s = until - self._loop.time()
        if outdone or left_s > 0:
            await asyncio.sleep(POLL_S if outdone else min(left_s, POLL_S))
        return outdone or left_s > 0

    def _respect_s(self, meta: Meta | None) -> float:
        """How much longer than a lease a node waits, so that those come first who know more of what was told.

        That is whoever has led last, as far as it knows; then who has read what Redis lacks; and last, where no leader was
        heard to live at a Redis that may have taken the place of another, who knows nothing more than it has.
        """
        best = self._furthest()
        if best is not None and self._known is not None and best is self._known[0]:
            return 0.0
        if best is not None and (meta is None or best.knows_more_than(meta.history)):
            return RESPECT_S
        return 2 * RESPECT_S if self._newcomer else 0.0

    async def _hesitates(self, meta: Meta | None) -> bool:
        """Leave it to nodes that lead fewer namespaces for a moment; whether one of them was faster."""
        self._spread.leads(self._namespace.name, None)
        pause_s = self._spread.hesitation_s(self._node.address, self._namespace.name)
        if not pause_s:
            return False
        await asyncio.sleep(pause_s)
        seen = await self._namespace.read()
        return (seen and seen.position) != (meta and meta.position)

    async def _wish(self) -> None:
        """Ask the leader for the namespace, where it leads too many."""
        now = self._loop.time()
        if now - self._wished_at >= WISH_S and self._spread.wish(self._node.address) == self._namespace.name:
            self._wished_at = now
            if not await self._namespace.findable():
                return  # it would be handed over, and taken back
            await self._namespace.wish(self._node.address, self._spread.count(self._node.address))

    async def _lapsed(self, tenure: object, leader: str) -> Replica | None:
        """Take over, unless the leader has committed since what was read last."""
        meta = await self._namespace.read()
        if meta is None or meta.tenure != tenure:
            return None
        if not self._journal.history.includes(meta.position):
            await self._load()  # the journal is lost, or cut off
            return None
        if self._newcomer and await self._waits(self._loop.time()):
            return None
        self._log.warning("the leader has not been heard of for its lease", leader=leader)
        if await self._hesitates(meta):
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
            self._log.info("the journal does not go back to where this node is; reading the records")
            await self._load()
            return None
        for news in found:
            if isinstance(news, Committed) and self._mirror is not None:
                self._mirror.follow(news)
        return found

    async def _load(self) -> None:
        """Read everything anew. Where that is broken off there is no replica: the old one does not fit any more."""
        self._mirror = None
        state = await load(self._namespace, self._journal, self._log)
        if state is None:
            return
        if self._known is not None and not self._known[0].ahead_of(self._journal.position):
            self._known = None
        self._heard_at = self._loop.time()  # what was read may be news
        replica = Replica()
        replica.apply(state)
        self._mirror = Mirror(replica)
        if not self._leads:
            self._log.info("caught up, and following", held=len(replica.manager.table.held))

    async def _take_over(self, meta: Meta | None, *, unmoved: bool) -> Replica | None:
        """Lead, if nobody else was faster. Nobody commits any more then, and what is missing here can be read."""
        await self._namespace.verify()  # last, for another may have become the master while this node waited
        self.since = self._loop.time()
        base = await self._namespace.take_over(self._node, meta, unmoved=unmoved)
        if base is None:
            return None
        self._leads = True
        best, found = self._best(), self._namespace.history.without(self._untold)
        if best is not None and best[0].knows_more_than(found) and not self._told_all(found, best[0]):
            # Redis now has a leader behind the old state: what is known here follows on that, whatever happens meanwhile.
            self._known, self._mirror = (best[0].at((self._namespace.tenure.epoch, 1)), best[1]), None
            return await self._write_anew(*self._known)
        lost = self._journal.history.knows_more_than(self._namespace.history)  # which nobody was told, so be it
        if self._mirror is None or lost or not await self._reached(base):
            await self._load()
        self._leads = self._mirror is not None  # or all is lost again, and there is nothing here to lead from
        return None if self._mirror is None else self._mirror.replica

    def _told_all(self, found: History, known: History) -> bool:
        """Whether Redis has all that this node told when it led, and nobody else has told anything since."""
        return found.settled == self._told and known.settled[0] == found.settled[0]

    async def _reached(self, base: Position) -> bool:
        """Whether the journal has led here to where the last leader stopped."""
        while not self._journal.history.includes(base):
            if await self._read(None) == []:
                return False
        return True

    def _furthest(self) -> History | None:
        """How far this node has seen the namespace come, of what it could still write."""
        if self._known is None or (self._mirror is not None and self._known[0].position < self._journal.position):
            return None if self._mirror is None else self._journal.history
        return self._known[0]

    def _best(self) -> tuple[History, Batch] | None:
        """The same, and what there was then."""
        history = self._furthest()
        if self._known is not None and history is self._known[0]:
            return self._known
        return None if history is None or self._mirror is None else (history, self._mirror.replica.whole())

    async def _write_anew(self, history: History, state: Batch) -> Replica | None:
        """Redis has lost what a leader had told already; but we have seen it. None where somebody else was faster."""
        self._log.warning("Redis has lost commits that this node has seen; writing the whole state anew")
        self.since = self._loop.time()
        try:
            await self._namespace.write_anew(self._node, state, history)
        except Superseded as error:
            self._log.info("another node was faster", why=str(error))
            self._leads = False
            return None
        self._leads = True
        replica = Replica()
        replica.apply(state)
        return replica
