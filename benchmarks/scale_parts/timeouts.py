"""Very many locks that time out at nearly the same time, and their effect on other clients."""

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
    """100,000 locks expire within one second, memory store: delay of the messages, and of the event loop.

    The lateness by the server's clock is `held` in its message, less the requested timeout; it
    contains no time of the client. This is the clock of the step in which the lock ended. The rest,
    writing the message and reading it, is part of the arrival time, which is counted from when the
    request was *sent* and is therefore an upper bound. The client only reads bytes and records the
    time, and parses them afterwards. A third process pings.
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
        notified = wire.listen(opened, LOCKS, due.first + 1 + 20)
        ended = time.monotonic()
        gc.enable()
        pinger.stop()
        if notified != LOCKS:
            raise Missing(f"{notified:,} of {LOCKS:,} timeouts were notified within 20 s")
        late_ms, arrived_ms = due.lateness(opened)
        yield _row("notified late, by the server's clock: median", statistics.median(late_ms), 50)
        yield _row("notified late, by the server's clock: the worst", max(late_ms), 500)
        yield _row("… and read by the client, from when it asked: median", statistics.median(arrived_ms), 50)
        yield _row("… and read by the client, from when it asked: the worst", max(arrived_ms), 500)
        yield _row("the longest answer to a ping, while nothing happens", pinger.longest_ms(quiet, quiet + QUIET_S))
        lost_ms = pinger.gap_ms(due.first, ended)
        note = f"{lost_ms:.1f} ms is the longest that the pinging process itself was late"
        yield _row("the longest answer to a ping, while they fall due", pinger.longest_ms(due.first, ended), 100, note)


def _row(what: str, value: float, goal: float | None = None, note: str = "") -> Row:
    return Row(what, value, "ms", goal=goal, digits=1, note=note)


def _rate(opened: list[wire.Peer]) -> float:
    """Return the seconds for some locks, which end at once, to estimate the time to acquire them
    all.
    """
    numbers = iter(range(PROBE))
    began = time.monotonic()
    wire.send_all(opened, lambda _: wire.lock((f"probe/{n}" for n in islice(numbers, wire.BATCH)), 600_000))
    return time.monotonic() - began


class Due:
    """The locks to acquire: when each is to expire, within one second from `first` on, and its
    requested timeout.
    """

    def __init__(self, first: float) -> None:
        self.first = first
        self._numbers = iter(range(LOCKS))
        self._random = random.Random(1)
        self._asked: dict[wire.Peer, list[tuple[float, int]]] = {}

    def batch(self, peer: wire.Peer) -> bytes:
        """Return the next requests for a connection, each with the timeout until its planned
        expiry.
        """
        now = time.monotonic()
        asked = self._asked.setdefault(peer, [])
        lines = []
        for number in islice(self._numbers, wire.BATCH):
            timeout_ms = round((self.first + self._random.random() - now) * 1000)
            asked.append((now, timeout_ms))
            lines.append(wire.lock([f"accounts/{number:07}"], timeout_ms))
        return b"".join(lines)

    def lateness(self, opened: Sequence[wire.Peer]) -> tuple[list[float], list[float]]:
        """Return the lateness of each in ms: by the server's clock, and its upper bound at the
        client.
        """
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
    """Iterate over the lines that a connection has received, each with the time at which its end
    was read.
    """
    rest = b""
    for at, data in peer.received:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield at, line
