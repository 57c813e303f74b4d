"""Rows of an `inspected`, for the commands that show them."""

from __future__ import annotations

from typing import Any

NOW = 1_000_000.0


def row(id: int, *resources: str, **more: Any) -> dict[str, Any]:
    """One that is held, or waits where it has `blockers`: for 3.2 s, with 6.8 s left."""
    named: dict[str, Any] = {"resources": list(resources), "resourcesTotal": len(resources)}
    if "blockers" in more:
        more = {"blockersTotal": len(more["blockers"]), **more}
    return {"id": id, **named, "priority": 0, "since": NOW - 3_200, "expiresIn": 6_800, **more}


def blocker(id: int, **more: Any) -> dict[str, Any]:
    return {"id": id, "resource": "a", "mode": "exclusive", "state": "held", "since": NOW - 3_200, **more}


def inspected(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An answer with these rows."""
    queue = [row for row in rows if "blockers" in row]
    holders = [row for row in rows if "blockers" not in row]
    return {"holders": holders, "holdersTotal": len(holders), "queue": queue, "queueTotal": len(queue), **more}
