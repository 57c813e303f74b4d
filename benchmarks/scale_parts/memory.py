"""The memory that a held lock takes in the server."""

from __future__ import annotations

import time
from collections.abc import Iterator

from scale_parts import wire
from scale_parts.processes import genie
from scale_parts.report import Missing, Row, progress

LOCKS = 1_000_000
LONG_MS = 2_000_000_000
WARM_UP = 5_000
WARM_UP_MS = 2_000
CONNECTIONS = 8
"""A server allows 200,000 requests on each."""


def memory() -> Iterator[Row]:
    """Acquire 1,000,000 locks over TCP, memory store: the growth of the server's process."""
    with genie() as server:
        wire.hold(server.port, WARM_UP, WARM_UP_MS, kind="first")  # what is made once is there then
        time.sleep(2 * WARM_UP_MS / 1000)
        before = server.resident_bytes()
        progress(f"taking {LOCKS:,} locks")
        began = time.monotonic()
        wire.hold(server.port, LOCKS, LONG_MS, CONNECTIONS)
        took_s = time.monotonic() - began
        time.sleep(1)
        if (held := wire.held(server.port)) != LOCKS:
            raise Missing(f"{held:,} locks are held, not {LOCKS:,}")
        yield Row(
            "resident memory for each of 1,000,000 held locks, in bytes",
            (server.resident_bytes() - before) / LOCKS,
            goal=1000,
            digits=0,
            note=f"from {before / 1e6:,.0f} MB to {server.resident_bytes() / 1e6:,.0f} MB;"
            f" taken over {CONNECTIONS} connections at {LOCKS / took_s:,.0f}/s",
        )
