"""Starts, awaits and kills a group of Redis processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from redis import RedisError

from redises.node import Node
from support.processes.servers import WAIT_S

POLL_S = 0.02


def start_all(nodes: Sequence[Node]) -> None:
    """Start all processes in parallel, and wait until each replies."""
    for node in nodes:
        node.spawn()
    for node in nodes:
        node.wait_until_ready()


def kill_all(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.kill()


async def until(condition: str, is_met: Callable[[], Awaitable[object]], timeout_s: float = WAIT_S) -> None:
    """Poll until a condition is met. A Redis that does not reply, or replies with an error, does not meet it."""
    deadline, last = time.monotonic() + timeout_s, "it is false"
    while True:
        try:
            if await is_met():
                return
        except (RedisError, OSError, TimeoutError) as error:
            last = repr(error)
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition}: not within {timeout_s:g} s ({last})")
        await asyncio.sleep(POLL_S)
