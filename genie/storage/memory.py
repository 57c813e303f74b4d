"""The store of a server without Redis: it stores nothing, and all locks end with the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from genie.roles import FollowerRole, StoreOutage
from genie.storage.store import Batch, Node, StateMachine, StoreMemory


class MemoryStore:
    """Stores nothing: every commit succeeds immediately, and this node always leads."""

    durable = False
    full = False
    failure_count = 0
    outage: StoreOutage | None = None

    async def open(
        self,
        node: Node,  # noqa: ARG002 - there is no other node
        snapshot: Callable[[], Batch],  # noqa: ARG002 - there is nothing to restore
        on_role_changed: Callable[[FollowerRole], None],  # noqa: ARG002 - this node is never a follower
    ) -> StateMachine:
        """Return an empty state at once: this node always leads."""
        return StateMachine()

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        """Call `done(None)` immediately, without storing `batch`."""
        done(None)

    async def wait_for_transfer_request(self) -> None:
        """Wait forever: there is no other node."""
        await asyncio.Event().wait()

    async def read_memory(self) -> StoreMemory | None:
        """Return None: the store keeps nothing."""

    async def resign(self) -> None:
        """Do nothing: there is no other node."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
