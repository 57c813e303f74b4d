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

from genie.storage.redis.election import Candidacy, LeadershipBalancer
from genie.storage.redis.keyspace import Keyspace, Meta
from genie.storage.redis.log import AT_ONCE, BatchCommitted, EpochStarted, LogReader, LogTruncated, Position
from genie.storage.redis.replica import LocalReplica, PriorLeadership, Snapshot, load
from genie.storage.store import LeadershipLost, Node, StateMachine

log = structlog.get_logger()

LONGEST_WAIT_MS = 1_000
"""How long one call may wait for news: Redis, or the network to it, may die without a word."""
BREATH_S = 0.01
"""Between two calls, where there is news all the time: so that they don't cost Redis what the commits do."""
WISH_S = 1.0
"""How often a wish for the namespace is repeated."""


class Follower:
    """What one node knows of a namespace that it does not lead.

    `following` is told who leads, whenever that changes. `led` is what the node knows from when it led, `untold` the
    batches that it sent then and told nobody of.
    """

    def __init__(
        self,
        namespace: Keyspace,
        journal: LogReader,
        node: Node,
        balancer: LeadershipBalancer,
        following: Callable[[str | None], None],
        led: PriorLeadership | None = None,
        untold: Collection[Position] = (),
    ) -> None:
        self._log = log.bind(namespace=namespace.name)
        self._namespace = namespace
        self._journal = journal
        self._node = node
        self._balancer = balancer
        self._tell = following
        self._wished_at = -inf
        self._loop = asyncio.get_running_loop()
        self._knowledge = LocalReplica(journal, led, untold)
        self._precedence = Candidacy(namespace, self._knowledge, node, balancer)
        self._leads = False
        self.since = 0.0
        """Since when this node leads: when it began to take over."""

    def interrupted(self) -> None:
        """Redis could not be reached."""
        self._precedence.interrupted()
        self._following(None)

    async def lead(self) -> StateMachine:
        """Follow until this node leads. To be called again after an error: it goes on where it was."""
        while True:
            meta = await self._namespace.read()
            if meta is None:
                replica = await self._nobody()
            else:
                self._precedence.somebody()
                replica = await self._follow(meta)
            if replica is not None:
                await self._namespace.unlink_others()
                self._balancer.leads(self._namespace.name, self._node.address)
                return replica

    def _following(self, leader: str | None) -> None:
        self._balancer.leads(self._namespace.name, leader)
        self._tell(leader)

    async def _nobody(self) -> StateMachine | None:
        """The namespace is new, or Redis has lost everything. A leader that lives will write it anew: wait a lease."""
        self._following(None)
        lost = await self._namespace.wait()
        if await self._precedence.waits_where_nothing_is(lost=lost):
            return None
        if await self._precedence.hesitates(None):
            return None
        best = self._knowledge.best
        if best is not None and best.history.position > (0, 0):
            await self._namespace.verify()
            return await self._write_anew(best)
        return await self._take_over(None, unmoved=False)

    async def _follow(self, meta: Meta) -> StateMachine | None:
        """Follow whoever leads. Returns the replica where this node leads now, None where there is something new to see."""
        succeeds = meta.node is not None and self._node.is_restart_of(meta.node)
        lacks = self._journal.position > (0, 0) and not meta.history.includes(self._journal.position)
        if meta.node is None or (succeeds and not self._precedence.newcomer):
            return await self._unled(meta, lacks=lacks)
        self._following(None if succeeds else meta.node.address)
        if self._knowledge.mirror is None:
            await self._load()
            return None  # another may lead by now
        knows_more = self._knowledge.more_than(meta.history)
        if lacks and not knows_more:
            # Two have led, cut off from each other, and the Redis that is left has the last word.
            self._log.warning("Redis is led on from another state than this node has seen; reading the records")
            self._knowledge.forget()
            return None
        if knows_more and (lacks or self._precedence.newcomer):
            return await self._behind(meta)
        return await self._listen(meta, meta.node)

    async def _unled(self, meta: Meta, *, lacks: bool) -> StateMachine | None:
        """Nobody leads, by what Redis says; or this node did before it was started again."""
        newcomer = self._precedence.newcomer
        if newcomer and self._knowledge.mirror is None:
            await self._load()
            return None
        if (lacks or newcomer) and await self._precedence.waits_for_who_led(meta):
            return None  # who led what Redis lacks may live, and not know yet that there is another master
        if meta.node is None and await self._precedence.hesitates(meta):
            return None
        return await self._take_over(meta, unmoved=False)

    async def _behind(self, meta: Meta) -> StateMachine | None:
        """Redis has gone back behind what is known here: whoever leads writes it anew, or if nobody does in a lease, we."""
        if await self._precedence.waits_for_who_led(meta):
            return None
        return await self._take_over(meta, unmoved=True)

    async def _listen(self, meta: Meta, leader: Node) -> StateMachine | None:
        """Take in what one leader commits, until it has not been heard of for its lease, or another begins."""
        lease_s = leader.lease_ms / 1000
        wait_s = lease_s + self._precedence.respect_s(meta)
        while True:
            left_s = self._precedence.left_s(wait_s)
            found = await self._read(min(ceil(left_s * 1000), LONGEST_WAIT_MS) if left_s > 0 else None)
            if found is None:
                return None
            if not found and left_s <= 0:
                return await self._lapsed(meta.tenure, leader.address)
            for news in found:
                self._precedence.heard()
                if news.position > meta.position:  # else it may have come with the state of another Redis
                    self._precedence.newcomer, wait_s = False, lease_s
                    self._knowledge.a_leader_lives()
                if isinstance(news, EpochStarted) or news.resigned:
                    return None
            if not found and await self._moved_on(meta):
                return None
            await self._wish()
            if 0 < len(found) < AT_ONCE:
                await asyncio.sleep(BREATH_S)

    async def _wish(self) -> None:
        """Ask the leader for the namespace, where it leads too many."""
        now = self._loop.time()
        if now - self._wished_at >= WISH_S and self._balancer.wish(self._node.address) == self._namespace.name:
            self._wished_at = now
            if not await self._namespace.findable():
                return  # it would be handed over, and taken back
            await self._namespace.wish(self._node.address, self._balancer.count(self._node.address))

    async def _lapsed(self, tenure: object, leader: str) -> StateMachine | None:
        """Take over, unless the leader has committed since what was read last."""
        meta = await self._namespace.read()
        if meta is None or meta.tenure != tenure:
            return None
        if not self._journal.history.includes(meta.position):
            await self._load()  # the journal is lost, or cut off
            return None
        if self._precedence.newcomer and await self._precedence.waits_for_others():
            return None
        self._log.warning("the leader has not been heard of for its lease", leader=leader)
        if await self._precedence.hesitates(meta):
            return None
        replica = await self._take_over(meta, unmoved=True)
        self._precedence.heard()
        return replica

    async def _moved_on(self, meta: Meta) -> bool:
        """Whether Redis has gone back behind what was read, or another way: the journal would not say so."""
        seen = await self._namespace.read()
        return seen is None or seen.tenure != meta.tenure or seen.number < self._journal.position[1]

    async def _read(self, wait_ms: int | None) -> list[EpochStarted | BatchCommitted] | None:
        """Take in what the journal has. None where the records had to be read: another may lead by now."""
        try:
            found = await self._journal.read(wait_ms)
        except LogTruncated:
            self._log.info("the journal does not go back to where this node is; reading the records")
            await self._load()
            return None
        for news in found:
            if isinstance(news, BatchCommitted) and self._knowledge.mirror is not None:
                self._knowledge.mirror.follow(news)
        return found

    async def _load(self) -> None:
        """Read everything anew. Where that is broken off there is no replica: the old one does not fit any more."""
        self._knowledge.mirror = None
        state = await load(self._namespace, self._journal, self._log)
        if state is None:
            return
        self._precedence.heard()  # what was read may be news
        replica = StateMachine()
        replica.apply(state)
        self._knowledge.read(replica)
        if not self._leads:
            self._log.info("caught up, and following", held=len(replica.manager.table.held))

    async def _take_over(self, meta: Meta | None, *, unmoved: bool) -> StateMachine | None:
        """Lead, if nobody else was faster. Nobody commits any more then, and what is missing here can be read."""
        await self._namespace.verify()  # last, for another may have become the master while this node waited
        self.since = self._loop.time()
        base = await self._namespace.take_over(self._node, meta, unmoved=unmoved)
        if base is None:
            return None
        self._leads = True
        history = self._namespace.history
        missing = self._knowledge.missing(history)
        if missing is not None:
            # Redis now has a leader behind the old state: what is known here follows on that, whatever happens meanwhile.
            on = Snapshot(missing.history.at((self._namespace.tenure.epoch, 1)), missing.state)
            self._knowledge.keep(on)
            return await self._write_anew(on)
        lost = self._journal.history.knows_more_than(history)  # which nobody was told, so be it
        if self._knowledge.mirror is None or lost or not await self._reached(base):
            await self._load()
        mirror = self._knowledge.mirror
        self._leads = mirror is not None  # or all is lost again, and there is nothing here to lead from
        return None if mirror is None else mirror.replica

    async def _reached(self, base: Position) -> bool:
        """Whether the journal has led here to where the last leader stopped."""
        while not self._journal.history.includes(base):
            if await self._read(None) == []:
                return False
        return True

    async def _write_anew(self, known: Snapshot) -> StateMachine | None:
        """Redis has lost what a leader had told already; but we have seen it. None where somebody else was faster."""
        self._log.warning("Redis has lost commits that this node has seen; writing the whole state anew")
        self.since = self._loop.time()
        try:
            await self._namespace.write_anew(self._node, known.state, known.history)
        except LeadershipLost as error:
            self._log.info("another node was faster", why=str(error))
            self._leads = False
            return None
        self._leads = True
        replica = StateMachine()
        replica.apply(known.state)
        return replica
