"""SIGINT and SIGTERM end a run by leaving all blocks, so that every server is terminated and its
data are removed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
STOPS = (signal.SIGINT, signal.SIGTERM)


def listen() -> None:
    """Install the signal handlers."""
    for each in _handled_signals():
        signal.signal(each, _stop)


def _handled_signals() -> list[signal.Signals]:
    """Return the signals to handle. Ignored signals stay ignored, such as SIGINT in a background job of a script."""
    return [each for each in STOPS if signal.getsignal(each) is not signal.SIG_IGN]


def _stop(number: int, _: object) -> NoReturn:
    """Raise SystemExit at the first signal; ignore further ones, so that they do not interrupt the
    cleanup.
    """
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    print("stopped", file=sys.stderr)
    raise SystemExit(128 + number)


@contextmanager
def defer_signals(hurry: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Defer signals to the end of the block, which they can `hurry`: interrupting it would leak a
    process.
    """
    received: list[int] = []

    def later(number: int, _: object) -> None:
        received.append(number)
        hurry()

    before = {each: signal.signal(each, later) for each in _handled_signals()}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if received:
            signal.raise_signal(received[0])


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Like `asyncio.run(main())`, but a signal cancels the main task: an exception raised within
    another task might be lost. `main` is called when signals are deferred, so that its coroutine is
    always awaited.
    """
    tasks: list[asyncio.Task[T]] = []

    def cancel() -> None:
        for task in tasks:
            task.get_loop().call_soon_threadsafe(task.cancel)

    with defer_signals(cancel), asyncio.Runner() as runner:
        tasks.append(runner.get_loop().create_task(main()))
        return runner.get_loop().run_until_complete(tasks[0])
