"""Ending what goes on: tasks, and what is iterated over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

AGAIN_S = 0.1


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it has ended, however it does.

    Once is not always enough: before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes in the moment in
    which what it waits for is done, and libraries use it.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)


@asynccontextmanager
async def closing(iterator: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close what is iterated over when it is left, if it can be closed: it may hold a connection."""
    try:
        yield iterator
    finally:
        if hasattr(iterator, "aclose"):
            await iterator.aclose()
