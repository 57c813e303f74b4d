"""No store at all: the locks end with the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from genie.storage.store import Batch, Node, Replica


class MemoryStore:
    """Commits at once, to nowhere."""

    durable = False
    full = False
    errors = 0

    async def open(
        self,
        node: Node,  # noqa: ARG002 - nobody else is there
        whole: Callable[[], Batch],  # noqa: ARG002 - nothing to lose
        following: Callable[[str | None], None],  # noqa: ARG002
    ) -> Replica:
        """An empty state."""
        return Replica()

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        """Done."""
        done(None)

    async def wanted(self) -> None:
        """Nobody ever asks."""
        await asyncio.Event().wait()

    async def resign(self) -> None:
        """There is nobody else."""

    async def close(self) -> None:
        """Nothing to let go of."""
