"""The shell around the core for threads."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from typing import Any

from genie.client.commands import BYE_TIMEOUT_S, Bye, Call, Release, Request
from genie.client.sync_wire import Wire, settle
from genie.client.watches import Change, Watch
from genie.errors import ConnectionLost, GenieError, Unavailable


class Link(Wire):
    """Sends calls and brings back their outcomes; for any number of threads.

    `connect_timeout` (seconds) bounds the first connection, what a call waits for a later one, and what a release
    waits for its answer.
    """

    def open(self) -> None:
        """Connect to the first server that leads.

        Unavailable, if in one round none answers at all, or if none leads within `connect_timeout`. RequestRejected, if
        none takes this client and one says so.
        """
        if self._thread is not None or self._closed:
            raise RuntimeError("a client is opened once")
        end = time.monotonic() + self._connect_timeout
        self._servers.answered = False
        self._dialing = True
        self._start()
        try:
            self._reach(end)
        except BaseException:
            self._stop()
            self._say_last()
            self._thread = None
            self._closed = False
            raise

    def close(self) -> None:
        """End the connection; calls that wait fail, and what they asked for is given back."""
        with self._changed:
            if self._thread is None or self._closing or self._closed:
                return
            self._closing = True
            outcomes = self._session.begin_close(time.monotonic())
            self._write()
        settle(outcomes)
        try:
            with contextlib.suppress(GenieError, TimeoutError):
                self._say_bye()
        finally:
            self._stop()
            with self._changed:
                self._write()
                outcomes = self._session.finish_close(time.monotonic())
            settle(outcomes)
            self._say_last()

    def new_ref(self) -> str:
        """A `ref` for a new request."""
        with self._changed:
            return self._session.new_ref()

    def call(self, call: Call) -> Any:
        """Send a call, when there is a connection, and wait for its answer. What is interrupted is given back.

        A request for locks bears to wait for a connection itself; for other calls Unavailable is raised, if there is
        none within `connect_timeout`.
        """
        waiter: Future[Any] = Future()
        call.waiter = waiter
        try:
            with self._changed:
                self.check_open()
                if not self._session.up:
                    self._check_not_rejected()
                if not isinstance(call, Request):
                    self._wait_until_up()
                self._session.send(call, time.monotonic())
                self._write()
            return waiter.result()
        except BaseException:
            # A grant may have come already, and wait for this thread's turn; the core knows.
            with self._changed:
                self._session.abandon(call, time.monotonic())
                self._write()
            raise

    def ready(self) -> None:
        """Wait for a connection; Unavailable, if there is none within `connect_timeout`."""
        with self._changed:
            self.check_open()
            if not self._session.up:
                self._check_not_rejected()
            self._wait_until_up()

    def detach(self, request: Request) -> None:
        """Stop managing a held lock."""
        with self._changed:
            self._session.detach(request, time.monotonic())

    def held(self, id: int) -> Request | None:
        """The lock of this client with this id, if it holds one."""
        with self._changed:
            return self._session.held(id)

    def release(self, release: Release) -> str:
        """Send a release, now or when there is a connection, and wait for its answer, but not for ever.

        Unavailable, if it takes too long. Then, and if this is interrupted, the release goes on alone.
        """
        with self._changed:
            self.check_open()
            waiter: Future[str] = Future()
            release.waiter = waiter
            self._session.send(release, time.monotonic())
            self._write()
        return self._finish(release, waiter)

    def leave(self, request: Request, *, wait: bool) -> str | None:
        """The same for a lock or a waiting request, if it has not ended, with or without waiting for the answer."""
        with self._changed:
            self.check_open()
            release = self._session.release(request, time.monotonic())
            waiter: Future[str] = Future()
            if release is not None and wait:
                release.waiter = waiter
            self._write()
        return None if release is None or not wait else self._finish(release, waiter)

    def begin(self, watch: Watch) -> None:
        """Let the server tell what is watched, before anybody waits for it."""
        with self._changed:
            self.check_open()
            self._session.request_next(watch, time.monotonic())
            self._write()

    def next(self, watch: Watch) -> Change | None:
        """Wait for the next change; None, if there will never be one. Whoever is interrupted ends the watch."""
        try:
            while True:
                with self._changed:
                    if watch.ended:
                        watch.check()
                        return None
                    if watch.changes:
                        return watch.changes.popleft()
                    waiter = self._want(watch)
                waiter.result()
        except RuntimeError:  # somebody else's watch goes on
            raise
        except BaseException:
            self.unwatch(watch)
            raise

    def unwatch(self, watch: Watch) -> None:
        """End a watch."""
        with self._changed:
            outcomes = self._session.unwatch(watch)
            self._write()
        settle(outcomes)

    def drop(self, watch: Watch) -> None:
        """The same, from wherever garbage is collected: that may be inside of anything, with the lock taken."""
        self._left.append(watch)
        self._ring()

    @property
    def up(self) -> bool:
        """Whether there is a connection."""
        return self._session.up

    def check_open(self) -> None:
        """RuntimeError before the client was opened, ConnectionLost after it was closed."""
        if self._closing or self._closed:
            raise ConnectionLost("the client was closed")
        if self._thread is None:
            raise RuntimeError("the client was not entered: use with genie.sync.connect() as client")

    # -- inside -------------------------------------------------------------------------------------------

    def _reach(self, end: float) -> None:
        while not self._round():
            self._check_not_rejected()
            if not self._servers.answered or time.monotonic() >= end:
                raise self._servers.unavailable_error()
            self._pause(self._servers.delay)

    def _wait_until_up(self) -> None:
        taken = self._changed.wait_for(
            lambda: self._session.up or self._closing or self._session.rejection is not None, self._connect_timeout
        )
        self.check_open()
        if taken and not self._session.up:
            self._check_not_rejected()
        if not self._session.up:
            raise self._servers.unavailable_error()

    def _check_not_rejected(self) -> None:
        denied = self._session.rejection
        if denied is not None:
            raise denied

    def _want(self, watch: Watch) -> Future[None]:
        self.check_open()
        if watch.waiter is not None:
            raise RuntimeError("somebody waits for the next change already; each takes a watch of their own")
        waiter: Future[None] = Future()
        watch.waiter = waiter
        self._session.request_next(watch, time.monotonic())
        self._write()
        return waiter

    def _finish(self, release: Release, waiter: Future[str]) -> str:
        """Wait for the answer. It may be there already, and then the reader thread has taken the waiter from `release`."""
        try:
            return waiter.result(self._connect_timeout)
        except TimeoutError:
            reason = "the server does not answer" if self._session.up else str(self._servers.unavailable_error())
            raise Unavailable(
                f"{release.id} could not be released within {self._connect_timeout:g} s: {reason}"
            ) from None
        finally:
            release.waiter = None

    def _say_bye(self) -> None:
        """End the session, and wait for the answer, which comes after those to everything that was sent before."""
        bye = Bye()
        waiter: Future[None] = Future()
        bye.waiter = waiter
        with self._changed:
            if not self._session.up:
                return
            self._session.send(bye, time.monotonic())
            self._write()
        waiter.result(min(BYE_TIMEOUT_S, self._connect_timeout))

    def _say_last(self) -> None:
        """End the connection, when the thread has ended."""
        with self._changed:
            sock, self._socket = self._socket, None
            dropped, self._dropped = self._dropped, []
        for gone in dropped:
            gone.close()
        if sock is not None:
            with contextlib.suppress(OSError), sock:
                if self._tunnel is not None:
                    self._unsent += self._tunnel.last()
                if self._unsent:
                    sock.settimeout(self._connect_timeout)
                    sock.sendall(self._unsent)
        self._unsent.clear()
