"""A TCP proxy on the loopback, which cuts connections at chosen messages, or forwards bytes slowly or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import orjson

CutPosition = Literal["before", "within", "after"]
CUT_POSITIONS: tuple[CutPosition, ...] = ("before", "within", "after")


@dataclass(frozen=True)
class Cut:
    """Where to cut: at the next message of a kind, to the server or from it."""

    to_server: bool
    kind: str
    position: CutPosition

    def __str__(self) -> str:
        return f"{self.position} a {self.kind}"


Split = Callable[[bytes], Iterator[tuple[bytes, str]]]
"""Splits bytes into complete messages, each with its kind, and at the end the incomplete rest, with the kind ""."""
Decide = Callable[[str, bool], CutPosition | None]
"""Returns where to cut at a message, or None: its kind, and whether it goes to the server."""


def lines(data: bytes) -> Iterator[tuple[bytes, str]]:
    """Split messages of Genie's protocol."""
    *complete, rest = data.split(b"\n")
    for line in complete:
        yield line + b"\n", orjson.loads(line)["command"]
    yield rest, ""


def chunks(data: bytes) -> Iterator[tuple[bytes, str]]:
    """Return the bytes as one message of Redis: Genie sends each command, and each transaction, in one piece."""
    for name in ("MULTI", "WATCH", "EVAL", "XREAD"):
        if name.encode() in data[:64]:
            yield data, name
            break
    else:
        yield data, "reply"
    yield b"", ""


class Proxy:
    """Forwards to a port on the loopback. `fired` is set when the requested cut was proxy_."""

    def __init__(self, target: int, split: Split, decide: Decide | None = None) -> None:
        self.target = target
        self.port = 0
        self.fired = asyncio.Event()
        self.cuts: Counter[str] = Counter()
        """The number of cuts by kind of message."""
        self.closed = False
        """New connections are closed at once."""
        self.bytes_a_second: float | None = None
        """The limit of the bandwidth to the server."""
        self._split = split
        self._decide = decide or self._armed
        self._cut: Cut | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._blocked_hosts: set[str] = set()
        self._stalled_writers: set[asyncio.StreamWriter] = set()
        self._blocking_changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def arm(self, cut: Cut | None) -> None:
        """Make one cut, on the first connection with a matching message; None: make none."""
        self._cut = cut
        self.fired.clear()

    def cut(self) -> None:
        """Cut all connections at once."""
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Forward nothing more on the present connections, which stay open: they are half-open."""
        self._stalled_writers |= self._writers

    def block(self, *hosts: str) -> None:
        """Forward nothing, in either direction, for clients with these addresses; replaces the earlier ones."""
        self._blocked_hosts = set(hosts)
        self._blocking_changed.set()
        self._blocking_changed = asyncio.Event()

    def _armed(self, kind: str, to_server: bool) -> CutPosition | None:
        cut = self._cut
        if cut is None or (cut.to_server, cut.kind) != (to_server, kind):
            return None
        self._cut = None
        return cut.position

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = {writer}
        host = writer.get_extra_info("peername")[0]
        try:
            if self.closed:
                return
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self.target)
            writers.add(back_writer)
            self._writers |= writers
            directions = [
                asyncio.create_task(self._forward(reader, back_writer, host, to_server=True)),
                asyncio.create_task(self._forward(back_reader, writer, host, to_server=False)),
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # asyncio's streams would log a cancelled task
        finally:
            self._tasks.discard(task)
            self._writers -= writers
            for each in writers:
                each.close()  # after the forwarded bytes

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, *, to_server: bool
    ) -> None:
        """Forward one direction of a connection until it writers or is cut. `host` is the address of the client."""
        rest = b""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                while host in self._blocked_hosts or writer in self._stalled_writers:
                    await self._blocking_changed.wait()
                for piece, kind in self._split(rest + data):
                    if not kind:
                        rest = piece
                        break
                    if (position := self._decide(kind, to_server)) is not None:
                        self.cuts[kind] += 1
                        self.fired.set()
                        if position != "before":
                            writer.write(piece if position == "after" else piece[: len(piece) // 2])
                        return
                    writer.write(piece)
                await writer.drain()
                if to_server and self.bytes_a_second is not None:
                    await asyncio.sleep(len(data) / self.bytes_a_second)

    async def end(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxy(target: int, split: Split, decide: Decide | None = None) -> AsyncIterator[Proxy]:
    """Run a proxy on a free port."""
    proxy_ = Proxy(target, split, decide)
    server = await asyncio.start_server(proxy_.serve, "127.0.0.1", 0)
    proxy_.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy_
    finally:
        server.close()
        await proxy_.end()
