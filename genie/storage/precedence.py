"""Who comes first to take over a namespace: whoever leads and may live, then who knows more of what was told, and
of those that know the same who leads fewer namespaces.

Nobody decides it. A node leaves the lead to the others for a time of its own, which is the longer the less it knows, and
those that wait at one Redis leave each other a mark there of how far they have come.
"""

from __future__ import annotations

import asyncio

from genie.storage.knowledge import Knowledge
from genie.storage.namespace import Meta, Namespace, Tenure
from genie.storage.node import Node
from genie.storage.spread import Spread

RESPECT_S = 1.0
"""What the last leader is given to come back first, where Redis has lost something: as long as it may pause by then."""
POLL_S = 0.1
"""How often is looked whether the time is over."""


class Precedence:
    """What one node leaves to others, from what it has heard and what it knows."""

    def __init__(self, namespace: Namespace, knowledge: Knowledge, node: Node, spread: Spread) -> None:
        self._namespace = namespace
        self._knowledge = knowledge
        self._node = node
        self._spread = spread
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        """When there was news of a leader, or of Redis, last."""
        self.newcomer = namespace.replaceable
        """No leader was heard to live at this Redis, and it may know less than was told by one that it lacks."""
        self._behind: tuple[Tenure, int] | None = None
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
        self._spread.leads(self._namespace.name, None)
        pause_s = self._spread.hesitation_s(self._node.address, self._namespace.name)
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
