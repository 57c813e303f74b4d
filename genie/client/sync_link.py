"""The shell around the core for threads: a non-blocking socket, and a thread that reads from it and keeps time.

Calling threads write what they have to say themselves, as far as the socket takes it without blocking; the rest is
left to the thread. So nobody waits for the network with the lock taken, and the thread never stops reading. While the
connection is lost a second thread dials, since that may block.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from genie.client.calls import Call, Ping, Release, Request
from genie.client.core import Core, Outcome
from genie.client.reach import Address, watch_over
from genie.client.servers import Servers
from genie.errors import GenieError, Unavailable

READ_SIZE = 1 << 18
"""Bytes to read at once."""


class Link:
    """Sends calls, brings back their outcomes, and keeps the connection; for any number of threads.

    `connect_timeout` (seconds) bounds an attempt to connect, what a call waits for a connection, and what a release
    waits for its answer.
    """

    def __init__(self, addresses: Sequence[Address], connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._changed = threading.Condition(threading.Lock())
        """Guards the core and all that follows; notified when there is a connection, and when there will be none."""
        self._core = Core()
        self._servers = Servers(addresses, connect_timeout)
        self._address = addresses[0]
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._bell: socket.socket | None = None
        """What wakes the thread out of its sleep."""

    # -- for the client -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect to the first address that answers. Unavailable, if in one round none does."""
        if self._thread is not None or self._closed:
            raise RuntimeError("a client is opened once")
        if not self._round():
            raise self._servers.unavailable()
        self._bell, ear = socket.socketpair()
        self._bell.setblocking(False)
        ear.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(ear,), name="genie-client", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection; calls that wait fail."""
        if self._thread is None or self._closed:
            return
        deadline = time.monotonic() + self._connect_timeout
        try:
            # Every `queued` that is due comes before the answer to a ping, and with each the release of what was
            # abandoned; the next answer shows that it has been released.
            with contextlib.suppress(GenieError, TimeoutError):
                while self._owes():
                    self._ask(Ping(), max(0.0, deadline - time.monotonic()))
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._ring()
            self._thread.join()
            with self._changed:
                self._write()
                outcomes = self._core.closed()
                sock, self._socket = self._socket, None
            _settle(outcomes)
            if sock is not None:
                self._say_last(sock)
            with self._changed:
                bell, self._bell = self._bell, None
            if bell is not None:
                bell.close()

    def ref(self) -> str:
        """A `ref` for a new request."""
        with self._changed:
            return self._core.ref()

    def call(self, call: Call) -> Any:
        """Send a call, when there is a connection, and wait for its answer. What is interrupted is given back.

        Unavailable, if there is no connection within `connect_timeout`.
        """
        return self._ask(call, None)

    def release(self, release: Release) -> str:
        """Send a release, now or when there is a connection, and wait for its answer, but not for ever.

        Unavailable, if it takes too long. Then, and if this is interrupted, the release goes on alone.
        """
        with self._changed:
            self.check_open()
            release.waiter = Future()
            self._core.send(release, time.monotonic())
            self._write()
        return self._finish(release)

    def leave(self, request: Request, *, wait: bool) -> str | None:
        """The same for a lock or a waiting request, if it has not ended, with or without waiting for the answer."""
        with self._changed:
            self.check_open()
            release = self._core.leave(request, time.monotonic())
            if release is not None and wait:
                release.waiter = Future()
            self._write()
        return None if release is None or not wait else self._finish(release)

    @property
    def up(self) -> bool:
        """Whether there is a connection."""
        return self._core.up

    def check_open(self) -> None:
        """Unavailable before the client was opened and after it was closed."""
        if self._thread is None or self._closed:
            raise Unavailable("the client is not open")

    # -- by whichever thread calls ------------------------------------------------------------------------

    def _owes(self) -> bool:
        with self._changed:
            return self._core.up and self._core.owes

    def _ask(self, call: Call, timeout: float | None) -> Any:
        waiter: Future[Any] = Future()
        call.waiter = waiter
        try:
            with self._changed:
                self._wait_until_up()
                self._core.send(call, time.monotonic())
                self._write()
            return waiter.result(timeout)
        except BaseException:
            # A grant may have come already, and wait for this thread's turn; the core knows.
            with self._changed:
                self._core.abandon(call, time.monotonic())
                self._write()
            raise

    def _wait_until_up(self) -> None:
        self._changed.wait_for(lambda: self._core.up or self._closed, self._connect_timeout)
        self.check_open()
        if not self._core.up:
            raise self._servers.unavailable()

    def _finish(self, release: Release) -> str:
        waiter = cast("Future[str]", release.waiter)
        try:
            return waiter.result(self._connect_timeout)
        except TimeoutError:
            reason = "the server does not answer" if self._core.up else str(self._servers.unavailable())
            raise Unavailable(
                f"{release.id} could not be released within {self._connect_timeout:g} s: {reason}"
            ) from None
        finally:
            release.waiter = None

    def _write(self) -> None:
        """Send what the socket takes. With the lock taken."""
        if self._socket is None:
            return
        self._unsent += self._core.outgoing()
        if not self._unsent:
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the thread sees the end when it reads
        if self._unsent and threading.current_thread() is not self._thread:
            self._ring()

    def _ring(self) -> None:
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):  # it rings already
                self._bell.send(b"!")

    def _say_last(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            if self._unsent:
                sock.settimeout(self._connect_timeout)
                sock.sendall(self._unsent)

    # -- by the thread ------------------------------------------------------------------------------------

    def _run(self, ear: socket.socket) -> None:
        watched: socket.socket | None = None
        with ear, selectors.DefaultSelector() as selector:
            selector.register(ear, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                with self._changed:
                    outcomes = self._core.tick(now) if self._core.wake <= now else []
                    self._write()
                    if self._closed:
                        break
                    sock, wake = self._socket, self._core.wake
                    mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                _settle(outcomes)
                if watched is not sock:
                    if watched is not None:
                        selector.unregister(watched)
                        watched.close()
                    if sock is not None:
                        selector.register(sock, mask)
                    watched = sock
                elif sock is not None:
                    selector.modify(sock, mask)
                selector.select(None if wake == math.inf else max(0.0, wake - time.monotonic()))
                with contextlib.suppress(BlockingIOError):
                    ear.recv(4096)
                if sock is not None:
                    self._read(sock)
        _settle(outcomes)
        if watched is not None and watched is not self._socket:
            watched.close()

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(str(error) or type(error).__name__)
            return
        if not data:
            self._lost("the server closed it")
            return
        with self._changed:
            outcomes = self._core.receive(data, time.monotonic())
            broken = self._core.broken
            if not broken:
                self._servers.worked()
            self._write()
        _settle(outcomes)
        if broken:
            self._lost(broken)

    def _lost(self, why: str) -> None:
        with self._changed:
            self._socket = None
            self._unsent.clear()
            outcomes = self._core.disconnected(self._servers.lost(self._address, why))
        _settle(outcomes)
        threading.Thread(target=self._dial, name="genie-client-dial", daemon=True).start()

    # -- by the thread that dials -------------------------------------------------------------------------

    def _dial(self) -> None:
        while not self._pause(self._servers.delay):
            if self._round():
                return

    def _pause(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)

    def _round(self) -> bool:
        """Try every address once."""
        for address in self._servers.trying():
            try:
                sock = socket.create_connection(address, self._servers.attempt_timeout)
            except (OSError, UnicodeError) as error:
                self._servers.failed(error)
                continue
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_over(sock)
            with self._changed:
                if self._closed:
                    sock.close()
                    return True
                self._socket = sock
                self._address = address
                self._core.connected(time.monotonic())
                self._write()
                self._changed.notify_all()
            self._ring()
            return True
        return False


def _settle(outcomes: list[Outcome]) -> None:
    for call, value, error in outcomes:
        waiter, call.waiter = call.waiter, None
        if waiter is None:
            if isinstance(call, Request) and call.error is not None:
                call.lost.set()
        elif error is None:
            waiter.set_result(value)
        else:
            waiter.set_exception(error)
