"""The way by which a namespace came to where it is: whether one state of it is before another, or on another branch.

A Redis may go back to an earlier state (its last writes were lost with its machine), or two may have gone on from one
state, each with a leader of its own (they were cut off from each other). By the numbers of epochs alone these two can't be
told apart, and they want the opposite: in the first whoever knows more writes it anew, in the second whoever the surviving
Redis does not know must give in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

Position = tuple[int, int]
"""How far the batches have come: the epoch, and the number of the batch within it."""

LONGEST = 50
"""Epochs that are remembered. A Redis that has gone back by more is believed."""


@dataclass(frozen=True, slots=True)
class History:
    """A position, last, behind the last batch of each of the epochs before that led to it."""

    ends: tuple[Position, ...] = ((0, 0),)

    @property
    def position(self) -> Position:
        """Where it has come to."""
        return self.ends[-1]

    @property
    def settled(self) -> Position:
        """Where it had come to before those who led last and committed nothing: they have told nobody anything."""
        return next((end for end in reversed(self.ends) if end[1]), self.ends[0])

    def includes(self, position: Position) -> bool:
        """Whether it has come by there, or has just got there."""
        return any(epoch == position[0] and position[1] <= number for epoch, number in self.ends)

    def ahead_of(self, position: Position) -> bool:
        """Whether it has come by there, and gone on."""
        return position != self.position and self.includes(position)

    def knows_more_than(self, other: History) -> bool:
        """Whether something was committed on this way that the other, which has come by there, does not have."""
        return self.settled != other.settled and self.ahead_of(other.settled)

    def without(self, untold: Collection[Position]) -> History:
        """The same, where some batches are known to have been told to nobody: a state with them is none that somebody saw."""
        return History(tuple((epoch, number - ((epoch, number) in untold)) for epoch, number in self.ends))

    def at(self, position: Position) -> History:
        """The same, further on in the same epoch or in the one that follows."""
        ends = self.ends[:-1] if position[0] == self.position[0] else self.ends
        return History((*ends, position)[-LONGEST:])


def read_position(stored: bytes) -> Position:
    """A position, as it is stored; nothing is the very beginning."""
    epoch, _, number = stored.partition(b"-")
    return int(epoch or 0), int(number or 0)


def read_ends(stored: bytes) -> tuple[Position, ...]:
    """Positions, as they are stored."""
    return tuple(map(read_position, stored.split()))


def ends(history: History) -> str:
    """The same as it is stored."""
    return " ".join(f"{epoch}-{number}" for epoch, number in history.ends)
