"""States of a connection, and the table of their transitions."""

from __future__ import annotations

import pytest

from genie.server.peer import DETACHED, READY, TRANSITIONS, ConnectionState, Peer


def test_every_state_has_a_row() -> None:
    assert TRANSITIONS.keys() == set(ConnectionState)


def test_a_detached_connection_has_another_session_and_stays_detached() -> None:
    peer = Peer()
    peer.enter_state(READY)
    session = peer.session
    peer.detach()
    assert peer.session is not session
    assert peer.closing
    peer.enter_state(DETACHED)
    with pytest.raises(RuntimeError, match="does not become"):
        peer.enter_state(READY)
