"""Whose requests they are, and what must end with them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from genie.core import Request

if TYPE_CHECKING:
    from genie.server.connection import Connection

ENDED_REFS = 10_000
"""Requests with a `ref` that are remembered beyond their end, for each session."""


class Session:
    """The requests of one connection: what goes when it goes, and which `ref` is which request."""

    __slots__ = ("_ended", "_refs", "bound", "connection")

    def __init__(self, connection: Connection) -> None:
        self.connection: Connection | None = connection
        self.bound: dict[int, Request] = {}
        """Those that end with the session: they wait, or are held with `onDisconnect: release`."""
        self._refs: dict[str, Request] = {}
        self._ended: deque[Request] | None = None  # most sessions never need it, and an empty one is 600 bytes

    def queued(self, request: Request) -> None:
        """A request of this session arrived."""
        self.bound[request.id] = request
        if request.ref is not None:
            self._refs[request.ref] = request

    def granted(self, request: Request) -> None:
        """A request of this session arrived and is held at once."""
        if request.release_on_disconnect:
            self.bound[request.id] = request
        if request.ref is not None:
            self._refs[request.ref] = request

    def locked(self, request: Request) -> None:
        """It is held."""
        if not request.release_on_disconnect:
            del self.bound[request.id]

    def released(self, request: Request) -> None:
        """It ended."""
        self.bound.pop(request.id, None)
        if request.ref is not None:
            if self._ended is None:
                self._ended = deque()
            self._ended.append(request)
            if len(self._ended) > ENDED_REFS:
                oldest = self._ended.popleft()
                if oldest.ref is not None and self._refs.get(oldest.ref) is oldest:
                    del self._refs[oldest.ref]

    def close(self) -> None:
        """Nobody is connected any more. What it holds may be held for long: keep nothing else."""
        self.connection = None
        self._refs.clear()
        self._ended = None

    def known(self, ref: str) -> Request | None:
        """The request that came with this `ref` before, if any."""
        return self._refs.get(ref)


def same(one: Request, other: Request) -> bool:
    """Whether two requests ask for the same, so that the second may be a repetition of the first."""
    return (
        one.shared == other.shared
        and one.exclusive == other.exclusive
        and one.transaction == other.transaction
        and one.priority == other.priority
        and one.queue_timeout_ms == other.queue_timeout_ms
        and one.transaction_timeout_ms == other.transaction_timeout_ms
        and one.release_on_disconnect == other.release_on_disconnect
    )
