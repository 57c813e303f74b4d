"""A proxy that cuts a connection at the message that it is told: before it, within it, or behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Literal

import orjson

from proxy import serving

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


class Cutter:
    """Forwards to a port on the loopback. `fired` is set when the cut that was asked for is made."""

    def __init__(self, target: int, split: Split) -> None:
        self.target = target
        self.port = 0
        self.fired = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self._split = split
        self._cut: Cut | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def arm(self, cut: Cut | None) -> None:
        """Make one cut, on whichever connection its message comes first."""
        self._cut = cut
        self.fired.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        ends = [writer]
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self.target)
            ends.append(back_writer)
            ways = [
                asyncio.create_task(self._forward(reader, back_writer, to_server=True)),
                asyncio.create_task(self._forward(back_reader, writer, to_server=False)),
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
            self.tasks.discard(task)
            for end in ends:
                end.close()  # what was forwarded goes out before

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool) -> None:
        rest = b""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                for piece, kind in self._split(rest + data):
                    if not kind:
                        rest = piece
                        break
                    cut = self._cut
                    if cut is not None and (cut.to_server, cut.kind) == (to_server, kind):
                        self._cut = None
                        self.fired.set()
                        if cut.place != "before":
                            writer.write(piece if cut.place == "behind" else piece[: len(piece) // 2])
                        return
                    writer.write(piece)
                await writer.drain()


def cutting(target: int, split: Split) -> AbstractAsyncContextManager[Cutter]:
    """A cutter that serves."""
    return serving(Cutter(target, split))
