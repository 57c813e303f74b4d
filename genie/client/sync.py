"""The public API for threads: the asyncio API without `await`."""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from ssl import SSLContext
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, cast

from genie.client import clock, inspection, watches
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
from genie.client.handover import Guard, LostEvent
from genie.client.hints import warn_unconfirmed
from genie.client.inspection import Inspection
from genie.client.sync_connection import SyncConnection
from genie.client.transaction import (
    Attempts,
    RunningNames,
    TransactionInfo,
    TransactionLocks,
    TransactionOptions,
    unique_name,
)
from genie.client.watches import Change, WatchInfo
from genie.errors import Code, Deadlock, GenieError, QueueTimeout, RequestRejected
from genie.protocol.resources import exclusive

T = TypeVar("T")


class Lock(LockInfo):
    """A granted lock, as `genie.Lock`. Any thread may use it."""

    __slots__ = ("_connection",)

    def __init__(self, connection: SyncConnection, request: Request) -> None:
        super().__init__(request)
        self._connection = connection

    @property
    def held(self) -> bool:
        """True if the lock is held now, as `genie.Lock.held`. False in a forked process."""
        return self._request.is_held(clock.now()) and not self._connection.forked

    @property
    def lost(self) -> LostEvent:
        """An event that is set when the lock ends without `release`, as `genie.Lock.lost`.

        The event has `is_set()` and `wait(timeout)`, as a `threading.Event`.
        """
        return cast("LostEvent", self._request.lost_event)

    def release(self) -> None:
        """Release the lock, and wait until the server confirms. Does nothing if the lock was released before or is lost.

        Raises:
            Unavailable: if the server does not confirm the release within `response_timeout`. The client then retries in
                the background.
            RuntimeError: if the lock was detached: use `client.release(id)`.

        """
        self._check_managed()
        if self._request.state is not RequestState.HELD:
            return
        try:
            self._connection.release_lock(self._request)
        except RequestRejected as error:
            if error.code != Code.UNKNOWN_ID:  # a lock that the server does not know is not held
                raise

    def detach(self) -> int:
        """Hand the lock over to another client: stop managing it here, and leave it held. Returns its `id`.

        See `genie.Lock.detach` for the steps and the errors.
        """
        self._connection.detach(self._request)
        return self.id

    def extend(self, seconds: float | timedelta) -> None:
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
            self._connection.call(extend)
        self._check_extended()


class LockContext:
    """The context manager that `client.lock(…)` returns: holds a lock while its block runs. It can be used once.

    If the lock is lost, the end of the block raises LockLost, since the thread can't be interrupted earlier. An exception
    of the block is propagated. A detached lock is not released at the end of the block.
    """

    __slots__ = ("__weakref__", "_connection", "_guard", "_lock", "_request")

    def __init__(self, connection: SyncConnection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._lock: Lock | None = None
        """The lock. None before the block begins."""
        self._guard = connection.guard(self, request)
        """Releases the lock if the end of the block is interrupted before its first instruction."""

    def __enter__(self) -> Lock:
        if self._request.state is not RequestState.WAITING:
            raise RuntimeError("a lock context can be entered only once; call client.lock() again")
        try:
            self._lock = acquire(self._connection, self._request)
            return self._lock  # noqa: TRY300 - an exception at this point must release the lock, too
        except BaseException:  # for example raised by a signal handler after the grant: the block will not run
            self._connection.abandon(self._request)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the lock at the end of the block. Raise LockLost if the lock was lost and the block raised no error.

        A failed release is retried in the background. If the block has raised an error, that error is propagated, with a
        note about the failed release or the lost lock.
        """
        try:
            self._end_block(error)
            self._connection.unguard(self._guard)
        except BaseException:  # maybe raised by a signal handler before the release was sent
            self._connection.abandon(self._request)
            raise

    def _end_block(self, error: BaseException | None) -> None:
        """Release the lock after a block that has ended with this error, or without one."""
        lock, request = self._lock, self._request
        if lock is None or request.state is RequestState.DETACHED or self._connection.forked:
            return  # this process has no lock to release
        if error is None:
            release_after_success(self._connection, [request])
            if request.error is not None:
                raise copy_lock_lost(request.error)
            return
        problem = release_after_error(self._connection, [request])
        if problem is not None:
            error.add_note(f"lock {lock.id} was not released: {problem}")
        elif request.error is not None:
            error.add_note(str(request.error))


def release_after_success(connection: SyncConnection, requests: Sequence[Request]) -> None:
    """Release the locks of a block that has succeeded.

    If the server does not confirm the release, the client logs a warning, and retries the release in the background. The
    block does not fail, because its work is done.
    """
    unconfirmed = connection.release_all(requests)
    if unconfirmed is not None:
        warn_unconfirmed(requests, unconfirmed)


def release_after_error(connection: SyncConnection, requests: Sequence[Request]) -> GenieError | None:
    """Release the locks of a block that has failed. Returns the error of a failed release, or None.

    While disconnected, the release is only queued: the error of the block is not delayed until there is a connection.
    """
    if connection.up:
        return connection.release_all(requests)
    for request in requests:
        connection.abandon(request)
    return None


def acquire(connection: SyncConnection, request: Request) -> Lock:
    """Send a request, wait until it is granted, and return the lock. If the request fails, its error is raised."""
    request.lost_event = LostEvent()
    try:
        connection.call(request)
        if request.error is not None:  # the lock was granted, and lost before this thread could run
            raise copy_lock_lost(request.error)  # noqa: TRY301
        return Lock(connection, request)
    except BaseException:  # maybe raised by a signal handler after the grant
        connection.abandon(request)
        raise


class Transaction(TransactionInfo):
    """A running transaction: locks resources as it proceeds. `client.run_transaction` passes it to the work.

    All locks of the transaction are released together at its end: do not release them before.
    """

    __slots__ = ("_connection", "_owner")

    def __init__(
        self, connection: SyncConnection, locks: TransactionLocks, owner: weakref.ref[TransactionContext]
    ) -> None:
        super().__init__(locks)
        self._connection = connection
        self._owner = owner
        """The context of the block. A weak reference, because the context must be garbage collected after a block whose end
        was interrupted."""

    def lock(self, *resources: str) -> Lock:
        """Wait until all of the resources can be locked at once, and hold them until the end of the transaction.

        Returns at once for resources that the transaction holds already, except for units. Raises the errors of
        `genie.Transaction.lock`.
        """
        request = self._locks.request(resources, self._connection.new_ref())
        if request.state is RequestState.HELD:
            return Lock(self._connection, request)
        owner = self._owner()
        if owner is not None:
            owner.guards.append(self._connection.guard(owner, request))
        lock = acquire(self._connection, request)
        if self._locks.ended:  # the block may have released its locks before this thread could run
            self._connection.abandon(request)
            raise self._locks.ended_error()
        return lock


class TransactionContext:
    """The context manager that `client.transaction(…)` returns. It can be used once.

    If a lock is lost, the end of the block raises LockLost, since the thread can't be interrupted earlier.
    """

    __slots__ = ("__weakref__", "_connection", "_names", "_was_entered", "guards", "locks")

    def __init__(self, connection: SyncConnection, locks: TransactionLocks, names: RunningNames | None) -> None:
        self.locks = locks
        """The requests of the transaction."""
        self.guards: list[Guard] = []
        """They release the locks if the end of the block is interrupted before its first instruction."""
        self._connection = connection
        self._names = names
        """The names of the client's running transactions. The block adds its name. None if the caller has added it."""
        self._was_entered = False

    def __enter__(self) -> Transaction:
        if self._was_entered:
            raise RuntimeError("a transaction can be entered only once; call client.transaction() again")
        self._connection.check_open()
        if self._names is not None:
            self._names.add(self.locks.name, self)
        self._was_entered = True
        return Transaction(self._connection, self.locks, weakref.ref(self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release all locks. Raise LockLost if any lock was lost, and the block raised no error.

        A failed release is retried in the background. If the block has raised an error, that error is propagated, with notes
        about the failed release and the lost locks.
        """
        try:
            self._end_block(error)
            for guard in self.guards:
                self._connection.unguard(guard)
        except BaseException:  # maybe raised by a signal handler before the releases were sent
            for request in self.locks.requests:
                self._connection.abandon(request)
            raise

    def _end_block(self, error: BaseException | None) -> None:
        """Release all locks after a block that has ended with this error, or without one."""
        self.locks.ended = True
        if self._names is not None:
            self._names.discard(self.locks.name)
        if self._connection.forked:
            return  # this process has no locks to release
        for request in self.locks.waiting():
            self._connection.fail_request(request, self.locks.ended_error())
        if error is None:
            release_after_success(self._connection, self.locks.held())
            self.locks.check_not_lost()
            return
        problem = release_after_error(self._connection, self.locks.held())
        if problem is not None:
            error.add_note(f"the locks of {self.locks.name!r} were not released: {problem}")
        for request in self.locks.requests:
            if request.error is not None:
                error.add_note(str(request.error))


class Watch(WatchInfo):
    """The iterator of changes that `client.watch(…)` returns. It may also be used with `with`.

    The iteration ends with the watch. The watch ends

    - with `close`, which any thread may call, and at the end of a `with` block;
    - when a wait for the next change is interrupted;
    - when the object is garbage collected, for example after a `for` over `client.watch(…)`;
    - when the client is closed.
    """

    __slots__ = ("__weakref__", "_connection", "_guard")

    def __init__(self, connection: SyncConnection, watch: watches.Watch) -> None:
        super().__init__(watch)
        self._connection = connection
        self._guard = connection.guard(self, watch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        change = self._connection.next_change(self._watch)
        if change is None:
            raise StopIteration
        return change

    def close(self) -> None:
        """End the watch. Does nothing if the watch has ended."""
        self._connection.unwatch(self._watch)
        self._connection.unguard(self._guard)

    def __enter__(self) -> Self:
        """Start the watch, so that changes are buffered from now on. Without `with` the iteration starts it."""
        self._connection.start_watch(self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


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
    """Return a client that connects at the start of its `with` block and is closed at the end.

    Arguments, environment variables and errors are those of `genie.connect`.
    """
    options = ClientOptions(connect_timeout, response_timeout, session, session_timeout, token, namespace, note, lazy)
    return Client(parse_addresses(host, port, ssl=ssl), options)


class Client:
    """A client with one connection to the leader, for any number of threads. Made by `connect`.

    Locks stay held while the client is disconnected, and waiting requests keep their queue positions. An `extend`,
    `inspect` or `ping` whose connection ends before the reply raises ConnectionLost. If Ctrl-C interrupts a waiting
    call, its request is released.
    """

    def __init__(self, addresses: Sequence[Address], options: ClientOptions) -> None:
        self._connection = SyncConnection(addresses, options)
        self._transactions = RunningNames()

    __reduce__ = reject_pickling

    def __enter__(self) -> Self:
        self._connection.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, release: bool = False) -> None:
        """End the session and the connection. Waiting calls raise ConnectionLost, and their requests are cancelled.

        `genie.Client.close` describes `release`, and which locks are released without it.
        """
        self._connection.close(release=release)

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
        """Hold a lock while a block runs: `with client.lock("exclusive:a", "shared:b") as lock:`.

        Arguments and errors are those of `acquire`. With `watchdog` the lock is extended as long as the block runs,
        so that `transaction_timeout` only bounds how long the lock outlives a crash of this process. If the lock is
        lost, the end of the block raises LockLost.
        """
        ref = self._connection.new_ref()
        request = make_request(
            ref, resources, transaction, queue_timeout, transaction_timeout, priority, watchdog, on_disconnect, note
        )
        return LockContext(self._connection, request)

    def elect(
        self, name: str, *, transaction_timeout: float | timedelta = 10.0, note: str | None = None
    ) -> LockContext:
        """Lead while a block runs: `with client.elect("leader/billing") as leadership:`.

        Arguments and errors are those of `genie.Client.elect`. If the leadership is lost, the end of the block raises
        LockLost: check `leadership.held` in the block, or wait for `leadership.lost`.
        """
        return self.lock(
            exclusive(name), queue_timeout=None, transaction_timeout=transaction_timeout, watchdog=True, note=note
        )

    def acquire(
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

        Arguments and errors are those of `genie.Client.acquire`. Timeouts are in seconds.
        """
        ref = self._connection.new_ref()
        request = make_request(
            ref, resources, transaction, queue_timeout, transaction_timeout, priority, watchdog, on_disconnect, note
        )
        return acquire(self._connection, request)

    def try_acquire(
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
        ref = self._connection.new_ref()
        request = make_request(
            ref, resources, transaction, 0, transaction_timeout, priority, watchdog, on_disconnect, note
        )
        try:
            return acquire(self._connection, request)
        except QueueTimeout:
            return None

    def acquire_any(
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

        Arguments and errors are those of `genie.Client.acquire_any`. Timeouts are in seconds.
        """
        request = make_any_request(
            self._connection.new_ref(),
            resources,
            target,
            weights=weights,
            transaction=transaction,
            transaction_timeout=transaction_timeout,
            on_disconnect=on_disconnect,
            note=note,
        )
        return acquire(self._connection, request)

    def transaction(self, name: str | None = None, **options: Unpack[TransactionOptions]) -> TransactionContext:
        """Lock resources as a block proceeds, and release them together: `with client.transaction() as tx:`.

        Arguments and errors are those of `genie.Client.transaction`.
        """
        locks = TransactionLocks(unique_name() if name is None else name, dict(options))
        return TransactionContext(self._connection, locks, self._transactions)

    def run_transaction(
        self,
        work: Callable[[Transaction], T],
        *,
        name: str | None = None,
        attempts: int = 10,
        **options: Unpack[TransactionOptions],
    ) -> T:
        """Run work that locks resources as it proceeds, and return its result. After a deadlock the work is repeated.

        Arguments and errors are those of `genie.Client.run_transaction`, except that `work` is a function, and is not
        interrupted when a lock is lost: LockLost is raised at its end.
        """
        if inspect.iscoroutinefunction(work):
            raise TypeError(f"the work must be a function, not the coroutine function {work!r}")
        name = unique_name(work) if name is None else name
        repetition = Attempts(attempts)
        self._transactions.add(name, repetition)
        try:
            while True:
                context = TransactionContext(self._connection, TransactionLocks(name, dict(options)), None)
                try:
                    with context as tx:
                        wanted = repetition.wanted_resources()
                        if wanted:
                            tx.lock(*wanted)
                            context.locks.begin_work()
                        return work(tx)
                except Deadlock:
                    pause_s = repetition.begin_retry(context.locks)
                    if pause_s is None:
                        raise
                time.sleep(pause_s)
        finally:
            self._transactions.discard(name)

    def watch(self, prefix: str) -> Watch:
        """Watch the locks on resources with a prefix: `for change in client.watch("token/"):`.

        The changes and the errors are those of `genie.Client.watch`.
        """
        return Watch(self._connection, watches.Watch(prefix))

    def inspect(
        self,
        *,
        resource: str | None = None,
        transaction: str | None = None,
        id: int | None = None,
        limit: int | None = None,
        only: Literal["holders", "queue"] | None = None,
    ) -> Inspection:
        """Return the held locks (`holders`) and the waiting requests with their blockers (`queue`).

        Arguments and errors are those of `genie.Client.inspect`.
        """
        query = Inspect(resource=resource, transaction=transaction, id=id, limit=limit, only=only)
        return inspection.parse_inspected(self._connection.call(query))

    def ping(self) -> None:
        """Send a `ping`, and wait until the server replies. Raises Unavailable after `response_timeout`."""
        self._connection.call(Ping())

    def release(self, id: int) -> str:
        """Release a lock or cancel a waiting request by its id, even if another client made the request.

        Result and errors are those of `genie.Client.release`. For a lock of this client, prefer `lock.release()`.
        """
        return self._connection.release(Release(id))

    def extend(self, id: int, seconds: float | timedelta) -> None:
        """Set the remaining time of a lock of any client, by its id, to `seconds` from now.

        See `genie.Client.extend` for the effect on the client that acquired the lock, and for the errors.
        """
        self._connection.call(Extend(id, to_seconds(seconds, "seconds"), self._connection.find_held_lock(id)))
