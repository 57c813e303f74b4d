"""What one node knows of a namespace that it does not lead: what it has read, and what there was when it led.

A Redis may turn out to know less, for another has taken its place. Then the nodes have what is left of what was told.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from genie.storage.base import Batch, Replica
from genie.storage.history import History, Position
from genie.storage.journal import Journal
from genie.storage.mirror import Mirror


class Known(NamedTuple):
    """Everything that there was when the namespace had come so far."""

    history: History
    state: Batch


class Led(NamedTuple):
    """What a node knew when it stopped leading, and how far of that it had told: what is behind may as well be lost."""

    known: Known
    told: Position


class Knowledge:
    """Of these two the one that has come further. `untold` are batches that this node sent and told nobody of: some Redis
    may have them, and another may not.
    """

    def __init__(self, journal: Journal, led: Led | None, untold: Collection[Position]) -> None:
        self._journal = journal
        self._led = None if led is None else led.known
        self._told = None if led is None else led.told
        self._untold = untold
        self.mirror: Mirror | None = None
        """What was read, as far as the journal has come. None where nothing was, or it fell behind."""

    @property
    def furthest(self) -> History | None:
        """How far this node has seen the namespace come, of what it could still write."""
        if self._led is None or (self.mirror is not None and self._led.history.position < self._journal.position):
            return None if self.mirror is None else self._journal.history
        return self._led.history

    @property
    def best(self) -> Known | None:
        """The same, and what there was then."""
        if self.has_led_last:
            return self._led
        return None if self.mirror is None else Known(self._journal.history, self.mirror.replica.whole())

    @property
    def has_led_last(self) -> bool:
        """Whether nobody has led since, as far as this node knows."""
        return self._led is not None and self.furthest is self._led.history

    def more_than(self, other: History) -> bool:
        """Whether it has something on the way of the other that the other lacks."""
        furthest = self.furthest
        return furthest is not None and furthest.knows_more_than(other)

    def missing(self, history: History) -> Known | None:
        """What must be written anew where Redis has come so far: None if it has all that was told."""
        found, furthest = history.without(self._untold), self.furthest
        if furthest is None or not furthest.knows_more_than(found):
            return None
        told_all = found.settled == self._told and furthest.settled[0] == found.settled[0]
        return None if told_all else self.best

    def read(self, replica: Replica) -> None:
        """Everything was read anew, and this is it."""
        if self._led is not None and not self._led.history.ahead_of(self._journal.position):
            self._led = None
        self.mirror = Mirror(replica)

    def a_leader_lives(self) -> None:
        """It has the last word, not who has led before."""
        self._led = None

    def forget(self) -> None:
        """Another way is the one that counts."""
        self.mirror = self._led = None

    def keep(self, known: Known) -> None:
        """Let this alone count until it is written."""
        self._led, self.mirror = known, None
