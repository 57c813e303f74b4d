"""Which connections are closed because of their incomplete lines, and when."""

from __future__ import annotations

import asyncio

import pytest

from genie.errors import RequestRejected
from genie.server import partial_lines
from genie.server.partial_lines import PartialLines


class Sender:
    """A connection, as far as it is closed here."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[RequestRejected] = asyncio.get_running_loop().create_future()
        self.reading_is_paused = False

    def drop_partial_line(self, why: RequestRejected) -> None:
        self.closed.set_result(why)


def senders(lines: PartialLines, *sizes: int) -> list[Sender]:
    made = [Sender() for _ in sizes]
    for sender, size in zip(made, sizes, strict=True):
        lines.update(sender, size, new=True)
    return made


async def test_the_longest_are_closed_until_a_tenth_is_free() -> None:
    lines = PartialLines(1000)
    made = senders(lines, 100, 400, 300, 200)
    assert not any(sender.closed.done() for sender in made)
    lines.update(made[0], 101, new=False)
    assert [sender.closed.done() for sender in made] == [False, True, False, False]
    assert lines.bytes == 601
    error = made[1].closed.result()
    assert error.code == "too-many"
    assert "1000 bytes" in error.message


async def test_what_is_completed_or_lost_does_not_count() -> None:
    lines = PartialLines(1000)
    one, two = senders(lines, 600, 400)
    lines.update(one, 0, new=True)
    assert lines.bytes == 400
    lines.discard(two)
    lines.discard(two)
    assert lines.bytes == 0
    lines.update(one, 1000, new=True)
    assert not one.closed.done()


async def test_a_line_that_takes_too_long_is_closed_and_one_that_began_later_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partial_lines, "MAX_LINE_AGE_S", 0.02)
    lines = PartialLines(1000)
    slow, steady, later = senders(lines, 1, 1, 1)
    async with asyncio.timeout(60):
        while not slow.closed.done():
            lines.update(slow, 2, new=False)
            lines.update(steady, 1, new=True)
            await asyncio.sleep(0)
        error = slow.closed.result()
        assert (error.code, error.message) == ("bad-message", "the line was not completed within 0.02 s")
        assert not steady.closed.done(), "each of its lines was completed in time"
        assert later.closed.done()
        assert (await steady.closed).code == "bad-message"
    assert lines.bytes == 0


async def test_no_line_is_too_slow_while_the_server_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_lines, "MAX_LINE_AGE_S", 0.01)
    lines = PartialLines(1000)
    paused, other = senders(lines, 1, 1)
    paused.reading_is_paused = True
    async with asyncio.timeout(60):
        await other.closed
        for _ in range(3):
            later = senders(lines, 1)[0]
            await later.closed
        assert not paused.closed.done()
        paused.reading_is_paused = False
        await paused.closed
    assert lines.bytes == 0
