"""Work in slices: whoever looks at much lets the locks have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

import msgspec
from msgspec import Struct

from genie.admin.models import Answer, ApiError
from genie.errors import Code

SLICE: Final = 1_000
"""Work between two pauses. One is about a microsecond: a row of a table looked at, a few hundred bytes written."""


class Pace:
    """Counts work and pauses. Not time: so what it does is the same on every machine and each time."""

    def __init__(self) -> None:
        self._done = 0
        self.most = 0
        """The most work that was ever done without a pause."""

    async def did(self, work: int) -> bool:
        """So much more was done. Returns whether there was a pause: then everything may have changed."""
        self._done += work
        self.most = max(self.most, self._done)
        if self._done < SLICE:
            return False
        await self.pause()
        return True

    async def pause(self) -> None:
        """Let others have their turn."""
        self._done = 0
        await asyncio.sleep(0)


# -- One question after the other, and one answer for all who ask the same at about the same time --------

FRESH_S = 0.5
"""For so long an answer is given again."""
MOST_KEPT = 16
MOST_AT_ONCE = 64
"""Questions that wait for their turn. It is also that of the locks: more would take too much of it."""


class Turns:
    """However many ask, at most one slice is worked on between two turns of the event loop."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._turn = asyncio.Lock()
        self._asked = 0
        self._kept: dict[Hashable, tuple[float, Body]] = {}

    async def answer(self, key: Hashable, make: Callable[[], Awaitable[Body]]) -> Body:
        """The answer that `make` makes, or that it made for the same key within half a second."""
        if self._asked >= MOST_AT_ONCE:
            raise ApiError(503, Code.TOO_MANY, f"{MOST_AT_ONCE} questions wait for their answers; ask again later")
        self._asked += 1
        try:
            async with self._turn:
                now = asyncio.get_running_loop().time()
                self._kept = {known: kept for known, kept in self._kept.items() if now - kept[0] < FRESH_S}
                if key not in self._kept:
                    await self.pace.pause()
                    body = await make()
                    if len(self._kept) >= MOST_KEPT:
                        del self._kept[next(iter(self._kept))]
                    self._kept[key] = asyncio.get_running_loop().time(), body
                return self._kept[key][1]
        finally:
            self._asked -= 1


# -- An answer as JSON, in slices: some are of several megabytes --------

PIECE_BYTES = 16 << 10
"""An answer comes in pieces of about so much, each to be sent by itself."""
BYTES_OF_WORK = 256
"""So many bytes are as much work as looking at one row."""

Body = tuple[bytes, ...]
"""An encoded answer, in pieces."""

_encode = msgspec.json.Encoder().encode


async def encode(answer: Answer, pace: Pace) -> Body:
    """A large answer, whose lists are written item by item. (No field at its top may be left out by a default.)"""
    pieces: list[bytes] = []
    piece = bytearray(b"{")
    for index, field in enumerate(msgspec.structs.fields(answer)):
        piece += b',"' if index else b'"'
        piece += field.encode_name.encode() + b'":'
        value = getattr(answer, field.name)
        if not isinstance(value, list) or not value or not isinstance(value[0], Struct):
            piece += _encode(value)
            continue
        before = b"["
        for item in value:
            line = _encode(item)
            piece += before
            piece += line
            before = b","
            if len(piece) >= PIECE_BYTES:
                pieces.append(bytes(piece))
                piece.clear()
            await pace.did(1 + len(line) // BYTES_OF_WORK)
        piece += b"]"
    piece += b"}"
    return (*pieces, bytes(piece))
