"""How the namespaces spread over the nodes that are up, without anybody who decides it.

Each node sees who leads the namespaces that it serves itself, and goes by two rules. When a namespace has no leader, it
takes it over the later the more it leads already. When some node leads two more than itself, it leaves a wish for one of
those, and the leader, who looks for wishes now and then, hands it over. So nodes that serve the same namespaces come to
differ by one at most, and then nothing moves any more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from hashlib import blake2b

from genie.storage.redis.keyspace import Keyspace, LeaderEpoch, Meta
from genie.storage.redis.replica import LocalReplica
from genie.storage.store import Node

HESITATION_S = 0.1
"""How much later a node takes over for each namespace that it leads, and again for each more than another leads."""
LONGEST_S = 0.5
"""The most of both: so all nodes may lead many, and who leads fewest needs no longer than this."""
GIVEN_S = 1.0
"""How much later a node takes one over that it has just given away: else who leads many would often be faster again."""
TOO_MANY = 2
"""By how many more a node must lead than another before it hands one over: moving the last would only turn it round."""


class LeadershipBalancer:
    """Who leads what, by address, of the namespaces that this node serves."""

    def __init__(self) -> None:
        self._leaders: dict[str, str] = {}
        self._given: dict[str, str] = {}
        """What this node has handed over, and to whom, until it hears who leads it."""

    def leads(self, namespace: str, address: str | None) -> None:
        """Who is known to lead it now; None: nobody is."""
        if address is None:
            self._leaders.pop(namespace, None)
        else:
            self._leaders[namespace] = address
            self._given.pop(namespace, None)

    def count(self, address: str) -> int:
        """How many it leads."""
        return sum(leader == address for leader in self._leaders.values())

    def hesitation_s(self, own: str, namespace: str) -> float:
        """How long this node should leave a namespace that nobody leads to nodes that lead fewer."""
        count = self.count(own)
        more = count - min(Counter(self._leaders.values()).values(), default=0)
        hesitation_s = min(HESITATION_S * count, LONGEST_S) + (min(HESITATION_S * more, LONGEST_S) if count else 0)
        return hesitation_s + (GIVEN_S if namespace in self._given else 0)

    def give(self, namespace: str, own: str, other: str, count: int) -> bool:
        """Whether this node should hand a namespace over to another that led so many when it asked.

        If so it counts as gone, and as the other's: who asks again before it leads the first gets no second.
        """
        given = sum(receiver == other for receiver in self._given.values())
        if other == own or self.count(own) - max(count, self.count(other) + given) < TOO_MANY:
            return False
        self.leads(namespace, None)
        self._given[namespace] = other
        return True

    def wish(self, own: str) -> str | None:
        """The namespace that this node should ask for, if any: one at a time, and of several nodes each another."""
        counts = Counter(self._leaders.values())
        most, leads = max(
            ((address, count) for address, count in counts.items()), key=lambda it: it[1], default=("", 0)
        )
        if leads - counts[own] < TOO_MANY:
            return None
        its = [namespace for namespace, leader in self._leaders.items() if leader == most]
        return min(its, key=lambda namespace: blake2b(f"{own} {namespace}".encode()).digest())


# -- Who comes first to take over a namespace: whoever leads and may live, then who knows more of what was told, and --------

RESPECT_S = 1.0
"""What the last leader is given to come back first, where Redis has lost something: as long as it may pause by then."""
POLL_S = 0.1
"""How often is looked whether the time is over."""


class Candidacy:
    """What one node leaves to others, from what it has heard and what it knows."""

    def __init__(self, namespace: Keyspace, knowledge: LocalReplica, node: Node, balancer: LeadershipBalancer) -> None:
        self._namespace = namespace
        self._knowledge = knowledge
        self._node = node
        self._balancer = balancer
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        """When there was news of a leader, or of Redis, last."""
        self.newcomer = namespace.replaceable
        """No leader was heard to live at this Redis, and it may know less than was told by one that it lacks."""
        self._behind: tuple[LeaderEpoch, int] | None = None
        """Where Redis stands since it was seen to have gone back behind what is known here."""
        self._nobody_since: float | None = None
        """Since when the namespace says nothing of itself."""

    def interrupted(self) -> None:
        """Redis could not be reached. Perhaps the leader can't reach it either, so its lease begins anew."""
        self.heard()
        self._nobody_since = None
        self.newcomer = self._namespace.replaceable

    def heard(self) -> None:
        """There is news."""
        self._heard_at = self._loop.time()

    def somebody(self) -> None:
        """The namespace says something of itself."""
        self._nobody_since = None

    def left_s(self, wait_s: float) -> float:
        """How long until nothing was heard for so long."""
        return self._heard_at + wait_s - self._loop.time()

    def respect_s(self, meta: Meta | None) -> float:
        """How much longer than a lease a node waits, so that those come first who know more of what was told.

        That is whoever has led last, as far as it knows; then who has read what Redis lacks; and last, where no leader was
        heard to live at a Redis that may have taken the place of another, who knows nothing more than it has.
        """
        known = self._knowledge
        if known.has_led_last:
            return 0.0
        if known.furthest is not None and (meta is None or known.more_than(meta.history)):
            return RESPECT_S
        return 2 * RESPECT_S if self.newcomer else 0.0

    async def waits_where_nothing_is(self, *, lost: bool) -> bool:
        """Leave a namespace that says nothing of itself to whoever led it; `lost`: it has just come to this."""
        if lost or self._nobody_since is None:  # somebody may have led it since the last look, and live
            self._nobody_since = self._loop.time()
        return await self._waits(self._nobody_since + self._node.lease_ms / 1000 + self.respect_s(None))

    async def waits_for_who_led(self, meta: Meta) -> bool:
        """Leave a Redis that lacks what was read here to whoever led then, for a lease; whether it has not ended yet."""
        if self._behind != (meta.tenure, meta.number):
            self._behind = meta.tenure, meta.number
            self.heard()
        lease_s = (meta.node or self._node).lease_ms / 1000
        return await self._waits(self._heard_at + lease_s + self.respect_s(meta))

    async def waits_for_others(self) -> bool:
        """Leave the lead to who waits beside this node and has come further."""
        return await self._waits(self._loop.time())

    async def hesitates(self, meta: Meta | None) -> bool:
        """Leave it to nodes that lead fewer namespaces for a moment; whether one of them was faster."""
        self._balancer.leads(self._namespace.name, None)
        pause_s = self._balancer.hesitation_s(self._node.address, self._namespace.name)
        if not pause_s:
            return False
        await asyncio.sleep(pause_s)
        seen = await self._namespace.read()
        return (seen and seen.position) != (meta and meta.position)

    async def _waits(self, until: float) -> bool:
        """Leave the lead to whoever may live until then, and to who waits beside this node and has come further."""
        history = self._knowledge.furthest
        outdone = await self._namespace.outdone((0, 0) if history is None else history.settled)
        left_s = until - self._loop.time()
        if outdone or left_s > 0:
            await asyncio.sleep(POLL_S if outdone else min(left_s, POLL_S))
        return outdone or left_s > 0
