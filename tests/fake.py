"""A server that says what the test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson

from ports import free_port
from servers import WAIT_S


def pong(ref: str) -> str:
    return f'{{"command":"pong","payload":{{"ref":"{ref}"}}}}'


def locked(ref: str, id: int = 101, expires_in: int | None = None) -> str:
    left = "" if expires_in is None else f',"expiresIn":{expires_in}'
    return f'{{"command":"locked","payload":{{"id":{id},"fence":{id},"ref":"{ref}"{left}}}}}'


def released(ref: str, reason: str, id: int = 101) -> str:
    return f'{{"command":"released","payload":{{"id":{id},"reason":"{reason}","ref":"{ref}"}}}}'


def error(code: str, message: str = "no", **more: object) -> str:
    return orjson.dumps({"command": "error", "payload": {"code": code, "message": message, **more}}).decode()


class Line:
    """One connection as the server has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def expect(self, command: str) -> dict[str, Any]:
        """The next command. A client that asks meanwhile whether the server is there is told so."""
        while True:
            async with asyncio.timeout(WAIT_S):
                line = await self.reader.readline()
            assert line, f"the client left, and did not send {command}"
            message = orjson.loads(line)
            if message["command"] == command:
                return message["payload"]
            assert message["command"] == "ping", f"the client sent {message}, not {command}"
            self.say(pong(message["payload"]["ref"]))

    def say(self, *lines: str) -> None:
        self.writer.write("".join(line + "\n" for line in lines).encode())

    async def grant(self, id: int = 101) -> None:
        ref = (await self.expect("request"))["ref"]
        self.say(locked(ref, id))

    async def release(self, id: int = 101, reason: str = "success") -> None:
        payload = await self.expect("release")
        assert payload["id"] == id
        self.say(released(payload["ref"], reason, id))

    async def cancel(self, ref: str, id: int = 101, reason: str = "success") -> None:
        assert await self.expect("release") == {"ref": ref}
        self.say(released(ref, reason, id))

    async def bye(self) -> None:
        payload = await self.expect("bye")
        self.say(orjson.dumps({"command": "bye", "payload": payload}).decode())
        self.cut()

    def cut(self) -> None:
        self.writer.transport.abort()


class Fake:
    """Knows a session from its second connection on, and then tells what is in `last_words`.

    With `refusal` it answers `hello` with that; with `silent` it says nothing of its own. `namespace` is what it welcomes to,
    None for that of the `hello`.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.lines: asyncio.Queue[Line] = asyncio.Queue()
        self.open: list[Line] = []
        self.sessions: set[str] = set()
        self.last_words: list[str] = []
        self.refusal: str | None = None
        self.silent = False
        self.namespace: str | None = "n"
        self.hellos: list[dict[str, Any]] = []

    async def accept(self) -> Line:
        """The next connection, when it has been welcomed or refused."""
        async with asyncio.timeout(WAIT_S):
            return await self.lines.get()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        self.open.append(line)
        if not self.silent:
            with suppress(AssertionError, OSError):  # it may leave again at once
                await self.greet(line)
        self.lines.put_nowait(line)

    async def greet(self, line: Line) -> None:
        hello = await line.expect("hello")
        self.hellos.append(hello)
        session, namespace = hello["session"], self.namespace or hello["namespace"]
        await line.expect("ping")
        if self.refusal is not None:
            line.say(self.refusal, self.refusal)
            return
        resumed = "true" if session in self.sessions else "false"
        fields = (
            f'"protocol":1,"server":"fake/1","namespace":"{namespace}","resumed":{resumed},"quiet":true,"ref":"hello"'
        )
        welcome = f'{{"command":"welcome","payload":{{{fields}}}}}'
        line.say(welcome, *(self.last_words if session in self.sessions else ()), pong("resume"))
        self.sessions.add(session)


@asynccontextmanager
async def fake_server(port: int | None = None) -> AsyncIterator[Fake]:
    """At a port that nobody else gets when it is closed, unless one is given."""
    fake = Fake(free_port() if port is None else port)
    server = await asyncio.start_server(fake.take, "127.0.0.1", fake.port, limit=1 << 21)
    try:
        yield fake
    finally:
        server.close()
        for line in fake.open:
            line.writer.transport.abort()
            with suppress(OSError):
                await line.writer.wait_closed()
