"""An event loop in a thread of its own, whose state other threads may use as well.

The state of a selector is atomic between two awaits. For threads the same is kept by a mutex: the loop's thread holds it
whenever it runs, and releases it only while it polls for I/O. Another thread that holds it is alone with the state, as a
callback of the loop would be. So a call that waits for nothing is executed by the calling thread itself, which takes some
microseconds; handing it to the loop and back takes a hundred.

The main thread never takes the mutex. Signal handlers run there, between any two instructions, and may raise (as Ctrl-C
does): that would leave the state half changed. Its calls are handed to the loop.
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
    """A call would have to wait, and is not made in the event loop. It has changed nothing."""


class Mutex:
    """Mutual exclusion of the event loop's thread and of others. It is the guard of the selector that it protects."""

    __slots__ = ("_lock", "_owner", "loop_thread")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.loop_thread: int | None = None
        """The thread that may wait while it holds the mutex, for it is then released."""

    def acquire(self) -> None:
        """Wait for the mutex. RuntimeError as by `check_free`."""
        self.check_free()
        self._lock.acquire()
        self._owner = get_ident()

    def check_free(self) -> None:
        """RuntimeError where this thread holds the mutex: it would wait for itself."""
        if self._owner == get_ident():
            raise RuntimeError(
                "a selector for threads can't be called while it executes a call: neither by a `where`, nor by its store, nor"
                " by what `run` executes"
            )

    def release(self) -> None:
        """Let others have it."""
        self._owner = None
        self._lock.release()

    # -- as a guard -----------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Nothing: any thread that holds the mutex may use the selector."""

    def check(self) -> None:
        """RuntimeError where this thread does not hold the mutex."""
        if get_ident() != self._owner:
            raise RuntimeError("a selector for threads is used only through its facade")

    def check_can_wait(self) -> None:
        """NeedsLoop outside of the event loop."""
        if get_ident() != self.loop_thread:
            raise NeedsLoop

    def time(self) -> float:
        """Seconds of the monotonic clock, which is also the event loop's."""
        self.check()
        return time.monotonic()


class _Polling(selectors.DefaultSelector):
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
    """A coroutine that a thread hands to the loop. Its methods are called in the loop's thread."""

    __slots__ = ("_abandoned", "_coroutine", "_task", "_undo", "outcome", "posted")

    def __init__(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None) -> None:
        self._coroutine = coroutine
        self._undo = undo
        self._task: asyncio.Task[None] | None = None
        self._abandoned = False
        self.posted = False
        """Whether the loop may have heard of it."""
        self.outcome: Future[T] = Future()

    def begin(self) -> None:
        """Execute the coroutine."""
        self._task = asyncio.get_running_loop().create_task(self._execute())
        self._task.add_done_callback(lambda _: self._coroutine.close())  # cancelled before it began

    def abandon(self) -> None:
        """The thread was interrupted and will not take the outcome: cancel the call, or undo it if it has succeeded."""
        self._abandoned = True
        if self._task is None:
            self._coroutine.close()
        elif not self._task.done():
            self._task.cancel()
        elif self.outcome.done() and self.outcome.exception() is None:
            self._undone(self.outcome.result())

    def fail(self) -> None:
        """The loop has ended, and the coroutine has not begun. Also called in the thread that made the call."""
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
                self._undone(result)
            self.outcome.set_result(result)

    def _undone(self, result: T) -> None:
        if self._undo is not None:
            self._undo(result)


class Background:
    """An event loop in a daemon thread, which begins with the first call that needs it. For any number of threads."""

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
        """Whether the loop ends or has ended, or will never begin."""

    def call(self, make: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], object] | None = None) -> T:
        """Execute a coroutine in this thread, or in the loop where it has to wait or this is the main thread.

        A `make` that has raised NeedsLoop is called once more. `undo` as in `run`.
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

        A thread that is interrupted meanwhile (KeyboardInterrupt) cancels it; if it has succeeded already its result is
        given to `undo`, in the loop. Closed where the loop has ended or ends before the coroutine.
        """
        call = _Call(coroutine, undo)
        try:
            self._begin()
            self._calls.add(call)  # before the look: the loop first sets `stopped`, and fails all calls at its end
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
        """Cancel what still runs in the loop, and end it. A second time waits for the same."""
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
                    self._loop = asyncio.SelectorEventLoop(_Polling(self.mutex))
                    thread = threading.Thread(target=self._live, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread

    def _check_usable(self) -> None:
        if self.stopped:
            raise Closed
        self.mutex.check_free()

    def _post(self, callback: Callable[[], None]) -> None:
        """Let the loop call something. Closed where it has ended."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise Closed from None

    def _live(self) -> None:
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
        self.stopped = True  # what has begun by now is cancelled, and nothing more begins

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
    """Execute a coroutine that does not have to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("a call that should not have to wait does")
