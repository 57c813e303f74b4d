"""A lock, as asyncio users hold it, and the block of code that it guards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Any, Literal, Self, cast

from genie.client import commands, inspection, watches
from genie.client.aio_connection import AsyncConnection
from genie.client.commands import Extend, Inspect, LockInfo, OnDisconnect, Ping, Release, Request, State, any_request
from genie.client.config import Address, find_namespace, find_token, parse_addresses
from genie.client.errors import already_released, copy_lock_lost
from genie.client.inspection import Inspection
from genie.client.watches import Change
from genie.errors import Code, ConnectionLost, GenieError, QueueTimeout, RequestRejected


class Lock(LockInfo):
    """A lock that was granted. It is held until `release`, or until it is lost: then the event `lost` is set.

    `detach` hands it over to another client.

    `lock.held` is a bool, to be asked at any time. `lock.lost` is an event, which is true in itself: ask `lock.lost.is_set()`.

    It stays valid when the client's connection is made again. A lock that nobody releases ends by its
    `transaction_timeout`, also if its client was closed (then nobody tells `lost`).
    """

    __slots__ = ("_connection",)

    def __init__(self, connection: AsyncConnection, request: Request) -> None:
        super().__init__(request)
        self._connection = connection

    @property
    def held(self) -> bool:
        """Whether the lock is held now, as far as this client knows.

        False after `release` or `detach`, after the lock was lost, and as soon as its time has passed on this client's
        clock, also where the server could not be reached or this program could not run meanwhile.
        """
        return self._request.held(time.monotonic())

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
        call = self._connection.release_lock(self._request)
        if call is None:
            return
        try:
            await self._connection.finish(call)
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

    async def extend(self, seconds: float) -> None:
        """Let the hold end `seconds` from now, sooner or later than it would have.

        LockLost, if it is not held any more; ConnectionLost, if the answer did not come; Unavailable, if there is no
        connection within `connect_timeout`; RuntimeError, if the lock was detached.
        """
        extend = Extend(self.id, seconds, self._request)
        self._check_managed()
        await self._connection.ready()
        self._check_managed()
        if self._request.state is State.HELD:
            await self._connection.call(extend)
        if self._request.error is not None:
            raise copy_lock_lost(self._request.error)
        if self._request.state not in (State.HELD, State.DETACHED):
            raise already_released(self.id)


async def acquire(connection: AsyncConnection, request: Request) -> Lock:
    """Ask for a lock and wait for it."""
    await connection.call(request)
    if request.error is not None:  # granted, and lost before this task's turn came
        raise copy_lock_lost(request.error)
    return Lock(connection, request)


class LockContext:
    """What `client.lock(…)` returns: `async with` it, once, to hold a lock while the block runs.

    A lock that is lost meanwhile cancels the block as `asyncio.timeout` does, and LockLost comes out of it. A
    cancellation from outside stays one. An error of the block's own comes out as it is, unless the block was cancelled
    because the lock is lost: then it is the cause of the LockLost. A lock that was detached is neither released nor
    lost when the block is left.
    """

    __slots__ = ("_cancelling", "_connection", "_lock", "_request", "_task")

    def __init__(self, connection: AsyncConnection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._lock: Lock | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> Lock:
        if self._request.state is not State.WAITING:
            raise RuntimeError("this was entered before; ask for another lock with client.lock()")
        self._lock = await acquire(self._connection, self._request)
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
                raise copy_lock_lost(request.error) from error
            return
        try:
            if error is None or self._connection.session.up:
                await lock.release()
            else:
                self._connection.release_lock(request)  # a block that failed is not kept waiting for a connection
        except GenieError as refused:
            with contextlib.suppress(ConnectionLost):  # the client was closed
                self._connection.release_lock(request)  # in the background from now on
            if error is None:
                raise
            error.add_note(f"Besides, lock {lock.id} could not be released: {refused}")
            return
        if error is None and request.error is not None:
            raise copy_lock_lost(request.error)


# -- What asyncio users watch --------


class Watch:
    """What `client.watch(…)` returns: `async for change in` it, alone or inside `async with`.

    It ends with `aclose`, when the `async with` block is left, when whoever waits for the next change is cancelled, or
    when nobody has it any more, as behind an `async for` over `client.watch(…)` itself. Then, and when the client is
    closed, the iteration ends.
    """

    __slots__ = ("_connection", "_watch")

    def __init__(self, connection: AsyncConnection, watch: watches.Watch) -> None:
        self._connection = connection
        self._watch = watch

    @property
    def prefix(self) -> str:
        """How the names begin."""
        return self._watch.prefix

    @property
    def truncated(self) -> bool:
        """Whether more was held than the server told when it was last asked: then the picture has gaps.

        What was locked then and is not told is missing. And of what was held before, and ended while there was no
        connection, the `unlocked` may be missing until somebody else locks it.
        """
        return self._watch.truncated

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        watch = self._watch
        while not watch.ended:
            if watch.changes:
                return watch.changes.popleft()
            await self._connection.more(watch)
        watch.check()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Watch no longer. A second time does nothing."""
        self._connection.unwatch(self._watch)

    async def __aenter__(self) -> Self:
        """Begin to watch: what happens from here on is told, whenever it is asked for."""
        self._connection.begin(self._watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._watch.ended:
            self._connection.drop(self._watch)


# -- The client for asyncio --------


def connect(
    host: str | Sequence[str] | None = None,
    port: int | None = None,
    *,
    connect_timeout: float = 10.0,
    session: str | None = None,
    session_timeout: float = 10.0,
    token: str | None = None,
    namespace: str | None = None,
    ssl: bool | SSLContext | None = None,
) -> Client:
    """A client, which connects when its `async with` block is entered and closes when it is left.

    `host` is one address, several with commas between them, or a list of them: `HOST`, `HOST:PORT`, `[IPv6]:PORT`;
    `port` is for those that name none. GENIE_HOST and GENIE_PORT say what is left out, else 127.0.0.1 and 7077.

    Of several servers the one that leads is found by itself. Entering the block raises Unavailable if no server
    answers at all, or if none leads within `connect_timeout` seconds. A connection that is lost later is made again in
    the background; a call that needs it waits up to `connect_timeout`, then raises Unavailable.

    The server keeps what this client holds and waits for while the connection is away, for `session_timeout` seconds.
    `session` is the secret (16 to 128 characters) that it knows the client by: a random one, if none is given. Two
    clients with the same one take each other's place.

    `token` is what the server wants to be told first, where it has any. What is left out comes from GENIE_TOKEN, else
    from the file at GENIE_TOKEN_FILE, which must hold one word. Entering the block raises RequestRejected where it is wrong.
    A server that does not take it any more when the connection is made again fails the calls that wait.

    `namespace` is whose locks these are, where a server has several namespaces (1 to 128 letters, digits or any of
    `_.:-`; else a ValueError at once). What is left out comes from GENIE_NAMESPACE, else it is the server's first. All
    that this client asks for is in it; nothing spans namespaces, so take a client for each. Entering the block raises
    RequestRejected (`unknown-namespace`) where the servers do not serve it.

    `genies://HOST:PORT` is a server that speaks TLS; with `ssl=True`, or a context, all of them do. Its certificate and
    its name are verified. GENIE_TLS_CA is a file with those who may sign it, else it is whom this system trusts;
    GENIE_TLS_CERT and GENIE_TLS_KEY are what this client shows. Your own context counts more than these.
    """
    return Client(
        parse_addresses(host, port, ssl=ssl),
        connect_timeout=connect_timeout,
        session=session,
        session_timeout=session_timeout,
        token=token,
        namespace=namespace,
    )


class Client:
    """Locks from one server, over one connection, for any number of tasks. Made by `connect`.

    Every call can be cancelled: what it asked for is given back. Locks that are held stay held when the connection
    ends, and who waits for one goes on waiting, in the same place. An `extend`, `inspect` or `ping` whose connection
    ends before its answer came raises ConnectionLost.
    """

    def __init__(
        self,
        to: Sequence[Address],
        *,
        connect_timeout: float = 10.0,
        session: str | None = None,
        session_timeout: float = 10.0,
        token: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self._connection = AsyncConnection(
            to, connect_timeout, session, session_timeout, find_token(token), find_namespace(namespace)
        )

    async def __aenter__(self) -> Self:
        await self._connection.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session and the connection. Calls that wait raise ConnectionLost, and what they asked for is cancelled.

        Locks with `on_disconnect="release"` are released; the others stay held until they are released by id or their
        `transaction_timeout` has passed. Without a connection, or if the server does not answer for a moment, the server
        does the same when the session's timeout has passed.
        """
        await self._connection.close()

    def lock(
        self,
        *resources: str,
        transaction: str | None = None,
        queue_timeout: float | None = 10.0,
        transaction_timeout: float = 10.0,
        priority: float = 0,
        watchdog: bool = False,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> LockContext:
        """`async with client.lock("exclusive:a", "shared:b") as lock:` holds all of them while the block runs.

        Arguments and errors are those of `acquire`. With `watchdog` the hold is extended for as long as the block
        runs, so that `transaction_timeout` only bounds how long the lock outlives this process. If the lock is lost
        the block is cancelled and LockLost comes out of it.
        """
        return LockContext(
            self._connection,
            self._request(
                resources,
                transaction=transaction,
                queue_timeout=queue_timeout,
                transaction_timeout=transaction_timeout,
                priority=priority,
                watchdog=watchdog,
                on_disconnect=on_disconnect,
                note=note,
            ),
        )

    async def acquire(
        self,
        *resources: str,
        transaction: str | None = None,
        queue_timeout: float | None = 10.0,
        transaction_timeout: float = 10.0,
        priority: float = 0,
        watchdog: bool = False,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> Lock:
        """Wait until all the resources can be locked at once, and hold them until `lock.release()`.

        A resource is `shared:NAME`, `exclusive:NAME`, or a NAME without a colon, which is exclusive (`genie.shared`
        and `genie.exclusive` take any name). A resource that is named twice is locked once, in the stronger mode:
        `lock.resources` lists what is locked. `transaction` names the one transaction that asks: what it holds is not
        in its way, and deadlocks are found between transactions. Higher `priority` goes first. With `queue_timeout=None`
        the request waits without a limit, also while no server answers.

        The lock is lost `transaction_timeout` seconds after it was granted. With `watchdog` the client extends it until
        `lock.release()`, for as long as this client is open and can reach a server. `note` (256 characters at most) is shown
        to people who look for who holds the lock, and to clients that waited for it in vain. With `on_disconnect="release"` the
        server releases the lock when the session of this client ends: when the client is closed, or when there was no
        connection for `session_timeout`. By default (`"keep"`) the lock stays until `transaction_timeout`.

        Raises QueueTimeout (which is a TimeoutError) after `queue_timeout` seconds in the queue, Deadlock at once where
        waiting could not end, LockError where the waiting request was released by its id, RequestRejected where the server
        refuses it, Unavailable where no server has answered for `queue_timeout` and `connect_timeout` together, and
        ConnectionLost where the client was closed. RuntimeError, if the client was not entered with `async with`.
        """
        return await acquire(
            self._connection,
            self._request(
                resources,
                transaction=transaction,
                queue_timeout=queue_timeout,
                transaction_timeout=transaction_timeout,
                priority=priority,
                watchdog=watchdog,
                on_disconnect=on_disconnect,
                note=note,
            ),
        )

    async def try_acquire(
        self,
        *resources: str,
        transaction: str | None = None,
        transaction_timeout: float = 10.0,
        priority: float = 0,
        watchdog: bool = False,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> Lock | None:
        """Do what `acquire` does, without waiting: None if the resources can't be locked at once.

        Raises what `acquire` raises, also Deadlock, but never QueueTimeout.
        """
        request = self._request(
            resources,
            transaction=transaction,
            queue_timeout=0,
            transaction_timeout=transaction_timeout,
            priority=priority,
            watchdog=watchdog,
            on_disconnect=on_disconnect,
            note=note,
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
        transaction_timeout: float = 10.0,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> Lock:
        """Lock as many of the resources as it takes, of those that are free, and hold them until `lock.release()`.

        The server goes through the resources (10,000 at most) in the order given, in one step, and takes what no other
        owner holds or waits for, until the `weights` of what it took (1 for each where there are none) reach `target`.
        `lock.resources` are those that it took. It never waits: where what is free does not reach the target nothing is
        taken and Insufficient is raised, with the sums of the weights that are free and that are locked. Integers are
        added exactly, however large.

        Raises RequestRejected where the server refuses it or its line would be longer than 1 MiB, Unavailable where no
        server has said anything for `connect_timeout`, and ConnectionLost where the client was closed. The lock is
        lost `transaction_timeout` seconds after it was granted.
        """
        request = any_request(
            self._connection.session.new_ref(),
            resources,
            target,
            weights=weights,
            transaction=transaction,
            transaction_timeout=transaction_timeout,
            on_disconnect=on_disconnect,
            note=note,
        )
        return await acquire(self._connection, request)

    def watch(self, prefix: str) -> Watch:
        """`async for change in client.watch("token/"):` tells who locks and unlocks resources whose names begin so.

        First comes a `locked` for each lock that is held, then what happens, as it happens. After a lost connection, a
        failover, or where changes came faster than they were taken, the client asks what is held and tells the
        difference to what it told before. So whoever applies the changes has the right picture, though not every lock
        that was held for a moment only. More than 10,000 held locks are not told by the server: see `truncated`.

        It waits for a connection for as long as it takes. Raises RequestRejected where the server refuses it, as it
        does with more than 100 prefixes, and ConnectionLost where the client was closed before. Leaving the loop ends the watch;
        closing the client ends the loop.
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
        """Return who holds and who waits for whom: `holders` and `queue`, at most `limit` rows (100), and their totals.

        `resource` is a name without a mode. With `only` all rows are of one kind. Times are seconds, `since` is the unix
        time as `time.time()` gives it. Raises RequestRejected where the server refuses it.
        """
        return inspection.read(await self._connection.call(Inspect(resource, transaction, id, limit, only)))

    async def ping(self) -> None:
        """Return when the server has answered."""
        await self._connection.call(Ping())

    async def release(self, id: int) -> str:
        """End a lock, or cancel a waiting request, by its id, whichever client made it.

        So a transaction can begin in one service and end in another. Returns the reason for which it ended: `success`, or
        an earlier one if it had ended before. Raises RequestRejected (`unknown-id`) where the server does not know the id.
        Prefer `lock.release()` for a lock of this client.
        """
        release = Release(id)
        self._connection.release(release)
        return await self._connection.finish(release)

    async def extend(self, id: int, seconds: float) -> None:
        """Let the hold of a lock end `seconds` from now, by its id, whichever client made it.

        Only the client that asks knows of it: the client that made the lock counts it as lost when its own
        `transaction_timeout` has passed, and may then release it, unless it extends the lock itself or has handed it
        over with `lock.detach()`. Raises LockLost if the lock has ended,
        RequestRejected if the request still waits (`bad-request`) or the server does not know the id (`unknown-id`),
        ConnectionLost if the answer did not come, and Unavailable if there is no connection within `connect_timeout`.
        """
        await self._connection.call(Extend(id, seconds, self._connection.held(id)))

    def _request(self, resources: Sequence[str], **options: Any) -> Request:
        return commands.request(self._connection.session.new_ref(), resources, **options)
