"""The calls whose answers are due on one connection, and which of them an answer belongs to."""

from __future__ import annotations

from collections import deque

from genie.client.calls import Extend, Inspect, Ping, Release
from genie.client.watches import Unwatch, Watch
from genie.protocol import messages

InOrder = Ping | Inspect | Watch | Unwatch
"""What is answered in the order in which it was sent."""


class Due:
    """Releases and extensions by their id, the others in their order."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[Release | Extend]] = {}
        self._in_order: deque[InOrder] = deque()
        self._number = 0

    def __bool__(self) -> bool:
        """Whether any answer is due."""
        return bool(self._by_id or self._in_order)

    def add(self, call: Release | Extend | InOrder) -> None:
        """A call has been sent."""
        self._number += 1
        call.number = self._number
        match call:
            case Release() | Extend():
                self._by_id.setdefault(call.id, []).append(call)
            case _:
                self._in_order.append(call)

    def first(self, id: int) -> Release | Extend | None:
        """The oldest release or extension of an id."""
        calls = self._by_id.get(id)
        return calls[0] if calls else None

    def take(self, id: int) -> Release | Extend:
        """The same, taken out."""
        calls = self._by_id[id]
        call = calls.pop(0)
        if not calls:
            del self._by_id[id]
        return call

    def take_next(self, kind: type[InOrder]) -> InOrder | None:
        """The oldest of those in order, taken out; None if it is not of this kind."""
        if self._in_order and isinstance(self._in_order[0], kind):
            return self._in_order.popleft()
        return None

    def take_meant(self, error: messages.Error.Payload) -> Release | Extend | InOrder | None:
        """The call that an error means, taken out: the oldest that fits its id.

        An inspection of an id may be meant by an error with that id. Of two that fit, the older: the server answers in
        order.
        """
        by_id = self.first(error.id) if error.id is not None else None
        in_order = self._in_order[0] if self._in_order else None
        if error.id is not None and not (isinstance(in_order, Inspect) and in_order.id == error.id):
            in_order = None
        if in_order is not None and (by_id is None or in_order.number < by_id.number):
            return self._in_order.popleft()
        return self.take(by_id.id) if by_id is not None else None

    @property
    def owes(self) -> bool:
        """Whether the answer to a release that nobody waits for is to come."""
        return any(
            isinstance(call, Release) and call.waiter is None for calls in self._by_id.values() for call in calls
        )

    def take_all(self) -> list[Release | Extend | InOrder]:
        """Everything, the connection being gone: what has an id first."""
        calls: list[Release | Extend | InOrder] = []
        for by_id in self._by_id.values():
            calls += by_id
        calls += self._in_order
        self._by_id.clear()
        self._in_order.clear()
        return calls
