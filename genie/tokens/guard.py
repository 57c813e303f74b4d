"""Who may use the state of a selector: calls from other threads are rejected before they change anything.

Selectors need no lock because all their state is confined to one event loop: what happens between two awaits is atomic.
A call from another thread would break that without any sign of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from threading import get_ident
from typing import NoReturn, Protocol


class Guard(Protocol):
    """Decides whether the present caller may use a selector, and tells it the time."""

    def bind(self) -> None:
        """The selector is started."""

    def check(self) -> None:
        """RuntimeError where the caller may not use the selector."""

    def check_can_wait(self) -> None:
        """Called before the store is awaited. Raises what the caller is to be told where it can't wait, or RuntimeError
        as `check` does.
        """

    def time(self) -> float:
        """Seconds of a clock that never goes back. RuntimeError where the caller may not use the selector."""


class ThreadGuard:
    """Confines a selector to the thread whose event loop starts it, or uses it before it is started.

    `instead` says in the error what to use from other threads. The thread is compared, and not the event loop: before
    Python 3.12 it takes a system call to find the running loop.
    """

    __slots__ = ("_clock", "_ident", "_instead", "_name")

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self._ident: int | None = None
        self._name = ""
        self._clock: Callable[[], float]

    def bind(self) -> None:
        """Confine the selector to this thread, and take the time from its running event loop."""
        self._clock = asyncio.get_running_loop().time
        self._name = threading.current_thread().name
        self._ident = get_ident()

    def check(self) -> None:
        """RuntimeError in any other thread."""
        if get_ident() != self._ident:
            self._meet()

    def check_can_wait(self) -> None:
        """The same: in its own thread a selector can always wait."""
        self.check()

    def time(self) -> float:
        """The event loop's time, in seconds. RuntimeError in any other thread."""
        if get_ident() != self._ident:
            self._meet()
        return self._clock()

    def _meet(self) -> None:
        """The first thread is accepted."""
        if self._ident is not None:
            self._reject()
        self.bind()

    def _reject(self) -> NoReturn:
        raise RuntimeError(
            f"this selector and its selections belong to the event loop of thread {self._name!r}, and can't be used from"
            f" thread {threading.current_thread().name!r}. {self._instead}"
        )
