"""The connection of the client for threads: a non-blocking socket, and a thread that reads from it and keeps time.

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
from collections import deque
from collections.abc import Sequence
from ssl import SSLError

from genie.client.commands import Outcome, Request
from genie.client.config import KEEPALIVE_IDLE_S, Address
from genie.client.failover import ServerList
from genie.client.session import ClientSession
from genie.client.tls import Tunnel
from genie.client.watches import Watch
from genie.net import enable_keepalive
from genie.tls import reason

READ_SIZE = 1 << 18
"""Bytes to read at once."""


class Wire:
    """Moves the core's bytes, keeps its time, and makes the connection again when it is lost.

    `connect_timeout` (seconds) is for a round of attempts to connect.
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
        self._connect_timeout = connect_timeout
        self._changed = threading.Condition(threading.Lock())
        """Guards the core and all that follows; notified when a connection is up, or gone, or when the client closes."""
        self._servers = ServerList(addresses, connect_timeout)
        self._session = ClientSession(session, session_timeout, connect_timeout, token, namespace)
        self._session.explain_unavailable = lambda: str(self._servers.unavailable_error())
        self._address = addresses[0]
        self._up_since = 0.0
        self._socket: socket.socket | None = None
        self._tunnel: Tunnel | None = None
        """TLS on it."""
        self._dropped: list[socket.socket] = []
        """Sockets that the thread is to close."""
        self._unsent = bytearray()
        self._closing = False
        """The session is to end: no new connection is made, which would begin another one."""
        self._closed = False
        self._dialing = False
        self._thread: threading.Thread | None = None
        self._wakes_at = math.inf
        self._bell: socket.socket | None = None
        """What wakes the thread out of its sleep."""
        self._left: deque[Watch] = deque()
        """Watches that nobody has any more, which the thread is to end."""

    # -- by whichever thread calls ------------------------------------------------------------------------

    def _start(self) -> None:
        self._bell, ear = socket.socketpair()
        self._bell.setblocking(False)
        ear.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(ear,), name="genie-client", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        """End the thread, and the attempts to connect."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._ring()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()

    def _write(self) -> None:
        """Send what the socket takes, and see that the thread wakes in time. With the lock taken."""
        if self._socket is not None:
            try:
                data = self._session.data_to_send()
                self._unsent += data if self._tunnel is None else self._tunnel.wrap(data)
                if self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:  # those of TLS are some, too
                self._unsent.clear()
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # the thread sees the end when it reads
        if (
            self._unsent or self._session.next_timer < self._wakes_at
        ) and threading.current_thread() is not self._thread:
            self._ring()

    def _ring(self) -> None:
        if self._bell is not None:
            with contextlib.suppress(OSError):  # it rings already, or nobody listens any more
                self._bell.send(b"!")

    # -- by the thread ------------------------------------------------------------------------------------

    def _run(self, ear: socket.socket) -> None:
        watched: socket.socket | None = None
        with ear, selectors.DefaultSelector() as selector:
            selector.register(ear, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                with self._changed:
                    outcomes = self._session.on_timer(now) if self._session.next_timer <= now else []
                    while self._left:
                        outcomes += self._session.unwatch(self._left.popleft())
                    broken = self._session.close_reason
                    self._write()
                    dropped, self._dropped = self._dropped, []
                    sock, self._wakes_at = self._socket, self._session.next_timer
                    mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                    closed = self._closed
                settle(outcomes)
                if watched is not None and watched is not sock:
                    selector.unregister(watched)
                for gone in dropped:
                    gone.close()
                if closed:
                    return
                if broken and sock is not None:
                    self._lost(sock, broken)
                    continue
                if sock is not None:
                    (selector.modify if watched is sock else selector.register)(sock, mask)
                watched = sock
                selector.select(None if self._wakes_at == math.inf else max(0.0, self._wakes_at - time.monotonic()))
                with contextlib.suppress(BlockingIOError):
                    ear.recv(4096)
                if sock is not None:
                    self._read(sock)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(sock, str(error) or type(error).__name__)
            return
        if not data:
            self._lost(sock, "the server closed it")
            return
        with self._changed:
            if sock is not self._socket:
                return
            was_up = self._session.up
            plain, ended = self._plain(data)
            outcomes = self._session.receive_data(plain, time.monotonic()) if plain else []
            broken = self._session.close_reason or ended
            if was_up and not broken:
                self._servers.on_success()
            elif self._session.up:
                self._up_since = time.monotonic()
                self._changed.notify_all()
            self._write()
        settle(outcomes)
        if broken:
            self._lost(sock, broken)

    def _plain(self, data: bytes) -> tuple[bytes, str]:
        """What was received, without TLS, and why nothing more will be, if so. With the lock taken."""
        if self._tunnel is None:
            return data, ""
        try:
            plain = self._tunnel.unwrap(data)
        except SSLError as error:
            return b"", reason(error)
        return (b"", "the server closed it") if plain is None else (plain, "")

    def _lost(self, sock: socket.socket, why: str) -> None:
        """A connection has ended, or must."""
        with self._changed:
            if sock is not self._socket:
                return
            self._socket = None
            self._dropped.append(sock)
            self._unsent.clear()
            if self._session.redirect is not None:
                self._servers.on_redirect(self._address, self._session.redirect)
            if self._session.up:
                why = self._servers.on_disconnect(self._address, why, time.monotonic() - self._up_since)
            else:
                self._servers.on_failure(why)
            outcomes = self._session.on_disconnected(why, time.monotonic())
            dial = not self._dialing and not self._closing
            self._dialing = self._dialing or dial
            self._changed.notify_all()
            self._ring()
        settle(outcomes)
        if dial:
            threading.Thread(target=self._dial, name="genie-client-dial", daemon=True).start()

    # -- by the thread that dials -------------------------------------------------------------------------

    def _dial(self) -> None:
        while not self._pause(self._servers.delay):
            if self._round():
                return
            with self._changed:
                outcomes = [] if self._session.rejection is None else self._session.fail_callers(time.monotonic())
                self._changed.notify_all()
            settle(outcomes)

    def _pause(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)

    def _round(self) -> bool:
        """Try every address once, and those that are named as leaders."""
        for address in self._servers.round():
            end = time.monotonic() + self._servers.attempt_timeout
            try:
                sock = socket.create_connection(address[:2], self._servers.attempt_timeout)
                tunnel = _tunnel(sock, address, end)
            except (OSError, UnicodeError) as error:
                self._servers.on_failure(error)
                continue
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enable_keepalive(sock, idle_s=KEEPALIVE_IDLE_S)
            if self._greet(sock, tunnel, address, end):
                return True
        return False

    def _greet(self, sock: socket.socket, tunnel: Tunnel | None, address: Address, end: float) -> bool:
        """Say hello, and wait until the server takes this client."""
        with self._changed:
            if self._closed:
                sock.close()
                return True
            self._socket, self._tunnel = sock, tunnel
            self._address = address
            self._session.on_connected()
            self._write()
            self._ring()
            self._changed.wait_for(
                lambda: self._session.up or self._socket is not sock or self._closed, max(0.0, end - time.monotonic())
            )
            if self._closed or (self._session.up and self._socket is sock):
                self._dialing = False
                return True
        self._lost(sock, "no answer")
        return False


def _tunnel(sock: socket.socket, address: Address, end: float) -> Tunnel | None:
    """The TLS of a connection, where the address asks for it. OSError, and the socket is closed, where there is none."""
    if address.tls is None:
        return None

    def bounded() -> socket.socket:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        return sock

    try:
        tunnel = Tunnel(address.tls, address.host)
        tunnel.shake_hands(lambda data: bounded().sendall(data), lambda: bounded().recv(READ_SIZE))
    except BaseException:
        sock.close()
        raise
    return tunnel


def settle(outcomes: list[Outcome]) -> None:
    """Tell those who wait. With the lock not taken."""
    for call, value, error in outcomes:
        waiter, call.waiter = call.waiter, None
        if waiter is None:
            if isinstance(call, Request) and call.error is not None:
                call.lost.set()
        elif error is None:
            waiter.set_result(value)
        else:
            waiter.set_exception(error)
