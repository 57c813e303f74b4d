"""One TCP connection of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol, cast

from genie.client.commands import BYE_TIMEOUT_S, Bye, Call, Outcome, Release, Request
from genie.client.config import KEEPALIVE_IDLE_S, Address
from genie.client.failover import ServerList
from genie.client.session import ClientSession
from genie.client.watches import Watch
from genie.errors import ConnectionLost, GenieError, RequestRejected, Unavailable
from genie.net import enable_keepalive
from genie.tls import reason


class Waiter(Protocol):
    """A future of asyncio or of `concurrent.futures`, which the outcome of a call completes."""

    def done(self) -> bool:
        """Return whether it has been completed or cancelled."""

    def set_result(self, result: Any, /) -> None:
        """Complete it with the value of the call."""

    def set_exception(self, exception: Any, /) -> None:
        """Complete it with the error of the call."""


class TransportHandler(asyncio.Protocol):
    """Tells its owner what happens to it."""

    def __init__(self, connection: AsyncConnection, address: Address) -> None:
        self.connection = connection
        self.address = address
        self.transport: asyncio.Transport | None = None
        self.abandoned = False
        """Whether nobody wants it any more."""
        self.handshake_done = asyncio.Event()
        """Set when the server has taken this client, or won't."""
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """By the event loop."""
        self.transport = cast("asyncio.Transport", transport)
        self.connection.on_connected(self)

    def data_received(self, data: bytes) -> None:
        """By the event loop."""
        self.connection.on_data(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """By the event loop."""
        self.closed.set()
        self.connection.on_disconnected(self, "the server closed it" if exc is None else reason(exc))


class AsyncConnection:
    """The connection of one client to its servers: reconnects, keeps the timers, and matches calls with outcomes.

    Any number of tasks may use it. `connect_timeout` (seconds) bounds the first connection, the wait of a call
    for a later one, and the wait of a release for its reply. `session` is the state machine behind it.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        connect_timeout: float,
        session: str | None,
        session_timeout: float,
        token: str | None,
        namespace: str | None = None,
    ) -> None:
        self.connect_timeout = connect_timeout
        self._servers = ServerList(addresses, connect_timeout)
        self.session = ClientSession(session, session_timeout, connect_timeout, token, namespace)
        self.session.explain_unavailable = lambda: str(self._servers.unavailable_error())
        self._loop: asyncio.AbstractEventLoop
        self._handler: TransportHandler | None = None
        self._up_since = 0.0
        self._up = asyncio.Event()
        """Set when there is a connection, and when there never will be one again."""
        self._closed = True
        self._entered = False
        """Whether the client was opened before."""
        self._connecting: asyncio.Task[None] | None = None
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    @property
    def address(self) -> Address | None:
        """The server to which there is a connection."""
        return None if self._handler is None else self._handler.address

    # -- from the event loop ------------------------------------------------------------------------------

    def on_connected(self, handler: TransportHandler) -> None:
        """There is a connection."""
        transport = cast("asyncio.Transport", handler.transport)
        if handler.abandoned:
            transport.abort()
            return
        enable_keepalive(transport.get_extra_info("socket"), idle_s=KEEPALIVE_IDLE_S)
        self._handler = handler
        self.session.on_connected()
        self.flush()

    def on_data(self, handler: TransportHandler, data: bytes) -> None:
        """Bytes have come."""
        if handler is not self._handler:
            return
        was_up = self.session.up
        self._settle(self.session.receive_data(data, time.monotonic()))
        if self.session.close_reason:
            self._abandon_transport(handler, self.session.close_reason)
        elif was_up:
            self._servers.on_success()
        elif self.session.up:
            self._up_since = time.monotonic()
            self._up.set()
            handler.handshake_done.set()
        self.flush()

    def on_disconnected(self, handler: TransportHandler, why: str) -> None:
        """A connection has ended."""
        if handler is not self._handler:
            return
        self._handler = None
        if self.session.redirect is not None:
            self._servers.on_redirect(handler.address, self.session.redirect)
        if self.session.up:
            self._up.clear()
            why = self._servers.on_disconnect(handler.address, why, time.monotonic() - self._up_since)
            if not self._closed and (self._connecting is None or self._connecting.done()):
                self._connecting = self._loop.create_task(self._reconnect())
        else:
            self._servers.on_failure(why)
        self._settle(self.session.on_disconnected(why, time.monotonic()))
        handler.handshake_done.set()

    def flush_soon(self) -> None:
        """Send, together, what is to be sent by the end of this turn of the loop."""
        if not self._flushing and not self._loop.is_closed():
            self._flushing = True
            self._loop.call_soon(self.flush)

    def begin_batch(self) -> None:
        """Keep what is to be sent until `flush`, which the caller calls at the end of its batch."""
        self._flushing = True

    def flush(self) -> None:
        """Send what is to be sent, and set the timer."""
        self._flushing = False
        if self._handler is not None and self._handler.transport is not None:
            data = self.session.data_to_send()
            if data:
                self._handler.transport.write(data)
        self._set_timer()

    # -- inside -------------------------------------------------------------------------------------------

    async def _round(self) -> bool:
        """Try every address once, and those that are named as leaders."""
        rejections: list[RequestRejected | None] = []
        for address in self._servers.round():
            self.session.handshake_rejection = None
            handler = TransportHandler(self, address)
            try:
                async with asyncio.timeout(self._servers.attempt_timeout):
                    host, port, tls = address
                    await self._loop.create_connection(lambda handler=handler: handler, host, port, ssl=tls)
                    await handler.handshake_done.wait()
            except (OSError, UnicodeError) as error:
                self._abandon_transport(handler, "no answer to hello")
                self._servers.on_failure(error)
            except BaseException:
                self._abandon_transport(handler, "")
                raise
            if handler is self._handler:
                return True
            rejections.append(self.session.handshake_rejection)
            if rejections[-1] is not None:
                self._servers.on_rejection(address, rejections[-1])
        self.session.end_round(rejections)
        return False

    def _abandon_transport(self, handler: TransportHandler, why: str) -> None:
        """Use a connection no more."""
        handler.abandoned = True
        self.on_disconnected(handler, why)
        if handler.transport is not None:
            handler.transport.abort()

    async def _reconnect(self) -> None:
        while True:
            await asyncio.sleep(self._servers.delay)
            if await self._round():
                return
            if self.session.rejection is not None:
                self._settle(self.session.fail_callers(time.monotonic()))
                self._up.set()  # whoever waits for a connection looks why there is none
                self._up.clear()

    def _settle(self, outcomes: list[Outcome]) -> None:
        for call, value, error in outcomes:
            waiter, call.waiter = call.waiter, None
            if waiter is None:
                if isinstance(call, Request) and call.error is not None:
                    self._notify_lost(call)
            elif not waiter.done():
                if error is None:
                    waiter.set_result(value)
                else:
                    waiter.set_exception(error)

    def _notify_lost(self, request: Request) -> None:
        if request.lost is not None:
            request.lost.set()
        if request.on_lost is not None:
            request.on_lost()

    def _set_timer(self) -> None:
        if self._closed:
            return
        wake = self.session.next_timer
        if self._timer is not None:
            if self._timer_at <= wake:
                return
            self._timer.cancel()
        self._timer_at = wake  # uvloop's handle of a time that is past can't say when
        self._timer = None if wake == math.inf else self._loop.call_later(wake - time.monotonic(), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._settle(self.session.on_timer(time.monotonic()))
        if self.session.close_reason and self._handler is not None:
            self._abandon_transport(self._handler, self.session.close_reason)
        self.flush()

    # -- calls ----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the first server that leads.

        Unavailable, if in one round none answers at all, or if none leads within `connect_timeout`. RequestRejected, if
        none takes this client and one says so.
        """
        if not self._closed:
            raise RuntimeError("the client is open already")
        self._loop = asyncio.get_running_loop()
        self._servers.answered = False
        try:
            async with asyncio.timeout(self.connect_timeout):
                while not await self._round():
                    self.check_not_rejected()
                    if not self._servers.answered:
                        raise self._servers.unavailable_error()
                    await asyncio.sleep(self._servers.delay)
        except TimeoutError as error:
            if not self._servers.answered:
                self._servers.on_failure(error)
            raise self._servers.unavailable_error() from None
        self._closed = False
        self._entered = True
        self._set_timer()

    async def close(self) -> None:
        """End the connection; calls that wait fail, and what they asked for is given back."""
        if self._closed:
            return
        self._closed = True
        try:
            self._settle(self.session.begin_close(time.monotonic()))
            self.flush_soon()
            if self.session.up:
                async with asyncio.timeout(min(BYE_TIMEOUT_S, self.connect_timeout)):
                    await self._answer(Bye())
        except (TimeoutError, GenieError):
            pass  # it ends by its own timeouts
        finally:
            await self._shut()

    async def call(self, call: Call) -> Any:
        """Send a call, when there is a connection, and wait for its answer. What is cancelled is given back.

        A request for locks bears to wait for a connection itself; for other calls Unavailable is raised, if there is
        none within `connect_timeout`.
        """
        self.check_open()
        if not self.session.up:
            self.check_not_rejected()
            if not isinstance(call, Request):
                await self.ready()
        return await self._answer(call)

    def send(self, call: Call, waiter: Waiter) -> None:
        """Send a call; its outcome completes `waiter`. A request or a release waits for a connection, others need one."""
        call.waiter = waiter
        self.session.send(call, time.monotonic())
        self.flush_soon()

    def abandon(self, call: Call) -> None:
        """Forget a call whose caller does not wait any longer; what a request asked for is released."""
        self.session.abandon(call, time.monotonic())
        self.flush_soon()

    async def ready(self) -> None:
        """Wait for a connection; Unavailable, if there is none within `connect_timeout`."""
        if self.session.up:
            return
        try:
            async with asyncio.timeout(self.connect_timeout):
                while not self.session.up:
                    self.check_open()
                    self.check_not_rejected()
                    await self._up.wait()
        except TimeoutError:
            raise self._servers.unavailable_error() from None

    async def finish(self, release: Release) -> str:
        """Wait for the answer to a release, which may have to wait for a connection itself, but not for ever.

        Unavailable, if it takes too long. Then, and if this is cancelled, the release goes on alone.
        """
        waiter = release.waiter = self._loop.create_future()
        bound = self._loop.call_later(self.connect_timeout, self._time_out_release, release)
        self.flush_soon()
        try:
            return cast("str", await waiter)
        finally:
            release.waiter = None
            bound.cancel()

    def release_lock(self, request: Request) -> Release | None:
        """Send the release of a lock; None if it has ended."""
        self.check_open()
        release = self.session.release(request, time.monotonic())
        self.flush_soon()
        return release

    def detach(self, request: Request) -> None:
        """Stop managing a held lock."""
        self.session.detach(request, time.monotonic())

    def held(self, id: int) -> Request | None:
        """The lock of this client with this id, if it holds one."""
        return self.session.held(id)

    def release(self, release: Release) -> None:
        """Send a release, now or when there is a connection."""
        self.check_open()
        self.session.send(release, time.monotonic())

    def check_open(self) -> None:
        """RuntimeError before the client was opened, ConnectionLost after it was closed."""
        if not self._closed:
            return
        if not self._entered:
            raise RuntimeError("the client was not entered: use async with genie.connect() as client")
        raise ConnectionLost("the client was closed")

    def begin(self, watch: Watch) -> None:
        """Let the server tell what is watched, before anybody waits for it."""
        self.check_open()
        self.session.request_next(watch, time.monotonic())
        self.flush_soon()

    async def more(self, watch: Watch) -> None:
        """Wait until a watch has a change to take, or has ended. A cancellation ends the watch."""
        self.check_open()
        waiter = self._loop.create_future()
        self.request_next(watch, waiter)
        try:
            await waiter
        except BaseException:
            self.unwatch(watch)
            raise

    def request_next(self, watch: Watch, waiter: Waiter) -> None:
        """Complete `waiter` as soon as a watch has a change to take, or has ended."""
        self.check_open()
        if watch.waiter is not None:
            raise RuntimeError("the next change is awaited already; every waiter needs a watch of its own")
        if watch.changes or watch.ended:
            waiter.set_result(None)
            return
        watch.waiter = waiter
        self.session.request_next(watch, time.monotonic())
        self.flush_soon()

    def unwatch(self, watch: Watch) -> None:
        """End a watch."""
        self._settle(self.session.unwatch(watch))
        if not self._closed:
            self.flush_soon()

    def drop(self, watch: Watch) -> None:
        """The same, from wherever garbage is collected."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.unwatch, watch)

    # -- inside -------------------------------------------------------------------------------------------

    def check_not_rejected(self) -> None:
        """Raise the final error by which the servers rejected this client, if they did."""
        denied = self.session.rejection
        if denied is not None:
            raise denied

    async def _answer(self, call: Call) -> Any:
        waiter = self._loop.create_future()
        self.send(call, waiter)
        try:
            return await waiter
        except BaseException:
            self.abandon(call)  # its grant may have arrived before this task ran
            raise

    async def _shut(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.flush()
        handler, self._handler = self._handler, None
        if handler is not None and handler.transport is not None:
            handler.transport.close()  # which sends first what it was given
        self._settle(self.session.finish_close(time.monotonic()))
        self._up.set()
        try:
            if self._connecting is not None:
                await asyncio.wait({self._connecting})
            if handler is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        self.connect_timeout
                    ):  # `wait_for` of Python 3.11 may swallow a cancellation
                        await handler.closed.wait()
        finally:
            if handler is not None and handler.transport is not None:
                handler.transport.abort()

    def _time_out_release(self, release: Release) -> None:
        if release.waiter is not None and not release.waiter.done():
            release.waiter.set_exception(Unavailable(self.release_timeout_text(release.id)))

    def release_timeout_text(self, id: int) -> str:
        """Return why a release had no reply within `connect_timeout`."""
        reason = "the server does not answer" if self.session.up else str(self._servers.unavailable_error())
        return f"{id} could not be released within {self.connect_timeout:g} s: {reason}"

    def abort(self) -> None:
        """Close the transport at once, without a farewell to the server."""
        if self._handler is not None and self._handler.transport is not None:
            self._handler.transport.abort()
