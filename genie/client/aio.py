"""The public asyncio API: `connect`, `Client`, `Lock`, and the context managers and iterators that the methods of `Client`
return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from ssl import SSLContext
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, cast

from genie.client import clock, inspection, watches
from genie.client.aio_connection import AsyncConnection
from genie.client.commands import (
    Extend,
    Inspect,
    LockInfo,
    OnDisconnect,
    Ping,
    Release,
    Request,
    RequestState,
    make_any_request,
    make_request,
)
from genie.client.config import Address, ClientOptions, Token, parse_addresses
from genie.client.durations import to_seconds
from genie.client.errors import copy_lock_lost, reject_pickling
from genie.client.hints import warn_unconfirmed
from genie.client.inspection import Inspection
from genie.client.transaction import (
    Attempts,
    RunningNames,
    TransactionInfo,
    TransactionLocks,
    TransactionOptions,
    unique_name,
)
from genie.client.watches import Change, WatchInfo
from genie.errors import Code, ConnectionLost, Deadlock, GenieError, QueueTimeout, RequestRejected
from genie.protocol.resources import exclusive

T = TypeVar("T")


class Lock(LockInfo):
    """A granted lock. This client holds the lock until `release` or `detach`, or until the lock is lost.

    The event `lost` is set when the lock is lost. `held` is a bool that can be read at any time.

    The lock survives reconnects of its client. Without `release` the server ends it after its `transaction_timeout`,
    even if the client was closed before (in that case `lost` is not set).
    """

    __slots__ = ("_connection",)

    def __init__(self, connection: AsyncConnection, request: Request) -> None:
        super().__init__(request)
        self._connection = connection

    @property
    def held(self) -> bool:
        """True if the lock is held now, as this client knows it.

        False after `release` or `detach`, after the lock was lost, and as soon as its `transaction_timeout` has passed
        on this client's clock. The clock is read on each access, so `held` is also correct while the client is
        disconnected, and after the program was suspended. False in a forked process, in which the client cannot be used.
        """
        return self._request.is_held(clock.now()) and not self._connection.forked

    @property
    def lost(self) -> asyncio.Event:
        """An event that is set when the lock ends without `release`: the lock timed out, or was released by its id.

        The event is not set after `detach`. Test `lock.lost.is_set()`, since the event object itself is always truthy.
        """
        request = self._request
        if request.lost_event is None:
            request.lost_event = asyncio.Event()
            if request.error is not None:  # the lock was lost before the first access
                request.lost_event.set()
        return cast("asyncio.Event", request.lost_event)

    async def release(self) -> None:
        """Release the lock, and wait until the server confirms. Does nothing if the lock was released before or is lost.

        Raises:
            Unavailable: if the server does not confirm the release within `response_timeout`, for example while
                disconnected. The client then retries in the background.
            RuntimeError: if the lock was detached: use `client.release(id)`.

        """
        self._check_managed()
        if self._request.state is not RequestState.HELD:
            return
        try:
            release = self._connection.begin_release(self._request)
            if release is not None:
                await self._connection.wait_for_release(release)
        except RequestRejected as error:
            if error.code != Code.UNKNOWN_ID:  # a lock that the server does not know is not held
                raise

    def detach(self) -> int:
        """Hand the lock over to another client: stop managing it here, and leave it held. Returns its `id`.

        From then on this client neither extends the lock (even with `watchdog`) nor releases it (even at the end of
        its block, or after a reconnect), and does not report its end: `held` is False, `lost` is never set, and the
        block is not cancelled. `release` and `extend` of this lock raise RuntimeError. `client.release(id)` and
        `client.extend(id, seconds)` still work, in this client and in others.

        `detach` sends nothing and does not extend the lock, so the other client should call `client.extend` at once.
        An extension that a watchdog sent before `detach` may arrive after the other client's extension and shorten the
        lock. To prevent this, call `await client.ping()` after `detach`, and pass on the id after that.

        If the lock was detached before, `detach` only returns the id.

        Raises:
            LockLost: if the lock is no longer held.
            ValueError: if the lock was acquired with `on_disconnect="release"`, because it ends with this client.

        """
        self._connection.detach(self._request)
        return self.id

    async def extend(self, seconds: float | timedelta) -> None:
        """Set the remaining time of the lock to `seconds` from now, which may also shorten the lock.

        Raises:
            LockLost: if the lock is no longer held.
            ConnectionLost: if the connection ended before the reply. The lock may or may not have been extended.
            Unavailable: if there was no reply within `response_timeout`. The lock may or may not have been extended.
            RuntimeError: if the lock was detached.

        """
        # Made first, because it checks `seconds`.
        extend = Extend(self.id, to_seconds(seconds, "seconds"), self._request)
        self._check_managed()
        if self._request.state is RequestState.HELD:  # otherwise `_check_extended` raises LockLost
            await self._connection.call(extend)
        self._check_extended()


async def acquire(connection: AsyncConnection, request: Request) -> Lock:
    """Send a request, wait until it is granted, and return the lock. If the request fails, its error is raised."""
    await connection.call(request)
    if request.error is not None:  # the lock was granted, and lost before this task could run
        raise copy_lock_lost(request.error)
    return Lock(connection, request)


class LockContext:
    """The async context manager that `client.lock(…)` returns: holds a lock while its block runs. It can be used once.

    If the lock is lost, the block is cancelled, as by `asyncio.timeout`, and the `async with` statement raises LockLost;
    the exception with which the block ended becomes its cause. A cancellation by another task, and any other exception of
    the block, is propagated. A detached lock is not released at the end of the block.
    """

    __slots__ = ("_connection", "_earlier_cancellations", "_request", "_task")

    def __init__(self, connection: AsyncConnection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._task: asyncio.Task[Any] | None = None
        """The task that runs the block. None before the block begins."""
        self._earlier_cancellations = 0
        """How many cancellations of the task were requested before the block (`Task.cancelling`)."""

    async def __aenter__(self) -> Lock:
        """Acquire the lock. After that, the loss of the lock cancels the task that runs the block."""
        if self._request.state is not RequestState.WAITING:
            raise RuntimeError("a lock context can be entered only once; call client.lock() again")
        lock = await acquire(self._connection, self._request)
        self._task = asyncio.current_task()
        self._earlier_cancellations = 0 if self._task is None else self._task.cancelling()
        self._request.on_lost = self._cancel_block
        return lock

    def _cancel_block(self) -> None:
        """Cancel the task that runs the block, because the lock is lost."""
        if self._task is not None:
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the lock at the end of the block, or raise LockLost if the lock was lost during the block.

        A failed release is retried in the background. If the block has raised an error, that error is propagated, with a
        note about the failed release.
        """
        request, task = self._request, self._task
        if task is None:  # the block was never entered
            return
        request.on_lost = None  # the rest of the task must not be cancelled
        if request.state is RequestState.DETACHED:
            return
        if request.error is not None:  # the lock was lost during the block
            remaining_cancellations = task.uncancel()  # withdraws the cancellation by `_cancel_block`
            if isinstance(error, asyncio.CancelledError) and remaining_cancellations > self._earlier_cancellations:
                return  # other code has cancelled the task as well: propagate this cancellation
            raise copy_lock_lost(request.error) from error
        if error is not None:
            problem = await release_after_error(self._connection, [request])
            if problem is not None:
                error.add_note(f"lock {request.id} was not released: {problem}")
            return
        unconfirmed = await self._connection.release_one(request)
        if unconfirmed is not None:
            warn_unconfirmed([request], unconfirmed)
        if request.error is not None:  # the lock was lost before the release arrived
            raise copy_lock_lost(request.error)


async def release_after_error(connection: AsyncConnection, requests: Sequence[Request]) -> GenieError | None:
    """Release the locks of a block that has failed. Returns the error of a failed release, or None.

    While disconnected, the release is only queued: the error of the block is not delayed until there is a connection.
    """
    if connection.session.up:
        return await connection.release_all(requests)
    try:
        for request in requests:
            connection.release_lock(request)
    except ConnectionLost as problem:  # the client was closed
        return problem
    return None


# -- transactions -------------------------------------------------------------------------------------


class Transaction(TransactionInfo):
    """A running transaction: locks resources as it proceeds. `client.run_transaction` passes it to the work.

    All locks of the transaction are released together at its end: do not release them before.
    """

    __slots__ = ("_connection", "_on_lost")

    def __init__(self, connection: AsyncConnection, locks: TransactionLocks, on_lost: Callable[[], None]) -> None:
        super().__init__(locks)
        self._connection = connection
        self._on_lost = on_lost

    async def lock(self, *resources: str) -> Lock:
        """Wait until all of the resources can be locked at once, and hold them until the end of the transaction.

        Returns at once for resources that the transaction holds already, except for units: each call locks further ones.
        Resources and errors are those of `client.acquire`. If any lock of the transaction is lost, its work is cancelled.

        Raises:
            Deadlock: at once, if the wait could never end. `client.run_transaction` then repeats the work.
            LockLost: if a lock of the transaction was lost.
            RuntimeError: if the transaction has ended.

        """
        request = self._locks.request(resources, self._connection.session.calls.new_ref())
        if request.state is RequestState.HELD:
            return Lock(self._connection, request)
        lock = await acquire(self._connection, request)
        self._locks.check_not_ended()  # the block may have released the lock before this task could run
        request.on_lost = self._on_lost
        return lock


class TransactionContext:
    """The async context manager that `client.transaction(…)` returns. It can be used once.

    If a lock is lost, the block is cancelled, and the `async with` statement raises LockLost, as `client.lock` does.
    """

    __slots__ = ("__weakref__", "_connection", "_earlier_cancellations", "_has_cancelled", "_names", "_task", "locks")

    def __init__(self, connection: AsyncConnection, locks: TransactionLocks, names: RunningNames | None) -> None:
        self.locks = locks
        """The requests of the transaction."""
        self._connection = connection
        self._names = names
        """The names of the client's running transactions. The block adds its name. None if the caller has added it."""
        self._task: asyncio.Task[Any] | None = None
        """The task that runs the block. None before the block begins."""
        self._earlier_cancellations = 0
        """How many cancellations of the task were requested before the block (`Task.cancelling`)."""
        self._has_cancelled = False
        """True if a lost lock has cancelled the block."""

    async def __aenter__(self) -> Transaction:
        if self._task is not None:
            raise RuntimeError("a transaction can be entered only once; call client.transaction() again")
        self._connection.check_open()
        if self._names is not None:
            self._names.add(self.locks.name, self)
        self._task = asyncio.current_task()
        self._earlier_cancellations = 0 if self._task is None else self._task.cancelling()
        return Transaction(self._connection, self.locks, self._cancel_block)

    def _cancel_block(self) -> None:
        """Cancel the task that runs the block, once, because a lock is lost."""
        if self._task is not None and not self._has_cancelled and not self.locks.ended:
            self._has_cancelled = True
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release all locks, and end the requests of other tasks.

        Raises LockLost if a lock was lost during the block, unless other code has cancelled the task: then CancelledError is
        propagated. An unconfirmed release after a successful block is logged, and retried in the background.
        """
        lost = self.locks.lost_error()
        self._end_requests()
        cancelled_by_other_code = self._withdraw_cancellation(error)
        if error is None and lost is None:
            held = self.locks.held()
            unconfirmed = await self._connection.release_all(held)
            if unconfirmed is not None:
                warn_unconfirmed(held, unconfirmed)
            self.locks.check_not_lost()  # a lock may have been lost before the release arrived
            return
        problem = await release_after_error(self._connection, self.locks.held())
        if problem is not None and error is not None:
            error.add_note(f"the locks of {self.locks.name!r} were not released: {problem}")
        if lost is not None and not cancelled_by_other_code:
            raise lost from error

    def _end_requests(self) -> None:
        """Fail the requests for which other tasks wait. From here on, a lost lock does not cancel the task."""
        self.locks.ended = True
        if self._names is not None:
            self._names.discard(self.locks.name)
        for request in self.locks.requests:
            request.on_lost = None
        for request in self.locks.waiting():
            self._connection.fail_request(request, self.locks.ended_error())

    def _withdraw_cancellation(self, error: BaseException | None) -> bool:
        """Withdraw the cancellation by `_cancel_block`, if there was one. Return whether other code has cancelled the task."""
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if not self._has_cancelled or self._task is None:
            return is_cancelled
        remaining_cancellations = self._task.uncancel()
        return is_cancelled and remaining_cancellations > self._earlier_cancellations


# -- watches ------------------------------------------------------------------------------------------


class Watch(WatchInfo):
    """The async iterator of changes that `client.watch(…)` returns. It may also be used with `async with`.

    The iteration ends with the watch. The watch ends

    - with `aclose`, and at the end of an `async with` block;
    - when the task that waits for the next change is cancelled;
    - when the object is garbage collected, for example after an `async for` over `client.watch(…)`;
    - when the client is closed.
    """

    __slots__ = ("_connection",)

    def __init__(self, connection: AsyncConnection, watch: watches.Watch) -> None:
        super().__init__(watch)
        self._connection = connection

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        """Wait for the next change and return it, or end the iteration if the watch has ended."""
        watch = self._watch
        while not watch.ended:
            if watch.changes:
                return watch.changes.popleft()
            await self._connection.wait_for_change(watch)
        watch.raise_rejection()  # only if the server rejected the watch
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the watch. Does nothing if the watch has ended."""
        self._connection.unwatch(self._watch)

    async def __aenter__(self) -> Self:
        """Start the watch, so that changes are buffered from now on. Without `async with` the iteration starts it."""
        self._connection.start_watch(self._watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        """End a watch that was not closed, for example after leaving an `async for` loop."""
        if not self._watch.ended:
            self._connection.unwatch_threadsafe(self._watch)


# -- the client ---------------------------------------------------------------------------------------


def connect(  # noqa: PLR0913 - one for each option
    host: str | Sequence[str] | None = None,
    port: int | None = None,
    *,
    connect_timeout: float | timedelta = 10.0,
    response_timeout: float | timedelta = 1.0,
    session: str | None = None,
    session_timeout: float | timedelta = 10.0,
    token: Token | None = None,
    namespace: str | None = None,
    note: str | None = None,
    lazy: bool = False,
    ssl: bool | SSLContext | None = None,
) -> Client:
    """Return a client that connects at the start of its `async with` block and is closed at the end.

    Among several servers the client finds the leader. If the connection is lost, the client reconnects in the background.

    The `async with` statement tries all addresses of all servers, again and again, and raises Unavailable if none accepts
    the client within `connect_timeout`. It raises RequestRejected at once if the servers reject the token or do not serve
    the namespace. If they reject the client only when it reconnects later, the waiting calls fail with RequestRejected.

    Args:
        host: one address, several addresses separated by commas, or a list: `HOST`, `HOST:PORT`, `[IPv6]:PORT`. The
            prefix `genies://` selects TLS. Default: GENIE_HOST, else 127.0.0.1.
        port: the port of addresses without a port. Default: GENIE_PORT, else 7077.
        connect_timeout: seconds after which entering the client raises Unavailable, if no server has accepted it.
        response_timeout: seconds for which a call waits for a server, connected or not. After that, Unavailable is raised.
            A request waits for its `queue_timeout` and this time. To let calls ride through a failover of the leader,
            whose lease is 3 seconds, set 5 seconds or more.
        session: the secret that identifies the session to the server, 16 to 128 characters. Default: a random secret.
            Use a secret in one process only: a second client with the same secret takes over the session of the first
            one. A client whose session is taken over three times in a row ends.
        session_timeout: seconds for which the server keeps the session of a disconnected client: its waiting requests,
            and its locks with `on_disconnect="release"`. The client counts them from the last command that was answered.
        token: the token for authentication, if the server requires one, or a function that returns it. Default:
            GENIE_TOKEN, else the token in the file GENIE_TOKEN_FILE. The file is read, and the function called, for each
            connection, so a token can be replaced. The function runs in the client's event loop: it must not block.
        namespace: the namespace of all locks of this client: 1 to 128 letters, digits, or any of `_.:-`. Default:
            GENIE_NAMESPACE, else the first namespace of the server. Use one client for each namespace.
        note: who this client is, in at most 256 characters: the note of each request without one of its own. Operators see
            it, and so does a request that waits for a lock of this client. Default: `PROGRAM PID@HOST`. An empty text
            means no note.
        lazy: if true, the `async with` statement returns at once, and the client connects in the background. Until then,
            calls behave as while the client is disconnected. So a service can start before its Genie servers.
        ssl: True, or an `ssl.SSLContext`, selects TLS for all servers. For True, the file GENIE_TLS_CA contains the
            trusted CAs (default: the CAs of the system), and GENIE_TLS_CERT and GENIE_TLS_KEY are the client's own
            certificate. The files are read for each connection. The server's certificate and host name are verified.

    Raises:
        ValueError, TypeError: if an argument, or an environment variable that replaces it, is invalid.

    """
    options = ClientOptions(connect_timeout, response_timeout, session, session_timeout, token, namespace, note, lazy)
    return Client(parse_addresses(host, port, ssl=ssl), options)


class Client:
    """A client with one connection to the leader, for any number of tasks. Made by `connect`.

    Every call can be cancelled; its request is then released. Locks stay held while the client is disconnected, and
    waiting requests keep their queue positions. An `extend`, `inspect` or `ping` whose connection ends before the
    reply raises ConnectionLost.
    """

    def __init__(self, addresses: Sequence[Address], options: ClientOptions) -> None:
        self._connection = AsyncConnection(addresses, options)
        self._transactions = RunningNames()

    __reduce__ = reject_pickling

    async def __aenter__(self) -> Self:
        await self._connection.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, release: bool = False) -> None:
        """End the session and the connection. Waiting calls raise ConnectionLost, and their requests are cancelled.

        Locks with `on_disconnect="release"` are released. The others stay held until they are released by id or their
        `transaction_timeout` has passed; a warning names them. A server that can't be reached does the same after
        `session_timeout`.

        Args:
            release: release all locks of this client, as if each had `on_disconnect="release"`.

        """
        await self._connection.close(release=release)

    def lock(
        self,
        *resources: str,
        transaction: str | None = None,
        queue_timeout: float | timedelta | None = 10.0,
        transaction_timeout: float | timedelta = 10.0,
        priority: float = 0,
        watchdog: bool = False,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> LockContext:
        """Hold a lock while a block runs: `async with client.lock("exclusive:a", "shared:b") as lock:`.

        Arguments and errors are those of `acquire`. With `watchdog` the lock is extended as long as the block runs, so
        that `transaction_timeout` only bounds how long the lock outlives a crash of this process. If the lock is lost,
        the block is cancelled, and the `async with` statement raises LockLost.
        """
        ref = self._connection.session.calls.new_ref()
        request = make_request(
            ref, resources, transaction, queue_timeout, transaction_timeout, priority, watchdog, on_disconnect, note
        )
        return LockContext(self._connection, request)

    def elect(
        self, name: str, *, transaction_timeout: float | timedelta = 10.0, note: str | None = None
    ) -> LockContext:
        """Lead while a block runs: `async with client.elect("leader/billing") as leadership:`.

        The block begins when this client is the leader, which may take any time. It is an exclusive lock without a
        queue timeout, which is extended as long as the block runs. If the leadership is lost, the block is cancelled,
        and the `async with` statement raises LockLost. At the end of the block the next candidate becomes the leader.

        `leadership.fence` is a fencing token. A later leader has a greater fencing token.

        Args:
            name: the name of the resource that all candidates lock, without a mode.
            transaction_timeout: seconds after which a leader that crashed or can't reach Genie is succeeded. The lock
                is extended every third of this time.
            note: text that describes this candidate to operators, for example its host name.

        Raises:
            RequestRejected: if the server rejects the request.
            ConnectionLost: if the client was closed.
            RuntimeError: if the client was not entered with `async with`.

        """
        return self.lock(
            exclusive(name), queue_timeout=None, transaction_timeout=transaction_timeout, watchdog=True, note=note
        )

    async def acquire(
        self,
        *resources: str,
        transaction: str | None = None,
        queue_timeout: float | timedelta | None = 10.0,
        transaction_timeout: float | timedelta = 10.0,
        priority: float = 0,
        watchdog: bool = False,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> Lock:
        """Wait until all of the resources can be locked at once, and hold them until `lock.release()`.

        Args:
            resources: `shared:NAME`, `exclusive:NAME`, or a NAME without a colon, which is exclusive (`genie.shared`
                and `genie.exclusive` accept any name); `2/10:NAME` for 2 of 10 units (`genie.units`); a NAME that ends
                in `/**` for all names below it (`genie.subtree`). A resource that is listed twice is locked once,
                exclusively if either of the two is exclusive; its units are added up. `lock.resources` lists the locked
                resources.
            transaction: name of the transaction of this request. Requests of one transaction do not block each other,
                and deadlocks are detected between transactions.
            queue_timeout: seconds, or a timedelta, to wait in the queue. With None there is no limit, even while no server
                responds.
            transaction_timeout: seconds, or a timedelta, after the grant at which the lock is lost.
            priority: requests with a higher priority are granted first.
            watchdog: extend the lock automatically until `lock.release()`, as long as this client is open and can
                reach the leader.
            on_disconnect: with `"release"`, the server releases the lock when the session of this client ends, that is,
                when the client is closed, or no server has answered it for `session_timeout`. With `"keep"`, the lock
                stays held until `transaction_timeout`.
            note: text of at most 256 characters that is shown to operators, and in the errors of requests that
                waited for this lock. Default: the note of the client.

        Raises:
            QueueTimeout: (a TimeoutError) after `queue_timeout` seconds in the queue.
            Deadlock: at once, if the wait could never end.
            LockError: if the waiting request was released by its id.
            RequestRejected: if the server rejects the request.
            Unavailable: if no server has answered within `queue_timeout` plus `response_timeout`.
            ConnectionLost: if the client was closed.
            RuntimeError: if the client was not entered with `async with`.

        """
        ref = self._connection.session.calls.new_ref()
        request = make_request(
            ref, resources, transaction, queue_timeout, transaction_timeout, priority, watchdog, on_disconnect, note
        )
        return await acquire(self._connection, request)

    async def try_acquire(
        self,
        *resources: str,
        transaction: str | None = None,
        transaction_timeout: float | timedelta = 10.0,
        priority: float = 0,
        watchdog: bool = False,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> Lock | None:
        """Lock the resources without waiting. Returns None if they can't be locked now.

        Arguments and errors are those of `acquire`, except that QueueTimeout is never raised.
        """
        ref = self._connection.session.calls.new_ref()
        request = make_request(
            ref, resources, transaction, 0, transaction_timeout, priority, watchdog, on_disconnect, note
        )
        try:
            return await acquire(self._connection, request)
        except QueueTimeout:
            return None

    async def acquire_any(
        self,
        resources: Sequence[str],
        target: int,
        *,
        weights: Sequence[int] | None = None,
        transaction: str | None = None,
        transaction_timeout: float | timedelta = 10.0,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> Lock:
        """Lock free resources of a list until their weights reach `target`, and hold them until `lock.release()`.

        The server goes through the list in the given order, in one atomic step, and locks resources that no other owner
        holds or waits for. `lock.resources` are the locked resources. The server decides at once: if the free resources
        do not reach the target, it locks nothing, and the call raises Insufficient.

        Args:
            resources: 1 to 10,000 resources, as in `acquire`, but no subtrees. Units of a resource are free if they can
                be locked at once.
            target: the sum of weights to reach.
            weights: a positive integer for each resource, of any size. Default: 1 for each resource.
            transaction: name of the transaction of this request, as in `acquire`.
            transaction_timeout: seconds, or a timedelta, after the grant at which the lock is lost.
            on_disconnect: `"keep"` or `"release"`, as in `acquire`.
            note: text for operators, as in `acquire`.

        Raises:
            Insufficient: if the free resources do not reach the target. The error has the sums of the weights of the
                free and of the locked resources.
            RequestRejected: if the server rejects the request, or its line would be longer than 1 MiB.
            Unavailable: if no server has answered within `response_timeout`.
            ConnectionLost: if the client was closed.

        """
        request = make_any_request(
            self._connection.session.calls.new_ref(),
            resources,
            target,
            weights=weights,
            transaction=transaction,
            transaction_timeout=transaction_timeout,
            on_disconnect=on_disconnect,
            note=note,
        )
        return await acquire(self._connection, request)

    def transaction(self, name: str | None = None, **options: Unpack[TransactionOptions]) -> TransactionContext:
        """Lock resources as a block proceeds, and release them together: `async with client.transaction() as tx:`.

        Use `run_transaction` to repeat the work after a deadlock.

        Args:
            name: the name of the transaction. It must be unique: requests with one name never block each other, so a
                constant, or the key of an idempotent operation, isolates nothing. Default: a unique name.
            options: `queue_timeout`, `transaction_timeout`, `priority`, `watchdog`, `on_disconnect` and `note` of each lock,
                as in `acquire`.

        Raises:
            ValueError, TypeError: if an argument is invalid, or at the start of the block, if a transaction with this name
                runs in this client.

        """
        locks = TransactionLocks(unique_name() if name is None else name, dict(options))
        return TransactionContext(self._connection, locks, self._transactions)

    async def run_transaction(
        self,
        work: Callable[[Transaction], Awaitable[T]],
        *,
        name: str | None = None,
        attempts: int = 10,
        **options: Unpack[TransactionOptions],
    ) -> T:
        """Run work that locks resources as it proceeds, and return its result. After a deadlock the work is repeated.

        All locks are released at the end of each attempt. Before the work is repeated, one request locks everything that
        the earlier attempts have asked for: that request cannot deadlock, so the work does not lose twice to the same
        transactions. The work may be repeated until it has all of its locks: before that, it must change nothing, or undo
        its changes.

        Args:
            work: an async function. Its argument is the transaction: `lock = await tx.lock("accounts/2")`.
            name: the name of the transaction, as in `transaction`. Default: a unique name.
            attempts: how often the work is done at most. Only Deadlock repeats it.
            options: as in `transaction`, for each lock.

        Raises:
            Deadlock: if the last attempt has also ended in a deadlock.
            LockLost: if a lock was lost during the work, which was cancelled.
            Exception: any other error of the work.

        """
        name = unique_name(work) if name is None else name
        repetition = Attempts(attempts)
        self._transactions.add(name, repetition)
        try:
            while True:
                context = TransactionContext(self._connection, TransactionLocks(name, dict(options)), None)
                try:
                    async with context as tx:
                        wanted = repetition.wanted_resources()
                        if wanted:
                            await tx.lock(*wanted)
                            context.locks.begin_work()
                        running = work(tx)
                        if not isinstance(running, Awaitable):
                            raise TypeError(f"the work must be a coroutine function, not {work!r}")
                        return await running
                except Deadlock:
                    pause_s = repetition.begin_retry(context.locks)
                    if pause_s is None:
                        raise
                await asyncio.sleep(pause_s)
        finally:
            self._transactions.discard(name)

    def watch(self, prefix: str) -> Watch:
        """Watch the locks on resources with a prefix: `async for change in client.watch("token/"):`.

        The iteration starts with a `locked` change for each held lock, and continues with the changes as they happen.
        After a reconnect, or if changes arrive faster than they are consumed, the client fetches a snapshot of the held
        locks and reports the difference to the earlier changes. So a consumer that applies all changes has the current
        state, but may miss a lock that was held only briefly. A snapshot has at most 10,000 locks: see `truncated`.

        The iteration waits for a connection without a limit. Leaving the loop ends the watch. Closing the client ends
        the loop. The iteration raises RequestRejected if the server rejects the watch, for example because the client
        watches more than 100 prefixes, and ConnectionLost if the client was closed before.
        """
        return Watch(self._connection, watches.Watch(prefix))

    async def inspect(
        self,
        *,
        resource: str | None = None,
        transaction: str | None = None,
        id: int | None = None,
        limit: int | None = None,
        only: Literal["holders", "queue"] | None = None,
    ) -> Inspection:
        """Return the held locks (`holders`) and the waiting requests with their blockers (`queue`).

        Args:
            resource: return only requests that lock or wait for this resource, a name without a mode.
            transaction: return only requests of this transaction.
            id: return only the request with this id.
            limit: maximum number of requests; 100 if None. The totals count all matches.
            only: return only held locks (`"holders"`) or only waiting requests (`"queue"`).

        Raises:
            RequestRejected: if the server rejects the query.
            Unavailable: if no server has answered within `response_timeout`.

        """
        query = Inspect(resource=resource, transaction=transaction, id=id, limit=limit, only=only)
        return inspection.parse_inspected(await self._connection.call(query))

    async def ping(self) -> None:
        """Send a `ping`, and wait until the server replies. Raises Unavailable after `response_timeout`."""
        await self._connection.call(Ping())

    async def release(self, id: int) -> str:
        """Release a lock or cancel a waiting request by its id, even if another client made the request.

        A transaction can thus begin in one service and end in another. For a lock of this client, prefer `lock.release()`.

        Returns:
            Why the request ended: `success` if this call ended it, otherwise the earlier reason.

        Raises:
            RequestRejected: with the code `unknown-id` if the server does not know the id.
            Unavailable: if the server does not confirm the release within `response_timeout`. The client then retries in
                the background.

        """
        return await self._connection.release(Release(id))

    async def extend(self, id: int, seconds: float | timedelta) -> None:
        """Set the remaining time of a lock of any client, by its id, to `seconds` from now.

        The server does not notify the client that acquired the lock. That client considers the lock lost after the
        original `transaction_timeout`, and may then release the lock, unless it extends the lock as well or has called
        `lock.detach()`.

        Raises:
            LockLost: if the lock has ended.
            RequestRejected: if the request still waits (`bad-request`), or the server does not know the id
                (`unknown-id`).
            ConnectionLost: if the connection ended before the reply. The lock may or may not have been extended.
            Unavailable: if there was no reply within `response_timeout`. The lock may or may not have been extended.

        """
        await self._connection.call(Extend(id, to_seconds(seconds, "seconds"), self._connection.find_held_lock(id)))
