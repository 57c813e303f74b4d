"""Pings a server at a fixed interval from a separate process, and reports the time of each reply.

As a program: `pinger.py PORT PING INTERVAL_MS` pings until its standard input ends, and then prints
a JSON list of [time of the ping, ms until the reply]. The clock is the machine's monotonic one,
which all processes share on Linux. The process does nothing else and has no other objects, so that
its own overhead is two system calls.
"""

from __future__ import annotations

import gc
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

INTERVAL_MS = 4


class Pinger:
    """Pings a server from its creation until `stop`; `samples` are available afterwards."""

    def __init__(self, port: int, ping: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port), ping.decode(), str(INTERVAL_MS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for its parent, who ends it
        )
        self._samples: list[tuple[float, float]] = []

    def stop(self) -> None:
        """Stop pinging, and read the samples."""
        said, _ = self._process.communicate()
        self._samples = [(at, ms) for at, ms in json.loads(said)]

    def kill(self) -> None:
        """Terminate the process if it still runs."""
        self._process.kill()
        self._process.wait()

    def longest_ms(self, since: float, until: float) -> float:
        """Return the longest reply time of the pings that were sent or unanswered in this interval
        of `time.monotonic`.
        """
        return max(ms for at, ms in self._samples if at + ms / 1000 >= since and at <= until)

    def times_ms(self) -> list[float]:
        """Return the reply times in ms."""
        return [ms for _, ms in self._samples]

    def gap_ms(self, since: float, until: float) -> float:
        """Return the longest time without a ping, beyond the interval and the reply time: time that
        the pinger's process did not run.
        """
        sent = [(at, ms) for at, ms in self._samples if since <= at <= until]
        return max((b - a) * 1000 - ms - INTERVAL_MS for (a, ms), (b, _) in pairwise(sent))


@contextmanager
def pinging(port: int, ping: bytes) -> Iterator[Pinger]:
    """Provide a pinger, which is terminated at the end of the block."""
    pinger = Pinger(port, ping)
    try:
        yield pinger
    finally:
        pinger.kill()


def _main(port: int, ping: bytes, interval_s: float) -> None:
    gc.disable()
    samples = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not select.select([sys.stdin], [], [], interval_s)[0]:
            sent = time.monotonic()
            sock.sendall(ping)
            if not sock.recv(256):
                raise SystemExit("the server closed the connection")
            samples.append((sent, (time.monotonic() - sent) * 1000))
    print(json.dumps(samples))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2].encode(), float(sys.argv[3]) / 1000)
