"""An event loop in a thread of its own whose state other threads may use too.

Between two awaits the state of a selector changes atomically. A mutex extends this to threads: the
loop's thread holds it whenever it runs, and releases it only while it polls for I/O. A thread that
holds the mutex has exclusive access, like a callback of the loop. A call that awaits nothing is
therefore executed by the calling thread itself, in some microseconds; passing it to the loop and
back takes about a hundred.

The main thread never takes the mutex. Signal handlers run there between any two instructions and
may raise, as Ctrl-C does, which would leave the state half changed. Its calls are passed to the
loop.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import get_ident
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Closed(RuntimeError):
    """The selector is closed."""

    def __init__(self, more: str = "") -> None:
        super().__init__(f"the selector is closed{more}")


class NeedsLoop(Exception):
    """A call would have to wait, and does not run in the event loop. It has changed nothing."""


class Mutex:
    """Mutual exclusion of the event loop's thread and other threads. It is the guard of the
    selector that it protects.
    """

    __slots__ = ("_lock", "_owner", "loop_thread")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.loop_thread: int | None = None
        """The thread that may await while it holds the mutex: polling releases it."""

    def acquire(self) -> None:
        """Wait for the mutex. RuntimeError as in `check_free`."""
        self.check_free()
        self._lock.acquire()
        self._owner = get_ident()

    def check_free(self) -> None:
        """Raise RuntimeError if this thread holds the mutex: it would deadlock."""
        if self._owner == get_ident():
            raise RuntimeError(
                "a selector for threads can't be called while it executes a call: neither by a `where`, nor by its store, nor"
                " by what `run` executes"
            )

    def release(self) -> None:
        """Release the mutex."""
        self._owner = None
        self._lock.release()

    # -- as a guard -----------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Do nothing: any thread that holds the mutex may use the selector."""

    def check(self) -> None:
        """Raise RuntimeError if this thread does not hold the mutex."""
        if get_ident() != self._owner:
            raise RuntimeError("a selector for threads is used only through its facade")

    def check_can_wait(self) -> None:
        """Raise NeedsLoop outside of the event loop."""
        if get_ident() != self.loop_thread:
            raise NeedsLoop

    def time(self) -> float:
        """Return the monotonic clock's seconds, which is also the event loop's clock."""
        self.check()
        return time.monotonic()


class _PollingSelector(selectors.DefaultSelector):
    """Releases a mutex while the event loop polls for I/O."""

    def __init__(self, mutex: Mutex) -> None:
        super().__init__()
        self._mutex = mutex

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._mutex.release()
        try:
            return super().select(timeout)
        finally:
            self._mutex.acquire()


class _Call(Generic[T]):
    """A coroutine that a thread has passed to the loop. Its methods run in the loop's thread."""

    __slots__ = ("_abandoned", "_coroutine", "_task", "_undo", "outcome", "posted")

    def __init__(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None) -> None:
        self._coroutine = coroutine
        self._undo = undo
        self._task: asyncio.Task[None] | None = None
        self._abandoned = False
        self.posted = False
        """Whether the loop may have received it."""
        self.outcome: Future[T] = Future()

    def begin(self) -> None:
        """Start the coroutine."""
        self._task = asyncio.get_running_loop().create_task(self._execute())
        self._task.add_done_callback(lambda _: self._coroutine.close())  # cancelled before it began

    def abandon(self) -> None:
        """The calling thread was interrupted: cancel the call, or undo it if it has succeeded."""
        self._abandoned = True
        if self._task is None:
            self._coroutine.close()
        elif not self._task.done():
            self._task.cancel()
        elif self.outcome.done() and self.outcome.exception() is None:
            self._undo_result(self.outcome.result())

    def fail(self) -> None:
        """The loop has ended before the coroutine began. Also runs in the calling thread."""
        with suppress(InvalidStateError):
            self.outcome.set_exception(Closed())
            self._coroutine.close()

    async def _execute(self) -> None:
        try:
            result = await self._coroutine
        except asyncio.CancelledError:
            self.outcome.set_exception(Closed(": the call was cancelled"))
        except BaseException as error:  # noqa: BLE001 - it is the thread's
            self.outcome.set_exception(error)
        else:
            if self._abandoned:
                self._undo_result(result)
            self.outcome.set_result(result)

    def _undo_result(self, result: T) -> None:
        if self._undo is not None:
            self._undo(result)


class Background:
    """An event loop in a daemon thread, started by the first call that needs it. For any number of
    threads.
    """

    def __init__(self, name: str) -> None:
        self.mutex = Mutex()
        self._name = name
        self._main = threading.main_thread().ident
        self._calls: set[_Call[Any]] = set()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stopping = asyncio.Event()
        self.stopped = False
        """Whether the loop is ending or has ended, or will never start."""

    def call(self, make: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], object] | None = None) -> T:
        """Execute a coroutine in this thread; in the loop if it has to wait, or if this is the main
        thread.

        `make` is called again if its coroutine raised NeedsLoop. `undo` as in `run`.
        """
        if self.stopped:
            raise Closed
        if get_ident() != self._main:
            mutex = self.mutex
            mutex.acquire()
            try:
                return immediately(make())
            except NeedsLoop:
                pass
            finally:
                mutex.release()
        return self.run(make(), undo)

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
        """Execute a coroutine in the loop, and wait for its outcome.

        KeyboardInterrupt in the waiting thread cancels it; if it has succeeded already its result
        is passed to `undo`, in the loop. Closed if the loop has ended or ends before the coroutine.
        """
        call = _Call(coroutine, undo)
        try:
            self._begin()
            self._calls.add(call)  # before the check: the loop first sets `stopped`, then fails all calls
            self._check_usable()
            call.posted = True
            self._post(lambda: call.fail() if self.stopped else call.begin())
            return call.outcome.result()
        except BaseException as error:
            self._drop(call, error)
            raise
        finally:
            self._calls.discard(call)

    def stop(self) -> None:
        """Cancel what runs in the loop, and end it. A second call waits for the same."""
        self.mutex.check_free()
        with self._starting:
            if self._thread is None:
                self.stopped = True
                return
        with suppress(Closed):
            self._post(self._stopping.set)
        self._thread.join()

    # -- inside ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self.stopped:
                    self._loop = asyncio.SelectorEventLoop(_PollingSelector(self.mutex))
                    thread = threading.Thread(target=self._run_loop, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread

    def _check_usable(self) -> None:
        if self.stopped:
            raise Closed
        self.mutex.check_free()

    def _post(self, callback: Callable[[], None]) -> None:
        """Let the loop call something. Closed if it has ended."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise Closed from None

    def _run_loop(self) -> None:
        self.mutex.loop_thread = get_ident()
        self.mutex.acquire()
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_stopped())
        finally:
            for call in list(self._calls):
                call.fail()
            self.mutex.release()

    async def _until_stopped(self) -> None:
        await self._stopping.wait()
        self.stopped = True  # calls in progress are cancelled, and no more are started

    def _drop(self, call: _Call[Any], error: BaseException) -> None:
        if call.outcome.done() and call.outcome.exception() is error:
            return
        try:
            if call.posted:
                self._post(call.abandon)
                return
        except Closed:
            pass
        call.fail()


def immediately(coroutine: Coroutine[Any, Any, T]) -> T:
    """Execute a coroutine that awaits nothing, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("a call that must not wait did")
