"""Very many locks that time out at nearly the same time, and what it does to everybody else."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from scale_parts import wire
from scale_parts.pinger import pinging
from scale_parts.processes import PING, genie
from scale_parts.report import Missing, Row, progress

LOCKS = 100_000
PROBE = 5_000
CONNECTIONS = 8
QUIET_S = 3.0


def timeouts() -> Iterator[Row]:
    """100,000 locks fall due within one second, memory store: how late each is told, and how long the loop is busy.

    `held` in the server's answer, less the timeout that was asked for, is how late it was by the server's own clock,
    and no client's time is in it. It is the clock of the step in which the lock ended; the rest of the way, writing it
    and what the client takes, is in the arrival, which is counted from when the request was *sent*, so it is a bound.
    The client reads bytes and notes the time, and parses when all is over. The pings come from a third process.
    """
    with genie() as server, wire.peers(server.port, CONNECTIONS) as opened, pinging(server.port, PING) as pinger:
        with wire.peers(server.port, CONNECTIONS) as others:
            took_s = _rate(others)
        progress("nothing, to see the machine's own noise")
        quiet = time.monotonic()
        time.sleep(QUIET_S)
        due = Due(time.monotonic() + 1 + 2 * took_s * LOCKS / PROBE)
        progress(f"taking {LOCKS:,} locks")
        gc.disable()
        wire.send_all(opened, due.batch, keep=True)
        if time.monotonic() > due.first:
            raise Missing("the locks were taken too slowly: the first fell due before the last was taken")
        progress("waiting for them to fall due")
        told = wire.listen(opened, LOCKS, due.first + 1 + 20)
        ended = time.monotonic()
        gc.enable()
        pinger.stop()
        if told != LOCKS:
            raise Missing(f"{told:,} of {LOCKS:,} timeouts were told within 20 s")
        late_ms, arrived_ms = due.lateness(opened)
        yield _row("told late, by the server's clock: median", statistics.median(late_ms), 50)
        yield _row("told late, by the server's clock: the worst", max(late_ms), 500)
        yield _row("… and read by the client, from when it asked: median", statistics.median(arrived_ms), 50)
        yield _row("… and read by the client, from when it asked: the worst", max(arrived_ms), 500)
        yield _row("the longest answer to a ping, while nothing happens", pinger.longest_ms(quiet, quiet + QUIET_S))
        lost_ms = pinger.gap_ms(due.first, ended)
        note = f"{lost_ms:.1f} ms is the longest that the pinging process itself was late"
        yield _row("the longest answer to a ping, while they fall due", pinger.longest_ms(due.first, ended), 100, note)


def _row(what: str, value: float, goal: float | None = None, note: str = "") -> Row:
    return Row(what, value, "ms", goal=goal, digits=1, note=note)


def _rate(opened: list[wire.Peer]) -> float:
    """Seconds for a few locks, which end at once: how long it will take to take them all."""
    numbers = iter(range(PROBE))
    began = time.monotonic()
    wire.send_all(opened, lambda _: wire.lock((f"probe/{n}" for n in islice(numbers, wire.BATCH)), 600_000))
    return time.monotonic() - began


class Due:
    """The locks: when each is to fall due, within one second from `first` on, and what was asked for it."""

    def __init__(self, first: float) -> None:
        self.first = first
        self._numbers = iter(range(LOCKS))
        self._random = random.Random(1)
        self._asked: dict[wire.Peer, list[tuple[float, int]]] = {}

    def batch(self, peer: wire.Peer) -> bytes:
        """The next requests, for this connection, each with the timeout that is left until it is to fall due."""
        now = time.monotonic()
        asked = self._asked.setdefault(peer, [])
        lines = []
        for number in islice(self._numbers, wire.BATCH):
            timeout_ms = round((self.first + self._random.random() - now) * 1000)
            asked.append((now, timeout_ms))
            lines.append(wire.lock([f"accounts/{number:07}"], timeout_ms))
        return b"".join(lines)

    def lateness(self, opened: Sequence[wire.Peer]) -> tuple[list[float], list[float]]:
        """How late each was, in ms: by the server's clock, and at the client at most."""
        late_ms, arrived_ms = [], []
        for peer in opened:
            asked, of = iter(self._asked[peer]), dict[int, tuple[float, int]]()
            for at, line in _lines(peer):
                said = json.loads(line)
                payload = said["payload"]
                if said["command"] == "locked":  # they are granted in the order in which they were asked for
                    of[payload["id"]] = next(asked)
                elif said["command"] == "released":
                    sent, timeout_ms = of[payload["id"]]
                    late_ms.append(payload["held"] - timeout_ms)
                    arrived_ms.append((at - sent) * 1000 - timeout_ms)
        return late_ms, arrived_ms


def _lines(peer: wire.Peer) -> Iterator[tuple[float, bytes]]:
    """What a connection heard, line by line, each with the time at which its end was there."""
    rest = b""
    for at, data in peer.heard:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield at, line
