"""A proxy on the loopback. It cuts a connection at the message that it is told, passes bytes on slowly, or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import orjson

Place = Literal["before", "within", "behind"]
PLACES: tuple[Place, ...] = ("before", "within", "behind")


@dataclass(frozen=True)
class Cut:
    """Where to cut: at the next message of a kind that goes to the server, or comes from it."""

    to_server: bool
    kind: str
    place: Place

    def __str__(self) -> str:
        return f"{self.place} a {self.kind}"


Split = Callable[[bytes], Iterator[tuple[bytes, str]]]
"""Pieces of what was read, each with its kind, and at last what is not whole yet, with none."""
Decide = Callable[[str, bool], Place | None]
"""Where to cut at a message, if at all: its kind, and whether it goes to the server."""


def lines(data: bytes) -> Iterator[tuple[bytes, str]]:
    """Genie's wire."""
    *whole, rest = data.split(b"\n")
    for line in whole:
        yield line + b"\n", orjson.loads(line)["command"]
    yield rest, ""


def chunks(data: bytes) -> Iterator[tuple[bytes, str]]:
    """Redis' wire, as it is read: Genie sends each command in one piece."""
    for name in ("EVALSHA", "EVAL", "XREAD", "HGETALL"):
        if name.encode() in data[:64]:
            yield data, name
            break
    else:
        yield data, "reply"
    yield b"", ""


class Proxy:
    """Forwards to a port on the loopback. `fired` is set when the cut that was asked for is made."""

    def __init__(self, target: int, split: Split, decide: Decide | None = None) -> None:
        self.target = target
        self.port = 0
        self.fired = asyncio.Event()
        self.cuts: Counter[str] = Counter()
        """The kinds of messages at which it has cut."""
        self.closed = False
        """Whether who comes is sent away."""
        self.bytes_a_second: float | None = None
        """How slowly it passes on what goes to the server."""
        self._split = split
        self._decide = decide or self._armed
        self._cut: Cut | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._deaf: set[str] = set()
        self._hears = asyncio.Event()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def arm(self, cut: Cut | None) -> None:
        """Make one cut, on whichever connection its message comes first."""
        self._cut = cut
        self.fired.clear()

    def cut(self) -> None:
        """Cut every connection that there is, wherever it is."""
        for writer in self._writers:
            writer.transport.abort()

    def part(self, *hosts: str) -> None:
        """Pass nothing on, either way, for those who come from these addresses: their connections stay, and hang."""
        self._deaf = set(hosts)
        self._hears.set()
        self._hears = asyncio.Event()

    def _armed(self, kind: str, to_server: bool) -> Place | None:
        cut = self._cut
        if cut is None or (cut.to_server, cut.kind) != (to_server, kind):
            return None
        self._cut = None
        return cut.place

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = {writer}
        host = writer.get_extra_info("peername")[0]
        try:
            if self.closed:
                return
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self.target)
            ends.add(back_writer)
            self._writers |= ends
            ways = [
                asyncio.create_task(self._forward(reader, back_writer, host, to_server=True)),
                asyncio.create_task(self._forward(back_reader, writer, host, to_server=False)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # asyncio's streams would complain of a task that was cancelled
        finally:
            self._tasks.discard(task)
            self._writers -= ends
            for end in ends:
                end.close()  # what was forwarded goes out before

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, *, to_server: bool
    ) -> None:
        rest = b""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                while host in self._deaf:
                    await self._hears.wait()
                for piece, kind in self._split(rest + data):
                    if not kind:
                        rest = piece
                        break
                    if (place := self._decide(kind, to_server)) is not None:
                        self.cuts[kind] += 1
                        self.fired.set()
                        if place != "before":
                            writer.write(piece if place == "behind" else piece[: len(piece) // 2])
                        return
                    writer.write(piece)
                await writer.drain()
                if to_server and self.bytes_a_second is not None:
                    await asyncio.sleep(len(data) / self.bytes_a_second)

    async def end(self) -> None:
        """End what is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxy(target: int, split: Split, decide: Decide | None = None) -> AsyncIterator[Proxy]:
    """One that serves, at a free port."""
    made = Proxy(target, split, decide)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.end()
