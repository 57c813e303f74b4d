"""Runs the cases for servers: connects to a server, sends commands and compares the answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conformance.cases import Case, CaseError
from conformance.matching import Mismatch, Variables, match, matches, show, substitute
from conformance.report import Failure, Result
from conformance.scripted_servers import encode

MAX_LINE_BYTES: Final = 1 << 24
MAX_TRANSCRIPT: Final = 60
MAX_SHOWN: Final = 1500
CONNECT_LIMIT_S: Final = 5.0
BYTEWISE_PAUSE_S: Final = 0.001

FOLLOWER: Final = "F"
"""The name of connections to the follower."""

Step = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """The server under test: `HOST:PORT`; a follower of it; and a token, if the server requires one."""

    address: str
    follower: str | None = None
    token: str | None = None


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPv6]:PORT`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


def is_reachable(address: str) -> bool:
    """Return whether a server accepts connections."""
    try:
        socket.create_connection(split_address(address), CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


class ClientConnection:
    """A connection of the kit to the server under test."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.reader = reader
        self.writer = writer

    async def read(self) -> dict[str, Any] | None:
        """Return the next message; None at the end of the connection."""
        try:
            line = await self.reader.readline()
        except ConnectionError:
            return None
        if not line:
            return None
        try:
            message = json.loads(line)
        except ValueError:
            raise Failure(f"{self.name} received a line that is not JSON: {line[:200]!r}") from None
        if not isinstance(message, dict) or set(message) != {"command", "payload"}:
            raise Failure(f"{self.name} received {show(message)}: a message is {{command, payload}}")
        return message

    def kill(self) -> None:
        """Abort the connection: the server receives a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class ServerCase:
    """The execution of one case. The methods `_do_…` execute the steps."""

    def __init__(self, case: Case, target: Target, limit_s: float) -> None:
        self._case = case
        self._target = target
        self._limit_s = limit_s
        self._started_at = time.monotonic()
        self.transcript: list[str] = []
        self._variables: Variables = {"run": f"{secrets.token_hex(6)}-"}
        if target.token is not None:
            self._variables["$token"] = target.token
        self._connections: dict[str, ClientConnection] = {}
        self._marks: dict[str, float] = {}

    async def run(self) -> None:
        """Execute the steps. Raises Failure if the server does not do what they expect."""
        try:
            for index, step in enumerate(self._case.steps, 1):
                await self._execute(index, step)
        finally:
            for connection in self._connections.values():
                connection.writer.transport.abort()

    async def _execute(self, index: int, step: Step) -> None:
        method = getattr(self, f"_do_{next(iter(step))}", None)  # the first key names the step
        if method is None:
            raise CaseError(f"{self._case.name}: unknown step {show(step)}")
        try:
            await method(step)
        except (Mismatch, Failure) as error:
            raise Failure(f"step {index}, {show(step, 160)}: {error}") from None
        except TimeoutError:
            raise Failure(f"step {index}, {show(step, 160)}: nothing within {self._limit_s:g} s") from None
        except OSError as error:
            raise Failure(f"step {index}, {show(step, 160)}: {error}") from None
        except (KeyError, TypeError) as error:
            raise CaseError(f"{self._case.name}: step {index}, {show(step)}: {error!r}") from error

    def _record(self, line: str) -> None:
        self.transcript.append(f"{time.monotonic() - self._started_at:7.3f} {line[:MAX_SHOWN]}")

    async def _at(self, step: Step) -> ClientConnection:
        """Return the connection of a step; open it if this is its first step."""
        name = step.get("on", "A")
        if name not in self._connections:
            address = self._target.follower if name == FOLLOWER else self._target.address
            host, port = split_address(str(address))
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
            self._connections[name] = ClientConnection(name, reader, writer)
        return self._connections[name]

    async def _next(self, connection: ClientConnection) -> dict[str, Any] | None:
        async with asyncio.timeout(self._limit_s):
            message = await connection.read()
        end = f"{connection.name} was closed by the server"
        self._record(end if message is None else f"{connection.name} <- {json.dumps(message, ensure_ascii=False)}")
        return message

    # -- steps --------------------------------------------------------------------------------------------

    async def _do_open(self, step: Step) -> None:
        """`{"open": NAME}`: open a connection. Other steps open their connection, too."""
        await self._at({"on": step["open"]})

    async def _do_send(self, step: Step) -> None:
        """`{"send": {…} or […], "on": NAME, "bytewise": true}`: send commands in one write."""
        connection = await self._at(step)
        sent = substitute(step["send"], self._variables)
        data = b"".join(map(encode, sent if isinstance(sent, list) else [sent]))
        self._record(f"{connection.name} -> {data.decode().strip()}")
        for part in [bytes([byte]) for byte in data] if step.get("bytewise") else [data]:
            connection.writer.write(part)
            if step.get("bytewise"):
                await asyncio.sleep(BYTEWISE_PAUSE_S)
        await self._drain(connection)

    async def _do_raw(self, step: Step) -> None:
        r"""`{"raw": TEXT, "on": NAME}`: send characters as bytes: `\u00ff` is the byte 255."""
        connection = await self._at(step)
        data = substitute(step["raw"], self._variables).encode("latin-1")
        self._record(f"{connection.name} -> {data[:MAX_SHOWN]!r}")
        connection.writer.write(data)
        await self._drain(connection)

    async def _drain(self, connection: ClientConnection) -> None:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(self._limit_s):
                await connection.writer.drain()

    async def _do_expect(self, step: Step) -> None:
        """`{"expect": {…}, "on": NAME}`: the next message on the connection."""
        message = await self._next(await self._at(step))
        if message is None:
            raise Failure("the server closed the connection")
        match(step["expect"], message, self._variables)

    async def _do_expectAll(self, step: Step) -> None:  # noqa: N802 - named after the step
        """`{"expectAll": […], "on": NAME}`: the next messages on the connection, in any order."""
        connection, remaining = await self._at(step), list(step["expectAll"])
        while remaining:
            message = await self._next(connection)
            found = next((part for part in remaining if matches(part, message, self._variables)), None)
            if found is None:
                raise Failure(f"{show(message)} matches none of {show(remaining)}")
            remaining.remove(found)

    async def _do_nothing(self, step: Step) -> None:
        """`{"nothing": ms, "on": NAME}`: no message arrives within this time."""
        connection = await self._at(step)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(step["nothing"] / 1000):
                message = await connection.read()
            raise Failure(f"received {show(message)}, expected nothing")

    async def _do_closed(self, step: Step) -> None:
        """`{"closed": NAME}`: the server closes the connection, without another message."""
        message = await self._next(await self._at({"on": step["closed"]}))
        if message is not None:
            raise Failure(f"received {show(message)}, expected the end of the connection")

    async def _do_close(self, step: Step) -> None:
        """`{"close": NAME}`: close the connection."""
        self._record(f"{step['close']} is closed")
        self._connections.pop(step["close"]).writer.close()

    async def _do_kill(self, step: Step) -> None:
        """`{"kill": NAME}`: abort the connection."""
        self._record(f"{step['kill']} is aborted")
        self._connections.pop(step["kill"]).kill()

    async def _do_halfClose(self, step: Step) -> None:  # noqa: N802 - named after the step
        """`{"halfClose": NAME}`: end sending on the connection."""
        self._record(f"{step['halfClose']} is half-closed")
        (await self._at({"on": step["halfClose"]})).writer.write_eof()

    async def _do_wait(self, step: Step) -> None:
        """`{"wait": ms}`: wait."""
        await asyncio.sleep(step["wait"] / 1000)

    async def _do_mark(self, step: Step) -> None:
        """`{"mark": NAME}`: remember the time."""
        self._marks[step["mark"]] = time.monotonic()

    async def _do_elapsed(self, step: Step) -> None:
        """`{"elapsed": [FROM, TO], "atLeast": ms}`: compare the time between two marks with a lower bound."""
        first, last = (self._marks[name] for name in step["elapsed"])
        if (last - first) * 1000 < step["atLeast"]:
            raise Failure(f"only {(last - first) * 1000:.0f} ms have passed, expected at least {step['atLeast']}")

    async def _do_repeat(self, step: Step) -> None:
        """`{"repeat": n, "steps": […]}`: execute steps several times. `$i` is the number, from 0."""
        outer = dict(self._variables)
        for number in range(step["repeat"]):
            self._variables.clear()
            self._variables.update(outer | {"$i": number})
            for index, inner in enumerate(step["steps"], 1):
                await self._execute(index, inner)

    async def _do_until(self, step: Step) -> None:
        """`{"until": {…}, "send": {…}, "on": NAME}`: send a command again until its answer matches."""
        async with asyncio.timeout(self._limit_s):
            while True:
                await self._do_send({"send": step["send"], "on": step.get("on", "A")})
                message = await self._next(await self._at(step))
                if message is None or matches(step["until"], message, self._variables):
                    break
                await asyncio.sleep(0.01)
        if message is None:
            raise Failure("the server closed the connection")


async def run_cases(
    cases: Sequence[Case],
    target: Target,
    *,
    without: frozenset[str],
    jobs: int,
    limit_s: float,
    on_result: Callable[[Result], None],
) -> list[Result]:
    """Run cases at the same time against one server.

    Without a token the cases that need one are skipped. With a token only they run, because the server rejects connections
    that begin without it. Without a follower the cases that need one are skipped.
    """
    results: list[Result] = []
    queue: list[Case] = []
    for case in cases:
        reason = _skip_reason(case, without, target)
        if reason:
            results.append(Result(case, "skipped", reason))
            on_result(results[-1])
        else:
            queue.append(case)

    async def work() -> None:
        while queue:
            case = queue.pop(0)
            result = await _run_case(case, ServerCase(case, target, limit_s))
            results.append(result)
            on_result(result)

    await asyncio.gather(*[work() for _ in range(min(jobs, len(queue)))])
    return results


def _skip_reason(case: Case, without: frozenset[str], target: Target) -> str:
    """Return why a case is skipped; empty: it runs."""
    missing = case.needs & without
    if missing:
        return f"needs {', '.join(sorted(missing))}"
    if "token" in case.needs and target.token is None:
        return "needs --token"
    if "follower" in case.needs and target.follower is None:
        return "needs --follower"
    return "" if "token" in case.needs or target.token is None else "a server with tokens; run it without --token"


async def _run_case(case: Case, execution: ServerCase) -> Result:
    started_at = time.monotonic()
    try:
        await execution.run()
    except Failure as error:
        transcript = execution.transcript[-MAX_TRANSCRIPT:]
        return Result(case, "failed", str(error), time.monotonic() - started_at, transcript)
    return Result(case, "passed", seconds=time.monotonic() - started_at)
