"""Helpers for asyncio tasks and iterators: cancel and wait, restart after errors, close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar

from genie.backoff import Backoff

T = TypeVar("T")

CANCEL_INTERVAL_S = 0.1
"""How often a task that does not end is cancelled again."""

_log = logging.getLogger("genie.tokens")


async def cancel_and_wait(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it has ended, whatever its outcome.

    One cancellation is not always enough: before Python 3.12 `asyncio.wait_for`, which libraries use,
    swallows a cancellation that arrives at the moment at which its awaitable completes.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_INTERVAL_S)


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Run work to completion, also if the caller is cancelled; CancelledError is raised afterwards.

    For steps whose interruption would leave an unknown outcome, such as a commit.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # marks it as retrieved
        raise


async def supervise(name: str, run: Callable[[Backoff], Awaitable[None]]) -> NoReturn:
    """Run a background loop forever: restart it, with backoff, whenever it returns or raises an error.

    Args:
        name: name of the loop, for the log.
        run: the loop. It gets the backoff of its restarts, and should reset it when it has made progress.

    """
    backoff = Backoff()
    while True:
        try:
            await run(backoff)
        except Exception as error:  # noqa: BLE001 - a store or a connection may raise anything
            _log.warning("background task failed, restarting task=%r error=%r", name, error)
        await asyncio.sleep(backoff.next_delay())


@asynccontextmanager
async def closing(iterator: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an async generator at the end of the block, since it may hold a database connection.

    `contextlib.aclosing` does not accept iterators without `aclose`, which a store may return.
    """
    try:
        yield iterator
    finally:
        if hasattr(iterator, "aclose"):
            await iterator.aclose()
