"""What is to be known of a lock, whichever shell it came from."""

from __future__ import annotations

from genie.client.calls import Request, State


class Held:
    """The facts of a lock that was granted."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {' '.join(self.resources)}: {self._request.state.name.lower()}>"

    def _check_managed(self) -> None:
        if self._request.state is State.DETACHED:
            raise RuntimeError(
                f"lock {self.id} was detached: use client.extend({self.id}, seconds) and client.release({self.id})"
            )

    @property
    def id(self) -> int:
        """The server's number for this lock; whoever has it can release the lock."""
        return self._request.id

    @property
    def fence(self) -> int:
        """The fencing token: a number that grows with every grant, by which a store can refuse a late writer."""
        return self._request.fence

    @property
    def resources(self) -> tuple[str, ...]:
        """What is locked, as on the wire (`shared:NAME`, `exclusive:NAME`) and in the order it was asked for."""
        return self._request.resources
