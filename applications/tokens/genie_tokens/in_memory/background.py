"""An event loop in a background thread, whose state other threads may use directly under a mutex.

In an event loop the code between two awaits is atomic. A mutex extends this to other threads: the
loop's thread holds it whenever it runs code, and releases it only while it polls for I/O. So a
thread that holds the mutex has exclusive access to the state, like a callback of the loop. A call
that awaits nothing is executed by the calling thread itself, in some microseconds; passing it to
the loop and back takes about a hundred.

The main thread never acquires the mutex: its calls are always passed to the loop. Signal handlers
run in the main thread between any two instructions and may raise, as Ctrl-C does, which would leave
the state half changed.
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

from genie_tokens.forks import STARTED_BEFORE_FORK, adapt_after_fork

T = TypeVar("T")


class Closed(RuntimeError):
    """The selector is closed."""

    def __init__(self, more: str = "") -> None:
        super().__init__(f"the selector is closed{more}")


class NeedsLoop(Exception):
    """A call must wait, but does not run in the event loop. The call has changed nothing, and can
    be repeated in the event loop.
    """


class Mutex:
    """Mutual exclusion between the event loop's thread and other threads. Also the `Guard` of the
    selector that it protects.
    """

    __slots__ = ("_lock", "_owner_thread_id", "loop_thread_id")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner_thread_id: int | None = None
        """The id of the thread that holds the mutex."""
        self.loop_thread_id: int | None = None
        """The id of the event loop's thread. Only this thread may await while it holds the mutex,
        because polling for I/O releases the mutex.
        """

    def after_fork(self) -> None:
        """Release the mutex in a forked process, which has no other thread."""
        self._lock, self._owner_thread_id = threading.Lock(), None

    def acquire(self) -> None:
        """Wait for the mutex. Raises RuntimeError if the calling thread holds the mutex already."""
        self.check_not_held()
        self._lock.acquire()
        self._owner_thread_id = get_ident()

    def check_not_held(self) -> None:
        """Raise RuntimeError if the calling thread holds the mutex: waiting for the mutex would be
        a deadlock.
        """
        if self._owner_thread_id == get_ident():
            raise RuntimeError(
                "a selector for threads can't be called by code that it executes: by a `where`, by its store, or by a"
                " coroutine passed to `run`"
            )

    def release(self) -> None:
        """Release the mutex."""
        self._owner_thread_id = None
        self._lock.release()

    # -- implementation of `Guard` --------------------------------------------------------------------------

    def bind(self) -> None:
        """Do nothing: any thread that holds the mutex may use the selector."""

    def check(self) -> None:
        """Raise RuntimeError if the calling thread does not hold the mutex."""
        if get_ident() != self._owner_thread_id:
            raise RuntimeError("a selector for threads is used only through its facade")

    def check_can_wait(self) -> None:
        """Raise NeedsLoop if the calling thread is not the event loop's thread."""
        if get_ident() != self.loop_thread_id:
            raise NeedsLoop

    def time(self) -> float:
        """Return the time of the monotonic clock in seconds; event loops use the same clock. Raises
        RuntimeError if the calling thread does not hold the mutex.
        """
        self.check()
        return time.monotonic()


class _PollingSelector(selectors.DefaultSelector):
    """An I/O selector for an event loop. It releases a mutex while it polls."""

    def __init__(self, mutex: Mutex) -> None:
        super().__init__()
        self._mutex = mutex

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Release the mutex, poll for I/O, and acquire the mutex again."""
        self._mutex.release()
        try:
            return super().select(timeout)
        finally:
            self._mutex.acquire()


class _Call(Generic[T]):
    """A coroutine that a thread has passed to the event loop, and its result. The methods run in
    the loop's thread.
    """

    __slots__ = ("_abandoned", "_coroutine", "_task", "_undo", "future", "posted")

    def __init__(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None) -> None:
        self._coroutine = coroutine
        self._undo = undo
        """Called with the result if the calling thread was interrupted. None: nothing to undo."""
        self._task: asyncio.Task[None] | None = None
        """Executes the coroutine; None until the loop has started it."""
        self._abandoned = False
        """True if the calling thread was interrupted, and will not get the result."""
        self.posted = False
        """True if the call was passed to the loop, or an attempt to do so was interrupted."""
        self.future: Future[T] = Future()
        """The result, for which the calling thread waits."""

    def begin(self) -> None:
        """Start the coroutine."""
        self._task = asyncio.get_running_loop().create_task(self._execute())
        # A task that is cancelled before it begins does not close its coroutine.
        self._task.add_done_callback(lambda _: self._coroutine.close())

    def abandon(self) -> None:
        """Cancel the coroutine, or undo its result if the coroutine has succeeded. Called when the
        calling thread was interrupted and will not get the result.
        """
        self._abandoned = True
        if self._task is None:
            self._coroutine.close()
        elif not self._task.done():
            self._task.cancel()
        elif self.future.done() and self.future.exception() is None:
            self._undo_result(self.future.result())

    def fail(self) -> None:
        """End the call with the exception Closed, because the event loop has ended before the
        coroutine began. Has no effect if the call has ended. Any thread may call this method.
        """
        with suppress(InvalidStateError):
            self.future.set_exception(Closed())
            self._coroutine.close()

    async def _execute(self) -> None:
        """Await the coroutine, and pass its result or exception to the calling thread. Undo the
        result if the call was abandoned.
        """
        try:
            result = await self._coroutine
        except asyncio.CancelledError:
            self.future.set_exception(Closed(": the call was cancelled"))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            self.future.set_exception(error)
        else:
            if self._abandoned:
                self._undo_result(result)
            self.future.set_result(result)

    def _undo_result(self, result: T) -> None:
        if self._undo is not None:
            self._undo(result)


class Background:
    """An event loop in a daemon thread, which is started by the first call that needs the loop. Any
    number of threads may make calls.
    """

    def __init__(self, name: str) -> None:
        self.mutex = Mutex()
        """Held by the thread that executes a call."""
        self._thread_name = name
        """The name of the background thread."""
        self._main_thread_id = threading.main_thread().ident
        """The id of the main thread, which never acquires the mutex."""
        self._calls: set[_Call[Any]] = set()
        """The calls that have not returned yet."""
        self._start_lock = threading.Lock()
        """Serializes `_start` and `stop`."""
        self._thread: threading.Thread | None = None
        """The background thread; None until the first call that needs the loop."""
        self._loop: asyncio.AbstractEventLoop
        """Set before `_thread`."""
        self._stopping = asyncio.Event()
        """Set in the loop to end it."""
        self.stopped = False
        """True if the loop is ending or has ended, or will never start."""
        self._why_stopped = ""
        """The end of the message of Closed, after the fact."""
        adapt_after_fork(self)

    def after_fork(self) -> None:
        """Adapt this copy in a forked process, which has no background thread. If the thread was
        started before, later calls raise Closed.
        """
        self.mutex.after_fork()
        self._start_lock = threading.Lock()
        self._main_thread_id = get_ident()
        if self._thread is not None:
            self._thread, self.stopped, self._why_stopped = None, True, f": {STARTED_BEFORE_FORK}"

    def call(
        self, make_coroutine: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], object] | None = None
    ) -> T:
        """Execute the coroutine that `make_coroutine` returns: in the calling thread if possible,
        else in the event loop.

        The event loop executes the calls of the main thread, and coroutines that must wait. A
        coroutine that must wait raises NeedsLoop in the calling thread; then `make_coroutine` is
        called again. If the calling thread is interrupted after the loop has executed the
        coroutine, the result is passed to `undo`. Raises Closed after `stop`.
        """
        if self.stopped:
            raise Closed(self._why_stopped)
        if get_ident() != self._main_thread_id:
            mutex = self.mutex
            mutex.acquire()
            try:
                return run_without_waiting(make_coroutine())
            except NeedsLoop:
                pass  # the event loop executes the call instead
            finally:
                mutex.release()
        return self.run(make_coroutine(), undo)

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
        """Execute a coroutine in the event loop, and wait for the coroutine's result.

        KeyboardInterrupt in the waiting thread cancels the coroutine. If the coroutine has
        succeeded already, the loop calls `undo` with the result. Raises Closed if the loop ends
        before the coroutine.
        """
        call = _Call(coroutine, undo)
        try:
            self._start()
            self._calls.add(call)  # before the check, because the loop sets `stopped` and then fails all calls
            self._check_usable()
            call.posted = True
            self._post(lambda: call.fail() if self.stopped else call.begin())
            return call.future.result()
        except BaseException as error:
            self._abandon(call, error)
            raise
        finally:
            self._calls.discard(call)

    def stop(self) -> None:
        """Cancel the calls in progress, end the event loop, and wait until the background thread has
        ended. Later calls raise Closed.
        """
        self.mutex.check_not_held()
        with self._start_lock:
            if self._thread is None:
                self.stopped = True
                return
        with suppress(Closed):
            self._post(self._stopping.set)
        self._thread.join()

    # -- internals ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the event loop's thread, unless the thread was started or stopped before."""
        if self._thread is None:
            with self._start_lock:
                if self._thread is None and not self.stopped:
                    self._loop = asyncio.SelectorEventLoop(_PollingSelector(self.mutex))
                    thread = threading.Thread(target=self._run_loop, name=self._thread_name, daemon=True)
                    thread.start()
                    self._thread = thread

    def _check_usable(self) -> None:
        if self.stopped:
            raise Closed(self._why_stopped)
        self.mutex.check_not_held()

    def _post(self, callback: Callable[[], None]) -> None:
        """Let the event loop call a function soon. Raises Closed if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise Closed from None

    def _run_loop(self) -> None:
        """Run the event loop until `stop` is called, then end the remaining calls with the
        exception Closed. This is the target function of the thread.
        """
        self.mutex.loop_thread_id = get_ident()
        self.mutex.acquire()
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._wait_until_stopped())
        finally:
            for call in list(self._calls):
                call.fail()
            self.mutex.release()

    async def _wait_until_stopped(self) -> None:
        await self._stopping.wait()
        self.stopped = True  # calls in progress are cancelled, and further ones are rejected

    def _abandon(self, call: _Call[Any], error: BaseException) -> None:
        """Cancel or undo a call after `error` was raised in the calling thread. Has no effect if
        `error` is the exception of the call's own coroutine.
        """
        if call.future.done() and call.future.exception() is error:
            return
        try:
            if call.posted:
                self._post(call.abandon)
                return
        except Closed:
            pass  # the loop has ended, so the call is ended here
        call.fail()


def run_without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """Execute a coroutine without an event loop, and return the coroutine's result. Raises
    RuntimeError if the coroutine suspends.
    """
    try:
        coroutine.send(None)  # runs the coroutine until it ends or suspends
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine that must not wait has suspended")
