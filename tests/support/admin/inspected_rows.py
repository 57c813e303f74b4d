"""Sample rows of an `inspected`, for tests of the commands that show them."""

from __future__ import annotations

from typing import Any

NOW = 1_000_000.0


def row(id: int, *resources: str, **fields: Any) -> dict[str, Any]:
    """Return a held request, or a waiting one if it has `blockers`: for 3.2 s, with 6.8 s until its timeout."""
    listed: dict[str, Any] = {"resources": list(resources), "resourcesTotal": len(resources)}
    if "blockers" in fields:
        fields = {"blockersTotal": len(fields["blockers"]), **fields}
    return {"id": id, **listed, "priority": 0, "since": NOW - 3_200, "expiresIn": 6_800, **fields}


def blocker(id: int, **fields: Any) -> dict[str, Any]:
    return {"id": id, "resource": "a", "mode": "exclusive", "state": "held", "since": NOW - 3_200, **fields}


def inspected(*rows: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the payload of an `inspected` with these rows."""
    queue = [row for row in rows if "blockers" in row]
    holders = [row for row in rows if "blockers" not in row]
    return {"holders": holders, "holdersTotal": len(holders), "queue": queue, "queueTotal": len(queue), **fields}
