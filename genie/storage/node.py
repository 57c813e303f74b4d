"""Who a server is, as the others of its namespace see it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from msgspec import Struct, json


class Node(Struct, frozen=True):
    """A server that leads a namespace, or would.

    `boot`, `host` and `listening` say which it is: who can listen where it did, on the same machine since the same
    start, is its successor, and it is gone. `address` is where clients reach it. It leads for `lease_ms` from each of its
    commits on.
    """

    listening: str = ""
    address: str = ""
    lease_ms: int = 3_000
    boot: str = ""
    host: str = ""

    def succeeds(self, other: Node) -> bool:
        """Whether this is the same server, started again."""
        return bool(self.boot) and (self.boot, self.host, self.listening) == (other.boot, other.host, other.listening)


def this_node(listening: tuple[str, int], advertise: str | None, lease_ms: int) -> Node:
    """The node that a process is which has bound an address."""
    host, port = listening
    name = socket.gethostname()
    shown = name if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104 - it is compared
    return Node(f"{host}:{port}", advertise or f"{shown}:{port}", lease_ms, _boot(), name)


def _boot() -> str:
    """The start of this machine, as seen from its network namespace; empty where that can't be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - containers of one machine may have one name
    except OSError:
        return ""
    return f"{boot}/{network}"


def pack(node: Node | None) -> bytes:
    """A node as it is stored; nobody is nothing."""
    return b"" if node is None else json.encode(node)


def unpack(stored: bytes | None) -> Node | None:
    """The same, back."""
    return json.decode(stored, type=Node) if stored else None
