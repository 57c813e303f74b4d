"""The asyncio shell around the core: calls, and what comes of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

from genie.client.aio_connection import Connection
from genie.client.calls import BYE_TIMEOUT_S, Bye, Call, Release, Request
from genie.client.watches import Watch
from genie.errors import ConnectionLost, GenieError, Unavailable


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
