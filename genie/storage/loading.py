"""Read all of a namespace while its leader goes on to change it."""

from __future__ import annotations

from structlog.typing import FilteringBoundLogger

from genie.storage.base import Batch, Change
from genie.storage.journal import Committed, Gap, Journal
from genie.storage.mirror import decoded
from genie.storage.namespace import Namespace, read_counters
from genie.storage.records import Reader


async def load(namespace: Namespace, journal: Journal, log: FilteringBoundLogger) -> Batch | None:
    """Read the records, and the journal on from before that, for they may have changed meanwhile.

    Returns everything as one batch, as it is where the journal is read from then on; None where there is nothing.
    """
    while True:
        meta = await namespace.read()
        if meta is None:
            return None
        state, reader = meta.state, Reader()
        loaded: dict[int, Change] = {}
        journal.start(meta.history)
        async for records in namespace.load():
            loaded |= decoded(records, reader)
        state.changes = loaded
        try:
            if await _catch_up(namespace, journal, reader, state):
                state.changes = {id_: state.changes[id_] for id_ in sorted(state.changes)}
                return state
        except Gap:
            log.warning("the journal does not go back to where loading began; loading again")


async def _catch_up(namespace: Namespace, journal: Journal, reader: Reader, state: Batch) -> bool:
    """Bring loaded records to one point in time. False where somebody has written them anew meanwhile."""
    meta = await namespace.read()
    while meta is not None and journal.position < meta.position:
        found = await journal.read(None)
        for news in found:
            if isinstance(news, Committed):
                _, counted = read_counters(news.counters)
                state.changes |= decoded(news.records, reader)
                state.next_id, state.next_fence = counted.next_id, counted.next_fence
                state.clock_ms = counted.clock_ms
        if not found:
            raise Gap
    return meta is not None and journal.position >= meta.position
