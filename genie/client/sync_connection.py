"""The connection of the client for threads: an `AsyncConnection` on an event loop in a background thread.

A call passes its command to the event loop, and waits for a `Handover`. There is no coroutine and no task for each call:
measured with 1 to 64 threads, tasks cost up to a fifth of the rate.

A caller may be interrupted at any point, by an exception that a signal handler raises. So a caller changes the connection
only by appending to a deque, and the background thread never waits for a caller. A request whose caller was interrupted is
abandoned: the background thread releases it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum, auto
from typing import Any, TypeVar

from genie.client import clock
from genie.client.aio_connection import FORKED, AsyncConnection
from genie.client.commands import Call, Release, Request, RequestState
from genie.client.config import Address, ClientOptions
from genie.client.handover import Guard, Handover
from genie.client.process import current_process
from genie.client.requests import is_unknown_id
from genie.client.watches import Change, Watch
from genie.errors import ConnectionLost, GenieError

T = TypeVar("T")


GUARD_INTERVAL_S = 0.5
"""Time between two searches for contexts and watches that were garbage collected without having been ended."""
EXIT_TIMEOUT_S = 1.0
"""How long the process waits at its end until the servers have ended the sessions of the clients that were not closed."""


class _State(Enum):
    """The state of the connection of a client."""

    NEW = auto()
    OPEN = auto()
    CLOSED = auto()
    EXITED = auto()
    """The process is ending. It does not wait for daemon threads, so calls that wait there get no outcome."""
    FORKED = auto()
    """This process was forked after the client was opened. The background thread exists only in the parent process."""


OPEN = _State.OPEN


class SyncConnection:
    """The connection of one client, for any number of threads.

    Everything that changes the connection or its `session` runs in the background thread. Callers read the state of their
    own requests without a mutex, because the background thread writes the state before it completes their future.

    `AsyncConnection` describes the options.
    """

    def __init__(self, addresses: Sequence[Address], options: ClientOptions) -> None:
        self.aio = AsyncConnection(addresses, options)
        """The connection. Only the background thread changes it."""
        self.new_ref = self.aio.session.calls.new_ref
        """Returns a new `ref` for a request. Thread-safe."""
        self._loop: asyncio.AbstractEventLoop
        """The event loop of the background thread."""
        self._thread: threading.Thread | None = None
        self._thread_id = 0
        """The identifier of the background thread. 0 before it is started."""
        self._state = _State.NEW
        self._loop_ended = False
        """True if the event loop no longer executes submitted functions."""
        self._submitted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """Functions that the background thread must execute, with their arguments."""
        self._guards: set[Guard] = set()
        """The guards of the contexts and watches that were not ended. Any thread may add and remove guards."""
        self._dropped_guards: deque[Guard] = deque()
        """The guards whose context or watch was garbage collected."""
        self._is_check_scheduled = False
        """True if a call of `_check_guards` is scheduled."""

    # -- opening and closing ------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the background thread, and connect to the leader.

        Raises:
            Unavailable: if no server accepts the client within `connect_timeout`.
            RequestRejected: if all servers reject this client for good.
            RuntimeError: if the client was opened before.
        """
        if self._state is not _State.NEW or self._thread is not None:
            raise RuntimeError("a client can be opened only once: make a new one with genie.sync.connect()")
        try:
            self._start_loop()
            self._run_coroutine(self.aio.open())
            self._state = OPEN
        except BaseException:
            self._stop_loop()
            self._thread = None
            self._state = _State.NEW
            raise

    def close(self, *, release: bool = False) -> None:
        """End the session and the connection. Waiting calls fail. `AsyncConnection.close` describes `release`."""
        if self._state is not OPEN:
            return
        try:
            self._state = _State.CLOSED
            self._run_coroutine(self.aio.close(release=release))
        finally:
            self._stop_loop()

    def begin_exit(self, limit_s: float) -> None:
        """Begin to end the session, because the process is ending. Calls that wait get no outcome.

        The background thread ends when the server has closed the connection, or after `limit_s` seconds.
        """
        self._state = _State.EXITED
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._exit(limit_s)))

    async def _exit(self, limit_s: float) -> None:
        try:
            await self.aio.end_session_at_exit(limit_s)
        finally:
            self._loop.stop()

    def finish_exit(self) -> None:
        """Wait for the end of the background thread."""
        if self._thread is not None:
            self._thread.join()

    def mark_forked(self) -> None:
        """Make the client unusable in a forked process, because the connection belongs to the parent process."""
        self._state = _State.FORKED

    def _start_loop(self) -> None:
        """Start a background thread with a new event loop."""
        self._loop_ended = False
        self._loop = current_process().new_event_loop()
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
            self._loop.run_until_complete(self._end_tasks())
            self._loop.close()

    async def _end_tasks(self) -> None:
        """Fail the calls that were submitted before, cancel all tasks, and close the transport."""
        if self._state is not _State.EXITED:
            self._execute_submitted()
        await asyncio.sleep(0)  # starts the tasks that the submitted functions have created
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
        """Run a coroutine in the background thread, and return its result.

        If a signal handler raises an exception in this thread during the wait, the coroutine is cancelled. The exception is
        raised when the coroutine has ended.
        """
        handover: Handover[T] = Handover()
        tasks: list[asyncio.Task[T]] = []  # the background thread appends the task when it starts

        def start_task() -> None:
            task = self._loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(pass_outcome)

        def cancel_task() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # the exception was raised before `start_task` was queued
                coroutine.close()
                handover.set_exception(asyncio.CancelledError())

        def pass_outcome(task: asyncio.Task[T]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is None:
                handover.set_result(task.result())
            else:
                handover.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(start_task)
            handover.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel_task)
            handover.wait()  # until the coroutine has ended
            raise
        return handover.result()

    # -- calls --------------------------------------------------------------------------------------------

    def call(self, call: Call) -> Any:
        """Send a call, wait for its outcome, and return its result or raise its error, as `AsyncConnection.call` does.

        If this method raises an error for a request, the caller must `abandon` the request.
        """
        if self._state is not OPEN:
            self.check_open()  # raises an error
        handover: Handover[Any] = Handover()
        try:
            self._submit(self._send, call, handover)
            handover.wait()
        except BaseException:
            handover.abandon()
            raise
        return handover.result()

    def abandon(self, request: Request) -> None:
        """Release a request in the background, if it waits or is held, because its caller was interrupted or has failed.

        Neither blocks nor raises an error, so that the caller can propagate its own error.
        """
        if request.state in (RequestState.WAITING, RequestState.HELD) and self._state is OPEN:
            self._submit_quietly(self.aio.abandon, request)

    def fail_request(self, request: Request, error: Exception) -> None:
        """End a waiting request of another thread: its call raises this error. Returns at once."""
        self._submit_quietly(self.aio.fail_request, request, error)

    def release(self, release: Release) -> str:
        """Send a release by id, now or on the next connection, and wait for its reply. Returns why the lock ended.

        Raises Unavailable if there is no reply within `response_timeout`. The client then retries the release in the
        background, as it does if an exception interrupts the wait.
        """
        handover: Handover[str] = Handover()
        self._submit(self._send_release, release, handover)
        return handover.result()

    def release_lock(self, request: Request) -> None:
        """Release a lock, unless it has ended, and wait for the reply. Raises Unavailable after `response_timeout`."""
        handover: Handover[str] = Handover()
        self._submit(self._send_lock_release, request, handover)
        handover.result()

    def release_all(self, requests: Sequence[Request]) -> GenieError | None:
        """Release locks together, and wait for all replies. Returns the first error, or None.

        A failed release is retried in the background, also if an exception interrupts the wait.
        """
        first_error: GenieError | None = None
        try:
            handovers: list[Handover[str]] = []
            for request in requests:
                handovers.append(Handover())
                self._submit(self._send_lock_release, request, handovers[-1])
            for handover in handovers:
                try:
                    handover.result()
                except GenieError as error:
                    if not is_unknown_id(error):  # a lock that the server does not know is not held
                        first_error = first_error or error
        except ConnectionLost as error:  # the client was closed
            return error
        finally:
            for request in requests:
                self.abandon(request)  # does nothing for a lock that is released
        return first_error

    def detach(self, request: Request) -> None:
        """Stop managing a held lock, which stays held at the server. Raises the errors of `genie.Lock.detach`."""
        self._execute_and_wait(self.aio.detach, request)

    def find_held_lock(self, id: int) -> Request | None:
        """Return the request of the lock with this id if this client holds the lock, else None."""
        return self.aio.session.requests.find_held(id)

    @property
    def up(self) -> bool:
        """True if there is a connection with a completed handshake."""
        return self.aio.session.up

    @property
    def forked(self) -> bool:
        """True if this process was forked from the process that opened the client."""
        return self._state is _State.FORKED

    # -- watches ------------------------------------------------------------------------------------------

    def start_watch(self, watch: Watch) -> None:
        """Subscribe a watch before its first change is awaited."""
        self.check_open()
        self._execute_and_wait(self.aio.start_watch, watch)

    def next_change(self, watch: Watch) -> Change | None:
        """Wait for the next change of a watch, and return the change, or None if the watch has ended.

        An exception that interrupts the wait ends the watch. Raises RuntimeError if another thread already waits for a change
        of this watch. This error does not end the watch.
        """
        while True:
            handover: Handover[None] = Handover()
            try:
                if watch.changes:
                    return watch.changes.popleft()
                if watch.ended:
                    break
                self._submit(self.aio.request_next, watch, handover)
                handover.wait()
            except BaseException:
                self.unwatch_soon(watch)
                raise
            handover.result()
        watch.raise_rejection()
        return None

    def unwatch(self, watch: Watch) -> None:
        """End a watch, and wait until it has ended. Does nothing in a forked process, which has no connection."""
        if not self.forked:
            self._execute_and_wait(self.aio.unwatch, watch)

    def unwatch_soon(self, watch: Watch) -> None:
        """End a watch in the background, because its consumer was interrupted."""
        if self._state is OPEN:
            self.aio.unwatch_threadsafe(watch)

    # -- passing work to the background thread --------------------------------------------------------------

    def check_open(self) -> None:
        """Raise RuntimeError or ConnectionLost, which says why the client can't be used, unless the client is open."""
        if self._state is OPEN:
            return
        if self._state is _State.FORKED:
            raise RuntimeError(FORKED)
        if self._state is _State.CLOSED:
            raise ConnectionLost("the client was closed")
        if self._state is _State.EXITED:
            if threading.current_thread().daemon:
                Handover().wait()  # for ever: the process ends without this thread
            raise ConnectionLost("the client was closed at the end of the process")
        raise RuntimeError("the client was not entered: use `with genie.sync.connect() as client`")

    def _submit(self, function: Callable[..., None], *arguments: object) -> None:
        """Queue a function for the background thread, and return at once.

        The last argument must be a handover, which the function completes. If the function raises an error, the handover is
        completed with this error. Raises an error if the client is not open.
        """
        if self._state is not OPEN:
            self.check_open()  # raises an error
        if threading.get_ident() == self._thread_id:
            raise RuntimeError(
                "a call in the client's own thread, for example in a finalizer, would block itself forever"
            )
        self._submitted.append((function, arguments))
        # Wake the loop on each call. A flag "already woken" would save wake-ups, but an exception of a signal handler between
        # setting the flag and waking the loop would block all later calls.
        try:
            self._loop.call_soon_threadsafe(self._execute_submitted)
        except RuntimeError:
            if not self._loop.is_closed():  # raised by a signal handler
                raise
            raise ConnectionLost("the client was closed") from None
        if self._loop_ended:  # the function may have been queued too late to be executed
            raise ConnectionLost("the client was closed")

    def _submit_quietly(self, function: Callable[..., None], *arguments: object) -> None:
        """Queue a function for the background thread without a handover, and return at once. Raises no error."""
        self._submitted.append((function, arguments))
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._execute_submitted)

    def _execute_and_wait(self, function: Callable[..., None], *arguments: object) -> None:
        """Execute a function in the background thread, wait until it returns, and raise its error if it fails.

        If the background thread has ended, or is this thread, the function is executed in this thread.
        """
        if self._state is _State.FORKED:
            self.check_open()  # raises an error
        if self._thread is None or threading.get_ident() == self._thread_id:
            function(*arguments)
            return
        completion: Handover[None] = Handover()
        try:
            self._loop.call_soon_threadsafe(_execute, function, arguments, completion)
        except RuntimeError:
            if not self._loop.is_closed():  # raised by a signal handler
                raise
            function(*arguments)
            return
        if self._loop_ended:
            self._thread.join()  # the ending thread may still execute the function
            if not completion.done():  # the loop ended before it executed the function
                function(*arguments)
                return
        completion.result()

    # -- objects that are garbage collected before they were ended --------------------------------------------

    def guard(self, owner: object, owned: Request | Watch) -> Guard:
        """Make the client end `owned` if its owner, an object of the program, is garbage collected before `unguard`."""
        guard = Guard(owner, self._dropped_guards, owned)
        self._guards.add(guard)
        return guard

    def unguard(self, guard: Guard) -> None:
        """Remove a guard, because its context or watch was ended."""
        self._guards.discard(guard)

    def _check_guards(self) -> None:
        """Release the requests, and end the watches, whose owners were garbage collected. Repeated while there are guards."""
        while self._dropped_guards:
            guard = self._dropped_guards.popleft()
            self._guards.discard(guard)
            if isinstance(guard.owned, Request):
                self.aio.abandon(guard.owned)
            else:
                self.aio.unwatch(guard.owned)
        self._is_check_scheduled = bool(self._guards)
        if self._is_check_scheduled:
            self._loop.call_later(GUARD_INTERVAL_S, self._check_guards)

    # -- in the background thread ---------------------------------------------------------------------------

    def _execute_submitted(self) -> None:
        """Execute all queued functions, and send the resulting commands together."""
        if not self._submitted:
            return
        if self._guards and not self._is_check_scheduled:
            self._is_check_scheduled = True
            self._loop.call_later(GUARD_INTERVAL_S, self._check_guards)
        self.aio.begin_batch()
        try:
            while self._submitted:
                function, arguments = self._submitted.popleft()
                try:
                    function(*arguments)
                except Exception as error:
                    handover = arguments[-1]
                    if not isinstance(handover, Handover):  # the function was queued by `_submit_quietly`
                        raise
                    handover.set_exception(error)
        finally:
            self.aio.flush()

    def _send(self, call: Call, handover: Handover[Any]) -> None:
        """Send a call whose outcome completes `handover`. Raises the errors of `AsyncConnection.call`."""
        if handover.done():  # the calling thread was interrupted, and has abandoned the call
            return
        self.aio.check_open()
        if not self.aio.session.up:
            self.aio.check_not_rejected()
        self.aio.send(call, handover)

    def _send_release(self, release: Release, handover: Handover[str]) -> None:
        """Send a release by id, now or on the next connection. The reply completes `handover`."""
        self.aio.check_open()
        self.aio.check_not_ended()
        self.aio.send(release, handover)

    def _send_lock_release(self, request: Request, handover: Handover[str]) -> None:
        """Release a lock. The reply completes `handover` with the reason why the lock ended.

        If the lock has ended or is being released already, `handover` is completed at once with an empty string.
        """
        release = self.aio.release_lock(request)
        if release is None:
            handover.set_result("")
        else:
            release.future = handover
            self.aio.session.calls.limit_wait(release, clock.now())


def _execute(function: Callable[..., None], arguments: Sequence[object], completion: Handover[None]) -> None:
    """Execute a function, and complete `completion` with the error, or with None."""
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001 - passed on to the caller
        completion.set_exception(error)
    else:
        completion.set_result(None)


# -- exit and fork of the process ---------------------------------------------------------------------------

_running: set[SyncConnection] = set()
"""The connections whose background thread runs."""


@atexit.register
def _exit_all() -> None:
    """End the sessions of the clients that were not closed, so that the servers cancel their waiting requests at once.

    Also ends the threads of these clients, because a daemon thread must not run while the interpreter ends.
    """
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    connections = list(_running)
    for connection in connections:
        connection.begin_exit(deadline - time.monotonic())
    for connection in connections:
        connection.finish_exit()


def _after_fork_in_child() -> None:
    """Mark all clients as unusable in a forked child, which has no background threads."""
    for connection in _running:
        connection.mark_forked()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
