"""Background loops that are restarted after errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from genie.backoff import Backoff

_log = logging.getLogger("genie_tokens")


async def supervise(name: str, run: Callable[[Backoff], Awaitable[None]]) -> NoReturn:
    """Run a background loop forever: restart the loop, with backoff, whenever it returns or raises an error.

    Args:
        name: name of the loop, for the log.
        run: the loop. It gets the backoff of its restarts, and should call `reset` on it after each success.

    """
    backoff = Backoff()
    while True:
        try:
            await run(backoff)
        except Exception as error:  # noqa: BLE001 - a store or a connection may raise anything
            _log.warning("background task %r failed, restarting it: %r", name, error)
        await asyncio.sleep(backoff.next_delay())
