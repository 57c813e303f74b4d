"""The decorator `once`: one of several machines runs a job, and no machine runs it again for some time afterwards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from datetime import timedelta
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from genie.client import aio, sync
from genie.client.commands import make_request
from genie.client.config import logger
from genie.errors import ConnectionLost, QueueTimeout, Unavailable

P = ParamSpec("P")
T = TypeVar("T")


class OnceDecorator(Protocol):
    """The decorator that `once` returns, for functions and coroutine functions.

    The decorated function returns None if the job was skipped.
    """

    @overload
    def __call__(self, job: Callable[P, Coroutine[Any, Any, T]], /) -> Callable[P, Coroutine[Any, Any, T | None]]: ...
    @overload
    def __call__(self, job: Callable[P, T], /) -> Callable[P, T | None]: ...


def once(name: str, hold: float | timedelta, **options: Any) -> OnceDecorator:
    """Decorate a job that no other process may run while it runs, or within `hold` seconds after it has succeeded.

    The job may be a function or a coroutine function. The decorated job returns None if the job was skipped, because another
    process holds the lock. Each call opens a client, so the decorated job also works in processes that were forked.

    The client extends the lock while the job runs. It releases the lock if the job raises an error, and otherwise leaves the
    lock held for `hold` seconds. If the server does not confirm the last extension, the client logs a warning, and the lock
    stays held until its current timeout: a job that has succeeded is not repeated at once.

    Args:
        name: the resource that stands for the job, as in `client.acquire`.
        hold: how long the lock stays held after the job, in seconds or as a timedelta. It must exceed the difference between
            the clocks of the machines, and be shorter than the interval of the job. If the process dies during the job, the
            lock ends after at most this time.
        options: the arguments of `genie.connect`.

    The decorated job raises the errors of the job, and

    - LockLost if the lock was lost. A coroutine is then cancelled, but a function runs to its end.
    - Unavailable if no server accepts the client. The job does not run then.

    Raises:
        ValueError, TypeError: if `name` or `hold` is invalid, or the job is a generator function.

    """
    make_request("", [name], transaction_timeout=hold)  # checks the arguments

    def decorate(job: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(job) or inspect.isasyncgenfunction(job):
            raise TypeError(f"a job must be a function or a coroutine function, not the generator function {job!r}")
        if inspect.iscoroutinefunction(job):

            @functools.wraps(job)
            async def run_coroutine_once(*arguments: Any, **keywords: Any) -> Any:
                return await _run_coroutine(functools.partial(job, *arguments, **keywords), name, hold, options)

            return run_coroutine_once

        @functools.wraps(job)
        def run_once(*arguments: Any, **keywords: Any) -> Any:
            return _run_function(functools.partial(job, *arguments, **keywords), name, hold, options)

        return run_once

    return decorate


def _run_function(job: Callable[[], Any], name: str, hold: float | timedelta, options: dict[str, Any]) -> Any:
    """Run a job under its lock, and return its result, or None if it was skipped. `options` are those of `connect`."""
    with sync.connect(**options) as client, ExitStack() as stack:
        try:
            lock = stack.enter_context(client.lock(name, queue_timeout=0, transaction_timeout=hold, watchdog=True))
        except QueueTimeout:
            return None
        result = job()
        if inspect.isawaitable(result):
            raise TypeError(
                f"the job {name!r} has returned a coroutine, which does not run here: decorate the coroutine function itself"
            )
        id = lock.detach()  # from here on, an exception does not release the lock
        try:
            client.extend(id, hold)
        except (ConnectionLost, Unavailable) as error:
            _warn_not_extended(name, error)
        return result


async def _run_coroutine(
    job: Callable[[], Coroutine[Any, Any, Any]], name: str, hold: float | timedelta, options: dict[str, Any]
) -> Any:
    """Run a coroutine function under its lock, and return its result, or None if it was skipped."""
    async with aio.connect(**options) as client, AsyncExitStack() as stack:
        try:
            lock = await stack.enter_async_context(
                client.lock(name, queue_timeout=0, transaction_timeout=hold, watchdog=True)
            )
        except QueueTimeout:
            return None
        result = await job()
        id = lock.detach()  # from here on, an exception does not release the lock
        try:
            await client.extend(id, hold)
        except (ConnectionLost, Unavailable) as error:
            _warn_not_extended(name, error)
        return result


def _warn_not_extended(name: str, error: Exception) -> None:
    logger.warning(
        "the job %s has succeeded, but its lock could not be extended: another process may soon run the job again: %s",
        name,
        error,
    )
