"""Polls an admin port from a separate process, so that the client's own time does not count.

As a program: `poller.py PORT SECONDS CONNECTIONS PATH ...` requests the paths in turn on each
connection, and prints the number of responses, the size of the largest in bytes, and the longest
response time in ms.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from itertools import cycle

PAUSE_S = 0.02


def _poll(port: int, until: float, paths: list[str], responses: list[tuple[int, float]]) -> None:
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
        responses.append((size, (time.monotonic() - began) * 1000))
        time.sleep(PAUSE_S)
    connection.close()


def _main(port: int, seconds: float, connections: int, paths: list[str]) -> None:
    responses: list[tuple[int, float]] = []
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(
            target=_poll, args=(port, until, paths[place % len(paths) :] + paths[: place % len(paths)], responses)
        )
        for place in range(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(responses), max(size for size, _ in responses), max(ms for _, ms in responses))


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
