"""A lock, as threads hold it, and the block of code that it guards."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import cast

from genie.client.commands import Extend, LockInfo, Request, State
from genie.client.errors import already_released, copy_lock_lost
from genie.client.sync_link import Link
from genie.errors import Code, ConnectionLost, GenieError, RequestRejected


class Lock(LockInfo):
    """A lock that was granted. It is held until `release`, or until it is lost: then the event `lost` is set.

    `detach` hands it over to another client.

    `lock.held` is a bool, to be asked at any time. `lock.lost` is an event, which is true in itself: ask `lock.lost.is_set()`.

    It stays valid when the client's connection is made again. A lock that nobody releases ends by its
    `transaction_timeout`, also if its client was closed (then nobody tells `lost`).
    """

    __slots__ = ("_connection",)

    def __init__(self, link: Link, request: Request) -> None:
        super().__init__(request)
        self._connection = link

    @property
    def held(self) -> bool:
        """Whether the lock is held now, as far as this client knows.

        False after `release` or `detach`, after the lock was lost, and as soon as its time has passed on this client's
        clock, also where the server could not be reached or this program could not run meanwhile.
        """
        return self._request.held(time.monotonic())

    @property
    def lost(self) -> threading.Event:
        """An event that is set when the lock ended without `release`: it timed out, or its id was released elsewhere.

        It is not set after `detach`, whatever becomes of the lock.

        The event is true in itself, set or not: ask `lock.lost.is_set()`, or `lock.held`.
        """
        return cast("threading.Event", self._request.lost)

    def release(self) -> None:
        """Give the lock back. A second time does nothing, and neither does it for a lock that is lost.

        RuntimeError, if the lock was detached: `client.release(id)` releases it.

        Without a connection it waits for one, for `connect_timeout` at most; then it raises Unavailable, and goes on
        trying in the background.
        """
        self._check_managed()
        if self._request.state is not State.HELD:
            return
        try:
            self._connection.leave(self._request, wait=True)
        except RequestRejected as error:
            if error.code != Code.UNKNOWN_ID:
                raise

    def detach(self) -> int:
        """Hand the lock over to another client: stop managing it here, and leave it held. Returns its `id`.

        From then on this client does not extend the lock (also with `watchdog`), does not release it (also when its
        block is left, or after a reconnect), and does not report its end: `held` is False, `lost` is never set, and the
        block is not cancelled. `release` and `extend` of this lock raise RuntimeError. `client.release(id)` and
        `client.extend(id, seconds)` go on working, here and in other clients.

        `detach` sends nothing and does not extend the hold, so the other client calls `client.extend` at once. A watchdog's
        extension that was sent before `detach` may arrive after that one and shorten the hold. To exclude it, wait for
        `client.ping()` after `detach`, and pass on the id then.

        Raises LockLost if the lock is not held any more, and ValueError if it was acquired with
        `on_disconnect="release"`, since it ends with this client. For a detached lock it does nothing but return the id.
        """
        self._connection.detach(self._request)
        return self.id

    def extend(self, seconds: float) -> None:
        """Let the hold end `seconds` from now, sooner or later than it would have.

        LockLost, if it is not held any more; ConnectionLost, if the answer did not come; Unavailable, if there is no
        connection within `connect_timeout`; RuntimeError, if the lock was detached.
        """
        extend = Extend(self.id, seconds, self._request)
        self._check_managed()
        if self._request.state is State.HELD:
            self._connection.ready()
            self._check_managed()
        if self._request.state is State.HELD:
            self._connection.call(extend)
        if self._request.error is not None:
            raise copy_lock_lost(self._request.error)
        if self._request.state not in (State.HELD, State.DETACHED):
            raise already_released(self.id)


class LockContext:
    """What `client.lock(…)` returns: `with` it, once, to hold a lock while the block runs.

    A thread can't be interrupted: if the lock was lost meanwhile, LockLost comes out when the block is left. An error
    of the block's own comes out as it is. A lock that was detached is neither released nor lost when the block is left.
    """

    __slots__ = ("_connection", "_lock", "_request")

    def __init__(self, link: Link, request: Request) -> None:
        self._connection = link
        self._request = request
        self._lock: Lock | None = None

    def __enter__(self) -> Lock:
        if self._request.state is not State.WAITING:
            raise RuntimeError("this was entered before; ask for another lock with client.lock()")
        self._lock = acquire(self._connection, self._request)
        return self._lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lock, request = self._lock, self._request
        if lock is None or request.state is State.DETACHED:
            return
        try:
            if error is None or self._connection.up:
                lock.release()
            else:
                self._connection.leave(request, wait=False)  # a block that failed is not kept waiting for a connection
        except GenieError as refused:
            self._leave_alone()
            if error is None:
                raise
            error.add_note(f"Besides, lock {lock.id} could not be released: {refused}")
            return
        if request.error is not None:
            if error is None:
                raise copy_lock_lost(request.error)
            error.add_note(f"Besides, {request.error}")

    def _leave_alone(self) -> None:
        """Go on trying in the background."""
        with contextlib.suppress(ConnectionLost):  # the client was closed
            self._connection.leave(self._request, wait=False)


def acquire(link: Link, request: Request) -> Lock:
    """Ask for a lock and wait for it."""
    request.lost = threading.Event()
    link.call(request)
    if request.error is not None:  # granted, and lost before this thread's turn came
        raise copy_lock_lost(request.error)
    return Lock(link, request)
