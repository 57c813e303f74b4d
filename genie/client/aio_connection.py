"""One TCP connection of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

from genie.client.commands import BYE_TIMEOUT_S, Bye, Call, Outcome, Release, Request
from genie.client.config import KEEPALIVE_IDLE_S, Address
from genie.client.failover import Servers
from genie.client.session import Core
from genie.client.watches import Watch
from genie.errors import ConnectionLost, GenieError, Unavailable
from genie.net import enable_keepalive
from genie.tls import reason


class Owner(Protocol):
    """Whoever a connection belongs to."""

    def reached(self, wire: Wire) -> None:
        """There is a connection."""

    def received(self, wire: Wire, data: bytes) -> None:
        """Bytes have come."""

    def lost(self, wire: Wire, why: str) -> None:
        """It has ended."""


class Wire(asyncio.Protocol):
    """Tells its owner what happens to it."""

    def __init__(self, link: Owner, address: Address) -> None:
        self.link = link
        self.address = address
        self.transport: asyncio.Transport | None = None
        self.left = False
        """Whether nobody wants it any more."""
        self.settled = asyncio.Event()
        """Set when the server has taken this client, or won't."""
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """By the event loop."""
        self.transport = cast("asyncio.Transport", transport)
        self.link.reached(self)

    def data_received(self, data: bytes) -> None:
        """By the event loop."""
        self.link.received(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """By the event loop."""
        self.gone.set()
        self.link.lost(self, "the server closed it" if exc is None else reason(exc))


# -- The connection of the asyncio client: made again when it is lost, and a timer --------


class Connection:
    """`connect_timeout` (seconds) is for a round of attempts to connect."""

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
        self._servers = Servers(addresses, connect_timeout)
        self.core = Core(session, session_timeout, connect_timeout, token, namespace)
        self.core.trouble = lambda: str(self._servers.unavailable())
        self._loop: asyncio.AbstractEventLoop
        self._wire: Wire | None = None
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

    def now(self) -> float:
        """Seconds on the clock that the core is given."""
        return self._loop.time()

    @property
    def address(self) -> Address | None:
        """The server to which there is a connection."""
        return None if self._wire is None else self._wire.address

    # -- from the event loop ------------------------------------------------------------------------------

    def reached(self, wire: Wire) -> None:
        """There is a connection."""
        transport = cast("asyncio.Transport", wire.transport)
        if wire.left:
            transport.abort()
            return
        enable_keepalive(transport.get_extra_info("socket"), idle_s=KEEPALIVE_IDLE_S)
        self._wire = wire
        self.core.connected()
        self._flush()

    def received(self, wire: Wire, data: bytes) -> None:
        """Bytes have come."""
        if wire is not self._wire:
            return
        was_up = self.core.up
        self._settle(self.core.receive(data, self._loop.time()))
        if self.core.broken:
            self._leave(wire, self.core.broken)
        elif was_up:
            self._servers.worked()
        elif self.core.up:
            self._up_since = self._loop.time()
            self._up.set()
            wire.settled.set()
        self._flush()

    def lost(self, wire: Wire, why: str) -> None:
        """A connection has ended."""
        if wire is not self._wire:
            return
        self._wire = None
        if self.core.elsewhere is not None:
            self._servers.elsewhere(wire.address, self.core.elsewhere)
        if self.core.up:
            self._up.clear()
            why = self._servers.lost(wire.address, why, self._loop.time() - self._up_since)
            if not self._closed and (self._connecting is None or self._connecting.done()):
                self._connecting = self._loop.create_task(self._reconnect())
        else:
            self._servers.failed(why)
        self._settle(self.core.disconnected(why, self._loop.time()))
        wire.settled.set()

    def flush_soon(self) -> None:
        """Send, together, what is to be sent by the end of this turn of the loop."""
        if not self._flushing and not self._loop.is_closed():
            self._flushing = True
            self._loop.call_soon(self._flush)

    # -- inside -------------------------------------------------------------------------------------------

    async def _round(self) -> bool:
        """Try every address once, and those that are named as leaders."""
        for address in self._servers.round():
            wire = Wire(self, address)
            try:
                async with asyncio.timeout(self._servers.attempt_timeout):
                    host, port, tls = address
                    await self._loop.create_connection(lambda wire=wire: wire, host, port, ssl=tls)
                    await wire.settled.wait()
            except (OSError, UnicodeError) as error:
                self._leave(wire, "no answer to hello")
                self._servers.failed(error)
            except BaseException:
                self._leave(wire, "")
                raise
            if wire is self._wire:
                return True
        return False

    def _leave(self, wire: Wire, why: str) -> None:
        """Use a connection no more."""
        wire.left = True
        self.lost(wire, why)
        if wire.transport is not None:
            wire.transport.abort()

    async def _reconnect(self) -> None:
        while True:
            await asyncio.sleep(self._servers.delay)
            if await self._round():
                return
            if self.core.denied is not None:
                self._settle(self.core.deny(self._loop.time()))
                self._up.set()  # whoever waits for a connection looks why there is none
                self._up.clear()

    def _flush(self) -> None:
        self._flushing = False
        if self._wire is not None and self._wire.transport is not None:
            data = self.core.outgoing()
            if data:
                self._wire.transport.write(data)
        self._set_timer()

    def _settle(self, outcomes: list[Outcome]) -> None:
        for call, value, error in outcomes:
            waiter, call.waiter = call.waiter, None
            if waiter is None:
                if isinstance(call, Request) and call.error is not None:
                    self._tell_lost(call)
            elif not waiter.done():
                if error is None:
                    waiter.set_result(value)
                else:
                    waiter.set_exception(error)

    def _tell_lost(self, request: Request) -> None:
        if request.lost is not None:
            request.lost.set()
        if request.on_lost is not None:
            request.on_lost()

    def _set_timer(self) -> None:
        if self._closed:
            return
        wake = self.core.wake
        if self._timer is not None:
            if self._timer_at <= wake:
                return
            self._timer.cancel()
        self._timer_at = wake  # uvloop's handle of a time that is past can't say when
        self._timer = None if wake == math.inf else self._loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._settle(self.core.tick(self._loop.time()))
        if self.core.broken and self._wire is not None:
            self._leave(self._wire, self.core.broken)
        self._flush()


# -- The asyncio shell around the core: calls, and what comes of them --------


class Link(Connection):
    """Sends calls and brings back their outcomes; for any number of tasks.

    `connect_timeout` (seconds) bounds the first connection, what a call waits for a later one, and what a release
    waits for its answer.
    """

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
                    self._check_taken()
                    if not self._servers.answered:
                        raise self._servers.unavailable()
                    await asyncio.sleep(self._servers.delay)
        except TimeoutError as error:
            if not self._servers.answered:
                self._servers.failed(error)
            raise self._servers.unavailable() from None
        self._closed = False
        self._entered = True
        self._set_timer()

    async def close(self) -> None:
        """End the connection; calls that wait fail, and what they asked for is given back."""
        if self._closed:
            return
        self._closed = True
        try:
            self._settle(self.core.closing(self._loop.time()))
            self.flush_soon()
            if self.core.up:
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
        if not self.core.up:
            self._check_taken()
            if not isinstance(call, Request):
                await self.ready()
        return await self._answer(call)

    async def ready(self) -> None:
        """Wait for a connection; Unavailable, if there is none within `connect_timeout`."""
        if self.core.up:
            return
        try:
            async with asyncio.timeout(self.connect_timeout):
                while not self.core.up:
                    self.check_open()
                    self._check_taken()
                    await self._up.wait()
        except TimeoutError:
            raise self._servers.unavailable() from None

    async def finish(self, release: Release) -> str:
        """Wait for the answer to a release, which may have to wait for a connection itself, but not for ever.

        Unavailable, if it takes too long. Then, and if this is cancelled, the release goes on alone.
        """
        waiter = release.waiter = self._loop.create_future()
        bound = self._loop.call_later(self.connect_timeout, self._give_up, release)
        self.flush_soon()
        try:
            return cast("str", await waiter)
        finally:
            release.waiter = None
            bound.cancel()

    def leave(self, request: Request) -> Release | None:
        """Send the release of a lock; None if it has ended."""
        self.check_open()
        release = self.core.leave(request, self._loop.time())
        self.flush_soon()
        return release

    def detach(self, request: Request) -> None:
        """Stop managing a held lock."""
        self.core.detach(request, self._loop.time())

    def held(self, id: int) -> Request | None:
        """The lock of this client with this id, if it holds one."""
        return self.core.held(id)

    def release(self, release: Release) -> None:
        """Send a release, now or when there is a connection."""
        self.check_open()
        self.core.send(release, self._loop.time())

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
        self.core.want(watch, self._loop.time())
        self.flush_soon()

    async def more(self, watch: Watch) -> None:
        """Wait until a watch has a change to take, or will never have one. Whoever is cancelled ends the watch."""
        self.check_open()
        if watch.waiter is not None:
            raise RuntimeError("somebody waits for the next change already; each takes a watch of their own")
        waiter = watch.waiter = self._loop.create_future()
        self.core.want(watch, self._loop.time())
        self.flush_soon()
        try:
            await waiter
        except BaseException:
            self.unwatch(watch)
            raise

    def unwatch(self, watch: Watch) -> None:
        """End a watch."""
        self._settle(self.core.unwatch(watch))
        if not self._closed:
            self.flush_soon()

    def drop(self, watch: Watch) -> None:
        """The same, from wherever garbage is collected."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.unwatch, watch)

    # -- inside -------------------------------------------------------------------------------------------

    def _check_taken(self) -> None:
        denied = self.core.denied
        if denied is not None:
            raise denied

    async def _answer(self, call: Call) -> Any:
        waiter = call.waiter = self._loop.create_future()
        self.core.send(call, self._loop.time())
        self.flush_soon()
        try:
            return await waiter
        except BaseException:
            # A grant may have come already and wait for this task's turn; the core knows.
            self.core.abandon(call, self._loop.time())
            self.flush_soon()
            raise

    async def _shut(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        wire, self._wire = self._wire, None
        if wire is not None and wire.transport is not None:
            wire.transport.close()  # which sends first what it was given
        self._settle(self.core.closed(self._loop.time()))
        self._up.set()
        try:
            if self._connecting is not None:
                await asyncio.wait({self._connecting})
            if wire is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        self.connect_timeout
                    ):  # `wait_for` of Python 3.11 may swallow a cancellation
                        await wire.gone.wait()
        finally:
            if wire is not None and wire.transport is not None:
                wire.transport.abort()

    def _give_up(self, release: Release) -> None:
        if release.waiter is not None and not release.waiter.done():
            text = f"{release.id} could not be released within {self.connect_timeout:g} s"
            reason = "the server does not answer" if self.core.up else str(self._servers.unavailable())
            release.waiter.set_exception(Unavailable(f"{text}: {reason}"))
