"""A server with many locks in this process, whose admin port another process polls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import uvloop
from scale_parts.report import Missing, Row, progress

from admin_parts.filling import Filler
from admin_parts.turns import Longest
from genie.admin import AdminServer
from genie.config import Settings
from genie.observability import logs
from genie.server.app import Server

MANY = 100_000
LINES = 10_000
SECONDS = 3.5
GOAL_MS = 10.0
PATHS = (
    "/livez",
    "/metrics",
    "/api/state",
    "/api/waits",
    "/api/waits?limit=1000",
    "/api/hot?limit=100",
    "/api/deadlocks?limit=100",
    "/api/resources/accounts%2F0000000",
    "/api/schema",
)
POLLER = str(Path(__file__).parent / "poller.py")


def one_line() -> Iterator[Row]:
    """100,000 locks are held, and 100,000 requests wait in one wait queue."""
    yield from _measured(lambda: (_name(0) for _ in range(MANY)))


def many_lines() -> Iterator[Row]:
    """100,000 locks are held, and 100,000 requests wait in 10,000 wait queues."""
    yield from _measured(lambda: (_name(number % LINES) for number in range(MANY)))


def _name(number: int) -> str:
    return f"accounts/{number:07}"


def _measured(waiting: Callable[[], Iterable[str]]) -> list[Row]:
    logs.configure("error", "console")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(waiting()))


async def _measure(waiting: Iterable[str]) -> list[Row]:
    server = Server(Settings.from_options(port=0, admin_port=0, slow_wait=0))
    admin = AdminServer(server)
    address = await server.start()
    await admin.start()
    assert admin.address is not None, "it listens"  # noqa: S101
    fillers = [await Filler.connect(address) for _ in range(2)]
    try:
        progress("filling")
        await fillers[0].ask(map(_name, range(MANY)), 2)
        await fillers[1].ask(waiting, 1)
        await fillers[0].deadlocks(100)
        rows = [await _row("no polling", None)]
        for path in PATHS:
            progress(path)
            rows.append(await _row(f"GET {path}", (admin.address[1], 1, path)))
        rows.append(await _row("32 connections that poll all of them", (admin.address[1], 32, *PATHS)))
    finally:
        for filler in fillers:
            filler.close()
        await admin.stop()
        await server.stop()
    return rows


async def _row(what: str, polled: tuple[int | str, ...] | None) -> Row:
    """Return the row for the longest iteration of the event loop while the admin port is polled."""
    poller = None
    if polled is not None:
        port, connections, *paths = polled
        arguments = [str(port), str(SECONDS), str(connections), *map(str, paths)]
        poller = await asyncio.create_subprocess_exec(
            sys.executable, POLLER, *arguments, stdout=asyncio.subprocess.PIPE
        )
    longest = Longest()
    if poller is None:
        await asyncio.sleep(SECONDS)
        note = ""
    else:
        said, _ = await poller.communicate()
        if poller.returncode:
            raise Missing(f"{what}: the poller failed")
        answers, size, took_ms = said.split()
        note = f"{int(answers):,} answers of up to {int(size):,} bytes within {float(took_ms):,.0f} ms; "
    longest.stop()
    note += f"{longest.turns:,} turns of up to {max(longest.seconds_ms):.1f} ms, {longest.wall_ms:.1f} ms by the clock"
    if longest.collections:
        looks = ", ".join(f"{many} of generation {number}" for number, many in sorted(longest.collections.items()))
        note += f"; the collector: {looks}, up to {longest.collector_ms:.1f} ms"
    return Row(
        f"longest turn of a second: {what}",
        median(longest.seconds_ms),
        "ms",
        None if polled is None else GOAL_MS,
        note=note,
    )
