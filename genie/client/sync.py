"""The client for threads: the same as `genie.connect`, without `await`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, cast

from genie.client import calls
from genie.client.calls import Extend, Inspect, Ping, Release, Request, State
from genie.client.held import Held
from genie.client.reach import addresses
from genie.client.reasons import again
from genie.client.sync_link import Link
from genie.errors import Code, GenieError, LockLost, QueueTimeout, RequestRejected, Unavailable


def connect(
    host: str | Sequence[str] | None = None,
    port: int | None = None,
    *,
    connect_timeout: float = 10.0,
    session: str | None = None,
    session_timeout: float = 10.0,
) -> Client:
    """A client, which connects when its `with` block is entered and closes when it is left.

    `host` is one address, several with commas between them, or a list of them: `HOST`, `HOST:PORT`, `[IPv6]:PORT`;
    `port` is for those that name none. GENIE_HOST and GENIE_PORT say what is left out, else 127.0.0.1 and 7077.

    Of several servers the one that leads is found by itself. Entering the block raises Unavailable if no server
    answers at all, or if none leads within `connect_timeout` seconds. A connection that is lost later is made again in
    the background; a call that needs it waits up to `connect_timeout`, then raises Unavailable.

    The server keeps what this client holds and waits for while the connection is away, for `session_timeout` seconds.
    `session` is the secret (16 to 128 characters) that it knows the client by: a random one, if none is given. Two
    clients with the same one take each other's place.
    """
    return Client(
        addresses(host, port), connect_timeout=connect_timeout, session=session, session_timeout=session_timeout
    )


class Lock(Held):
    """A lock that was granted. It is held until `release`, or until it is lost: then `lost` is set.

    It stays valid when the client's connection is made again. A lock that nobody releases ends by its
    `transaction_timeout`, also if its client was closed (then nobody tells `lost`).
    """

    __slots__ = ("_link",)

    def __init__(self, link: Link, request: Request) -> None:
        super().__init__(request)
        self._link = link

    @property
    def lost(self) -> threading.Event:
        """Set when the lock ended without `release`: it timed out, or somebody else released its id."""
        return cast("threading.Event", self._request.lost)

    def release(self) -> None:
        """Give the lock back. A second time does nothing, and neither does it for a lock that is lost.

        Without a connection it waits for one, for `connect_timeout` at most; then it raises Unavailable, and goes on
        trying in the background.
        """
        if self._request.state is not State.HELD:
            return
        try:
            self._link.leave(self._request, wait=True)
        except RequestRejected as error:
            if error.code != Code.UNKNOWN_ID:
                raise

    def extend(self, seconds: float) -> None:
        """Let the hold end `seconds` from now, sooner or later than it would have.

        LockLost, if it is not held any more; ConnectionLost, if the answer did not come; Unavailable, if there is no
        connection within `connect_timeout`.
        """
        extend = Extend(self._request, seconds)
        if self._request.state is State.HELD:
            self._link.call(extend)
        if self._request.error is not None:
            raise again(self._request.error)
        if self._request.state is not State.HELD:
            raise LockLost(f"lock {self.id} was released", id=self.id)


class Hold:
    """What `client.lock(…)` returns: `with` it, once, to hold a lock while the block runs.

    A thread can't be interrupted: if the lock was lost meanwhile, LockLost comes out when the block is left. An error
    of the block's own comes out as it is.
    """

    __slots__ = ("_link", "_lock", "_request")

    def __init__(self, link: Link, request: Request) -> None:
        self._link = link
        self._request = request
        self._lock: Lock | None = None

    def __enter__(self) -> Lock:
        if self._request.state is not State.ASKED:
            raise RuntimeError("this was entered before; ask for another lock with client.lock()")
        self._lock = _acquire(self._link, self._request)
        return self._lock

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lock, request = self._lock, self._request
        if lock is None:
            return
        try:
            if error is None or self._link.up:
                lock.release()
            else:
                self._link.leave(request, wait=False)  # a block that failed is not kept waiting for a connection
        except GenieError as refused:
            self._leave_alone()
            if error is None:
                raise
            error.add_note(f"Besides, lock {lock.id} could not be released: {refused}")
            return
        if request.error is not None:
            if error is None:
                raise again(request.error)
            error.add_note(f"Besides, {request.error}")

    def _leave_alone(self) -> None:
        """Go on trying in the background."""
        with contextlib.suppress(Unavailable):  # the client was closed
            self._link.leave(self._request, wait=False)


class Client:
    """Locks from one server, over one connection, for any number of threads. Made by `connect`.

    Locks that are held stay held when the connection ends, and who waits for one goes on waiting, in the same place. An
    `extend`, `inspect` or `ping` whose connection ends before its answer came raises ConnectionLost. Ctrl-C in a call
    that waits gives back what it asked for.
    """

    def __init__(
        self,
        to: Sequence[tuple[str, int]],
        *,
        connect_timeout: float = 10.0,
        session: str | None = None,
        session_timeout: float = 10.0,
    ) -> None:
        self._link = Link(to, connect_timeout, session, session_timeout)

    def __enter__(self) -> Self:
        self._link.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Calls that wait raise ConnectionLost; locks that are held end by their timeouts.

        What waits for locks leaves the queue, at once if there is a connection, else when the session ends.
        """
        self._link.close()

    def lock(
        self,
        *resources: str,
        transaction: str | None = None,
        queue_timeout: float = 10.0,
        transaction_timeout: float = 10.0,
        priority: float = 0,
        watchdog: bool = False,
    ) -> Hold:
        """`with client.lock("exclusive:a", "shared:b") as lock:` holds all of them while the block runs.

        Arguments and errors are those of `acquire`. With `watchdog` the hold is extended for as long as the block
        runs, so that `transaction_timeout` only bounds how long the lock outlives this process. If the lock is lost,
        LockLost comes out when the block is left.
        """
        return Hold(
            self._link,
            self._request(
                resources,
                transaction=transaction,
                queue_timeout=queue_timeout,
                transaction_timeout=transaction_timeout,
                priority=priority,
                watchdog=watchdog,
            ),
        )

    def acquire(
        self,
        *resources: str,
        transaction: str | None = None,
        queue_timeout: float = 10.0,
        transaction_timeout: float = 10.0,
        priority: float = 0,
    ) -> Lock:
        """Wait until all the resources can be locked at once, and hold them until `lock.release()`.

        Arguments and errors are those of `genie.Client.acquire`; timeouts in seconds.
        """
        return _acquire(
            self._link,
            self._request(
                resources,
                transaction=transaction,
                queue_timeout=queue_timeout,
                transaction_timeout=transaction_timeout,
                priority=priority,
            ),
        )

    def try_acquire(
        self,
        *resources: str,
        transaction: str | None = None,
        transaction_timeout: float = 10.0,
        priority: float = 0,
    ) -> Lock | None:
        """The same without waiting: None if what is asked for can't be locked at once. Deadlock is still raised."""
        request = self._request(
            resources,
            transaction=transaction,
            queue_timeout=0,
            transaction_timeout=transaction_timeout,
            priority=priority,
        )
        try:
            return _acquire(self._link, request)
        except QueueTimeout:
            return None

    def inspect(
        self,
        *,
        resource: str | None = None,
        transaction: str | None = None,
        id: int | None = None,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """Who holds and who waits for whom: `holders` and `queue` in order, at most `limit` rows, and their totals.

        `resource` is a name without a mode. The rows are those of the wire: times in ms, `since` in unix ms.
        """
        return cast("dict[str, Any]", self._link.call(Inspect(resource, transaction, id, limit)))

    def ping(self) -> None:
        """Return when the server has answered."""
        self._link.call(Ping())

    def release(self, id: int) -> str:
        """End a lock, or cancel a waiting request, by its id, whoever made it.

        Returns the reason for which it ended: `success`, or an earlier one if it had ended before. RequestRejected
        (`unknown-id`), if it never was or is forgotten. For locks of one's own `lock.release()` is better.
        """
        return self._link.release(Release(id))

    def _request(self, resources: Sequence[str], **options: Any) -> Request:
        return calls.request(self._link.ref(), resources, **options)


def _acquire(link: Link, request: Request) -> Lock:
    request.lost = threading.Event()
    link.call(request)
    if request.error is not None:  # granted, and lost before this thread's turn came
        raise again(request.error)
    return Lock(link, request)
