"""The cost of very many idle connections."""

from __future__ import annotations

import selectors
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from scale_parts import wire
from scale_parts.processes import PING, Process, allow_files, genie
from scale_parts.report import Row, progress, ratio

IDLE = 10_000
BUSY = 64
ROUNDS = 8
ROUND_S = 1.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close with a reset. Otherwise each round would leave 10,000 ports in TIME_WAIT for a
minute.
"""


def idle() -> Iterator[Row]:
    """64 connections with one request in flight each, without others and beside 10,000 idle ones.

    The client is this process; the server's CPU time for each cycle tells whether the client kept
    up.
    """
    allow_files(IDLE + BUSY + 200)
    alone, beside = list[float](), list[float]()
    alone_us, beside_us = list[float](), list[float]()
    with genie() as server, wire.peers(server.port, BUSY) as busy:
        _rate(server, busy)
        for number in range(ROUNDS):
            progress(f"round {number + 1} of {ROUNDS}")
            if number % 2 == 0:
                _note(server, busy, alone, alone_us)
            with _idle(server.port):
                _note(server, busy, beside, beside_us)
            time.sleep(0.5)  # for the server to see that they are gone
            if number % 2:
                _note(server, busy, alone, alone_us)
    used = statistics.median(rate * us / 1e6 for rate, us in zip(alone, alone_us, strict=True))
    yield Row(
        "the rate of 64 connections beside 10,000 idle ones, to the rate without",
        ratio(beside, alone),
        goal=0.9,
        at_least=True,
        note=f"{statistics.median(alone):,.0f} and {statistics.median(beside):,.0f} cycles/s; the server was busy for"
        f" {used:.0%} of the time",
    )
    yield Row(
        "… the server's processor time for a cycle",
        ratio(beside_us, alone_us),
        note=f"{statistics.median(alone_us):,.1f} and {statistics.median(beside_us):,.1f} us",
    )


def _note(server: Process, busy: list[wire.Peer], rates: list[float], costs_us: list[float]) -> None:
    rate, cost_us = _rate(server, busy)
    rates.append(rate)
    costs_us.append(cost_us)


def _rate(server: Process, busy: list[wire.Peer]) -> tuple[float, float]:
    """Return cycles a second, and microseconds of the server's CPU time for each.

    The end of one cycle and the beginning of the next are sent together, since the client must be
    the faster of the two.
    """
    cycles, cpu_s = 0, server.cpu_s()
    leaving: set[socket.socket] = set()
    with selectors.DefaultSelector() as selector:
        for number, peer in enumerate(busy):
            ask = wire.lock([f"accounts/{number:07}"], 60_000)
            peer.sock.sendall(ask)
            selector.register(peer.sock, selectors.EVENT_READ, (peer.sock, ask))
        began = time.monotonic()
        end = began + ROUND_S
        gone = 0
        while gone < len(busy):
            over = time.monotonic() > end
            for sock, ask in wire.ready(selector):
                said = sock.recv(4096)
                at = said.rfind(b'"locked","payload":{"id":')
                if sock in leaving:
                    gone += 1
                elif at >= 0:
                    cycles += 1
                    id_ = said[at + 25 : said.index(b",", at + 25)]
                    sock.sendall(b'{"command":"release","payload":{"id":%b}}\n%b' % (id_, b"" if over else ask))
                    if over:
                        leaving.add(sock)
        took_s = time.monotonic() - began
    return cycles / took_s, (server.cpu_s() - cpu_s) / cycles * 1e6


@contextmanager
def _idle(port: int) -> Iterator[None]:
    """Open connections, wait until the server has accepted the last one, and close them at the end
    of the block.
    """
    with ExitStack() as stack:
        for _ in range(IDLE):
            sock = socket.create_connection(("127.0.0.1", port), wire.REPLY_TIMEOUT_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            stack.callback(sock.close)
        sock.sendall(PING)
        sock.recv(256)
        yield
