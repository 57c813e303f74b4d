"""A server that says what the test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson

from support.processes.ports import free_port
from support.processes.servers import WAIT_S

PONG = '{"command":"pong","payload":{}}'

ANSWERS = {
    "bye": "bye",
    "pong": "ping",
    "watching": "watch",
    "unwatched": "unwatch",
    "inspected": "inspect",
    "extended": "extend",
    "released": "release",
}
"""Answers, and the commands that they answer."""


def locked(ref: str, id: int = 101, expires_in: int | None = None) -> str:
    left = "" if expires_in is None else f',"expiresIn":{expires_in}'
    return f'{{"command":"locked","payload":{{"id":{id},"fence":{id},"ref":"{ref}"{left}}}}}'


def released(reason: str, id: int = 101) -> str:
    return f'{{"command":"released","payload":{{"id":{id},"reason":"{reason}"}}}}'


def error(code: str, message: str = "no", **more: object) -> str:
    return orjson.dumps({"command": "error", "payload": {"code": code, "message": message, **more}}).decode()


class Line:
    """One connection as the server has it. `bye` is answered at once, and ends it; other commands are for `expect`.

    With `polite=False` that is for `expect`, too.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, polite: bool) -> None:
        self.reader, self.writer, self.polite = reader, writer, polite
        self.commands: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        """What the client sent; None at the end."""
        self.last = ""
        """The `ref` of the command that was expected last."""
        self.refs: dict[str, str] = {}
        """The same, of each kind."""

    async def listen(self) -> None:
        with suppress(OSError):
            while line := await self.reader.readline():
                message = orjson.loads(line)
                if message["command"] == "bye" and self.polite:
                    self.writer.write(line)
                    self.writer.close()
                else:
                    self.commands.put_nowait(message)
        self.commands.put_nowait(None)

    async def expect(self, command: str) -> dict[str, Any]:
        """The payload of the next command, without its `ref` where nothing but its answer needs it.

        A client that asks meanwhile whether the server is there is answered.
        """
        while True:
            async with asyncio.timeout(WAIT_S):
                message = await self.commands.get()
            assert message is not None, f"the client left, and did not send {command}"
            payload = message["payload"]
            self.last = self.refs[message["command"]] = payload.get("ref", "")
            if message["command"] == command:
                if command not in ("request", "hello") and len(payload) > 1:
                    del payload["ref"]
                return payload
            assert message["command"] == "ping", f"the client sent {message}, not {command}"
            self.say(PONG)

    async def rest(self) -> list[str]:
        """The commands that it still sends, up to the end of the connection."""
        left = []
        async with asyncio.timeout(WAIT_S):
            while (message := await self.commands.get()) is not None:
                left.append(message["command"])
        return left

    def say(self, *lines: str) -> None:
        """Send messages. An answer without a `ref` gets that of the last command of its kind that was expected."""
        self.writer.write("".join(self.with_ref(line) + "\n" for line in lines).encode())

    def with_ref(self, line: str) -> str:
        try:
            message = orjson.loads(line)
        except ValueError:
            return line  # a test of what a client does then
        kind = message["command"]
        ref = self.last if kind == "error" else self.refs.get(ANSWERS.get(kind, ""), "")
        if ref and "ref" not in message["payload"]:
            message["payload"]["ref"] = ref
        return orjson.dumps(message).decode()

    async def grant(self, id: int = 101) -> None:
        self.say(locked((await self.expect("request"))["ref"], id))

    async def release(self, id: int = 101, reason: str = "success") -> None:
        assert await self.expect("release") == {"id": id}
        self.say(released(reason, id))

    async def cancelled(self, ref: str, id: int = 101) -> None:
        """The client cancels a request whose id it does not know."""
        assert await self.expect("release") == {"ref": ref}
        self.say(released("success", id))

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
        self.polite = True
        self.namespace: str | None = "n"
        self.hellos: list[dict[str, Any]] = []

    async def accept(self) -> Line:
        """The next connection, when it has been welcomed or refused."""
        async with asyncio.timeout(WAIT_S):
            return await self.lines.get()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer, polite=self.polite)
        self.open.append(line)
        listening = asyncio.create_task(line.listen())
        if not self.silent:
            with suppress(AssertionError, OSError):  # it may leave again at once
                await self.greet(line)
        self.lines.put_nowait(line)
        await listening

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
        line.say(welcome, *(self.last_words if session in self.sessions else ()), PONG)
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
