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

from genie_tokens.forks import STARTED_BEFORE_FORK, adapt_after_fork

NO_THREAD_ID = 0
"""No thread has this id."""


class Guard(Protocol):
    """Decides whether the calling thread may use a selector, and provides its clock."""

    def bind(self) -> None:
        """Called when the selector is started, by the thread that starts the selector."""

    def check(self) -> None:
        """Raise RuntimeError if the calling thread may not use the selector."""

    def check_can_wait(self) -> None:
        """Raise an exception if the calling thread may not use the selector, or can't wait for the
        store.
        """

    def time(self) -> float:
        """Return the time of a monotonic clock in seconds. Raises RuntimeError if the calling
        thread may not use the selector.
        """


class ThreadGuard:
    """Confines a selector to the thread that starts the selector, or that uses it first. A call from
    any other thread raises RuntimeError, and changes nothing.

    `advice` is appended to the error message: it says what to use from other threads. The guard
    compares threads instead of event loops, because before Python 3.12 finding the running loop
    takes a system call.
    """

    __slots__ = ("__weakref__", "_advice", "_clock", "_is_of_parent", "_thread_id", "_thread_name")

    def __init__(self, advice: str) -> None:
        self._advice = advice
        """The end of the error message: what to use from other threads."""
        self._thread_id: int | None = None
        """The id of the thread to which the selector is confined; None before `bind`."""
        self._thread_name = ""
        """The name of this thread, for the error message."""
        self._clock: Callable[[], float]
        """Returns the time of this thread's event loop; set by `bind`."""
        self._is_of_parent = False
        """True if the selector was confined to a thread before this process was forked."""
        adapt_after_fork(self)

    def bind(self) -> None:
        """Confine the selector to the calling thread, and use the clock of the thread's running
        event loop.
        """
        self._clock = asyncio.get_running_loop().time
        self._thread_name = threading.current_thread().name
        self._thread_id = get_ident()

    def after_fork(self) -> None:
        """Reject all calls in a forked process if the selector was used before. The forked thread
        keeps its id.
        """
        if self._thread_id is not None:
            self._thread_id, self._is_of_parent = NO_THREAD_ID, True

    def check(self) -> None:
        """Raise RuntimeError if the selector is confined to another thread. The first call confines
        the selector to the calling thread.
        """
        if get_ident() != self._thread_id:
            self._bind_or_reject()

    def check_can_wait(self) -> None:
        """Raise RuntimeError if the selector is confined to another thread. In its own thread a
        selector can always wait.
        """
        self.check()

    def time(self) -> float:
        """Return the event loop's time in seconds. Raises RuntimeError if the selector is confined
        to another thread.
        """
        if get_ident() != self._thread_id:
            self._bind_or_reject()
        return self._clock()

    def _bind_or_reject(self) -> None:
        """Confine the selector to the calling thread. Raises RuntimeError if the selector is
        confined to another thread already.
        """
        if self._thread_id is not None:
            self._reject()
        self.bind()

    def _reject(self) -> NoReturn:
        if self._is_of_parent:
            raise RuntimeError(f"this selector can't be used: {STARTED_BEFORE_FORK}")
        raise RuntimeError(
            f"this selector and its selections belong to the event loop of thread {self._thread_name!r}, and can't be used from"
            f" thread {threading.current_thread().name!r}. {self._advice}"
        )
