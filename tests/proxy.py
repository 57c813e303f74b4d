"""A small faulty proxy between Genie and Redis: it can swallow replies, or cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol, TypeVar


class Proxy:
    """Forwards bytes. `lose_next_reply` lets the next command through, and cuts in place of its reply."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.lost = asyncio.Event()
        self.bytes_a_second: float | None = None
        self._lose_after: bytes | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def lose_next_reply(self, to: bytes) -> None:
        """The next command that contains `to` reaches Redis; its reply does not come back."""
        self._lose_after = to
        self.lost.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            await self._forward(reader, writer)
        finally:
            self.tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            return
        losing = asyncio.Event()

        async def forth() -> None:
            while data := await reader.read(1 << 16):
                if self._lose_after is not None and self._lose_after in data:
                    self._lose_after = None
                    losing.set()
                back_writer.write(data)
                await back_writer.drain()
                if self.bytes_a_second is not None:
                    await asyncio.sleep(len(data) / self.bytes_a_second)

        async def back() -> None:
            while data := await back_reader.read(1 << 16):
                if losing.is_set():
                    self.lost.set()
                    return
                writer.write(data)
                await writer.drain()

        ways = [asyncio.create_task(forth()), asyncio.create_task(back())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, back_writer):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()


class Serving(Protocol):
    """A proxy, whatever it does to what it forwards."""

    port: int
    tasks: set[asyncio.Task[None]]
    """One for each connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...


P = TypeVar("P", bound=Serving)


@asynccontextmanager
async def serving(proxy: P) -> AsyncIterator[P]:
    """Let a proxy serve at a free port; in the end its connections are ended, too."""
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in proxy.tasks:
            task.cancel()
        await asyncio.gather(*proxy.tasks, return_exceptions=True)


def faulty_proxy(target: int) -> AbstractAsyncContextManager[Proxy]:
    return serving(Proxy(target))
