"""Polls an admin port from a process of its own: so what it takes itself is nobody's turn.

As a program: `poller.py PORT SECONDS CONNECTIONS PATH ...` polls the paths, one after the other on each connection, and
prints how many answers there were, the greatest of them in bytes, and the longest that one took (ms).
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from itertools import cycle

PAUSE_S = 0.02


def _poll(port: int, until: float, paths: list[str], told: list[tuple[int, float]]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for path in cycle(paths):
        began = time.monotonic()
        if began > until:
            break
        connection.request("GET", path)
        answer = connection.getresponse()
        size = len(answer.read())
        if answer.status != http.HTTPStatus.OK:
            raise SystemExit(f"{path}: {answer.status}")
        told.append((size, (time.monotonic() - began) * 1000))
        time.sleep(PAUSE_S)
    connection.close()


def _main(port: int, seconds: float, connections: int, paths: list[str]) -> None:
    told: list[tuple[int, float]] = []
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(
            target=_poll, args=(port, until, paths[place % len(paths) :] + paths[: place % len(paths)], told)
        )
        for place in range(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(told), max(size for size, _ in told), max(ms for _, ms in told))


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
