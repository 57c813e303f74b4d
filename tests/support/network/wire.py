"""A client of the bare wire, for tests: sends lines, waits for messages."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, ClassVar

import orjson

from support.processes.servers import WAIT_S


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    made: ClassVar[list[Wire]] = []
    """All of them, so that none is left open behind a test."""

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Wire:
        cls.made.append(cls(*await asyncio.open_connection(*address, limit=1 << 24)))
        return cls.made[-1]

    def send(self, command: str, **payload: Any) -> None:
        self.raw(orjson.dumps({"command": command, "payload": payload}) + b"\n")

    def raw(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self) -> tuple[str, dict[str, Any]]:
        """The next message; ("closed", {}) at the end."""
        async with asyncio.timeout(WAIT_S):
            line = await self.reader.readline()
        if not line:
            return "closed", {}
        message = orjson.loads(line)
        assert set(message) == {"command", "payload"}
        return message["command"], message["payload"]

    async def expect(self, command: str) -> dict[str, Any]:
        """The payload of the next message, which must be this one."""
        received, payload = await self.receive()
        assert received == command, (received, payload)
        return payload

    async def request(self, *resources: str, **payload: Any) -> int:
        """Ask, and return the id; what comes behind `queued` is left to be received."""
        self.send("request", resources=list(resources), **payload)
        return int((await self.expect("queued"))["id"])

    async def lock(self, *resources: str, **payload: Any) -> int:
        """Ask for what is free."""
        id_ = await self.request(*resources, **payload)
        assert (await self.expect("locked"))["id"] == id_
        return id_

    async def release(self, id_: int) -> str:
        self.send("release", id=id_)
        payload = await self.expect("released")
        assert payload["id"] == id_
        return str(payload["reason"])

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
