"""The I/O layer of the asyncio client: one TCP connection at a time, reconnects, timers, and waiting calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import weakref
from asyncio import _get_running_loop  # returns None if no event loop runs
from collections.abc import Coroutine, Sequence
from ssl import SSLContext
from typing import Any, Final, Protocol, cast

from genie.client import clock
from genie.client.attempts import Endpoint, Resolver, Round
from genie.client.commands import BYE_TIMEOUT_S, Bye, Call, Outcome, Release, Request, RequestState
from genie.client.config import (
    KEEPALIVE_IDLE_S,
    Address,
    ClientOptions,
    check_token,
    logger,
    resolve_namespace,
    resolve_note,
    resolve_token,
)
from genie.client.durations import to_seconds
from genie.client.failover import ServerList
from genie.client.handshake import UP, Phase
from genie.client.requests import is_unknown_id
from genie.client.session import ClientSession
from genie.client.watches import Watch
from genie.errors import ConnectionLost, GenieError, RequestRejected, Unavailable
from genie.net import enable_keepalive
from genie.tls import describe_error

MAX_UNSENT_COMMANDS: Final = 32
"""Maximum number of commands in one write. The server executes them while further tasks still encode their commands."""

READ_SIZE: Final = 256 * 1024
"""Maximum number of bytes in one read after the end of a connection."""

FORKED: Final = "the client was opened before this process was forked: open a new one in this process"
"""The error of calls in a forked process."""


class CallFuture(Protocol):
    """The future of a call: an `asyncio.Future`, or a `Handover` of the client for threads."""

    def done(self) -> bool:
        """Return whether the future has been completed or cancelled."""

    def set_result(self, result: Any, /) -> None:
        """Complete the future with the result of the call."""

    def set_exception(self, exception: Any, /) -> None:
        """Complete the future with the error of the call."""


class TransportHandler(asyncio.Protocol):
    """The asyncio protocol of one connection attempt. Forwards all events to the `AsyncConnection`."""

    def __init__(self, connection: AsyncConnection, address: Address) -> None:
        self.connection = connection
        self.address = address
        self.transport: asyncio.Transport | None = None
        self.abandoned = False
        """True if the attempt was given up. A connection that is made after that must be closed."""
        self.handshake_done = asyncio.Event()
        """Set when the handshake has succeeded or failed."""
        self.closed = asyncio.Event()
        """Set when the connection has ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, and report the new connection. Called by the event loop."""
        self.transport = cast("asyncio.Transport", transport)
        self.connection.transports.add(self.transport)
        self.connection.on_connected(self)

    def data_received(self, data: bytes) -> None:
        """Process received bytes. Called by the event loop."""
        self.connection.on_data(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Process the last bytes of the server, and report the end of the connection. Called by the event loop."""
        self.closed.set()
        self.connection.transports.discard(cast("asyncio.Transport", self.transport))
        try:
            rest = self._read_rest() if isinstance(exc, ConnectionError) else b""
            if rest:
                self.data_received(rest)
        finally:
            self.connection.on_disconnected(self, "the server closed it" if exc is None else describe_error(exc))

    def _read_rest(self) -> bytes:
        """Return the bytes that the server sent before it reset the connection.

        After a failed write, a transport does not read them. They may be the error that says why the connection has ended.
        With TLS they are lost: asyncio and uvloop close the socket before they report the end of the connection.
        """
        transport = cast("asyncio.Transport", self.transport)
        rest = b""
        if transport.get_extra_info("sslcontext") is None:
            with contextlib.suppress(OSError):
                sock = transport.get_extra_info("socket")
                with socket.fromfd(sock.fileno(), sock.family, sock.type) as copy:
                    copy.setblocking(False)
                    while data := copy.recv(READ_SIZE):
                        rest += data
        return rest


class AsyncConnection:
    """The connection of one client to its servers: reconnects, runs the timers, and completes the futures of calls.

    Any number of tasks may use the connection. Two of the options limit how long callers wait: `connect_timeout` for the
    first connection, `response_timeout` for the answer to a call.
    """

    def __init__(self, addresses: Sequence[Address], options: ClientOptions) -> None:
        # More than 16 fields: the connection, its timer and the tasks that wait change together.
        self.connect_timeout = to_seconds(options.connect_timeout, "connect_timeout")
        self._options = options
        self._resolver = Resolver()
        self._servers = ServerList(addresses, self.connect_timeout)
        self.session = ClientSession(
            options.session,
            session_timeout=to_seconds(options.session_timeout, "session_timeout"),
            response_timeout=to_seconds(options.response_timeout, "response_timeout"),
            namespace=resolve_namespace(options.namespace),
            note=resolve_note(options.note),
            explain_unavailable=self._servers.explain_unavailable,
        )
        """The protocol state machine."""
        token = check_token(options.token)
        if not callable(token):  # a function is called only when the client connects
            # Raises an error if the token or its file is invalid.
            self.session.handshake.use_token(resolve_token(token))
        self._loop: asyncio.AbstractEventLoop
        """The event loop in which the client was opened. Set by `open`."""
        self._handler: TransportHandler | None = None
        """The current connection, or the attempt that has sent `hello`, or None."""
        self.transports: set[asyncio.Transport] = set()
        """All open transports: also of attempts to connect, and of connections that are being closed."""
        self._connected_at = 0.0
        """When the last handshake was completed, in seconds of the monotonic clock."""
        self._closed = True
        """True before `open` and after `close`."""
        self._was_opened = False
        """True after the first `open`."""
        self.forked = False
        """True if this process was forked after the client was opened. The connection belongs to the parent process."""
        self._reconnect_task: asyncio.Task[None] | None = None
        self._flush_scheduled = False
        """True if `flush` will be called soon, so that `flush_soon` need not schedule it."""
        self._waiting_tasks = 0
        """Number of tasks that wait for the outcome of a call."""
        self._timer: asyncio.TimerHandle | None = None
        """The timer for the next deadline of the session, or None."""
        self._timer_at = math.inf
        """When `_timer` fires, in seconds of the monotonic clock. Infinite without a timer."""
        _connections.add(self)

    @property
    def address(self) -> Address | None:
        """The server of the current connection, or None."""
        return None if self._handler is None else self._handler.address

    def explain_unavailable(self) -> str:
        """Return why there is no connection, for error messages."""
        return self._servers.explain_unavailable()

    # -- events of the transport --------------------------------------------------------------------------

    def on_connected(self, handler: TransportHandler) -> None:
        """Prepare a new connection, or close it if its attempt was given up."""
        transport = cast("asyncio.Transport", handler.transport)
        if handler.abandoned:
            transport.abort()
            return
        enable_keepalive(transport.get_extra_info("socket"), idle_s=KEEPALIVE_IDLE_S)

    def on_data(self, handler: TransportHandler, data: bytes) -> None:
        """Pass received bytes to the session, and complete the calls whose replies they contain.

        Closes the connection if the session demands it. If the bytes complete the handshake, the attempt to connect has
        succeeded.
        """
        if handler is not self._handler:
            return  # data of an earlier connection
        handshake = self.session.handshake
        was_up = handshake.phase is UP
        outcomes = self.session.receive_data(data, clock.now())
        self._deliver(outcomes)
        if handshake.close_reason:
            self._abandon_transport(handler, handshake.close_reason)
        elif was_up:
            if outcomes:  # without an outcome, the data may be the first part of the error `unavailable`
                self._servers.on_success()
        elif handshake.phase is UP:  # the received data has completed the handshake
            self._connected_at = clock.now()
            handler.handshake_done.set()
        self.flush()

    def on_disconnected(self, handler: TransportHandler, reason: str) -> None:
        """Handle the end of a connection: fail the calls that can't be sent again.

        Starts to reconnect if the handshake was complete. Otherwise the connection attempt has failed.
        """
        if handler is not self._handler:
            return  # an earlier connection
        self._handler = None
        if self.session.up:
            reason = self._servers.on_disconnect(handler.address, reason, clock.now() - self._connected_at)
            if not self._closed and (self._reconnect_task is None or self._reconnect_task.done()):
                self._reconnect_task = self._loop.create_task(self._reconnect())
        else:
            self._servers.on_failure(reason)
        if self.session.handshake.redirect is not None:
            self._servers.on_redirect(handler.address, self.session.handshake.redirect)
        self._deliver(self.session.on_disconnected(reason))
        handler.handshake_done.set()

    def flush_soon(self) -> None:
        """Schedule a `flush` in the next iteration of the event loop, so that calls of several tasks are sent together."""
        if not self._flush_scheduled and not self._loop.is_closed():
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def _flush_now_if_idle(self) -> None:
        """Send the unsent calls now if no task waits for another call, else together with the calls of other tasks.

        Sending now saves an iteration of the event loop for each call of a single task. `MAX_UNSENT_COMMANDS` unsent calls
        are always sent now.
        """
        if self._waiting_tasks == 0 and not self._flush_scheduled:
            self.flush()
        elif len(self.session.calls.unsent_lines) >= MAX_UNSENT_COMMANDS:
            self._write_output()
        elif not self._flush_scheduled:
            self.flush_soon()

    def begin_batch(self) -> None:
        """Make `flush_soon` do nothing during a batch of calls. The caller must call `flush` at the end of the batch."""
        self._flush_scheduled = True

    def flush(self) -> None:
        """Write the session's buffered commands to the transport, and set the timer if it would fire too late."""
        self._flush_scheduled = False
        if self.session.calls.unsent_lines:
            self._write_output()
        if self.session.next_timer < self._timer_at:
            self._set_timer()

    def _write_output(self) -> None:
        """Write the session's buffered commands to the transport."""
        handler = self._handler
        if handler is not None and handler.transport is not None:
            handler.transport.write(self.session.data_to_send())

    # -- connecting, and the timer ------------------------------------------------------------------------

    async def _try_all_servers(self) -> bool:
        """Try to connect to each address of each server once, and follow redirects to the leader.

        Returns True as soon as a server accepts the client. Returns False if none does, after the handshake has recorded
        which servers rejected the client for good.
        """
        attempts = Round(self._servers, self._resolver, self._attempt)
        try:
            if await attempts.run():
                if self._handler is not None:
                    return True
                attempts.failures.append(None)  # the connection was lost before this task could continue
        except BaseException:  # this task was cancelled, maybe after a server has accepted the client
            if self._handler is not None:
                self._abandon_transport(self._handler, reason="")
            raise
        self.session.handshake.on_round_failed(attempts.failures)
        return False

    async def _attempt(self, attempts: Round, endpoint: Endpoint) -> bool:
        """Connect to an endpoint, and send `hello` in this attempt's turn. Return whether the server accepts the client."""
        address = endpoint.address
        handler = TransportHandler(self, address)
        rejection: RequestRejected | None = None
        try:
            context = self._read_credentials(address)
            async with asyncio.timeout(self._servers.attempt_timeout_s):
                for is_last_try in (False, False, True):
                    forks = _forks.count
                    await self._loop.create_connection(
                        lambda handler=handler: handler,
                        endpoint.ip,
                        address.port,
                        ssl=context,
                        server_hostname=address.host if context else None,
                    )
                    if forks == _forks.count or is_last_try:
                        break
                    # A child process has a copy of the socket, which `after_fork` did not know: connect again.
                    self._abandon_transport(handler, reason="")
                    handler = TransportHandler(self, address)
                rejection = await self._perform_handshake(handler, attempts)
        except (OSError, UnicodeError) as error:  # including TimeoutError
            if handler is self._handler:
                self._servers.on_silence(address)
            self._abandon_transport(handler, "no answer to hello")
            self._servers.on_failure(error)
        except BaseException:  # such as a cancellation
            self._abandon_transport(handler, reason="")
            raise
        is_accepted = handler is self._handler  # a failed handshake would have reset `self._handler` to None
        if is_accepted:
            return True
        attempts.failures.append(rejection)
        if rejection is not None:
            self._servers.on_rejection(address, rejection)
        return False

    def _read_credentials(self, address: Address) -> SSLContext | None:
        """Read the token and the certificates again, because they may have been replaced. Returns the TLS context, if any.

        Raises OSError if a file is invalid, for example while it is being replaced, or if the caller's token function fails.
        """
        try:
            self.session.handshake.use_token(resolve_token(self._options.token))
            return address.context()
        except Exception as error:
            raise OSError(f"no token or certificate for the connection: {error}") from error

    async def _perform_handshake(self, handler: TransportHandler, attempts: Round) -> RequestRejected | None:
        """Send `hello` in the turn of this attempt, and wait until the handshake has succeeded or failed.

        Returns the error of a server that has rejected the client for good, else None. Raises TimeoutError if the server does
        not answer and other endpoints remain.
        """
        handshake = self.session.handshake
        async with attempts.turn:
            time_limit_s = None if attempts.is_last else self._servers.hello_timeout_s
            async with asyncio.timeout(time_limit_s):
                handshake.final_error = None
                self._begin_handshake(handler)
                await handler.handshake_done.wait()
                return handshake.final_error

    def _begin_handshake(self, handler: TransportHandler) -> None:
        """Send `hello` on a new connection, unless the connection was closed or another attempt has won."""
        if handler.closed.is_set() or self._handler is not None:
            handler.handshake_done.set()
            return
        self._handler = handler
        self.session.on_connected(clock.now())
        self.flush()

    def _abandon_transport(self, handler: TransportHandler, reason: str) -> None:
        """Give up a connection, or the attempt to connect, and close its transport at once.

        `reason` is recorded as the last failure, unless it is empty.
        """
        handler.abandoned = True
        self.on_disconnected(handler, reason)
        if handler.transport is not None:
            handler.transport.abort()

    async def _reconnect(self) -> None:
        """Try the servers, with backoff, until a server accepts the client, or the client has ended.

        If all servers reject the client for good, the waiting calls fail, and the attempts continue for later calls.
        """
        while not self.session.handshake.has_ended:
            await asyncio.sleep(self._servers.next_round_delay_s)
            if await self._try_all_servers():
                return
            self._deliver(self.session.fail_callers(clock.now()))

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """Complete the future of each call. The outcome of a request that was granted before is the loss of its lock."""
        for call, result, error in outcomes:
            future, call.future = call.future, None
            if future is None:
                if isinstance(call, Request) and call.error is not None:
                    self._notify_lost(call)
            elif not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

    def _notify_lost(self, request: Request) -> None:
        """Set the `lost` event of a lock, if it is in use, and cancel the block of the lock's `async with` statement."""
        if request.lost_event is not None:
            request.lost_event.set()
        if request.on_lost is not None:
            request.on_lost()

    def _set_timer(self) -> None:
        """Schedule `_on_timer` for the next timer of the session, unless it is scheduled for then or earlier."""
        if self._closed:
            return
        next_timer = self.session.next_timer
        if next_timer >= self._timer_at:  # `_on_timer` will call this method again
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = next_timer  # uvloop's `self._timer.when()` is wrong for a time in the past
        self._timer = self._loop.call_later(next_timer - clock.now(), self._on_timer)

    def _on_timer(self) -> None:
        """Run the session's timers, close the connection if the session demands it, and send the resulting commands."""
        self._timer, self._timer_at = None, math.inf
        self._deliver(self.session.on_timer(clock.now()))
        if self.session.handshake.close_reason and self._handler is not None:
            self._abandon_transport(self._handler, self.session.handshake.close_reason)
        self.flush()

    # -- calls ----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the leader. With the option `lazy`, connect in the background and return at once.

        Raises:
            Unavailable: if no server accepts the client within `connect_timeout`.
            RequestRejected: if all servers reject this client for good.
            RuntimeError: if the client is open.

        """
        if self.forked:
            raise RuntimeError(FORKED)
        if not self._closed:
            raise RuntimeError("the client is open already: call connect() for another client")
        self._loop = asyncio.get_running_loop()
        if not self._options.lazy:
            await self._connect()
        self._closed = False
        self._was_opened = True
        if self._options.lazy:
            self._reconnect_task = self._loop.create_task(self._reconnect())
        self._set_timer()

    async def _connect(self) -> None:
        """Try the servers, with backoff, until a server accepts the client. Raises the errors of `open`."""
        try:
            async with asyncio.timeout(self.connect_timeout):
                while not await self._try_all_servers():
                    self.check_not_rejected()
                    if not (self._options.waits_for_servers or self._servers.any_server_answered):
                        raise Unavailable(self.explain_unavailable())
                    await asyncio.sleep(self._servers.next_round_delay_s)
        except TimeoutError:
            raise Unavailable(self.explain_unavailable()) from None
        finally:
            self._resolver.close()

    async def close(self, *, release: bool = False) -> None:
        """End the session and close the connection. Waiting calls fail, and the server cancels their requests.

        The server releases the locks that are bound to the session. The other locks stay held, and a warning names them. With
        `release` the client releases them first, which takes at most `response_timeout`.

        Waits for the server's reply to `bye`, for the shorter of `BYE_TIMEOUT_S` and `response_timeout`. Without a reply, the
        server ends the session after the session timeout.
        """
        if self._closed:
            return
        self._closed = True  # from here on, no lock is requested
        try:
            unbound = [request for request in self.session.requests.held() if not request.bound_to_session]
            self._deliver(self.session.begin_close(clock.now()))
            self.flush_soon()
            hint = "release or detach locks before `close`, or call close(release=True)"
            if release and unbound:
                hint = "the server has not confirmed their release"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.session.calls.response_timeout):
                        await self._release_and_wait(unbound)
            _warn_of_held_locks(unbound, hint)
            if self.session.handshake.phase in (Phase.RESUMING, UP):  # a `bye` waits for the end of the resumption
                async with asyncio.timeout(min(BYE_TIMEOUT_S, self.session.calls.response_timeout)):
                    await self._send_and_wait(Bye())
        except (TimeoutError, GenieError):
            pass  # the server ends the session after the session timeout
        finally:
            await self._close_transport()

    async def end_session_at_exit(self, limit_s: float) -> None:
        """Send `bye` because the process ends, and wait at most `limit_s` seconds until the server has closed the connection.

        Calls that still wait get no outcome.
        """
        handler = self._handler
        self._closed = True
        if handler is None or not self.session.up:
            return
        self.session.send(Bye(), clock.now())
        self.flush()
        self._handler = None  # ignore what the server still sends
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await handler.closed.wait()

    def call(self, call: Call) -> Coroutine[Any, Any, Any]:
        """Send a call, wait for its outcome, and return its result or raise its error.

        Without an answer Unavailable is raised: for a request after its queue timeout and `response_timeout`, for any
        other call after `response_timeout`, connected or not. If this task is cancelled, a request is released.
        """
        self.check_open()
        if self.session.handshake.phase is not UP:
            self.check_not_rejected()
        return self._send_and_wait(call)

    def send(self, call: Call, future: CallFuture) -> None:
        """Send a call, now or on the next connection. Its outcome, or Unavailable after a time, completes `future`."""
        now = clock.now()
        call.future = future
        if isinstance(call, Request):
            self.session.requests.send(call, now)
        else:
            self.session.send(call, now)
            self.session.calls.limit_wait(call, now)
        self._flush_now_if_idle()

    def abandon(self, call: Call) -> None:
        """Drop the outcome of a call whose caller no longer waits. A request is also released."""
        self.session.abandon(call, clock.now())
        self.flush_soon()

    def fail_request(self, request: Request, error: Exception) -> None:
        """End a waiting request whose caller must not wait any longer: its call raises this error."""
        future = request.future
        self.abandon(request)
        if future is not None and not future.done():
            future.set_exception(error)

    async def wait_for_release(self, release: Release) -> str:
        """Wait for the reply to a release, even if the client must reconnect. Returns the reason why the lock ended.

        Raises Unavailable after `response_timeout`. The client then retries the release in the background, as after a
        cancellation of this task.
        """
        future = release.future = self._loop.create_future()
        self.session.calls.limit_wait(release, clock.now())
        self._flush_now_if_idle()
        self._waiting_tasks += 1
        try:
            return cast("str", await future)
        except BaseException:
            self.session.calls.drop_caller(release)
            raise
        finally:
            self._waiting_tasks -= 1

    async def release_one(self, request: Request) -> GenieError | None:
        """Release one lock and wait for the reply. Return the error, or None if the lock is no longer held.

        After an error the release is retried in the background. Faster than `release_all`, because every block of
        `client.lock` ends with this call.
        """
        if self._closed:
            return ConnectionLost("the client was closed")
        now = clock.now()
        release = self.session.requests.release(request, now)
        if release is None:  # the lock has ended, is detached, or is being released
            return None
        future = release.future = self._loop.create_future()
        self.session.calls.limit_wait(release, now)
        self._flush_now_if_idle()
        self._waiting_tasks += 1
        try:
            await future
        except GenieError as error:
            if is_unknown_id(error):  # a lock that the server does not know is not held
                return None
            self._release_again([request])
            return error
        except BaseException:
            self.session.calls.drop_caller(release)
            raise
        finally:
            self._waiting_tasks -= 1
        return None

    async def release_all(self, requests: Sequence[Request]) -> GenieError | None:
        """Release locks together, and wait for all replies. Returns the first error, or None.

        A failed release is retried in the background, also after a cancellation of this task.
        """
        if self._closed:
            return ConnectionLost("the client was closed")
        problem = await self._release_and_wait(requests)
        if problem is not None:
            self._release_again(requests)
        return problem

    async def _release_and_wait(self, requests: Sequence[Request]) -> GenieError | None:
        """Release locks together, and wait for all replies. Returns the first error, or None."""
        now = clock.now()
        releases: list[Release] = []
        futures: list[asyncio.Future[str]] = []
        for request in requests:
            release = self.session.requests.release(request, now)
            if release is not None:
                release.future = self._loop.create_future()
                self.session.calls.limit_wait(release, now)
                releases.append(release)
                futures.append(release.future)
        self._flush_now_if_idle()
        self._waiting_tasks += 1
        first_error: GenieError | None = None
        try:
            for future in futures:
                try:
                    await future
                except GenieError as error:
                    if not is_unknown_id(error):  # a lock that the server does not know is not held
                        first_error = first_error or error
        except BaseException:
            for release in releases:
                self.session.calls.drop_caller(release)
            raise
        finally:
            self._waiting_tasks -= 1
        return first_error

    def _release_again(self, requests: Sequence[Request]) -> None:
        """Retry the release of locks in the background, unless the locks have ended or the client was closed."""
        if not self._closed:
            for request in requests:
                self.release_lock(request)

    def release_lock(self, request: Request) -> Release | None:
        """Send the release of a lock soon, or on the next connection, without waiting for the reply.

        Returns the call of the release, or None if the lock has ended or is being released already.
        """
        self.check_open()
        release = self.session.requests.release(request, clock.now())
        self.flush_soon()
        return release

    def begin_release(self, request: Request) -> Release | None:
        """Return the release of a lock, or None if the lock has ended. The caller must send it with `wait_for_release`."""
        self.check_open()
        return self.session.requests.release(request, clock.now())

    def detach(self, request: Request) -> None:
        """Stop managing a held lock, which stays held at the server. Raises the errors of `Lock.detach`."""
        self.session.requests.detach(request, clock.now())

    def find_held_lock(self, id: int) -> Request | None:
        """Return the request of the lock with this id if this client holds the lock, else None."""
        return self.session.requests.find_held(id)

    async def release(self, release: Release) -> str:
        """Send a release by id, now or on the next connection, and wait for the reply as `wait_for_release` does."""
        self.check_open()
        self.check_not_ended()
        self.session.send(release, clock.now())
        return await self.wait_for_release(release)

    def after_fork(self) -> None:
        """Adapt this copy of the connection in a forked process: another session, or if the client is open, no connection.

        The connections of an open client belong to the parent process. If the copies of their sockets stayed open, a server
        would not see the end of the parent process, and keep the locks that are bound to its session. The file descriptors
        stay in use, because the transports close them later.
        """
        self.session.renew_identity()
        self.forked = self.forked or not self._closed or self._handler is not None
        self._closed = True
        self._handler = None
        transports, self.transports = self.transports, set()
        for transport in transports:
            sock = transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, sock.fileno(), inheritable=False)
                os.close(null)

    def check_open(self) -> None:
        """Raise RuntimeError if the client was never opened, is used from another event loop or was opened before a fork.

        Raises ConnectionLost if the client was closed.
        """
        if not self._closed:
            if _get_running_loop() is not self._loop:
                raise RuntimeError(
                    "this client was opened in another event loop: use it in the coroutines of that loop only, or open a "
                    "client in this one. For threads use genie.sync.connect()"
                )
            return
        if self.forked:
            raise RuntimeError(FORKED)
        if not self._was_opened:
            raise RuntimeError("the client was not entered: use `async with genie.connect() as client`")
        raise ConnectionLost("the client was closed")

    def start_watch(self, watch: Watch) -> None:
        """Subscribe a watch before its first change is awaited. Raises RequestRejected if the client has ended."""
        self.check_open()
        self.check_not_ended()
        self.session.watches.request_next(watch, clock.now())
        self.flush_soon()

    async def wait_for_change(self, watch: Watch) -> None:
        """Wait until a watch has a change or has ended. If the caller is cancelled, the watch ends."""
        self.check_open()
        future = self._loop.create_future()
        self.request_next(watch, future)
        try:
            await future
        except BaseException:
            self.unwatch(watch)
            raise

    def request_next(self, watch: Watch, future: CallFuture) -> None:
        """Complete `future` with None as soon as a watch has a change or has ended.

        Raises RuntimeError if another caller waits for a change of the same watch, and RequestRejected if the client has ended.
        """
        self.check_open()
        self.check_not_ended()
        if watch.future is not None:
            raise RuntimeError(
                "another caller already waits for the next change of this watch: call client.watch() for each caller"
            )
        if watch.changes or watch.ended:
            future.set_result(None)
            return
        watch.future = future
        self.session.watches.request_next(watch, clock.now())
        self.flush_soon()

    def unwatch(self, watch: Watch) -> None:
        """End a watch, and wake a consumer that waits for its next change."""
        self._deliver(self.session.unwatch(watch, clock.now()))
        if not self._closed:
            self.flush_soon()

    def unwatch_threadsafe(self, watch: Watch) -> None:
        """End a watch that was garbage collected. Thread-safe, because any thread may collect it."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self.unwatch, watch)

    # -- helpers ------------------------------------------------------------------------------------------

    def check_not_rejected(self) -> None:
        """Raise the error of the last server if all servers have rejected this client for good."""
        rejection = self.session.handshake.rejection
        if rejection is not None:
            raise rejection

    def check_not_ended(self) -> None:
        """Raise the error that ended the client, if there is one.

        The client does not connect again, so a watch would wait, and releases would fill the memory.
        """
        if self.session.handshake.has_ended:
            self.check_not_rejected()

    async def _send_and_wait(self, call: Call) -> Any:
        """Send a call, and wait for its outcome. If this task is cancelled, a request is released."""
        future = self._loop.create_future()
        self.send(call, future)
        self._waiting_tasks += 1
        try:
            return await future
        except BaseException:
            self.abandon(call)  # also releases a lock that was granted just before the cancellation
            raise
        finally:
            self._waiting_tasks -= 1

    async def _close_transport(self) -> None:
        """Stop the timer and the reconnect task, fail all calls, send the unsent bytes, and close the connection.

        Waits at most `response_timeout` until the connection has ended, then aborts it.
        """
        self._resolver.close()
        if self._reconnect_task is not None:
            self._reconnect_task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf
        self.flush()
        handler, self._handler = self._handler, None
        if handler is not None and handler.transport is not None:
            handler.transport.close()  # sends the buffered data first
        self._deliver(self.session.finish_close())
        try:
            if self._reconnect_task is not None:
                await asyncio.wait({self._reconnect_task})
            if handler is not None:
                with contextlib.suppress(TimeoutError):
                    # Not `asyncio.wait_for`, which may swallow a cancellation in Python 3.11.
                    async with asyncio.timeout(self.session.calls.response_timeout):
                        await handler.closed.wait()
        finally:
            if handler is not None and handler.transport is not None:
                handler.transport.abort()

    def abort(self) -> None:
        """Close the transport at once, without sending `bye` or the unsent bytes."""
        self._closed = True  # else the end of the connection would start a reconnect
        self._resolver.close()
        if self._handler is not None and self._handler.transport is not None:
            self._handler.transport.abort()


def _warn_of_held_locks(requests: list[Request], hint: str) -> None:
    """Log a warning that names the locks of a closed client that may still be held."""
    held = [request for request in requests if request.state in (RequestState.HELD, RequestState.RELEASING)]
    if held:
        names = ", ".join(f"{request.id} ({' '.join(request.resources)})" for request in held)
        logger.warning(
            "the client was closed, and its locks stay held until they are released by id or time out: %s. %s",
            names,
            hint,
        )


# -- fork of the process --------------------------------------------------------------------------------

_connections: weakref.WeakSet[AsyncConnection] = weakref.WeakSet()
"""The connections of all clients, also of those for threads."""


class _Forks:
    """Counts the forks of this process."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """Count a fork that begins."""
        self.count += 1


_forks = _Forks()


def _after_fork_in_child() -> None:
    """Adapt the copies of all clients in a forked child."""
    for connection in list(_connections):
        connection.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.add, after_in_child=_after_fork_in_child)
