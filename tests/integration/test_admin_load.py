"""The admin port does little work in an iteration of the event loop, however many locks and requests there are.

Work is counted, not timed: calls, as reported to the profiler of the interpreter. So the result is the same on every
machine. `benchmarks/admin.py` measures the time.
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

from genie.admin import AdminServer, models
from genie.admin.throttle import MAX_SLICE_WORK, WorkBudget
from genie.config import Settings
from genie.core import Deadlocked, LockManager, Request
from genie.server.app import Server
from support.admin.client import fetch
from support.runs.searches import SOAK

pytestmark = pytest.mark.soak
T = TypeVar("T")
MANY = 100_000 if SOAK else 20_000
"""Held locks. Reading each of them would exceed the limit of calls."""
QUEUES = 10_000
HOUR_MS = 3_600_000
MAX_CALLS = 10_000
"""In one iteration of the event loop: about two or three milliseconds."""
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


def request_all(manager: LockManager, names: Iterable[str], **settings: str) -> None:
    for name_ in names:
        request = Request((), (name_,), HOUR_MS, HOUR_MS, **settings)  # type: ignore[arg-type]
        manager.step(request, 0)


def fill(server: Server, waiting: Iterable[str]) -> None:
    """Create many locks, waits, deadlocks and hot resources."""
    manager = server.default_namespace.manager
    assert manager is not None
    request_all(manager, map(name, range(MANY)))
    request_all(manager, waiting)
    for number in range(5_000):
        server.stats.contention.record_wait([f"hot/{number}"], number)
    ring = 60
    for owner in range(ring):
        request_all(manager, [f"ring/{owner}"], transaction=f"t{owner}")
    for owner in range(ring):
        for _ in range(100 if owner == ring - 1 else 1):
            victim = Request((), (f"ring/{(owner + 1) % ring}",), HOUR_MS, HOUR_MS, f"t{owner}")
            for event in manager.step(victim, 0):
                if isinstance(event, Deadlocked):
                    server.stats.record_ended(event, 0)


class CallCounter:
    """Counts the calls in each iteration of the event loop."""

    def __init__(self) -> None:
        self.max_calls = self._calls = 0
        self._loop = asyncio.get_running_loop()

    def _on_event(self, _: FrameType, event: str, __: object) -> None:
        if event.endswith("call"):
            self._calls += 1

    def _on_iteration(self) -> None:
        self.max_calls, self._calls = max(self.max_calls, self._calls), 0
        self._next = self._loop.call_soon(self._on_iteration)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._calls = 0
        self._on_iteration()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._next.cancel()


def poll(port: int, path: str, times: int) -> list[int]:
    """Poll a path, from a thread whose calls are not counted; return the sizes of the responses."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sizes = []
    for _ in range(times):
        connection.request("GET", path)
        response = connection.getresponse()
        sizes.append(len(response.read()))
        assert response.status == 200
    connection.close()
    return sizes


@asynccontextmanager
async def loaded_server(waiting: Iterable[str]) -> AsyncIterator[tuple[AdminServer, int]]:
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


async def assert_bounded(admin: AdminServer, port: int) -> None:
    """Poll each path, then all concurrently; assert that no iteration makes too many calls."""
    for path in PATHS:
        counter = CallCounter()
        with counter.counting():
            await asyncio.to_thread(poll, port, path, 1)
        assert 0 < counter.max_calls <= MAX_CALLS, path
    counter = CallCounter()
    with counter.counting():
        await asyncio.gather(*(asyncio.to_thread(poll, port, path, 2) for path in PATHS))
    assert counter.max_calls <= MAX_CALLS, "all concurrently"
    assert admin.budget.max_spent <= 3 * MAX_SLICE_WORK, "a slice, and one indivisible unit more"


async def test_one_long_queue_does_not_block_the_event_loop() -> None:
    async with loaded_server(name(0) for _ in range(MANY)) as (admin, port):
        await assert_bounded(admin, port)
        state = await _get(port, "/api/state", models.State)
        assert (state.queues[0].resource, state.queues[0].waiting) == (name(0), MANY)
        assert not state.queues_complete, "only the first 10,000 were scanned"
        waits = await _get(port, "/api/waits?limit=1000", models.Waits)
        assert len(waits.nodes) <= 1_000
        assert len(waits.edges) <= 4_000
        assert waits.queue_shown == len(waits.nodes) - 1
        assert waits.queue_total > MANY
        assert all(node.blockers_total in (msgspec.UNSET, *range(1, 11)) for node in waits.nodes)
        resource = await _get(port, "/api/resources/accounts%2F0000000", models.Resource)
        assert (resource.holders_total, resource.queue_total, len(resource.queue)) == (1, MANY, 100)
        assert [row.blockers_total for row in resource.queue] == list(range(1, 101))


async def test_many_queues_do_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loaded_server(name(number % QUEUES) for number in range(MANY)) as (admin, port):
        await assert_bounded(admin, port)
        waits = await _get(port, "/api/waits?limit=999", models.Waits)
        assert (len(waits.nodes), waits.queue_shown) == (999, 500), "each with its blocker"

        async def never_pause(_: WorkBudget, __: int) -> bool:
            return False

        monkeypatch.setattr(WorkBudget, "spend", never_pause)
        counter = CallCounter()
        with counter.counting():
            await asyncio.to_thread(poll, port, "/api/waits?limit=998", 1)
        assert counter.max_calls > MAX_CALLS, "the counter detects missing pauses"


async def _get(port: int, path: str, kind: type[T]) -> T:
    return (await fetch(port, path)).as_(kind)
