"""Describes the role of a server in a namespace as text: for the health checks, error messages, `genie status` and systemd."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol

from genie.roles import Following, Leading, Role, Starting, StoreOutage, StoreUnavailable, Waiting


class NamespaceView(Protocol):
    """The part of a namespace that its description reads."""

    @property
    def state(self) -> Role:
        """The role of the server in the namespace."""

    @property
    def store_available(self) -> bool:
        """True if a leader executes commands, or a follower reads from the store."""

    @property
    def store_unavailable_since(self) -> float | None:
        """Unix time at which the current interruption of the store began. None if there is no interruption."""

    @property
    def store_full(self) -> bool:
        """True if this server leads and its store is out of memory."""


def describe(view: NamespaceView) -> str:  # noqa: PLR0911 - one for each role
    """Return what the server does in a namespace, such as `follower of HOST:PORT`, and what hinders it."""
    match view.state:
        case Starting():
            return "starting, the store has not answered yet"
        case Waiting():
            return "waiting for a leader"
        case Following(leader=leader, caught_up=True):
            return f"follower of {leader}"
        case Following(leader=leader):
            return f"follower of {leader}, its replica has not caught up"
        case StoreUnavailable():
            return describe_outage(view.store_unavailable_since)
        case Leading() if not view.store_available:
            return f"leader, {describe_outage(view.store_unavailable_since)}"
        case Leading() if view.store_full:
            return "leader, the store is out of memory: only releases are accepted"
        case _:
            return view.state.name


def is_ready(view: NamespaceView) -> bool:
    """Return whether the server leads with an available store, or could take over at once."""
    match view.state:
        case Leading():
            return view.store_available
        case Following(caught_up=caught_up):
            return caught_up
        case _:
            return False


def unix_begin(outage: StoreOutage) -> float:
    """Return the Unix time at which an interruption of the store began."""
    duration_s = asyncio.get_running_loop().time() - outage.since
    return time.time() - duration_s


def describe_outage(since: float | None) -> str:
    """Return the text `store unavailable`, with the Unix time since which it is, if that is known."""
    if since is None:
        return "store unavailable"
    return f"store unavailable since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
