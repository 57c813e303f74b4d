"""Ports for servers of tests: each process of a test run has a share of its own, and no port is given twice."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle, islice

BELOW_THE_KERNELS = range(20_000, 32_000)
"""None that the kernel gives to a connection on its way out: such a port stays free while its server is down."""


def _own_ports() -> Iterator[int]:
    """Where each draw stood alone, a run of thousands would meet itself: two servers of one test with one port."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = BELOW_THE_KERNELS[worker::workers]
    # Runs beside one another, and programs that a test starts, begin somewhere else.
    first = random.randrange(len(share))  # noqa: S311 - no secret
    return cycle([*share[first:], *share[:first]])


_OWN_PORTS = _own_ports()


def free_port() -> int:
    """A port of this process's share that nobody listens on and that it has not given in its last thousands."""
    for port in islice(_OWN_PORTS, len(BELOW_THE_KERNELS)):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {BELOW_THE_KERNELS.start} to {BELOW_THE_KERNELS.stop - 1} is free")
