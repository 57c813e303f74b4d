"""The clocks of clients: time that passes when a test says so, not when the machine is slow."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from genie.client.config import Address
from genie.client.failover import ServerList
from genie.client.pending import PING_INTERVAL_S, PING_TIMEOUT_STEP_S
from genie.client.session import ClientSession
from servers import WAIT_S

LONG_S = WAIT_S / 2
"""Longer than anything takes, and not so long that a `skip` of it ends what is bounded by WAIT_S."""

PATIENT = {"connect_timeout": WAIT_S, "session_timeout": WAIT_S}
"""However long a server takes to be there again."""


def skip(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass at once, for the clients and for the event loops of asyncio."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)


def bear_little_silence(session: ClientSession, now: float) -> None:
    """Let a client look at once how long its server has been silent, and bear little, on this connection only."""
    silence, rest = session._keepalive, session._keepalive.stop

    def at_the_end() -> None:
        silence._ping_interval_s, silence._timeout_step_s = PING_INTERVAL_S, PING_TIMEOUT_STEP_S
        rest()

    silence._ping_interval_s, silence._timeout_step_s = 0.25, 0.125
    silence.rest = at_the_end  # type: ignore[method-assign]
    silence.wake = now


def pass_the_first_by_soon(servers: ServerList) -> None:
    """The first attempt of a round may take a moment only, and all the others however long they take."""
    all_of_them = servers.round

    def round() -> Iterator[Address]:
        for number, address in enumerate(all_of_them()):
            servers.attempt_timeout = LONG_S if number else 0.25
            yield address

    servers.round = round  # type: ignore[method-assign]
