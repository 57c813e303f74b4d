"""The connection of the client for threads: the asyncio client's, on an event loop in a background thread.

A call hands its command to the event loop and waits for a `concurrent.futures.Future`. There is no
coroutine and no task for each call: measured with 1 to 64 threads, tasks cost up to a fifth of the rate.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any, TypeVar

from genie.client.aio_connection import AsyncConnection
from genie.client.commands import Call, Release, Request
from genie.client.config import Address
from genie.client.watches import Change, Watch
from genie.errors import ConnectionLost, Unavailable

T = TypeVar("T")


class _State(Enum):
    NEW = auto()
    OPEN = auto()
    CLOSED = auto()
    FORKED = auto()
    """This process was forked after the client was opened. The background thread exists only in the parent process."""


OPEN = _State.OPEN


class SyncConnection:
    """The connection of one client, for any number of threads.

    Everything that changes the connection or its `session` runs in the background thread. Callers read the state of their
    own requests without a mutex, because the background thread writes the state before it completes their future.

    `connect_timeout` (seconds) bounds the first connection, the wait of a call for a later connection, and the wait of a
    release for its reply.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        connect_timeout: float,
        session_secret: str | None,
        session_timeout: float,
        token: str | None,
        namespace: str | None = None,
    ) -> None:
        self.aio = AsyncConnection(
            addresses,
            connect_timeout,
            session_secret=session_secret,
            session_timeout=session_timeout,
            token=token,
            namespace=namespace,
        )
        """The connection. Only the background thread changes it."""
        self.new_ref = self.aio.session.new_ref
        """Returns a new reference for a request. Thread-safe."""
        self._loop: asyncio.AbstractEventLoop
        """The event loop of the background thread."""
        self._thread: threading.Thread | None = None
        self._thread_id = 0
        """The identifier of the background thread; 0: it was not started yet."""
        self._state = _State.NEW
        self._loop_ended = False
        """Whether the event loop no longer executes submitted functions."""
        self._submitted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """Functions that the background thread must execute, with their arguments."""

    # -- opening and closing ------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the background thread, and connect to the leader.

        Raises:
            Unavailable: if no server replies in one round of attempts, or no leader is found within `connect_timeout`.
            RequestRejected: if all servers reject this client for good.
            RuntimeError: if the client was opened before.
        """
        if self._state is not _State.NEW or self._thread is not None:
            raise RuntimeError("a client can be opened only once: make a new one with genie.sync.connect()")
        self._start_loop()
        try:
            self._run_coroutine(self.aio.open())
        except BaseException:
            self._stop_loop()
            self._thread = None
            raise
        self._state = OPEN

    def close(self) -> None:
        """End the session and the connection. Waiting calls fail, and their requests are released."""
        if self._state is not OPEN:
            return
        self._state = _State.CLOSED
        try:
            self._run_coroutine(self.aio.close())
        finally:
            self._stop_loop()

    def stop(self) -> None:
        """End the background thread without sending `bye`. The server ends the session after the session timeout."""
        self._state = _State.CLOSED
        self._stop_loop()

    def mark_forked(self) -> None:
        """Make the client unusable in a forked process, because the connection belongs to the parent process."""
        self._state = _State.FORKED

    def _start_loop(self) -> None:
        """Start a background thread with a new event loop."""
        self._loop_ended = False
        self._loop = _new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="genie-client", daemon=True)
        self._thread.start()
        _running.add(self)

    def _run_loop(self) -> None:
        """Run the event loop until it is stopped, then clean up. This is the main function of the background thread."""
        self._thread_id = threading.get_ident()
        try:
            self._loop.run_forever()
        finally:
            self._loop_ended = True  # `_submit` now raises an error in the calling thread
            self._loop.run_until_complete(self._end_tasks())  # fails the calls that were submitted before
            self._loop.close()

    async def _end_tasks(self) -> None:
        """Fail the remaining calls, cancel all tasks, and close the transport, because the event loop ends."""
        self._execute_submitted()
        await asyncio.sleep(0)  # lets the tasks start that the submitted functions have created
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.aio.abort()

    def _stop_loop(self) -> None:
        """Stop the event loop, and wait for the background thread to end."""
        _running.discard(self)
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background thread and return its result.

        If KeyboardInterrupt interrupts the wait, the coroutine is cancelled. KeyboardInterrupt is raised after the
        coroutine has ended.
        """
        future: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []  # `start` appends the task in the background thread

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(complete_future)

        def cancel() -> None:
            tasks[0].cancel()

        def complete_future(task: asyncio.Task[T]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                future.set_result(task.result())
            else:
                future.set_exception(error)

        self._loop.call_soon_threadsafe(start)
        try:
            return future.result()
        except BaseException:
            if not future.done():  # this thread was interrupted while it waited for the result
                self._loop.call_soon_threadsafe(cancel)
                future.exception()  # waits until the coroutine has ended
            raise

    # -- calls --------------------------------------------------------------------------------------------

    def call(self, call: Call) -> Any:
        """Send a call, wait for its outcome, and return its result or raise its error.

        While disconnected a request is queued until its timeouts have passed. Any other call waits for a connection, and
        raises Unavailable after `connect_timeout`. If KeyboardInterrupt interrupts the wait, a request is released.
        """
        if self._state is not OPEN:
            self._check_open()  # raises an error
        future: Future[Any] = Future()
        try:
            self._submit(self._send, call, future)
            return future.result()
        except BaseException as error:
            is_outcome = future.done() and future.exception() is error
            if not is_outcome:  # this thread was interrupted, maybe after the call had its outcome
                self._execute_and_wait(self._abandon, call, future)
            raise

    def wait_until_connected(self) -> None:
        """Wait for a connection. Raises Unavailable if there is none within `connect_timeout`."""
        self._check_open()
        if not self.up:
            self._run_coroutine(self.aio.wait_until_connected())

    def release(self, release: Release) -> str:
        """Send a release, now or on the next connection, and wait for its reply.

        Returns the reason for which the lock ended.

        Raises:
            Unavailable: if there is no reply within `connect_timeout`. The client continues to send the release in the
                background. It also continues if KeyboardInterrupt interrupts the wait.
        """
        future: Future[str] = Future()
        self._submit(self._send_release, release, future)
        return self._await_release(release, future)

    def release_lock(self, request: Request, *, wait: bool) -> None:
        """Release a lock or cancel a waiting request, unless the request has ended.

        `wait`: wait for the reply, and raise Unavailable after `connect_timeout`. Otherwise return at once.
        """
        future: Future[str] = Future()
        self._submit(self._send_lock_release, request, future if wait else None)
        if wait:
            self._await_release(request, future)

    def detach(self, request: Request) -> None:
        """Stop managing a held lock. The server continues to hold the lock."""
        self._execute_and_wait(self.aio.detach, request)

    def find_held_lock(self, id: int) -> Request | None:
        """Return the request of the lock with this id if this client holds the lock, else None."""
        return self.aio.session.find_held_lock(id)

    @property
    def up(self) -> bool:
        """Whether there is a connection."""
        return self.aio.session.up

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the process that opened the client."""
        return self._state is _State.FORKED

    # -- watches ------------------------------------------------------------------------------------------

    def start_watch(self, watch: Watch) -> None:
        """Subscribe a watch now, instead of when its first change is awaited."""
        self._check_open()
        self._execute_and_wait(self.aio.start_watch, watch)

    def next_change(self, watch: Watch) -> Change | None:
        """Wait for the next change of a watch and return the change, or None if the watch has ended.

        Raises RuntimeError if another thread already waits for a change of this watch; the watch then continues. Any
        other error ends the watch, as does a KeyboardInterrupt.
        """
        try:
            while True:
                try:
                    return watch.changes.popleft()
                except IndexError:
                    if watch.ended:
                        watch.raise_rejection()
                        return None
                future: Future[None] = Future()
                self._submit(self._await_change, watch, future)
                future.result()
        except RuntimeError:  # another thread waits for the next change: do not end the watch
            raise
        except BaseException:
            self.unwatch(watch)
            raise

    def unwatch(self, watch: Watch) -> None:
        """End a watch. Does nothing in a forked process, because the connection belongs to the parent process."""
        if not self.forked:
            self._execute_and_wait(self.aio.unwatch, watch)

    def unwatch_threadsafe(self, watch: Watch) -> None:
        """End a watch that was garbage collected, which may happen in any thread and during any call."""
        if self._state is OPEN:
            self.aio.unwatch_threadsafe(watch)

    # -- passing work to the background thread --------------------------------------------------------------

    def _check_open(self) -> None:
        """Raise an error that says why the client can't be used, unless the client is open."""
        if self._state is OPEN:
            return
        if self._state is _State.FORKED:
            raise RuntimeError("the client was opened before this process was forked: open a new one in this process")
        if self._state is _State.CLOSED:
            raise ConnectionLost("the client was closed")
        raise RuntimeError("the client was not entered: use `with genie.sync.connect() as client`")

    def _submit(self, function: Callable[..., None], *arguments: object) -> None:
        """Queue a function for the background thread, and return at once.

        The function must not raise an error. Instead it completes the future that is its last argument, if that is not
        None. Raises an error if the client is not open.
        """
        if self._state is not OPEN:
            self._check_open()  # raises an error
        if threading.get_ident() == self._thread_id:
            raise RuntimeError(
                "a call in the client's own thread, for example in a finalizer, would block itself forever"
            )
        self._submitted.append((function, arguments))
        # Wake the loop on every call. A flag "already woken" would save wake-ups, but a KeyboardInterrupt between setting
        # the flag and waking the loop would block all later calls.
        try:
            self._loop.call_soon_threadsafe(self._execute_submitted)
        except RuntimeError:  # the event loop is closed
            raise ConnectionLost("the client was closed") from None
        if self._loop_ended:  # the function may have been queued too late to be executed
            raise ConnectionLost("the client was closed")

    def _execute_and_wait(self, function: Callable[..., None], *arguments: object) -> None:
        """Execute a function in the background thread, and wait until it returns.

        If the background thread has ended, or is this thread, the function is executed in this thread.
        """
        if self._state is _State.FORKED:
            self._check_open()  # raises an error
        if self._thread is None or threading.get_ident() == self._thread_id:
            function(*arguments)
            return
        completion: Future[None] = Future()
        try:
            self._loop.call_soon_threadsafe(_execute, function, arguments, completion)
        except RuntimeError:  # the event loop is closed
            function(*arguments)
            return
        if self._loop_ended:
            self._thread.join()  # the ending thread may still execute the function
            if not completion.done():  # the loop ended before it executed the function
                function(*arguments)
                return
        completion.result()

    # -- in the background thread ---------------------------------------------------------------------------

    def _execute_submitted(self) -> None:
        """Execute all queued functions, and send the resulting commands together."""
        if not self._submitted:
            return
        self.aio.begin_batch()
        try:
            while self._submitted:
                function, arguments = self._submitted.popleft()
                function(*arguments)
        finally:
            self.aio.flush()

    def _send(self, call: Call, future: Future[Any]) -> None:
        """Send a call whose outcome completes `future`. An error that prevents sending also completes `future`.

        Behaves like `AsyncConnection.call`, but creates a task only if the call must wait for a connection.
        """
        if future.done():  # the calling thread was interrupted, and has abandoned the call already
            return
        aio = self.aio
        try:
            aio.check_open()
            if not aio.session.up:
                aio.check_not_rejected()
                if not isinstance(call, Request):
                    self._loop.create_task(self._send_when_connected(call, future))
                    return
            aio.send(call, future)
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            future.set_exception(error)

    async def _send_when_connected(self, call: Call, future: Future[Any]) -> None:
        """Send a call as soon as there is a connection. `future` gets the error if there is no connection in time."""
        try:
            await self.aio.wait_until_connected()
        except asyncio.CancelledError:
            future.set_exception(ConnectionLost("the client was closed"))
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                self._send(call, future)

    def _abandon(self, call: Call, future: Future[Any]) -> None:
        """Drop the outcome of a call whose caller was interrupted. A request is also released."""
        future.cancel()
        self.aio.abandon(call)

    def _send_release(self, release: Release, future: Future[str]) -> None:
        """Send a release, or queue it while disconnected. The reply, or an error, completes `future`."""
        try:
            self.aio.check_open()
            self.aio.send(release, future)
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            future.set_exception(error)

    def _send_lock_release(self, request: Request, future: Future[str] | None) -> None:
        """Release the locks of a request. The reply completes `future`, if there is one, with the reason why the locks ended,
        or with the error.

        If the request has ended or is being released already, `future` is completed at once with an empty string.
        """
        try:
            pending_release = self.aio.release_lock(request)
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            if future is not None:
                future.set_exception(error)
            return
        if future is None:
            return
        if pending_release is None:
            future.set_result("")
        else:
            pending_release.future = future

    def _await_change(self, watch: Watch, future: Future[None]) -> None:
        """Complete `future` with None as soon as the watch has a change or has ended."""
        try:
            self.aio.request_next(watch, future)
        except Exception as error:  # noqa: BLE001 - passed on to the caller
            future.set_exception(error)

    # -- in the calling thread ------------------------------------------------------------------------------

    def _await_release(self, call: Release | Request, future: Future[str]) -> str:
        """Wait for the reply to a release, and return the reason for which the lock ended.

        `call` is the release, or the request that is being released. Raises Unavailable after `connect_timeout`.
        """
        try:
            return future.result(self.aio.connect_timeout)
        except TimeoutError:
            raise Unavailable(self.aio.release_timeout_text(call.id)) from None
        finally:
            pending_release = call if isinstance(call, Release) else call.release
            if pending_release is not None:
                pending_release.future = None  # a later reply has no caller


def _execute(function: Callable[..., None], arguments: Sequence[object], completion: Future[None]) -> None:
    """Execute a function, and complete the future `completion` with the error, or with None."""
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001 - passed on to the caller
        completion.set_exception(error)
    else:
        completion.set_result(None)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop: of uvloop if uvloop is installed, else of asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# -- exit and fork of the process ---------------------------------------------------------------------------

_running: set[SyncConnection] = set()
"""The connections whose background thread runs."""


@atexit.register
def _stop_all() -> None:
    """Stop the threads of clients that were not closed: a daemon thread must not run while the interpreter ends."""
    for connection in list(_running):
        connection.stop()


def _after_fork_in_child() -> None:
    """Mark all clients as unusable in a forked child, which has no background threads."""
    for connection in _running:
        connection.mark_forked()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
