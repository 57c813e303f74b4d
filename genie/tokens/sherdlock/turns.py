"""One after another, by transaction.

What a transaction holds is free to the same transaction. So two asks of one transaction at the same time could be given
the same token; they take turns. Asks of different transactions never wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Turns:
    """The transactions whose turn it is, and for each those who come next."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: dict[str, deque[asyncio.Future[None]]] = {}

    def turn(self, transaction: str) -> Turn:
        """`async with` it."""
        return Turn(self._next, transaction)


class Turn:
    """A transaction's turn, from when it comes until it is left."""

    __slots__ = ("_next", "_transaction")

    def __init__(self, nexts: dict[str, deque[asyncio.Future[None]]], transaction: str) -> None:
        self._next = nexts
        self._transaction = transaction

    async def __aenter__(self) -> None:
        line = self._next.get(self._transaction)
        if line is None:
            self._next[self._transaction] = deque()
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(place)
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():
                self._leave()  # it came, and nobody is there to use it
            else:
                line.remove(place)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        line = self._next[self._transaction]
        while line:
            place = line.popleft()
            if not place.done():
                place.set_result(None)
                return
        del self._next[self._transaction]
