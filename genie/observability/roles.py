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
        """Unix time at which an interruption of the store began; None if there is none."""

    @property
    def store_full(self) -> bool:
        """True if this server leads and its store is out of memory."""


def describe(view: NamespaceView) -> str:
    """Return what the server does in a namespace, such as `follower of HOST:PORT`, and what hinders it."""
    text = view.state.name
    match view.state:
        case Starting():
            text = "starting, the store has not answered yet"
        case Waiting():
            text = "waiting for a leader"
        case Following(leader=leader, caught_up=caught_up):
            text = f"follower of {leader}" + ("" if caught_up else ", its replica has not caught up")
        case StoreUnavailable():
            text = describe_outage(view.store_unavailable_since)
        case Leading() if not view.store_available:
            text = f"leader, {describe_outage(view.store_unavailable_since)}"
        case Leading() if view.store_full:
            text = "leader, the store is out of memory: only releases are accepted"
    return text


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
    return time.time() - (asyncio.get_running_loop().time() - outage.since)


def describe_outage(since: float | None) -> str:
    """Return that the store is unavailable, and since when if the Unix time is known."""
    at = "" if since is None else f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"store unavailable{at}"
