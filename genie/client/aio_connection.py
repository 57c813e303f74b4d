"""The connection of the asyncio client: made again when it is lost, and a timer.

It moves the core's bytes, keeps its time, and hands the outcomes to those who wait.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import cast

from genie.client.aio_wire import Wire
from genie.client.calls import Outcome, Request
from genie.client.core import Core
from genie.client.reach import Address, watch_over
from genie.client.servers import Servers


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
        watch_over(transport.get_extra_info("socket"))
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
