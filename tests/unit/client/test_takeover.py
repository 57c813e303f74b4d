"""A client whose session is taken over three times in a row ends; fewer takeovers are normal."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from genie.client.commands import Ping, RequestState
from genie.client.session import ClientSession
from genie.errors import ConnectionLost, Disconnected, RequestRejected
from support.network.scripted_server import (
    complete_handshake,
    connected_session,
    error,
    granted_request,
    locked,
    send_request,
)

TAKEN_OVER = error("session-taken-over")


def take_over(session: ClientSession) -> list[object]:
    """Let the server report a takeover, and close the connection. Returns the errors of the outcomes."""
    session.receive_data(TAKEN_OVER, 0.0)
    assert session.handshake.close_reason
    return [outcome.error for outcome in session.on_disconnected(session.handshake.close_reason)]


def test_the_third_takeover_in_a_row_fails_calls_and_locks():
    session = connected_session()
    lock = granted_request(session)
    for _ in range(2):
        assert take_over(session) == []
        complete_handshake(session, locked(101, lock.ref, expiresIn=10_000))
    waiting = send_request(session, "b")
    ping = Ping()
    ping.future = Future()
    session.send(ping, 0.0)
    errors = take_over(session)
    assert sorted(type(error).__name__ for error in errors) == ["ConnectionLost", "Disconnected", "RequestRejected"]
    [lost] = [error for error in errors if isinstance(error, Disconnected)]
    assert (
        str(lost)
        == "lock 101 is lost: another process with the same session=… took over the session; give each process its own"
    )
    assert any(isinstance(error, ConnectionLost) for error in errors)
    assert session.handshake.has_ended
    assert lock.state is waiting.state is RequestState.ENDED
    with pytest.raises(RequestRejected, match="3 times in a row: two processes use the same session=…"):
        raise session.handshake.rejection  # type: ignore[misc]


def test_a_connection_that_ends_otherwise_begins_a_new_count():
    session = connected_session()
    for _ in range(2):
        for _ in range(2):
            take_over(session)
            complete_handshake(session)
        session.on_disconnected("gone")
        complete_handshake(session)
    assert not session.handshake.has_ended


def test_a_takeover_during_the_handshake_counts():
    session = connected_session()
    take_over(session)
    for _ in range(2):
        session.on_connected(0.0)
        take_over(session)
    assert session.handshake.has_ended
