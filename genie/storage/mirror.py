"""What a follower has of its namespace: a replica, and behind it what was read lately, as it is stored.

Most locks are over soon. Of those that have come and gone in between nothing need be read, so that following costs a small
part of leading, and a node can stand by for many namespaces.
"""

from __future__ import annotations

from genie.storage.base import Change, Replica
from genie.storage.journal import Committed
from genie.storage.namespace import read_counters
from genie.storage.records import Reader

MOST_BEHIND = 2_000
"""Ids of which the replica may lack the last word: so many are taken in within a few hundredths of a second."""


class Mirror:
    """Follows batch by batch. `replica` is complete whenever it is asked for."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._reader = Reader()
        self._behind: dict[bytes, bytes] = {}
        """The last word on each id since, as it is stored; nothing where nothing is to be known of it any more."""
        self._counters = b""

    def follow(self, news: Committed) -> None:
        """Take note of one batch."""
        self._behind |= news.records
        self._counters = news.counters
        if len(self._behind) > MOST_BEHIND:
            self._catch_up()

    @property
    def replica(self) -> Replica:
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
            if change is not None or self._replica.knows(id_)
        }
        self._replica.apply(batch)


def decoded(records: dict[bytes, bytes], reader: Reader) -> dict[int, Change]:
    """Records by id, as they are stored, as changes."""
    return {int(id_): reader.read(int(id_), record) if record else None for id_, record in records.items()}
