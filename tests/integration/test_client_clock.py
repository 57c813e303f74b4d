"""The clock of the clients: a lock expires although the machine was suspended in the meantime."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest

from genie import connect, sync
from genie.client import clock
from support.network.clocks import suspend
from support.processes.servers import Genie, running_server

TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def server() -> Iterator[Genie]:
    with running_server() as genie:
        yield genie


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no CLOCK_BOOTTIME")
def test_the_clock_also_runs_while_the_machine_is_suspended() -> None:
    assert isinstance(clock.now, partial)
    assert (clock.now.func, clock.now.args) == (time.clock_gettime, (time.CLOCK_BOOTTIME,))


async def test_a_lock_is_not_held_after_the_machine_was_suspended_for_its_timeout(
    server: Genie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timers of the event loop do not count that time, so `lost` is set later."""
    async with connect(*server.address) as client:
        lock = await client.acquire("a", transaction_timeout=TIMEOUT_S)
        suspend(monkeypatch, TIMEOUT_S / 2)
        assert lock.held
        suspend(monkeypatch, TIMEOUT_S / 2)
        assert not lock.held
        await lock.release()


def test_a_lock_of_a_thread_is_not_held_after_the_machine_was_suspended_for_its_timeout(
    server: Genie, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sync.connect(*server.address) as client:
        lock = client.acquire("b", transaction_timeout=TIMEOUT_S)
        suspend(monkeypatch, TIMEOUT_S)
        assert not lock.held
        lock.release()
