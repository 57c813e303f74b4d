"""Thread confinement: calls of a selector from another thread are rejected before they change
anything.

A selector needs no lock because all its state is confined to one event loop: the code between two
awaits is atomic. A call from another thread would break that silently.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from threading import get_ident
from typing import NoReturn, Protocol


class Guard(Protocol):
    """Decides whether the calling thread may use a selector, and provides its clock."""

    def bind(self) -> None:
        """The selector is being started."""

    def check(self) -> None:
        """Raise RuntimeError if the caller may not use the selector."""

    def check_can_wait(self) -> None:
        """Called before the store is awaited. Raises if the caller can't wait, or as `check` does."""

    def time(self) -> float:
        """Return the seconds of a monotonic clock. RuntimeError if the caller may not use the
        selector.
        """


class ThreadGuard:
    """Confines a selector to the thread whose event loop starts it, or uses it before the start.

    `instead` is appended to the error, and says what to use from other threads. The thread is
    compared, not the event loop: before Python 3.12 finding the running loop takes a system call.
    """

    __slots__ = ("_clock", "_ident", "_instead", "_name")

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self._ident: int | None = None
        self._name = ""
        self._clock: Callable[[], float]

    def bind(self) -> None:
        """Confine the selector to this thread, and use the clock of its running event loop."""
        self._clock = asyncio.get_running_loop().time
        self._name = threading.current_thread().name
        self._ident = get_ident()

    def check(self) -> None:
        """Raise RuntimeError in any other thread."""
        if get_ident() != self._ident:
            self._bind_or_reject()

    def check_can_wait(self) -> None:
        """Raise RuntimeError in any other thread: in its own thread a selector can always wait."""
        self.check()

    def time(self) -> float:
        """Return the event loop's time in seconds. RuntimeError in any other thread."""
        if get_ident() != self._ident:
            self._bind_or_reject()
        return self._clock()

    def _bind_or_reject(self) -> None:
        if self._ident is not None:
            self._reject()
        self.bind()

    def _reject(self) -> NoReturn:
        raise RuntimeError(
            f"this selector and its selections belong to the event loop of thread {self._name!r}, and can't be used from"
            f" thread {threading.current_thread().name!r}. {self._instead}"
        )
