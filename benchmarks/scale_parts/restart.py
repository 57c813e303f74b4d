"""The unavailability of a server with many locks after a crash, and whether Redis stays responsive."""

from __future__ import annotations

import time
from collections.abc import Iterator

from scale_parts import wire
from scale_parts.pinger import pinging
from scale_parts.processes import REDIS_PING, genie, redis_server
from scale_parts.report import Missing, Row, progress

LOCKS = 1_000_000
CONNECTIONS = 8
"""A server allows 200,000 requests on each."""
LONG_MS = 2_000_000_000
QUIET_S = 5.0


def restart() -> Iterator[Row]:
    """Fill a server with 1,000,000 locks in Redis, kill it, restart it: time until it answers a request.

    Another process pings Redis all the time. The reply times while nothing happens are reported
    too: they are the noise of the machine, and are not subtracted.
    """
    with redis_server() as redis, genie(redis) as server, pinging(redis.port, REDIS_PING) as pinger:
        marks = [time.monotonic()]
        progress("nothing, to see the machine's own noise")
        time.sleep(QUIET_S)
        marks.append(time.monotonic())
        progress(f"taking {LOCKS:,} locks")
        wire.hold(server.port, LOCKS, LONG_MS, CONNECTIONS)
        marks.append(time.monotonic())
        progress("restarting the server")
        server.kill()
        killed = time.monotonic()
        server.start()
        _answers(server.port)
        marks.append(time.monotonic())
        if (held := wire.held(server.port)) != LOCKS + 1:
            raise Missing(f"{held:,} locks are held after the restart, not {LOCKS + 1:,}")
        pinger.stop()
        yield Row(
            "until a server with 1,000,000 locks in Redis answers after kill -9",
            marks[3] - killed,
            "s",
            goal=10,
            note=f"filled at {LOCKS / (marks[2] - marks[1]):,.0f}/s; Redis has {redis.resident_bytes() / 1e6:,.0f} MB",
        )
        times = ("in 5 s while nothing happens", "while the locks are taken", "while the server starts anew")
        for number, what in enumerate(times):
            since, until = marks[number : number + 2]
            lost_ms = pinger.gap_ms(since, until)
            yield Row(
                f"the longest that Redis takes to answer a ping, {what}",
                pinger.longest_ms(since, until),
                "ms",
                goal=50 if number else None,
                note=f"{lost_ms:.1f} ms is the longest that the pinging process itself was late",
            )


def _answers(port: int) -> None:
    """Lock a free resource: the server is available when it replies `locked`."""
    with wire.peers(port, 1) as (peer,):
        peer.sock.sendall(wire.lock(["the first one"], LONG_MS))
        received = b""
        while b'"locked"' not in received:
            data = peer.sock.recv(wire.READ_BYTES)
            received += data
            if not data or b'"error"' in received:
                raise Missing(f"the server answered {received!r}")
