"""The ends: moments at which the server must end, or list, very many locks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from fairness_parts.floods import LONG_MS, line

LOCKS = 150_000
CHUNK = 1_000
"""Requests in one write: both sides read and write in turns."""


def _receive(sock: socket.socket, lines: int) -> None:
    """Read this many lines."""
    while lines > 0:
        data = sock.recv(1 << 20)
        if not data:
            raise SystemExit("the server closed a connection")
        lines -= data.count(b"\n")


def _connect(port: int, **hello: object) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    if hello:
        sock.sendall(line("hello", **hello))
        _receive(sock, 1)
    return sock


def _lock(sock: socket.socket, timeout_ms: Callable[[], int] = lambda: LONG_MS, **payload: object) -> None:
    """Lock `LOCKS` resources, each with a request of its own."""
    for first in range(0, LOCKS, CHUNK):
        each_ms = timeout_ms()
        requests = [
            line("request", resources=[f"exclusive:end/{number}"], transactionTimeout=each_ms, **payload)
            for number in range(first, first + CHUNK)
        ]
        sock.sendall(b"".join(requests))
        _receive(sock, 2 * CHUNK)


@contextmanager
def _lost_connection(port: int) -> Iterator[Callable[[], None]]:
    with _connect(port) as sock:
        _lock(sock, onDisconnect="release")
        yield sock.close


@contextmanager
def _bye(port: int) -> Iterator[Callable[[], None]]:
    with _connect(port) as sock:
        _lock(sock, onDisconnect="release")

        def leave() -> None:
            sock.sendall(line("bye"))
            _receive(sock, LOCKS + 1)

        yield leave


@contextmanager
def _expired_sessions(port: int) -> Iterator[Callable[[], None]]:
    socks = [_connect(port, session=f"fairness-session-{number}", sessionTimeout=1) for number in range(2)]
    for number, sock in enumerate(socks):
        for first in range(0, LOCKS // 2, CHUNK):
            requests = [
                line("request", resources=[f"exclusive:{number}/{each}"], transactionTimeout=LONG_MS)
                for each in range(first, first + CHUNK)
            ]
            sock.sendall(b"".join(requests))
            _receive(sock, 2 * CHUNK)

    def leave() -> None:
        for sock in socks:
            sock.close()

    yield leave


@contextmanager
def _expired_locks(port: int) -> Iterator[Callable[[], None]]:
    with _connect(port) as sock:
        deadline = time.monotonic() + 12
        _lock(sock, lambda: max(1, int(1000 * (deadline - time.monotonic()))))
        yield lambda: time.sleep(max(0.0, deadline - time.monotonic()))


@contextmanager
def _watch(port: int) -> Iterator[Callable[[], None]]:
    """A prefix that only the last lock has, so that the server reads all names."""
    with _connect(port) as holder, _connect(port) as watcher:
        _lock(holder)

        def watch() -> None:
            for _ in range(50):
                watcher.sendall(line("watch", prefix=f"end/{LOCKS - 1}") + line("unwatch", prefix=f"end/{LOCKS - 1}"))
                _receive(watcher, 2)

        yield watch


@contextmanager
def _unread(port: int) -> Iterator[Callable[[], None]]:
    """100 clients that send 14 times `watch ""` and do not read."""
    with _connect(port) as holder:
        _lock(holder)
        socks = [_connect(port) for _ in range(100)]

        def watch() -> None:
            for sock in socks:
                sock.sendall(line("watch", prefix="") * 14)

        yield watch
        for sock in socks:
            sock.close()


@dataclass(frozen=True)
class End:
    """`prepare` takes a port, and yields a function that makes the server work: while it runs, and for a while after."""

    name: str
    prepare: Callable[[int], AbstractContextManager[Callable[[], None]]]


ENDS = (
    End(f"end of a connection with {LOCKS:,} locks", _lost_connection),
    End(f"bye of a connection with {LOCKS:,} locks", _bye),
    End(f"expiry of two sessions with {LOCKS // 2:,} locks each", _expired_sessions),
    End(f"expiry of {LOCKS:,} locks", _expired_locks),
    End(f"watch of a prefix among {LOCKS:,} locks", _watch),
    End("100 clients that watch and do not read", _unread),
)
