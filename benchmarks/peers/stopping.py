"""SIGINT and SIGTERM end a run by leaving all blocks, so that every server is ended and its data are removed."""

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
    """From now on."""
    for each in _heard():
        signal.signal(each, _stop)


def _heard() -> list[signal.Signals]:
    """Not what is ignored, as SIGINT is behind `&` in a script."""
    return [each for each in STOPS if signal.getsignal(each) is not signal.SIG_IGN]


def _stop(number: int, _: object) -> NoReturn:
    """A second signal does not disturb the end."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    print("stopped", file=sys.stderr)
    raise SystemExit(128 + number)


@contextmanager
def put_off(hurry: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A signal counts only when this block has ended, which it may `hurry`: in the midst of it something would be lost."""
    came: list[int] = []

    def later(number: int, _: object) -> None:
        came.append(number)
        hurry()

    before = {each: signal.signal(each, later) for each in _heard()}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if came:
            signal.raise_signal(came[0])


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but a signal cancels it: what is raised in the midst of any task may be lost there."""
    tasks: list[asyncio.Task[T]] = []

    def cancel() -> None:
        for task in tasks:
            task.get_loop().call_soon_threadsafe(task.cancel)

    with put_off(cancel), asyncio.Runner() as runner:
        tasks.append(runner.get_loop().create_task(main))
        return runner.get_loop().run_until_complete(tasks[0])
