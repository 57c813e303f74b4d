"""Wait for conditions that have no event in the test, such as those of threads and of other processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from support.processes.servers import WAIT_S

INTERVAL_S = 0.005


async def until(condition: Callable[[], object]) -> None:
    """Check a condition again and again until it is true. Raise TimeoutError after `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(INTERVAL_S)


def wait_until(condition: Callable[[], object]) -> None:
    """Do the same as `until` in a test without an event loop."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(INTERVAL_S)
