"""Limits for incomplete lines: their total size, and their age."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from genie.errors import RequestRejected
from genie.server import byte_limit
from genie.server.partial_lines import MAX_CLOSED_OLD_LINES, MAX_LINE_AGE_S, PartialLines
from genie.testing.simulation.loop import SimLoop


class FakeConnection:
    """Records the error with which it is closed."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[RequestRejected] = asyncio.get_running_loop().create_future()
        self.reading_is_paused = False

    def drop_partial_line(self, rejection: RequestRejected) -> None:
        self.closed.set_result(rejection)


def connections_with(lines: PartialLines, *sizes: int) -> list[FakeConnection]:
    connections = [FakeConnection() for _ in sizes]
    for connection, size in zip(connections, sizes, strict=True):
        lines.update(connection, size, new=True)
    return connections


async def test_the_largest_incomplete_lines_are_closed_until_the_low_water_mark() -> None:
    lines = PartialLines(1000)
    connections = connections_with(lines, 100, 400, 300, 200)
    assert not any(connection.closed.done() for connection in connections)
    lines.update(connections[0], 101, new=False)
    assert [connection.closed.done() for connection in connections] == [False, True, False, False]
    assert lines.bytes == 601
    error = connections[1].closed.result()
    assert error.code == "too-many"
    assert "1000 bytes" in error.message


async def test_many_lines_are_closed_in_several_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_limit, "MAX_CLOSED_LARGE_CONNECTIONS", 10)
    lines = PartialLines(1_000)
    connections = connections_with(lines, *[1] * 1_000)

    def closed() -> int:
        return sum(connection.closed.done() for connection in connections)

    lines.update(connections[0], 3, new=False)
    assert (closed(), lines.bytes) == (1, 999), "within the limit at once"
    counts = []
    for _ in range(15):
        await asyncio.sleep(0)
        counts.append(closed())
    assert counts[:3] == [11, 21, 31]
    assert lines.bytes == 900
    connections += connections_with(lines, *[1] * 101)
    assert lines.bytes == 1_000, "within the limit again"
    for _ in range(15):
        await asyncio.sleep(0)
    assert lines.bytes == 900


async def test_completed_lines_and_lost_connections_do_not_count() -> None:
    lines = PartialLines(1000)
    one, two = connections_with(lines, 600, 400)
    lines.update(one, 0, new=True)
    assert lines.bytes == 400
    lines.discard(two)
    lines.discard(two)
    assert lines.bytes == 0
    lines.update(one, 1000, new=True)
    assert not one.closed.done()


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    """An event loop with a virtual clock."""
    loop = SimLoop()
    yield loop
    loop.finish()


def test_a_connection_is_closed_when_its_line_is_too_old_and_not_before(loop: SimLoop) -> None:
    async def run() -> None:
        lines = PartialLines(1000)
        slow, steady, later = connections_with(lines, 1, 1, 1)
        lines.update(later, 0, new=False)
        await asyncio.sleep(10)
        lines.update(later, 1, new=True)
        await asyncio.sleep(MAX_LINE_AGE_S - 11)
        lines.update(slow, 2, new=False)
        lines.update(steady, 1, new=True)
        assert not slow.closed.done()
        error = await slow.closed
        assert asyncio.get_running_loop().time() == MAX_LINE_AGE_S
        assert (error.code, error.message) == ("bad-message", "the line was not completed within 30 s")
        assert not later.closed.done()
        await later.closed
        assert asyncio.get_running_loop().time() == MAX_LINE_AGE_S + 10
        assert not steady.closed.done(), "its last line was started later"
        await steady.closed
        assert asyncio.get_running_loop().time() == 2 * MAX_LINE_AGE_S - 1
        assert lines.bytes == 0

    loop.run_until_complete(run())


def test_a_line_does_not_age_while_reading_is_paused(loop: SimLoop) -> None:
    async def run() -> None:
        lines = PartialLines(1000)
        paused, other = connections_with(lines, 1, 1)
        paused.reading_is_paused = True
        await other.closed
        for _ in range(3):
            await connections_with(lines, 1)[0].closed
        assert not paused.closed.done()
        paused.reading_is_paused = False
        await paused.closed
        assert lines.bytes == 0

    loop.run_until_complete(run())


def test_many_lines_that_are_too_old_are_closed_in_several_iterations(loop: SimLoop) -> None:
    async def run() -> None:
        lines = PartialLines(1_000_000)
        connections = connections_with(lines, *[1] * 350)
        await connections[0].closed
        counts = []
        while lines.bytes:
            counts.append(sum(connection.closed.done() for connection in connections))
            await asyncio.sleep(0)
        assert max(b - a for a, b in zip([0, *counts], [*counts, 350], strict=True)) <= MAX_CLOSED_OLD_LINES
        assert asyncio.get_running_loop().time() == MAX_LINE_AGE_S
        assert all(connection.closed.done() for connection in connections)

    loop.run_until_complete(run())
