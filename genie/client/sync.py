"""The client for threads: the same as `genie.connect`, without `await`."""

from __future__ import annotations

from collections.abc import Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Any, Literal, Self

from genie.client import commands, inspection, watches
from genie.client.commands import Extend, Inspect, OnDisconnect, Ping, Release, Request, any_request
from genie.client.config import Address, find_namespace, find_token, parse_addresses
from genie.client.inspection import Inspection
from genie.client.sync_link import Link
from genie.client.sync_lock import Lock, LockContext, acquire
from genie.client.sync_watch import Watch
from genie.errors import QueueTimeout


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
    """A client, which connects when its `with` block is entered and closes when it is left.

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
    """Locks from one server, over one connection, for any number of threads. Made by `connect`.

    Locks that are held stay held when the connection ends, and who waits for one goes on waiting, in the same place. An
    `extend`, `inspect` or `ping` whose connection ends before its answer came raises ConnectionLost. Ctrl-C in a call
    that waits gives back what it asked for.
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
        self._connection = Link(
            to, connect_timeout, session, session_timeout, find_token(token), find_namespace(namespace)
        )

    def __enter__(self) -> Self:
        self._connection.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session and the connection. Calls that wait raise ConnectionLost, and what they asked for is cancelled.

        Locks with `on_disconnect="release"` are released; the others stay held until they are released by id or their
        `transaction_timeout` has passed. Without a connection, or if the server does not answer for a moment, the server
        does the same when the session's timeout has passed.
        """
        self._connection.close()

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
        """`with client.lock("exclusive:a", "shared:b") as lock:` holds all of them while the block runs.

        Arguments and errors are those of `acquire`. With `watchdog` the hold is extended for as long as the block
        runs, so that `transaction_timeout` only bounds how long the lock outlives this process. If the lock is lost,
        LockLost comes out when the block is left.
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

    def acquire(
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

        Arguments and errors are those of `genie.Client.acquire`; timeouts in seconds.
        """
        return acquire(
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

    def try_acquire(
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
        transaction_timeout: float = 10.0,
        on_disconnect: OnDisconnect = "keep",
        note: str | None = None,
    ) -> Lock:
        """Lock as many of the resources as it takes, of those that are free, and hold them until `lock.release()`.

        Arguments and errors are those of `genie.Client.acquire_any`; timeouts in seconds.
        """
        request = any_request(
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

    def watch(self, prefix: str) -> Watch:
        """`for change in client.watch("token/"):` tells who locks and unlocks resources whose names begin so.

        What is told, and what is raised, is as with `genie.Client.watch`.
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
        """Return who holds and who waits for whom: `holders` and `queue`, at most `limit` rows (100), and their totals.

        `resource` is a name without a mode. With `only` all rows are of one kind. Times are seconds, `since` is the unix
        time as `time.time()` gives it. Raises RequestRejected where the server refuses it.
        """
        return inspection.read(self._connection.call(Inspect(resource, transaction, id, limit, only)))

    def ping(self) -> None:
        """Return when the server has answered."""
        self._connection.call(Ping())

    def release(self, id: int) -> str:
        """End a lock, or cancel a waiting request, by its id, whichever client made it.

        So a transaction can begin in one service and end in another. Returns the reason for which it ended: `success`, or
        an earlier one if it had ended before. Raises RequestRejected (`unknown-id`) where the server does not know the id.
        Prefer `lock.release()` for a lock of this client.
        """
        return self._connection.release(Release(id))

    def extend(self, id: int, seconds: float) -> None:
        """Let the hold of a lock end `seconds` from now, by its id, whichever client made it.

        Only the client that asks knows of it: the client that made the lock counts it as lost when its own
        `transaction_timeout` has passed, and may then release it, unless it extends the lock itself or has handed it
        over with `lock.detach()`. Raises LockLost if the lock has ended,
        RequestRejected if the request still waits (`bad-request`) or the server does not know the id (`unknown-id`),
        ConnectionLost if the answer did not come, and Unavailable if there is no connection within `connect_timeout`.
        """
        self._connection.call(Extend(id, seconds, self._connection.held(id)))

    def _request(self, resources: Sequence[str], **options: Any) -> Request:
        return commands.request(self._connection.new_ref(), resources, **options)
