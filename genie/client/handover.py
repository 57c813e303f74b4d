"""Passes the outcomes of calls from the background thread of a client of `genie.sync` to the calling threads.

A signal handler may raise an exception at any point of the main thread: Ctrl-C, a soft time limit, an alarm. Such an
exception inside `concurrent.futures.Future` or `threading.Event` can leave their internal lock held for ever. The background
thread, which completes all calls, would then block on that lock. So here each wait has a mutex of its own, on which only the
caller waits, and which only the background thread releases. An interrupted caller leaves no mutex held.
"""

from __future__ import annotations

import _thread
import contextlib
import weakref
from collections import deque
from typing import Any, Generic, Self, TypeVar, cast

T = TypeVar("T")


SIGNAL_CHECK_S = 1.0
"""How long a thread waits before it lets Python handle signals. CPython misses a signal that arrives just before it begins to
wait: without this limit, Ctrl-C would have no effect until the call ends."""


def acquire_interruptibly(mutex: _thread.LockType) -> None:
    """Acquire a mutex without a time limit. Raises what the handler of a signal raises meanwhile."""
    while not mutex.acquire(True, SIGNAL_CHECK_S):
        pass


class Handover(Generic[T]):
    """The outcome of one call: the background thread sets it once, and one calling thread waits for it."""

    __slots__ = ("_done", "_pending", "_result", "error")

    def __init__(self) -> None:
        self._result: T | None = None
        self.error: BaseException | None = None
        """The error of the call. None if the call has succeeded, or has no outcome yet."""
        self._done = False
        """True if there is an outcome, or the caller has abandoned the call."""
        self._pending = _thread.allocate_lock()
        """A mutex that is held until the background thread sets the outcome."""
        self._pending.acquire()

    def done(self) -> bool:
        """Return whether there is an outcome, or the caller has abandoned the call."""
        return self._done

    # -- in the background thread ---------------------------------------------------------------------------

    def set_result(self, result: T) -> None:
        """Complete the call with a result. A call is completed only once, by this method or by `set_exception`."""
        self._result = result
        self._done = True
        self._pending.release()

    def set_exception(self, exception: BaseException) -> None:
        """Complete the call with an error."""
        self.error = exception
        self._done = True
        self._pending.release()

    def abandon(self) -> None:
        """Mark the call as done without an outcome, because the caller was interrupted and no longer waits."""
        self._done = True

    # -- in the calling thread ------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until there is an outcome. Has no time limit: the background thread completes each call in time."""
        if not self._done:
            acquire_interruptibly(self._pending)

    def result(self) -> T:
        """Wait for the outcome. Return the result, or raise the error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return cast("T", self._result)


class Guard(weakref.ref[Any]):
    """Detects that the caller's context or watch (`owner`) was garbage collected without having been ended.

    This happens if a signal handler raises an exception before the first instruction of `__exit__`. A method `__del__` would
    also detect it, but Python drops an exception that a signal handler raises inside `__del__`. So the callback of this weak
    reference is `deque.append`, a function in C, during which no signal handler runs.
    """

    __slots__ = ("owned",)

    def __init__(self, owner: object, dropped: deque[Guard], owned: Any) -> None:  # noqa: ARG002 - used by __new__
        self.owned = owned
        """The request or the subscription of the owner, which must be ended with it."""

    def __new__(cls, owner: object, dropped: deque[Guard], owned: Any) -> Self:  # noqa: ARG004 - used by __init__
        """Make a guard that appends itself to `dropped` when `owner` is garbage collected."""
        return super().__new__(cls, owner, dropped.append)


class LostEvent:
    """The event of a lost lock: like a `threading.Event` that only the client sets. Any number of threads may wait."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[Any] = deque()
        """A held mutex for each waiting thread."""

    def is_set(self) -> bool:
        """Return whether the lock is lost."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lock is lost, or `timeout` seconds have passed. Returns whether the lock is lost.

        Without a timeout, the wait has no limit.
        """
        if self._is_set:
            return True
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if not self._is_set:  # `set` may have run before the waiter was appended
            if timeout is None:
                acquire_interruptibly(waiter)
            else:
                waiter.acquire(timeout=max(timeout, 0.0))
        with contextlib.suppress(ValueError):  # raised if `set` has removed the waiter
            self._waiters.remove(waiter)
        return self._is_set

    def set(self) -> None:
        """Wake all waiting threads. Called in the background thread."""
        self._is_set = True
        with contextlib.suppress(IndexError):
            while True:
                self._waiters.popleft().release()
