"""The client for asyncio beside a raw loop over a socket in Python (see `benchmarks/clients.py`, which runs this)."""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import secrets
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson

import genie

TASKS = (1, 64)


class RawLoop(asyncio.Protocol):
    """Locks and releases on a plain connection, with a number of requests in flight, until a time on the loop's clock."""

    def __init__(self, in_flight: int, end: float) -> None:
        self._in_flight = self._open = in_flight
        self._end = end
        self._transport: asyncio.Transport
        self._buffer = b""
        self._refs = 0
        self.count = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin a session, like that of a client, and send the first requests."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport
        hello = {"command": "hello", "payload": {"quiet": True, "session": secrets.token_urlsafe(32)}}
        lines = [orjson.dumps(hello) + b"\n", *(self._request(task) for task in range(self._in_flight))]
        transport.write(b"".join(lines))

    def _request(self, task: int) -> bytes:
        """Return a request with the fields that the client sends, so that the server does the same for both."""
        self._refs += 1
        fields = b'"resources":["exclusive:raw/%d"],"queueTimeout":10000,"transactionTimeout":10000,"ref":"%d-%d"'
        return b'{"command":"request","payload":{' + fields % (task, task, self._refs) + b"}}\n"

    def data_received(self, data: bytes) -> None:
        """Answer `locked` with a release, and `released` with the next request, all in one write."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        output = []
        for line in lines:
            message = orjson.loads(line)
            payload = message["payload"]
            if message["command"] == "locked":
                release = b'{"command":"release","payload":{"id":%d,"ref":"%br"}}\n'
                output.append(release % (payload["id"], payload["ref"].encode()))
            elif message["command"] == "released":
                self.count += 1
                if asyncio.get_running_loop().time() < self._end:
                    output.append(self._request(int(payload["ref"].partition("-")[0])))
                else:
                    self._open -= 1
        if output:
            self._transport.write(b"".join(output))
        if not self._open and not self.done.done():
            self._transport.close()
            self.done.set_result(None)


async def raw_loop(host: str, port: int, tasks: int, end: float) -> int:
    """Return how many locks were released by a raw loop."""
    _, loop = await asyncio.get_running_loop().create_connection(lambda: RawLoop(tasks, end), host, port)
    await loop.done
    return loop.count


async def client_loop(client: genie.Client, tasks: int, end: float) -> int:
    """Return how many locks were released by concurrent tasks of one client."""
    count, clock = 0, asyncio.get_running_loop().time

    async def work(task: int) -> None:
        nonlocal count
        while clock() < end:
            lock = await client.acquire(f"exclusive:client/{task}")
            await lock.release()
            count += 1

    async with asyncio.TaskGroup() as group:
        for task in range(tasks):
            group.create_task(work(task))
    return count


async def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    host, _, port = options.address.rpartition(":")

    async def rate(loop: Callable[[float], Coroutine[Any, Any, int]]) -> float:
        began = time.perf_counter()
        count = await loop(asyncio.get_running_loop().time() + options.seconds)
        return count / (time.perf_counter() - began)

    results = []
    async with genie.connect(host, int(port)) as client:
        for tasks in TASKS:
            raw, own = [], []
            for _ in range(options.rounds):  # in turns, so that a change of the machine's speed affects both
                raw.append(await rate(lambda end, tasks=tasks: raw_loop(host, int(port), tasks, end)))  # type: ignore[misc]
                own.append(await rate(lambda end, tasks=tasks: client_loop(client, tasks, end)))  # type: ignore[misc]
            ratios = [one / other for one, other in zip(own, raw, strict=True)]
            results.append(
                {
                    "tasks": tasks,
                    "raw": statistics.median(raw),
                    "client": statistics.median(own),
                    "ratio": statistics.median(ratios),
                }
            )
    print(json.dumps({"language": "python", "runtime": f"CPython {platform.python_version()}", "results": results}))


if __name__ == "__main__":
    asyncio.run(main())
