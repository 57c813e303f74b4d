"""However much is held and waits, whoever looks does little between two turns of the event loop.

What is done in a turn is counted, not timed: calls, as the interpreter's profiler sees them. So the result is the same on
every machine. `benchmarks/admin.py` measures the time.
"""

from __future__ import annotations

import asyncio
import http.client
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import TypeVar

import msgspec
import pytest

from admin_client import fetch
from genie.admin import AdminServer, models
from genie.admin.throttle import MAX_SLICE_WORK, WorkBudget
from genie.config import Settings
from genie.core import Deadlocked, LockManager, Request
from genie.server.app import Server
from searches import SOAK

pytestmark = pytest.mark.soak
T = TypeVar("T")
MANY = 100_000 if SOAK else 20_000
"""Held locks. To look at each of them would be more calls than a turn may make."""
LINES = 10_000
HOUR_MS = 3_600_000
MOST_CALLS = 10_000
"""In one turn of the loop: about two or three milliseconds."""
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


def name(number: int) -> str:
    return f"accounts/{number:07}"


def take(manager: LockManager, names: Iterable[str], **settings: str) -> None:
    for one in names:
        request = Request((), (one,), HOUR_MS, HOUR_MS, **settings)  # type: ignore[arg-type]
        manager.step(request, 0)


def fill(server: Server, waiting: Iterable[str]) -> None:
    """Hold, wait, deadlock, and be hot: as it is after much of all."""
    manager = server.default_namespace.manager
    assert manager is not None
    take(manager, map(name, range(MANY)))
    take(manager, waiting)
    for number in range(5_000):
        server.stats.contention.record_wait([f"hot/{number}"], number)
    ring = 60
    for owner in range(ring):
        take(manager, [f"ring/{owner}"], transaction=f"t{owner}")
    for owner in range(ring):
        for _ in range(100 if owner == ring - 1 else 1):
            victim = Request((), (f"ring/{(owner + 1) % ring}",), HOUR_MS, HOUR_MS, f"t{owner}")
            for event in manager.step(victim, 0):
                if isinstance(event, Deadlocked):
                    server.stats.record_ended(event, 0)


class ResponseCache:
    """Counts the calls in each turn of the loop."""

    def __init__(self) -> None:
        self.most = self._calls = 0
        self._loop = asyncio.get_running_loop()

    def _seen(self, _: FrameType, event: str, __: object) -> None:
        if event.endswith("call"):
            self._calls += 1

    def _turn(self) -> None:
        self.most, self._calls = max(self.most, self._calls), 0
        self._next = self._loop.call_soon(self._turn)

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._calls = 0
        self._turn()
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._next.cancel()


def poll(port: int, path: str, times: int) -> list[int]:
    """From a thread, which is not counted: the sizes of the answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sizes = []
    for _ in range(times):
        connection.request("GET", path)
        answer = connection.getresponse()
        sizes.append(len(answer.read()))
        assert answer.status == 200
    connection.close()
    return sizes


@asynccontextmanager
async def full(waiting: Iterable[str]) -> AsyncIterator[tuple[AdminServer, int]]:
    server = Server(Settings.from_options(port=0, admin_port=0, slow_wait=0))
    admin = AdminServer(server)
    await server.start()
    await admin.start()
    try:
        fill(server, waiting)
        assert admin.address is not None
        yield admin, admin.address[1]
    finally:
        await admin.stop()
        await server.stop()


async def bounded(admin: AdminServer, port: int) -> None:
    """Poll every path, and all at the same time: no turn is long."""
    for path in PATHS:
        turns = ResponseCache()
        with turns.counted():
            await asyncio.to_thread(poll, port, path, 1)
        assert 0 < turns.most <= MOST_CALLS, path
    turns = ResponseCache()
    with turns.counted():
        await asyncio.gather(*(asyncio.to_thread(poll, port, path, 2) for path in PATHS))
    assert turns.most <= MOST_CALLS, "all at the same time"
    assert admin.budget.max_spent <= 3 * MAX_SLICE_WORK, "a slice, and what is done at one go beside"


async def test_no_look_at_one_long_line_holds_the_loop_for_long() -> None:
    async with full(name(0) for _ in range(MANY)) as (admin, port):
        await bounded(admin, port)
        state = await _get(port, "/api/state", models.State)
        assert (state.queues[0].resource, state.queues[0].waiting) == (name(0), MANY)
        assert not state.queues_complete, "only the first 10,000 were looked at"
        waits = await _get(port, "/api/waits?limit=1000", models.Waits)
        assert len(waits.nodes) <= 1_000
        assert len(waits.edges) <= 4_000
        assert waits.queue_shown == len(waits.nodes) - 1
        assert waits.queue_total > MANY
        assert all(node.blockers_total in (msgspec.UNSET, *range(1, 11)) for node in waits.nodes)
        resource = await _get(port, "/api/resources/accounts%2F0000000", models.Resource)
        assert (resource.holders_total, resource.queue_total, len(resource.queue)) == (1, MANY, 100)
        assert [row.blockers_total for row in resource.queue] == list(range(1, 101))


async def test_no_look_at_many_lines_holds_the_loop_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with full(name(number % LINES) for number in range(MANY)) as (admin, port):
        await bounded(admin, port)
        waits = await _get(port, "/api/waits?limit=999", models.Waits)
        assert (len(waits.nodes), waits.queue_shown) == (999, 500), "each with the one that it waits for"

        async def on_and_on(_: WorkBudget, __: int) -> bool:
            return False

        monkeypatch.setattr(WorkBudget, "spend", on_and_on)
        turns = ResponseCache()
        with turns.counted():
            await asyncio.to_thread(poll, port, "/api/waits?limit=998", 1)
        assert turns.most > MOST_CALLS, "without pauses it would be seen"


async def _get(port: int, path: str, kind: type[T]) -> T:
    return (await fetch(port, path)).as_(kind)
