"""Hands the results of calls over from the background thread of the client for threads to the calling threads.

A signal handler may raise an exception at any point of the main thread: Ctrl-C, a soft time limit, an alarm. Such an
exception inside `concurrent.futures.Future` or `threading.Event` can leave their internal lock held for ever, and the
background thread, which completes all calls, would block on that lock. Here the caller only waits on a mutex that belongs to
this one wait, and only the background thread releases it. So an interrupted caller leaves no mutex held.
"""

from __future__ import annotations

import _thread
import contextlib
import weakref
from collections import deque
from typing import Any, Generic, Self, TypeVar, cast

T = TypeVar("T")


class Handover(Generic[T]):
    """The outcome of one call: the background thread sets it once, and one calling thread waits for it."""

    __slots__ = ("_arrived", "_done", "_result", "error")

    def __init__(self) -> None:
        self._result: T | None = None
        self.error: BaseException | None = None
        """The error of the call; None: the call has succeeded, or has no outcome yet."""
        self._done = False
        """True if there is an outcome, or the caller has abandoned the call."""
        self._arrived = _thread.allocate_lock()
        """Held until the outcome arrives. The background thread releases it."""
        self._arrived.acquire()

    def done(self) -> bool:
        """Return whether there is an outcome, or the caller has abandoned the call."""
        return self._done

    # -- in the background thread ---------------------------------------------------------------------------

    def set_result(self, result: T) -> None:
        """Complete the call with a result. Call this method at most once, as `set_exception`."""
        self._result = result
        self._done = True
        self._arrived.release()

    def set_exception(self, exception: BaseException) -> None:
        """Complete the call with an error."""
        self.error = exception
        self._done = True
        self._arrived.release()

    def abandon(self) -> None:
        """Ignore the outcome, because the caller was interrupted and no longer waits."""
        self._done = True

    # -- in the calling thread ------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until there is an outcome. The background thread limits the time."""
        if not self._done:
            self._arrived.acquire()

    def result(self) -> T:
        """Wait for the outcome. Return the result, or raise the error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return cast("T", self._result)


class Guard(weakref.ref[Any]):
    """Reports that a context or watch of the caller was garbage collected without having been ended.

    This happens if a signal handler raises an exception before the first instruction of `__exit__`. A method `__del__` would
    also detect it, but an exception of a signal handler inside `__del__` is lost. So the callback of this weak reference is a
    function in C.
    """

    __slots__ = ("owned",)

    def __init__(self, owner: object, dropped: deque[Guard], owned: Any) -> None:  # noqa: ARG002 - used by __new__
        self.owned = owned
        """The request or the watch that must be ended."""

    def __new__(cls, owner: object, dropped: deque[Guard], owned: Any) -> Self:  # noqa: ARG004 - used by __init__
        """Make a guard that appends itself to `dropped` when `owner` is garbage collected."""
        return super().__new__(cls, owner, dropped.append)


class LostEvent:
    """The event of a lost lock: like a `threading.Event` that only the client sets. Any number of threads may wait."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[Any] = deque()
        """A held lock for each waiting thread."""

    def is_set(self) -> bool:
        """Return whether the lock is lost."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lock is lost, or the timeout in seconds has passed. Returns whether the lock is lost."""
        if self._is_set:
            return True
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if not self._is_set:  # else `set` may not have seen the waiter
            waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        with contextlib.suppress(ValueError):  # `set` has removed it
            self._waiters.remove(waiter)
        return self._is_set

    def set(self) -> None:
        """Wake all waiting threads. Called in the background thread."""
        self._is_set = True
        with contextlib.suppress(IndexError):
            while True:
                self._waiters.popleft().release()
