"""A client that costs as little as can be: bytes that were made before, answers that are counted and not read."""

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
"""Batches on their way on each connection, so that the server never waits for the client."""
BATCH = 100
"""Requests in a batch."""
READ_BYTES = 1 << 18
PATIENCE_S = 30.0
"""How long a server may be silent that owes an answer."""


class Peer:
    """One connection: when it heard what, where that is asked for, and how many answers are still to come."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard: list[tuple[float, bytes]] = []
        self.owed = 0

    def hear(self, *, keep: bool) -> int:
        """Read what there is. Returns the number of lines that it completes."""
        data = self.sock.recv(READ_BYTES)
        if not data:
            raise Missing("the server closed a connection")
        if keep:
            self.heard.append((time.monotonic(), data))
        return data.count(b"\n")

    def close(self) -> None:
        """Leave."""
        self.sock.close()


@contextmanager
def peers(port: int, number: int) -> Iterator[list[Peer]]:
    """So many connections."""
    with ExitStack() as stack:
        opened = []
        for _ in range(number):
            opened.append(Peer(port))
            stack.callback(opened[-1].close)
        yield opened


def lock(names: Iterable[str], transaction_timeout_ms: int) -> bytes:
    """Requests for one resource each."""
    return b"".join(
        b'{"command":"request","payload":{"resources":["exclusive:%b"],"transactionTimeout":%d}}\n'
        % (name.encode(), transaction_timeout_ms)
        for name in names
    )


def hold(port: int, locks: int, transaction_timeout_ms: int, connections: int = 4, kind: str = "accounts") -> None:
    """Take so many locks, accounts/0000001 and on, and leave: they stay held. None may time out before the last."""
    numbers = iter(range(1, locks + 1))

    def batch(_: Peer) -> bytes:
        return lock((f"{kind}/{number:07}" for number in islice(numbers, BATCH)), transaction_timeout_ms)

    with peers(port, connections) as opened:
        send_all(opened, batch)


def held(port: int) -> int:
    """How many locks the server says are held."""
    with peers(port, 1) as (peer,):
        peer.sock.sendall(b'{"command":"inspect","payload":{"limit":1}}\n')
        with peer.sock.makefile() as lines:
            return int(json.loads(lines.readline())["payload"]["holdersTotal"])


def send_all(opened: list[Peer], batch: Callable[[Peer], bytes], *, keep: bool = False) -> None:
    """Send batches as fast as they are answered, until an empty one comes. Each request in them has two answers.

    A batch is made when a connection has room for it. `keep` keeps what is heard, and when.
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
                peer.owed -= peer.hear(keep=keep)


def listen(opened: list[Peer], lines: int, until: float) -> int:
    """Keep what comes on these connections until it is so many lines, or that time. Returns the number of lines."""
    told = 0
    with selectors.DefaultSelector() as selector:
        for peer in opened:
            selector.register(peer.sock, selectors.EVENT_READ, peer)
        while told < lines and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                told += key.data.hear(keep=True)
    return told


def ready(selector: selectors.BaseSelector) -> list[Any]:
    """What was registered with the connections that can be read: some, for the server owes an answer on all."""
    keys = selector.select(PATIENCE_S)
    if not keys:
        raise Missing(f"the server owes answers and was silent for {PATIENCE_S:.0f} s")
    return [key.data for key, _ in keys]
