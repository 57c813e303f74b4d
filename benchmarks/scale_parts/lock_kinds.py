"""Units and subtrees: rates of a server beside those of plain locks, and the cost of one command among very many locks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fairness_parts.floods import LONG_MS, line

from benchmarks.against_parts.load import OWN_UNITS, Sample, Shape, measure
from benchmarks.peers.processes import pinned
from genie.core import LockManager, Release, Request
from genie.core.model import details_of
from scale_parts import wire
from scale_parts.core import handoffs
from scale_parts.pinger import pinging
from scale_parts.processes import PING, Process, genie
from scale_parts.report import Row, building, in_turns, medians, progress, ratio

ROUNDS = 7
ROUND_S = 0.5
WARM_UP_S = 0.2
NAMES = 1_000_000
CONNECTIONS = 8
"""A server allows 200,000 requests on each."""
SUBTREE_ROUNDS = 5
OWNERS = 10_000
ARRIVALS = 11
PAUSE_S = 0.5

OWN = Shape("", 64, 1)
HOT = Shape("", 64, 1, ("exclusive:hot",))
SHARED = Shape("", 64, 1, ("shared:accounts/{number}/{slot}",))
FROZEN = Shape("", 64, 1, ("exclusive:accounts/**", *["exclusive:accounts/{number}"] * 63))

RATES: list[tuple[str, Shape, Shape, Sequence[str], float | None]] = [
    ("units of free resources, to exclusive locks: 64 connections", OWN, Shape("", 64, 1, (OWN_UNITS,)), (), 0.85),
    ("… 16 requests in flight on each", Shape("", 64, 16), Shape("", 64, 16, (OWN_UNITS,)), (), 0.85),
    ("64 connections hand over 32 units of a resource, to one key", HOT, Shape("", 64, 1, ("1/32:hot",)), (), 0.8),
    ("exclusive locks beside a held subtree, to none", OWN, OWN, ("exclusive:other/**",), 0.85),
    ("… a subtree is always waiting", OWN, OWN, ("exclusive:other/held", "exclusive:other/**"), 0.85),
    ("shared locks below a held shared subtree, to none", SHARED, SHARED, ("shared:accounts/**",), 0.85),
    ("… the subtree is always waiting", SHARED, SHARED, ("exclusive:accounts/held", "shared:accounts/**"), 0.85),
    ("63 connections below a subtree that another one locks again and again, to one key", HOT, FROZEN, (), None),
]
"""What is measured, the shape to compare with, the measured one, the locks that are requested before it, and the goal."""


def kinds() -> Iterator[Row]:
    """Units and subtrees: rates beside plain locks, a long queue of units, a subtree over 1,000,000 names, an arrival."""
    with genie() as server, _pinned(server):
        for what, base, shape, before, goal in RATES:
            progress(what)
            samples = in_turns(ROUNDS, _sample(server, base), _sample(server, shape, before))
            theirs, own = ([sample.rate for sample in each] for each in samples)
            their_us, own_us = ([sample.server_us for sample in each] for each in samples)
            note = f"{medians('cycles/s', theirs, own)}; {medians('us of CPU time for a cycle', their_us, own_us)}"
            yield Row(what, ratio(own, theirs), goal=goal, at_least=True, note=f"{note}: {ratio(their_us, own_us):.2f}")
    with building():
        short, long = (handoffs(waiters, lambda: _for_units("A", 1, 1)) for waiters in (10, 10_000))
    base_us, long_us = in_turns(ROUNDS, short, long)
    note = medians("us with 10 and with 10,000", base_us, long_us)
    yield Row("a handoff of a unit with 10,000 waiters, to one with 10", ratio(long_us, base_us), goal=1.2, note=note)
    yield from _subtree_of_a_million()
    yield from _arrivals()


@contextmanager
def _pinned(server: Process) -> Iterator[None]:
    """Run the server on one processor, and this process on another one, if there are two."""
    own = os.sched_getaffinity(0)
    _, servers, load = pinned()
    if servers is not None and load is not None:
        os.sched_setaffinity(server.pid, {servers})
        os.sched_setaffinity(0, {load})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _sample(server: Process, shape: Shape, before: Sequence[str] = ()) -> Callable[[], Sample]:
    def run() -> Sample:
        with _requested(server.port, before):
            return measure(server.port, server.pid, shape, ROUND_S, WARM_UP_S)

    return run


@contextmanager
def _requested(port: int, resources: Sequence[str]) -> Iterator[None]:
    """Request each of these locks, which are held or wait until the end of the block."""
    with wire.peers(port, 1) as (peer,):
        for resource in resources:
            peer.sock.sendall(_request(resource))
        _send_and_wait(peer, PING, b'"pong"')
        yield


def _request(resource: str) -> bytes:
    options = {"queueTimeout": LONG_MS, "transactionTimeout": LONG_MS, "onDisconnect": "release"}
    return line("request", resources=[resource], **options)


def _send_and_wait(peer: wire.Peer, command: bytes, reply: bytes) -> bytes:
    """Send a command, and return what is received until a reply contains these bytes."""
    peer.sock.sendall(command)
    received = b""
    while reply not in received:
        received += peer.sock.recv(wire.READ_BYTES)
    return received


def _subtree_of_a_million() -> Iterator[Row]:
    with genie() as server, _pinned(server):
        progress(f"taking {NAMES:,} locks")
        wire.hold(server.port, NAMES, LONG_MS, CONNECTIONS)
        queued_ms, longest_ms = [], []
        for number in range(SUBTREE_ROUNDS):
            progress(f"round {number + 1} of {SUBTREE_ROUNDS}")
            with pinging(server.port, PING) as pinger:
                time.sleep(PAUSE_S)
                began = time.monotonic()
                with wire.peers(server.port, 1) as (peer,):
                    _send_and_wait(peer, _request("exclusive:accounts/**"), b'"queued"')
                    queued_ms.append((time.monotonic() - began) * 1000)
                time.sleep(PAUSE_S)  # the end of the connection cancels the request
                ended = time.monotonic()
                pinger.stop()
            longest_ms.append(pinger.longest_ms(began, ended))
    for what, times_ms in (
        ("a subtree over 1,000,000 held names is requested", queued_ms),
        ("… the longest ping of another client, until the request has been cancelled", longest_ms),
    ):
        note = f"at most {max(times_ms):.1f} ms in {SUBTREE_ROUNDS} rounds"
        yield Row(what, statistics.median(times_ms), "ms", goal=150, digits=1, note=note)


def _arrivals() -> Iterator[Row]:
    """The core alone, because the client would be a part of the time. `root` holds what all others wait for."""
    with building():
        pool, chains = _pool(), _chains()
    slowest_ms = 0.0
    notes = []
    for what, manager, name, transaction, limit in (
        ("nobody waits for it", pool, "pool", None, 1),
        ("all wait for it, and it waits for all", pool, "side", "root", OWNERS),
        ("100 wait for it, and it waits for 100 others", chains, "1/99", "0/root", 1),
        ("a deadlock of 101", chains, "0/99", "0/root", 1),
    ):
        times_ms = []
        for _ in range(ARRIVALS):
            request = _for_units(name, limit, limit, transaction)
            began = time.perf_counter()
            events = manager.step(request, 0)
            times_ms.append((time.perf_counter() - began) * 1000)
            if request.id in manager.table.waiting:
                manager.step(Release(request.id), 0)
        slowest_ms = max(slowest_ms, statistics.median(times_ms))
        notes.append(f"{statistics.median(times_ms):.2f} ms if {what}: {type(events[-1]).__name__}")
    note = "\n      ".join(notes)
    yield Row("an arrival among 10,000 owners that wait for units", slowest_ms, "ms", goal=20, note=note)


def _pool() -> LockManager:
    """Each of the owners holds a unit of `side` and waits for a unit of `pool`, whose only unit `root` holds."""
    manager = LockManager()
    manager.step(_for_units("pool", 1, 1, "root"), 0)
    for number in range(OWNERS):
        manager.step(_for_units("side", 1, OWNERS, str(number)), 0)
        manager.step(_for_units("pool", 1, 1, str(number)), 0)
    return manager


def _chains() -> LockManager:
    """The owners wait in 100 chains: owner k holds the unit of resource k and waits for that of resource k-1."""
    manager = LockManager()
    for chain in range(100):
        previous = f"{chain}/root"
        manager.step(_for_units(previous, 1, 1, previous), 0)
        for link in range(OWNERS // 100):
            name = f"{chain}/{link}"
            manager.step(_for_units(name, 1, 1, name), 0)
            manager.step(_for_units(previous, 1, 1, name), 0)
            previous = name
    return manager


def _for_units(name: str, units: int, limit: int, transaction: str | None = None) -> Request:
    request = Request(queue_timeout_ms=LONG_MS, transaction_timeout_ms=LONG_MS, transaction=transaction)
    request.details = details_of((), (), {name: (units, limit)})
    return request
