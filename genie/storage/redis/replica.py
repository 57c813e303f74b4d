"""What a follower has of its namespace: a replica, and behind it what was read lately, as it is stored.

Most locks are over soon. Of those that have come and gone in between nothing need be read, so that following costs a small
part of leading, and a node can stand by for many namespaces.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from genie.storage.redis.keyspace import Keyspace, read_counters
from genie.storage.redis.log import BatchCommitted, EpochHistory, LogReader, LogTruncated, Position
from genie.storage.redis.records import Reader
from genie.storage.store import Batch, Change, StateMachine

MOST_BEHIND = 2_000
"""Ids of which the replica may lack the last word: so many are taken in within a few hundredths of a second."""


class LazyReplica:
    """Follows batch by batch. `replica` is complete whenever it is asked for."""

    def __init__(self, replica: StateMachine) -> None:
        self._replica = replica
        self._reader = Reader()
        self._behind: dict[bytes, bytes] = {}
        """The last word on each id since, as it is stored; nothing where nothing is to be known of it any more."""
        self._counters = b""

    def follow(self, news: BatchCommitted) -> None:
        """Take note of one batch."""
        self._behind |= news.records
        self._counters = news.counters
        if len(self._behind) > MOST_BEHIND:
            self._catch_up()

    @property
    def replica(self) -> StateMachine:
        """The state that the batches so far have led to."""
        if self._counters:
            self._catch_up()
        return self._replica

    def _catch_up(self) -> None:
        behind, self._behind = self._behind, {}
        _, batch = read_counters(self._counters)
        self._counters = b""
        batch.changes = {
            id_: change
            for id_, change in sorted(decoded(behind, self._reader).items())
            if change is not None or id_ in self._replica
        }
        self._replica.apply(batch)


def decoded(records: dict[bytes, bytes], reader: Reader) -> dict[int, Change]:
    """Records by id, as they are stored, as changes."""
    return {int(id_): reader.read(int(id_), record) if record else None for id_, record in records.items()}


# -- Read all of a namespace while its leader goes on to change it --------


async def load(namespace: Keyspace, journal: LogReader, log: FilteringBoundLogger) -> Batch | None:
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
        except LogTruncated:
            log.warning("the journal does not go back to where loading began; loading again")


async def _catch_up(namespace: Keyspace, journal: LogReader, reader: Reader, state: Batch) -> bool:
    """Bring loaded records to one point in time. False where somebody has written them anew meanwhile."""
    meta = await namespace.read()
    while meta is not None and journal.position < meta.position:
        found = await journal.read(None)
        for news in found:
            if isinstance(news, BatchCommitted):
                _, counted = read_counters(news.counters)
                state.changes |= decoded(news.records, reader)
                state.next_id, state.next_fence = counted.next_id, counted.next_fence
                state.clock_ms = counted.clock_ms
        if not found:
            raise LogTruncated
    return meta is not None and journal.position >= meta.position


# -- What one node knows of a namespace that it does not lead: what it has read, and what there was when it led --------


class Snapshot(NamedTuple):
    """Everything that there was when the namespace had come so far."""

    history: EpochHistory
    state: Batch


class PriorLeadership(NamedTuple):
    """What a node knew when it stopped leading, and how far of that it had told: what is behind may as well be lost."""

    known: Snapshot
    told: Position


class LocalReplica:
    """Of these two the one that has come further. `untold` are batches that this node sent and told nobody of: some Redis
    may have them, and another may not.
    """

    def __init__(self, journal: LogReader, led: PriorLeadership | None, untold: Collection[Position]) -> None:
        self._journal = journal
        self._led = None if led is None else led.known
        self._told = None if led is None else led.told
        self._untold = untold
        self.mirror: LazyReplica | None = None
        """What was read, as far as the journal has come. None where nothing was, or it fell behind."""

    @property
    def furthest(self) -> EpochHistory | None:
        """How far this node has seen the namespace come, of what it could still write."""
        if self._led is None or (self.mirror is not None and self._led.history.position < self._journal.position):
            return None if self.mirror is None else self._journal.history
        return self._led.history

    @property
    def best(self) -> Snapshot | None:
        """The same, and what there was then."""
        if self.has_led_last:
            return self._led
        return None if self.mirror is None else Snapshot(self._journal.history, self.mirror.replica.snapshot())

    @property
    def has_led_last(self) -> bool:
        """Whether nobody has led since, as far as this node knows."""
        return self._led is not None and self.furthest is self._led.history

    def more_than(self, other: EpochHistory) -> bool:
        """Whether it has something on the way of the other that the other lacks."""
        furthest = self.furthest
        return furthest is not None and furthest.knows_more_than(other)

    def missing(self, history: EpochHistory) -> Snapshot | None:
        """What must be written anew where Redis has come so far: None if it has all that was told."""
        found, furthest = history.without(self._untold), self.furthest
        if furthest is None or not furthest.knows_more_than(found):
            return None
        told_all = found.settled == self._told and furthest.settled[0] == found.settled[0]
        return None if told_all else self.best

    def read(self, replica: StateMachine) -> None:
        """Everything was read anew, and this is it."""
        if self._led is not None and not self._led.history.ahead_of(self._journal.position):
            self._led = None
        self.mirror = LazyReplica(replica)

    def a_leader_lives(self) -> None:
        """It has the last word, not who has led before."""
        self._led = None

    def forget(self) -> None:
        """Another way is the one that counts."""
        self.mirror = self._led = None

    def keep(self, known: Snapshot) -> None:
        """Let this alone count until it is written."""
        self._led, self.mirror = known, None
