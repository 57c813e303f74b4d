"""The event loop with the virtual clock, and its nodes."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from genie.testing.simulation.loop import SimLoop, Stuck


def test_sleeping_takes_no_real_time(loop: SimLoop) -> None:
    started_at = time.monotonic()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == 3600
    assert time.monotonic() - started_at < 60


def test_callbacks_run_in_the_order_in_which_they_became_ready(loop: SimLoop) -> None:
    calls: list[object] = []

    async def main() -> None:
        loop.call_later(2, calls.append, "later")
        loop.call_later(1, calls.append, "sooner")
        for number in range(5):
            loop.call_soon(calls.append, number)
        await asyncio.sleep(3)

    loop.run_until_complete(main())
    assert calls == [0, 1, 2, 3, 4, "sooner", "later"]


def test_waiting_for_an_event_that_can_not_occur_raises(loop: SimLoop) -> None:
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())


def test_a_task_that_never_waits_for_the_clock_raises(loop: SimLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.testing.simulation.loop.MAX_BUSY_ITERATIONS", 100)

    async def spin(iterations: int) -> None:
        for _ in range(iterations):
            await asyncio.sleep(0)

    loop.run_until_complete(spin(90))
    loop.run_until_complete(asyncio.sleep(1))
    with pytest.raises(Stuck, match="100 iterations"):
        loop.run_until_complete(spin(110))


def test_a_cancelled_timer_does_not_advance_the_clock(loop: SimLoop) -> None:
    loop.call_later(100, print).cancel()
    loop.run_until_complete(asyncio.sleep(1))
    assert loop.time() == 1


def test_an_executor_runs_synchronously(loop: SimLoop) -> None:
    assert loop.run_until_complete(asyncio.wait_for(loop.run_in_executor(None, sum, [1, 2]), 1)) == 3


def test_a_killed_node_runs_no_finally_blocks(loop: SimLoop) -> None:
    calls: list[str] = []

    async def work() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                calls.append("worked")
        finally:
            calls.append("cleaned up")

    async def main() -> None:
        node = loop.create_node("a")
        loop.spawn(node, work())
        await asyncio.sleep(2.5)
        loop.kill(node)
        await asyncio.sleep(10)

    loop.run_until_complete(main())
    assert calls == ["worked", "worked"]


def test_a_stopped_node_catches_up_when_it_is_continued(loop: SimLoop) -> None:
    calls: list[float] = []

    async def work() -> None:
        loop.call_later(1, lambda: calls.append(loop.time()))
        loop.call_later(20, lambda: calls.append(loop.time()))
        await asyncio.sleep(30)

    async def main() -> None:
        node = loop.create_node("a")
        task = loop.spawn(node, work())
        await asyncio.sleep(0.5)
        loop.stop_node(node)
        await asyncio.sleep(9.5)
        assert calls == []
        loop.continue_node(node)
        await task

    loop.run_until_complete(main())
    assert calls == [10, 20]


def test_child_tasks_belong_to_the_node_of_their_parent(loop: SimLoop) -> None:
    calls: list[str] = []

    async def child() -> None:
        await asyncio.sleep(1)
        calls.append("child")

    async def parent() -> None:
        await asyncio.gather(child(), child())

    async def main() -> None:
        node = loop.create_node("a")
        loop.spawn(node, parent())
        await asyncio.sleep(0.5)
        loop.kill(node)
        await asyncio.sleep(5)

    loop.run_until_complete(main())
    assert calls == []


def test_a_signal_goes_to_the_node_that_handles_it(loop: SimLoop) -> None:
    calls: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, calls.append, "SIGTERM")
        await asyncio.sleep(5)

    async def main() -> None:
        one, other = loop.create_node("a"), loop.create_node("b")
        loop.spawn(one, work())
        await asyncio.sleep(1)
        assert not loop.send_signal(other, signal.SIGTERM)
        assert loop.send_signal(one, signal.SIGTERM)
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert calls == ["SIGTERM"]
