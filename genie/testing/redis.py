"""A Redis in memory that speaks RESP in the simulated network, and has bad days when it is told to.

It knows the commands that the storage of Genie uses, and runs its Lua.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha1
from typing import Any, cast

from genie.testing.keys import Keys, Members, Stream, Undo
from genie.testing.network import Listener
from genie.testing.resp import Failure, Reader, Status, encode
from genie.testing.scripts import scripts
from genie.testing.transport import SimTransport

OK = Status(b"OK")

CUT_BEFORE, CUT_AFTER, REFUSE = "cut before", "cut after", "refuse"
"""What may become of a command: the connection ends before it is carried out, or after; or it is answered by an error."""

Fault = Callable[[list[bytes], str], str | None]
"""Given a command and the node that sent it, says what becomes of it; None if nothing does."""


class SimRedis:
    """The keys and the commands. `fault` is asked before each command that comes over a connection."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.fault: Fault = lambda _command, _who: None
        self.on_write: Callable[[list[Undo], str], None] = lambda _group, _who: None
        """Called after each command that has written something, with what it undid and the node that it came from."""
        self._scripts: dict[bytes, bytes] = {}
        self._clients: dict[_Client, None] = {}
        self._listener: Listener | None = None

    async def serve(self, host: str, port: int = 6379) -> None:
        """Take connections, as the node that is running."""
        loop = asyncio.get_running_loop()
        self._listener = cast("Listener", await loop.create_server(lambda: _Client(self, self._clients), host, port))

    def restart(self, lost_writes: int = 0) -> int:
        """End every connection and forget the scripts, and the last so many writes. Returns how many those were."""
        for client in list(self._clients):
            client.cut()
        self._scripts.clear()
        return self.keys.lose(lost_writes)

    def flush(self) -> None:
        """FLUSHALL."""
        self.keys.clear()

    def flush_scripts(self) -> None:
        """SCRIPT FLUSH."""
        self._scripts.clear()

    def execute(self, command: list[bytes]) -> object:
        """Carry out one command; `Failure` where it fails."""
        method = _COMMANDS.get(command[0].upper())
        if method is None:
            raise Failure(f"ERR unknown command '{command[0].decode()}'")
        return method(self, command)

    def carry_out(self, command: list[bytes], who: str = "") -> object:
        """The same as one write, which is lost as a whole or not at all. A failure is returned."""
        try:
            reply = self.execute(command)
        except Failure as failure:
            reply = failure
        written = self.keys.end_write()
        if written:
            self.on_write(written, who)
            for client in list(self._clients):
                client.look()
        return reply

    # -- commands -----------------------------------------------------------------------------------------

    def _ok(self, _command: list[bytes]) -> object:
        return OK

    def _ping(self, _command: list[bytes]) -> object:
        return Status(b"PONG")

    def _config(self, command: list[bytes]) -> object:
        settings = {b"appendonly": b"yes", b"maxmemory": b"0", b"maxmemory-policy": b"noeviction"}
        return {name: settings[name] for name in command[2:] if name in settings}

    def _script(self, command: list[bytes]) -> object:
        if command[1].upper() == b"FLUSH":
            self._scripts.clear()
            return OK
        sha = sha1(command[2]).hexdigest().encode()  # noqa: S324 - Redis names scripts so
        self._scripts[sha] = command[2]
        return sha

    def _eval(self, command: list[bytes]) -> object:
        self._scripts[sha1(command[1]).hexdigest().encode()] = command[1]  # noqa: S324
        return self._run(command[1], command)

    def _evalsha(self, command: list[bytes]) -> object:
        script = self._scripts.get(command[1])
        if script is None:
            raise Failure("NOSCRIPT No matching script. Please use EVAL.")
        return self._run(script, command)

    def _run(self, script: bytes, command: list[bytes]) -> object:
        last = 3 + int(command[2])
        return scripts().run(script, command[3:last], command[last:], self.execute)

    def _hset(self, command: list[bytes]) -> object:
        parts = command[2:]
        if len(parts) % 2 or not parts:
            raise Failure("ERR wrong number of arguments for 'hset' command")
        return sum(self.keys.put(command[1], parts[i], parts[i + 1]) for i in range(0, len(parts), 2))

    def _hdel(self, command: list[bytes]) -> object:
        return sum(self.keys.drop(command[1], field) for field in command[2:])

    def _hget(self, command: list[bytes]) -> object:
        return self.keys.hash(command[1]).get(command[2])

    def _hmget(self, command: list[bytes]) -> object:
        there = self.keys.hash(command[1])
        return [there.get(field) for field in command[2:]]

    def _hgetall(self, command: list[bytes]) -> object:
        return dict(self.keys.hash(command[1]))

    def _hlen(self, command: list[bytes]) -> object:
        return len(self.keys.hash(command[1]))

    def _hscan(self, command: list[bytes]) -> object:
        return [b"0", [part for item in self.keys.hash(command[1]).items() for part in item]]

    def _sadd(self, command: list[bytes]) -> object:
        return sum(self.keys.put(command[1], member, None, Members) for member in command[2:])

    def _srem(self, command: list[bytes]) -> object:
        return sum(self.keys.drop(command[1], member) for member in command[2:])

    def _smembers(self, command: list[bytes]) -> object:
        return set(self.keys.set(command[1]))

    def _del(self, command: list[bytes]) -> object:
        return sum(self.keys.delete(key) for key in command[1:])

    def _exists(self, command: list[bytes]) -> object:
        return sum(key in self.keys for key in command[1:])

    def _xadd(self, command: list[bytes]) -> object:
        key, place, most = command[1], 2, None
        options = []
        while command[place].upper() in (b"MAXLEN", b"NOMKSTREAM", b"~", b"=", b"MINID", b"LIMIT"):
            options.append(command[place].upper())
            if command[place].upper() in (b"MAXLEN", b"MINID", b"LIMIT"):
                place += 1 + (command[place + 1] in (b"~", b"="))
                if options[-1] == b"MAXLEN":
                    most = int(command[place])
            place += 1
        stream = self.keys.stream(key)
        if stream is None:
            if b"NOMKSTREAM" in options:
                return None
            stream = Stream()
            self.keys.create(key, stream)
        id_ = _stream_id(command[place], 0)
        if id_ <= stream.last:
            raise Failure("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        before, cut = stream.last, 0 if most is None else max(0, len(stream.entries) + 1 - most)
        gone = stream.entries[:cut]
        self.keys.note(key, lambda: stream.undo(before, gone))
        stream.entries.append((id_, command[place + 1 :]))
        stream.last = id_
        del stream.entries[:cut]
        return b"%d-%d" % id_

    def _xrange(self, command: list[bytes]) -> object:
        stream = self.keys.stream(command[1])
        first, last = _stream_id(command[2], 0), _stream_id(command[3], 1 << 63)
        found = [] if stream is None else [_entry(entry) for entry in stream.entries if first <= entry[0] <= last]
        return found[: int(command[5])] if len(command) > 4 else found

    def _xrevrange(self, command: list[bytes]) -> object:
        stream = self.keys.stream(command[1])
        last, first = _stream_id(command[2], 1 << 63), _stream_id(command[3], 0)
        found = [] if stream is None else [_entry(entry) for entry in stream.entries if first <= entry[0] <= last]
        found.reverse()
        return found[: int(command[5])] if len(command) > 4 else found

    def _xlen(self, command: list[bytes]) -> object:
        stream = self.keys.stream(command[1])
        return 0 if stream is None else len(stream.entries)

    def read(self, command: list[bytes]) -> object:
        """An XREAD that doesn't wait."""
        found = self.read_streams(_Read(self, command))
        return found if found is None else [list(item) for item in found.items()]

    def read_streams(self, read: _Read) -> dict[bytes, list[Any]] | None:
        """What is behind the ids that an XREAD names, or None."""
        found: dict[bytes, list[Any]] = {}
        for key, after in read.after.items():
            stream = self.keys.stream(key)
            entries = [] if stream is None else [_entry(entry) for entry in stream.entries if entry[0] > after]
            if entries:
                found[key] = entries[: read.count]
        return found or None


class _Read:
    """An XREAD."""

    def __init__(self, redis: SimRedis, command: list[bytes]) -> None:
        self.count: int | None = None
        self.block_ms: int | None = None
        place = 1
        while command[place].upper() != b"STREAMS":
            if command[place].upper() == b"COUNT":
                self.count = int(command[place + 1])
            elif command[place].upper() == b"BLOCK":
                self.block_ms = int(command[place + 1])
            place += 2
        names = command[place + 1 :]
        half = len(names) // 2
        self.after: dict[bytes, tuple[int, int]] = {}
        for key, id_ in zip(names[:half], names[half:], strict=True):
            if id_ == b"$":
                stream = redis.keys.stream(key)
                self.after[key] = (0, 0) if stream is None else stream.last
            else:
                self.after[key] = _stream_id(id_, 0)


class _Client(asyncio.Protocol):
    """One connection. A blocking read keeps the commands behind it waiting."""

    def __init__(self, redis: SimRedis, registry: dict[_Client, None]) -> None:
        self._redis = redis
        self._registry = registry
        self._reader = Reader()
        self._transport: SimTransport
        self._who = ""
        self._version = 2
        self._waiting: list[list[bytes]] = []
        self._read: _Read | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("SimTransport", transport)
        self._who = self._transport.connection.client.node.name
        self._registry[self] = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._registry.pop(self, None)
        self._read = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._waiting += self._reader.feed(data)
        self._go_on()

    def cut(self) -> None:
        self._transport.abort()

    def look(self) -> None:
        """Somebody has written: is it what this one reads?"""
        if self._read is not None:
            found = self._redis.read_streams(self._read)
            if found is not None:
                self._read_is_over(found)

    def _read_is_over(self, found: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._read = self._timer = None
        self._say(found)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._read is None and not self._transport.is_closing():
            self._take(self._waiting.pop(0))

    def _take(self, command: list[bytes]) -> None:
        fault = self._redis.fault(command, self._who)
        if fault is REFUSE:
            self._say(Failure("ERR it is a bad day"))
        elif fault is CUT_BEFORE:
            self.cut()
        else:
            reply = self._carry_out(command)
            if fault is CUT_AFTER:
                self.cut()
            elif self._read is None:
                self._say(reply)

    def _carry_out(self, command: list[bytes]) -> object:
        name = command[0].upper()
        if name == b"HELLO":
            self._version = int(command[1]) if len(command) > 1 else self._version
            return {b"server": b"redis", b"version": b"7.2.0", b"proto": self._version, b"mode": b"standalone"}
        if name == b"XREAD":
            read = _Read(self._redis, command)
            found = self._redis.read_streams(read)
            if found is not None or read.block_ms is None:
                return found if self._version > 2 or found is None else list(found.items())
            self._read = read
            if read.block_ms:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(read.block_ms / 1000, self._read_is_over, None)
            return None
        return self._redis.carry_out(command, self._who)

    def _say(self, reply: object) -> None:
        if isinstance(reply, dict) and self._version < 3 and reply and isinstance(next(iter(reply.values())), list):
            reply = [list(item) for item in reply.items()]
        self._transport.write(encode(reply, self._version))


def _stream_id(text: bytes, rest: int) -> tuple[int, int]:
    if text == b"-":
        return 0, 0
    if text == b"+":
        return 1 << 63, 1 << 63
    exclusive = text.startswith(b"(")
    first, dash, second = text.removeprefix(b"(").partition(b"-")
    return int(first), (int(second) if dash else rest) + exclusive


def _entry(entry: tuple[tuple[int, int], list[bytes]]) -> list[Any]:
    return [b"%d-%d" % entry[0], entry[1]]


_COMMANDS: dict[bytes, Callable[[SimRedis, list[bytes]], object]] = {
    b"AUTH": SimRedis._ok,
    b"CLIENT": SimRedis._ok,
    b"CONFIG": SimRedis._config,
    b"DEL": SimRedis._del,
    b"EVAL": SimRedis._eval,
    b"EVALSHA": SimRedis._evalsha,
    b"EXISTS": SimRedis._exists,
    b"HDEL": SimRedis._hdel,
    b"HGET": SimRedis._hget,
    b"HGETALL": SimRedis._hgetall,
    b"HLEN": SimRedis._hlen,
    b"HMGET": SimRedis._hmget,
    b"HSCAN": SimRedis._hscan,
    b"HSET": SimRedis._hset,
    b"PING": SimRedis._ping,
    b"SADD": SimRedis._sadd,
    b"SCRIPT": SimRedis._script,
    b"SELECT": SimRedis._ok,
    b"SMEMBERS": SimRedis._smembers,
    b"SREM": SimRedis._srem,
    b"UNLINK": SimRedis._del,
    b"XADD": SimRedis._xadd,
    b"XLEN": SimRedis._xlen,
    b"XRANGE": SimRedis._xrange,
    b"XREVRANGE": SimRedis._xrevrange,
}
