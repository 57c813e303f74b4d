"""A client with minimal overhead: requests are encoded in advance, and replies are counted and not
parsed.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from scale_parts.report import Missing

WINDOW = 4
"""Batches in flight on each connection, so that the server never waits for the client."""
BATCH = 100
"""Requests in a batch."""
READ_BYTES = 1 << 18
REPLY_TIMEOUT_S = 30.0
"""Timeout for expected replies of a server."""


class Peer:
    """One connection: what it has received and when, if that is recorded, and the number of
    expected replies.
    """

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), REPLY_TIMEOUT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received: list[tuple[float, bytes]] = []
        self.owed = 0

    def receive(self, *, keep: bool) -> int:
        """Read the available data. Returns the number of lines that it completes."""
        data = self.sock.recv(READ_BYTES)
        if not data:
            raise Missing("the server closed a connection")
        if keep:
            self.received.append((time.monotonic(), data))
        return data.count(b"\n")

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


@contextmanager
def peers(port: int, number: int) -> Iterator[list[Peer]]:
    """Open this number of connections."""
    with ExitStack() as stack:
        opened = []
        for _ in range(number):
            opened.append(Peer(port))
            stack.callback(opened[-1].close)
        yield opened


def lock(names: Iterable[str], transaction_timeout_ms: int) -> bytes:
    """Encode requests for one resource each."""
    return b"".join(
        b'{"command":"request","payload":{"resources":["exclusive:%b"],"transactionTimeout":%d}}\n'
        % (name.encode(), transaction_timeout_ms)
        for name in names
    )


def hold(port: int, locks: int, transaction_timeout_ms: int, connections: int = 4, kind: str = "accounts") -> None:
    """Acquire this number of locks, accounts/0000001 and following, and disconnect: they stay held.
    None may expire before the last is granted.
    """
    numbers = iter(range(1, locks + 1))

    def batch(_: Peer) -> bytes:
        return lock((f"{kind}/{number:07}" for number in islice(numbers, BATCH)), transaction_timeout_ms)

    with peers(port, connections) as opened:
        send_all(opened, batch)


def held(port: int) -> int:
    """Query the number of held locks."""
    with peers(port, 1) as (peer,):
        peer.sock.sendall(b'{"command":"inspect","payload":{"limit":1}}\n')
        with peer.sock.makefile() as lines:
            return int(json.loads(lines.readline())["payload"]["holdersTotal"])


def send_all(opened: list[Peer], batch: Callable[[Peer], bytes], *, keep: bool = False) -> None:
    """Send batches as fast as they are answered, until an empty one. Each request has two replies.

    A batch is encoded when a connection has room for it. `keep` records the received data and their
    times.
    """
    with selectors.DefaultSelector() as selector:
        for peer in opened:
            selector.register(peer.sock, selectors.EVENT_READ, peer)
        more = True
        while True:
            for peer in opened:
                while more and peer.owed <= 2 * BATCH * (WINDOW - 1):
                    made = batch(peer)
                    more = bool(made)
                    peer.owed += 2 * made.count(b"\n")
                    peer.sock.sendall(made)
            if not any(peer.owed for peer in opened):
                return
            for peer in ready(selector):
                peer.owed -= peer.receive(keep=keep)


def listen(opened: list[Peer], lines: int, until: float) -> int:
    """Record the received data of these connections until this number of lines, or this time, is
    reached. Returns the number of lines.
    """
    notified = 0
    with selectors.DefaultSelector() as selector:
        for peer in opened:
            selector.register(peer.sock, selectors.EVENT_READ, peer)
        while notified < lines and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                notified += key.data.receive(keep=True)
    return notified


def ready(selector: selectors.BaseSelector) -> list[Any]:
    """Return the data registered with the readable connections; there must be some, since all
    expect replies.
    """
    keys = selector.select(REPLY_TIMEOUT_S)
    if not keys:
        raise Missing(f"the server owes answers and was silent for {REPLY_TIMEOUT_S:.0f} s")
    return [key.data for key, _ in keys]
