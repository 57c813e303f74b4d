"""The calls whose answers are due on one connection, and which of them an answer belongs to."""

from __future__ import annotations

from collections import deque

from genie.client.calls import Call, Extend, Inspect, Ping, Release, Request
from genie.protocol import messages


class Due:
    """Requests by their `ref`, releases and extensions by their id, pings and inspections in their order."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self._by_id: dict[int, list[Release | Extend]] = {}
        self._in_order: deque[Ping | Inspect] = deque()
        self._number = 0

    def add(self, call: Call) -> None:
        """A call has been sent."""
        self._number += 1
        call.number = self._number
        match call:
            case Request():
                self.requests[call.ref] = call
            case Release():
                self._by_id.setdefault(call.id, []).append(call)
            case Extend():
                self._by_id.setdefault(call.request.id, []).append(call)
            case Ping() | Inspect():
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

    def take_next(self, kind: type[Ping | Inspect]) -> Ping | Inspect | None:
        """The oldest ping or inspection, taken out; None if it is not of this kind."""
        if self._in_order and isinstance(self._in_order[0], kind):
            return self._in_order.popleft()
        return None

    def take_meant(self, error: messages.Error.Payload) -> Call | None:
        """The call that an error means, taken out: the request with its `ref`, or the oldest that fits its id.

        An inspection of an id may be meant by an error with that id. Of two that fit, the older: the server answers in
        order.
        """
        if error.ref is not None and error.ref in self.requests:
            return self.requests.pop(error.ref)
        by_id = self.first(error.id) if error.id is not None else None
        in_order = self._in_order[0] if self._in_order else None
        if error.id is not None and not (isinstance(in_order, Inspect) and in_order.id == error.id):
            in_order = None
        if in_order is not None and (by_id is None or in_order.number < by_id.number):
            return self._in_order.popleft()
        return self.take(by_id.id if isinstance(by_id, Release) else by_id.request.id) if by_id is not None else None

    @property
    def owes(self) -> bool:
        """Whether the id of an abandoned request, or the answer to a release that nobody waits for, is to come."""
        return any(request.abandoned for request in self.requests.values()) or any(
            isinstance(call, Release) and call.waiter is None for calls in self._by_id.values() for call in calls
        )

    def take_all(self) -> list[Call]:
        """Everything, the connection being gone: requests first, then the others in the order of their ids."""
        calls: list[Call] = [*self.requests.values()]
        for by_id in self._by_id.values():
            calls += by_id
        calls += self._in_order
        self.requests.clear()
        self._by_id.clear()
        self._in_order.clear()
        return calls
