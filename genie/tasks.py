"""Ending tasks."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.1


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it has ended, however it does.

    Once is not always enough: before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes in the moment in
    which what it waits for is done, and libraries use it.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)
