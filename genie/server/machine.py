"""What a server uses of its machine and of its process. A simulation replaces it."""

from __future__ import annotations

import errno
import gc
import os
import socket
import sys
import time
from pathlib import Path

from genie.net import local_addresses

BACKLOG = 4096
"""Backlog of the listening socket: thousands of clients connect simultaneously after a failover."""

RECEIVE_BUFFER_BYTES = 16 << 10
"""Size of the kernel's receive buffer of a connection, which Linux doubles. It bounds the bytes of one read, and so the
bytes that are queued before reading is paused. With the usual buffer of some MiB, thousands of connections could exceed
every bound in one iteration of the event loop."""

ACCEPTS_PER_ITERATION = 8
"""Number of connections that are accepted in an iteration of the event loop, which takes 5 ms while clients keep the
server busy. With one connection in each iteration, clients would wait long after a failover, or after one client has
opened thousands of connections."""

GC_THRESHOLD = (10_000, 2, 30_000)
"""Thresholds of the garbage collector, so high that it rarely reads everything. Requests create no reference cycles, so the
collector would find almost nothing. With Python's defaults, loading a million locks takes twice as long. A collection of the
second generation reads about 30,000 new objects; a million of them would stop the server for 0.4 s.
"""


class Machine:
    """The machine and the process in which a server runs."""

    def bind(self, host: str, port: int) -> socket.socket:
        """Return a socket that listens on an address. Raises OSError if the address is in use.

        Until a socket listens, Linux lets other sockets bind the same address. If another one listens first, uvloop would
        not report that this one does not.
        """
        family, kind, protocol, _, address = local_addresses(host, port)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)  # every connection inherits it
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        return sock

    def listening_sockets(self, sock: socket.socket) -> list[socket.socket]:
        """Return a bound socket and duplicates of it, because an event loop may accept only one connection of each in an iteration."""
        return [sock, *[sock.dup() for _ in range(ACCEPTS_PER_ITERATION - 1)]]

    def lock_address(self, address: tuple[str, int]) -> socket.socket | None:
        """Lock an address against other servers that are starting, and return the lock. Raises OSError if it is locked.

        A server that stops closes its socket first, and then waits until its last commits are stored. A second server on
        the same address could start meanwhile. The lock is a Unix socket with an abstract name: the kernel releases the name
        when the process ends. Returns None on systems other than Linux.
        """
        if sys.platform != "linux":
            return None
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(f"\0genie {address[0]} {address[1]}")
        except OSError:
            sock.close()
            raise OSError(errno.EADDRINUSE, "another server is starting or stopping on this address") from None
        return sock

    def boot_id(self) -> str:
        """Return an id that changes when the machine reboots, and differs between containers of one machine.

        Returns "" if the system has no such id, as on macOS.
        """
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            network = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - containers may share a host name
        except OSError:
            return ""
        return f"{boot}/{network}"

    def elapsed_s(self) -> float:
        """Return a monotonic time in seconds that includes, on Linux, the time for which the machine was suspended."""
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

    def prepare_memory(self) -> None:
        """Collect garbage now, and seldom from now on."""
        gc.collect()
        gc.set_threshold(*GC_THRESHOLD)

    def freeze_memory(self) -> None:
        """Exempt the loaded state, which is long-lived, from garbage collection."""
        gc.freeze()
