"""A RESP proxy in front of a real Redis, or a scripted Redis without one: tests decide the reply to each command.

It forwards one command at a time and waits for its reply, so that tests can cut a connection between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

Command = tuple[bytes, ...]


@dataclass
class Rule:
    """What happens to the next `times` commands with a name; "*": to the next commands of any name.

    `reply` is sent without forwarding the command; without it the command is forwarded. `cut` ends the connection, "before"
    the command is forwarded or "after" that, without the reply. With `kills` all connections end then, as if the client had
    died, and no further ones are served. `held` delays the reply until it is set.
    """

    name: str
    reply: bytes | None = None
    times: int = 1
    cut: str = ""
    kills: bool = False
    held: asyncio.Event | None = None
    met: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last of these commands was processed."""


def error(text: str) -> bytes:
    """Return an error reply in RESP."""
    return b"-" + text.encode() + b"\r\n"


def encoded(value: object) -> bytes:
    """Return a reply in RESP: a text, a number, None, or a list of those."""
    if isinstance(value, list | tuple):
        return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))
    if isinstance(value, int):
        return b":%d\r\n" % value
    if value is None:
        return b"$-1\r\n"
    data = str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


class Relay:
    """Listens on the loopback. `script` returns the reply to a command without a rule, or None to forward it to `target`.

    Without a target such a command never gets a reply.
    """

    def __init__(self, target: int = 0, script: Callable[[Command], bytes | None] | None = None) -> None:
        self.target = target
        self.port = 0
        self.seen: list[tuple[int, Command]] = []
        """All commands in the order of their arrival, each with the number of its connection."""
        self.connections = 0
        self._script = script or (lambda _: None)
        self._rules: list[Rule] = []
        self._is_dead = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def names(self) -> list[str]:
        """Return the names of all commands so far."""
        return [command[0].decode().upper() for _, command in self.seen]

    def rule(self, rule: Rule) -> Rule:
        """Add a rule; rules for the same name apply one after the other."""
        self._rules.append(rule)
        return rule

    def say(self, name: str, reply: bytes, times: int = 1) -> Rule:
        """Reply so to the next commands with a name."""
        return self.rule(Rule(name, reply, times))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number, back = self.connections, None
        try:
            if self._is_dead:
                return
            if self.target:
                back = await asyncio.open_connection("127.0.0.1", self.target)
            while True:
                command = await read_command(reader)
                self.seen.append((number, command))
                if not await self._process(command, writer, back):
                    break
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # asyncio's streams would log a cancelled task
        finally:
            self._tasks.discard(task)
            writer.transport.abort()
            if back is not None:
                back[1].transport.abort()

    async def _process(
        self,
        command: Command,
        writer: asyncio.StreamWriter,
        back: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None,
    ) -> bool:
        rule = self._take_rule(command)
        reply = self._script(command) if rule is None else rule.reply
        if rule is not None and rule.cut == "before":
            self._cut(rule)
            return False
        if reply is None:
            if back is None:
                await asyncio.Event().wait()
            assert back is not None
            back[1].write(encode_command(command))
            reply = await read_reply(back[0])
        if rule is not None:
            if not rule.times:
                rule.met.set()
            if rule.held is not None:
                await rule.held.wait()
            if rule.cut:
                self._cut(rule)
                return False
        writer.write(reply)
        await writer.drain()
        return True

    def _cut(self, rule: Rule) -> None:
        rule.met.set()
        if rule.kills:
            self._is_dead = True
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()

    def _take_rule(self, command: Command) -> Rule | None:
        name = command[0].decode().upper()
        for rule in self._rules:
            if rule.name in (name, "*") and rule.times:
                rule.times -= 1
                return rule
        return None

    async def end(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def encode_command(command: Command) -> bytes:
    """Encode a command in RESP."""
    return b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in command)


async def read_command(reader: asyncio.StreamReader) -> Command:
    """Read the next command; EOFError at the end."""
    head = await reader.readuntil(b"\r\n")
    parts = []
    for _ in range(int(head[1:])):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        parts.append((await reader.readexactly(size + 2))[:-2])
    return tuple(parts)


async def read_reply(reader: asyncio.StreamReader) -> bytes:
    """Read the next reply, without decoding it."""
    head = await reader.readuntil(b"\r\n")
    size = int(head[1:]) if head[:1] in b"$*" else -1
    if head[:1] == b"$" and size >= 0:
        return head + await reader.readexactly(size + 2)
    if head[:1] == b"*":
        for _ in range(size):
            head += await read_reply(reader)
    return head


@asynccontextmanager
async def relay(
    target: int = 0, script: Callable[[Command], bytes | None] | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Relay]:
    """Run a relay on a free port."""
    relay_ = Relay(target, script)
    server = await asyncio.start_server(relay_.serve, host, 0, limit=1 << 24)
    relay_.port = server.sockets[0].getsockname()[1]
    try:
        yield relay_
    finally:
        server.close()
        with suppress(OSError):
            await relay_.end()
