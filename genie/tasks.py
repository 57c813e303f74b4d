"""Helpers for asyncio tasks and iterators: cancel and wait, run to the end, close, run in several iterations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

__all__ = ["cancel_and_wait", "closing", "run_to_completion"]

T = TypeVar("T")

CANCEL_INTERVAL_S = 0.1
"""Seconds after which a task that has not ended is cancelled again."""


async def cancel_and_wait(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, if there is one, and wait until it has ended. The result or error of the task is ignored.

    The task is cancelled every `CANCEL_INTERVAL_S` until it ends, because a single cancellation can get lost: before
    Python 3.12 `asyncio.wait_for` swallows a cancellation that arrives just when its awaitable completes.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_INTERVAL_S)


async def run_to_completion(work: Coroutine[Any, Any, T], *, grace_s: float | None = None) -> T:
    """Run a coroutine to its end and return its result, even if the caller is cancelled meanwhile.

    For steps whose interruption would leave an unknown outcome, such as a commit. If the caller was cancelled,
    CancelledError is raised after the coroutine has ended, and the result or error of the coroutine is dropped.

    Args:
        work: the coroutine.
        grace_s: seconds after a cancellation of the caller at which the coroutine is cancelled as well. None: it is never
            cancelled.

    """
    task, loop = asyncio.create_task(work), asyncio.get_running_loop()
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        grace_ends_at = math.inf if grace_s is None else loop.time() + grace_s
        while not task.done():
            with suppress(asyncio.CancelledError):
                if loop.time() >= grace_ends_at:
                    await cancel_and_wait(task)
                else:
                    await asyncio.wait({task}, timeout=None if grace_s is None else grace_ends_at - loop.time())
        if not task.cancelled():
            task.exception()  # marks the error as retrieved, so that asyncio does not log it
        raise


@asynccontextmanager
async def closing(iterator: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an async generator at the end of the block, because the generator may hold a database connection.

    An iterator without `aclose`, which a store may return, is not closed; `contextlib.aclosing` would fail.
    """
    try:
        yield iterator
    finally:
        if hasattr(iterator, "aclose"):
            await iterator.aclose()


def run_in_iterations(parts: Iterator[None]) -> None:
    """Run the first part of some work now, and each other part in a later iteration of the event loop."""
    if next(parts, parts) is not parts:  # the default `parts` marks the end
        asyncio.get_running_loop().call_soon(run_in_iterations, parts)
