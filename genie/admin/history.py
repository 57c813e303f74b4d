"""Searches the history for the admin port. Each search is a process of its own, so that it delays no lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import UNSET

from genie.admin import models
from genie.admin.models import ApiError, or_unset
from genie.errors import Code
from genie.history.search import Entry, Query, Result
from genie.processes import run_process

log = structlog.get_logger()

MAX_SEARCHES: Final = 2
"""Maximum number of searches at the same time. Further searches are rejected."""
TIMEOUT_S: Final = 10.0
"""Maximum duration of a search in seconds."""
MAX_REQUESTS: Final = 100
"""Number of requests in a response, the latest."""


class HistorySearches:
    """The searches of all clients of the admin port."""

    def __init__(self) -> None:
        self._running_count = 0

    async def find(self, directory: Path, resource: str) -> models.History:
        """Find the latest requests for a resource in the history in a directory.

        Raises ApiError: 503 if too many searches run or the search takes too long, 500 if the history is damaged.
        """
        if self._running_count >= MAX_SEARCHES:
            raise ApiError(
                503, Code.UNAVAILABLE, f"{MAX_SEARCHES} searches of the history are running; try again later"
            )
        self._running_count += 1
        try:
            result = await _search(directory, Query(resource=resource, limit=MAX_REQUESTS))
        finally:
            self._running_count -= 1
        rows = [_past_request(entry) for entry in result.requests]
        return models.History(
            resource=resource, requests=rows, more=result.more, gaps=result.gaps, begins_at=result.begins_at
        )


async def _search(directory: Path, query: Query) -> Result:
    """Search in another process, which is killed if the caller is cancelled.

    Raises ApiError like `HistorySearches.find`.
    """
    command = [sys.executable, "-m", "genie.history.search", str(directory)]
    try:
        process = await run_process(command, msgspec.json.encode(query), timeout_s=TIMEOUT_S, errors=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        message = f"the search of the history took longer than {TIMEOUT_S:g} s; use genie history on the server"
        raise ApiError(503, Code.UNAVAILABLE, message) from None
    if process.returncode != 0:
        last_error_line = process.stderr.decode(errors="replace").rstrip().rpartition("\n")[2]
        log.error("history search failed", directory=str(directory), reason=last_error_line)
        raise ApiError(500, "unreadable", "the history cannot be read; the log of the server has details")
    return msgspec.json.decode(process.stdout, type=Result)


def _past_request(entry: Entry) -> models.PastRequest:
    """Convert a request of the history to its response type."""
    return models.PastRequest(
        id=entry.id,
        resources=entry.locks,
        resources_total=entry.resources_total,
        mode=entry.mode or "",
        asked_at=or_unset(entry.asked_at),
        granted_at=or_unset(entry.granted_at),
        ended_at=or_unset(entry.ended_at),
        record_ends_at=or_unset(entry.record_ends_at),
        reason=UNSET if entry.reason is None else str(entry.reason),
        fence=entry.fence or UNSET,
        transaction_name=or_unset(entry.transaction),
        principal=or_unset(entry.client),
        note=or_unset(entry.note),
        priority=entry.priority or UNSET,
        waited_for=[blocker.id for blocker in entry.waited_for],
    )
