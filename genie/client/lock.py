"""A lock, as asyncio users hold it, and the block of code that it guards."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, cast

from genie.client.aio_link import Link
from genie.client.calls import Extend, Request, State
from genie.client.held import Held
from genie.client.reasons import again, left
from genie.errors import Code, ConnectionLost, GenieError, RequestRejected


class Lock(Held):
    """A lock that was granted. It is held until `release`, or until it is lost: then the event `lost` is set.

    `detach` hands it over to another client.

    `lock.held` is a bool, to be asked at any time. `lock.lost` is an event, which is true in itself: ask `lock.lost.is_set()`.

    It stays valid when the client's connection is made again. A lock that nobody releases ends by its
    `transaction_timeout`, also if its client was closed (then nobody tells `lost`).
    """

    __slots__ = ("_link",)

    def __init__(self, link: Link, request: Request) -> None:
        super().__init__(request)
        self._link = link

    @property
    def held(self) -> bool:
        """Whether the lock is held now, as far as this client knows.

        False after `release` or `detach`, after the lock was lost, and as soon as its time has passed on this client's
        clock, also where the server could not be reached or this program could not run meanwhile.
        """
        return self._request.held(self._link.now())

    @property
    def lost(self) -> asyncio.Event:
        """An event that is set when the lock ended without `release`: it timed out, or its id was released elsewhere.

        It is not set after `detach`, whatever becomes of the lock.

        The event is true in itself, set or not: ask `lock.lost.is_set()`, or `lock.held`.
        """
        request = self._request
        if request.lost is None:
            request.lost = asyncio.Event()
            if request.error is not None:
                request.lost.set()
        return cast("asyncio.Event", request.lost)

    async def release(self) -> None:
        """Give the lock back. A second time does nothing, and neither does it for a lock that is lost.

        RuntimeError, if the lock was detached: `client.release(id)` releases it.

        Without a connection it waits for one, for `connect_timeout` at most; then it raises Unavailable, and goes on
        trying in the background.
        """
        self._check_managed()
        if self._request.state is not State.HELD:
            return
        call = self._link.leave(self._request)
        if call is None:
            return
        try:
            await self._link.finish(call)
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
        self._link.detach(self._request)
        return self.id

    async def extend(self, seconds: float) -> None:
        """Let the hold end `seconds` from now, sooner or later than it would have.

        LockLost, if it is not held any more; ConnectionLost, if the answer did not come; Unavailable, if there is no
        connection within `connect_timeout`; RuntimeError, if the lock was detached.
        """
        extend = Extend(self.id, seconds, self._request)
        self._check_managed()
        await self._link.ready()
        self._check_managed()
        if self._request.state is State.HELD:
            await self._link.call(extend)
        if self._request.error is not None:
            raise again(self._request.error)
        if self._request.state not in (State.HELD, State.DETACHED):
            raise left(self.id)


async def acquire(link: Link, request: Request) -> Lock:
    """Ask for a lock and wait for it."""
    await link.call(request)
    if request.error is not None:  # granted, and lost before this task's turn came
        raise again(request.error)
    return Lock(link, request)


class Hold:
    """What `client.lock(…)` returns: `async with` it, once, to hold a lock while the block runs.

    A lock that is lost meanwhile cancels the block as `asyncio.timeout` does, and LockLost comes out of it. A
    cancellation from outside stays one. An error of the block's own comes out as it is, unless the block was cancelled
    because the lock is lost: then it is the cause of the LockLost. A lock that was detached is neither released nor
    lost when the block is left.
    """

    __slots__ = ("_cancelling", "_link", "_lock", "_request", "_task")

    def __init__(self, link: Link, request: Request) -> None:
        self._link = link
        self._request = request
        self._lock: Lock | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> Lock:
        if self._request.state is not State.ASKED:
            raise RuntimeError("this was entered before; ask for another lock with client.lock()")
        self._lock = await acquire(self._link, self._request)
        self._task = asyncio.current_task()
        self._cancelling = 0 if self._task is None else self._task.cancelling()
        self._request.on_lost = self._cancel
        return self._lock

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lock, task, request = self._lock, self._task, self._request
        if lock is None or task is None:
            return
        request.on_lost = None
        if request.state is State.DETACHED:
            return
        if request.error is not None:
            # Lost while the block ran, and so it was cancelled.
            outside = task.uncancel() > self._cancelling
            if not (outside and isinstance(error, asyncio.CancelledError)):
                raise again(request.error) from error
            return
        try:
            if error is None or self._link.core.up:
                await lock.release()
            else:
                self._link.leave(request)  # a block that failed is not kept waiting for a connection
        except GenieError as refused:
            with contextlib.suppress(ConnectionLost):  # the client was closed
                self._link.leave(request)  # in the background from now on
            if error is None:
                raise
            error.add_note(f"Besides, lock {lock.id} could not be released: {refused}")
            return
        if error is None and request.error is not None:
            raise again(request.error)
