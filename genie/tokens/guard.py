"""Thread confinement: rejects calls of a selector from other threads, before they change anything.

A selector needs no mutex because its state is confined to the thread of one event loop: the code
between two awaits is atomic. Without this check, a call from another thread would break that
silently.
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
        """Called when the selector is started, by the thread that starts it."""

    def check(self) -> None:
        """Raise RuntimeError if the caller may not use the selector."""

    def check_can_wait(self) -> None:
        """Raise if the caller may not use the selector, or can't wait for the store."""

    def time(self) -> float:
        """Return the time of a monotonic clock in seconds. RuntimeError if the caller may not use
        the selector.
        """


class ThreadGuard:
    """Confines a selector to the thread that starts it, or that uses it first.

    `advice` is appended to the error message, and says what to use from other threads. Compares the
    thread instead of the event loop: before Python 3.12 finding the running loop takes a system
    call.
    """

    __slots__ = ("_advice", "_clock", "_ident", "_name")

    def __init__(self, advice: str) -> None:
        self._advice = advice
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
        """Raise RuntimeError in any other thread. In its own thread a selector can always wait."""
        self.check()

    def time(self) -> float:
        """Return the event loop's time in seconds. RuntimeError in any other thread."""
        if get_ident() != self._ident:
            self._bind_or_reject()
        return self._clock()

    def _bind_or_reject(self) -> None:
        """Bind the selector to this thread if it is not bound to another one; else raise
        RuntimeError.
        """
        if self._ident is not None:
            self._reject()
        self.bind()

    def _reject(self) -> NoReturn:
        raise RuntimeError(
            f"this selector and its selections belong to the event loop of thread {self._name!r}, and can't be used from"
            f" thread {threading.current_thread().name!r}. {self._advice}"
        )
