"""The floods: the commands that a client repeats, and the locks that the server must hold for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HELD = 10_000
"""Number of locks held for a flood that inspects many of them or competes for them."""
LONG_MS = 2**31 - 1


@dataclass(frozen=True)
class Flood:
    """`lines` are sent repeatedly. `held` are resources, each of which a separate request locks
    before.
    """

    name: str
    lines: bytes
    held: Sequence[str] = ()
    durable: bool = False
    """True if the flood writes to the store, so that it is also measured with Redis."""


def line(command: str, **payload: Any) -> bytes:
    """Encode a command as a line."""
    return json.dumps({"command": command, "payload": payload}, separators=(",", ":")).encode() + b"\n"


def _try(*resources: str) -> bytes:
    return line("request", resources=resources, queueTimeout=0)


MANY = [f"exclusive:many/{number}" for number in range(HELD)]
FLOODS = (
    Flood("ping", line("ping")),
    Flood("bad lines", b"x\n"),
    Flood("tries, 1 blocker", _try("exclusive:hot"), ["exclusive:hot"]),
    Flood("tries, 10 blockers", _try("exclusive:hot"), ["shared:hot"] * 10, durable=True),
    Flood("locks that time out", line("request", resources=["shared:brief"], transactionTimeout=5), durable=True),
    Flood("tries of 1,024", _try(*MANY[:1024]), MANY[1000:1010], durable=True),
    Flood("inspect", line("inspect", limit=1000), MANY),
    Flood("watch, unwatch", line("watch", prefix="many") + line("unwatch", prefix="many"), MANY),
    Flood(
        "any of 10,000", line("request", anyOf=MANY, target=HELD + 1, queueTimeout=0), MANY[: HELD // 2], durable=True
    ),
)
