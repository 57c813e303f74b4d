"""What a crowd of processes needs: to be started, to be waited for, and to be ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from redis import RedisError

from redises.node import Node
from servers import WAIT_S

POLL_S = 0.02


def start(nodes: Sequence[Node]) -> None:
    """All at once, and return when each answers."""
    for node in nodes:
        node.spawn()
    for node in nodes:
        node.until_it_answers()


def end(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.kill()


async def until(what: str, true: Callable[[], Awaitable[object]], bound_s: float = WAIT_S) -> None:
    """Look again and again until it is true. Those who do not answer, or refuse, say no."""
    end, last = time.monotonic() + bound_s, "it is not so"
    while True:
        try:
            if await true():
                return
        except (RedisError, OSError, TimeoutError) as error:
            last = repr(error)
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {bound_s:g} s ({last})")
        await asyncio.sleep(POLL_S)
