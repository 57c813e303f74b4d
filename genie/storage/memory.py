"""No store at all: the locks end with the process."""

from __future__ import annotations

from collections.abc import Callable

from genie.storage.base import Batch, Replica


class MemoryStore:
    """Commits at once, to nowhere."""

    durable = False

    async def open(self, whole: Callable[[], Batch]) -> Replica:  # noqa: ARG002 - nothing to lose
        """An empty state."""
        return Replica()

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:  # noqa: ARG002
        """Done."""
        done(None)

    async def close(self) -> None:
        """Nothing to let go of."""
