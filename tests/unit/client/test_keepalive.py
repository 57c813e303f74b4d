"""Keepalive: when a silent server is pinged, and when it is considered hung."""

from __future__ import annotations

import math

import pytest

from genie.client.commands import Extend, Inspect, Ping, Release
from genie.client.keepalive import PING_INTERVAL_S, PING_TIMEOUT_STEP_S, PING_TIMEOUT_STEPS
from genie.client.session import ClientSession
from support.network.scripted_server import (
    RefIgnoringSession,
    complete_handshake,
    encode,
    error,
    granted_request,
    locked,
    queued,
    reconnect,
    released,
    send_request,
    sent_request,
)
from support.network.scripted_server import connected_session as connected_session_of

PING = encode("ping")
PONG = encode("pong")
GONE_S = PING_INTERVAL_S + PING_TIMEOUT_STEPS * PING_TIMEOUT_STEP_S


def connected(*, keepalive: bool) -> ClientSession:
    return connected_session_of(RefIgnoringSession, keepalive=keepalive)


def run(session: ClientSession, until: float) -> list[tuple[float, bytes]]:
    """Call the timers until a time, without messages from the server; return what was sent, and when."""
    sent = []
    while session.next_timer <= until:
        now = session.next_timer
        session.on_timer(now)
        data = session.data_to_send()
        if data:
            sent.append((now, data))
        if session.handshake.close_reason:
            break
    return sent


def with_pending_ping(session: ClientSession) -> None:
    send_request(session)


def with_pending_release(session: ClientSession) -> None:
    session.requests.release(granted_request(session), 0.0)


def with_held_lock(session: ClientSession) -> None:
    granted_request(session, transaction_timeout=1000)


def with_abandoned_request(session: ClientSession) -> None:
    session.abandon(send_request(session), 0.0)


def with_pending_extension(session: ClientSession) -> None:
    lock = granted_request(session)
    session.send(Extend(lock.id, 1000, lock), 0.0)


@pytest.mark.parametrize(
    "expect_messages",
    [
        with_pending_ping,
        sent_request,
        with_held_lock,
        with_pending_release,
        with_abandoned_request,
        with_pending_extension,
    ],
)
def test_a_hung_server_is_pinged_once_and_then_left(expect_messages):
    session = connected(keepalive=True)
    expect_messages(session)
    session.data_to_send()
    assert run(session, GONE_S - 0.001) == [(PING_INTERVAL_S, PING)]
    assert not session.handshake.close_reason
    assert run(session, GONE_S) == []
    assert session.handshake.close_reason == "the server does not answer"


@pytest.mark.parametrize("call", [Ping(), Inspect(), Release(7)])
def test_a_server_that_does_not_reply_to_a_call_is_left(call):
    session = connected(keepalive=True)
    session.send(call, 0.0)
    session.data_to_send()
    assert run(session, GONE_S) == [(PING_INTERVAL_S, PING)]
    assert session.handshake.close_reason


def test_an_idle_client_sends_no_pings():
    session = connected(keepalive=True)
    assert run(session, 100.0) == []
    assert session.next_timer == math.inf
    lock = granted_request(session, now=100.0, transaction_timeout=1000)
    assert session.next_timer == 100.0 + PING_INTERVAL_S
    session.requests.release(lock, 101.0)
    session.receive_data(released(101, "success", "2"), 101.0)
    session.data_to_send()
    assert run(session, 300.0) == []
    assert session.next_timer == math.inf


def test_a_server_that_replies_is_pinged_again_after_the_next_interval():
    session = connected(keepalive=True)
    granted_request(session, transaction_timeout=1000)
    assert run(session, PING_INTERVAL_S) == [(PING_INTERVAL_S, PING)]
    late = GONE_S - 0.5
    assert run(session, late) == []
    assert session.receive_data(PONG, late)[0][1:] == (None, None)
    assert run(session, late + PING_INTERVAL_S) == [(late + PING_INTERVAL_S, PING)]
    assert run(session, late + GONE_S) == []
    assert session.handshake.close_reason


@pytest.mark.parametrize("word", [PONG[:5], queued(101, "1")])
def test_any_received_bytes_restart_the_interval(word):
    session = connected(keepalive=True)
    send_request(session)
    session.data_to_send()
    session.receive_data(word, PING_INTERVAL_S - 0.5)
    assert run(session, GONE_S + PING_INTERVAL_S - 0.501) == [(2 * PING_INTERVAL_S - 0.5, PING)]
    assert not session.handshake.close_reason


def test_the_reply_to_a_keepalive_ping_completes_no_other_ping():
    session = connected(keepalive=True)
    sent_request(session)
    run(session, PING_INTERVAL_S)
    mine = Ping()
    session.send(mine, PING_INTERVAL_S)
    assert session.receive_data(PONG, PING_INTERVAL_S)[0][0] is not mine
    assert session.receive_data(PONG, PING_INTERVAL_S) == [(mine, None, None)]
    assert not session.handshake.close_reason


def test_a_server_that_replies_unavailable_is_left_at_once():
    session = connected(keepalive=True)
    sent_request(session)
    run(session, PING_INTERVAL_S)
    session.receive_data(error("unavailable", "no store"), PING_INTERVAL_S + 2)
    assert "no store" in session.handshake.close_reason


def test_a_suspended_client_reads_before_the_timeout_counts():
    session = connected(keepalive=True)
    sent_request(session, queue_timeout=1000)
    run(session, PING_INTERVAL_S)
    session.on_timer(PING_INTERVAL_S + 100.0)
    assert not session.handshake.close_reason
    session.receive_data(PONG, PING_INTERVAL_S + 100.0)
    assert run(session, PING_INTERVAL_S + 100.0 + GONE_S - 0.001) == [(2 * PING_INTERVAL_S + 100.0, PING)]
    assert not session.handshake.close_reason


def test_the_next_connection_has_its_own_keepalive():
    session = connected(keepalive=True)
    request = sent_request(session, queue_timeout=1000, transaction_timeout=1000)
    run(session, GONE_S)
    assert session.handshake.close_reason
    session.on_disconnected("gone")
    session.on_timer(50.0)
    session.on_connected(0.0)
    session.on_timer(51.0)
    assert not session.handshake.close_reason
    session.on_disconnected("gone again")
    complete_handshake(session, now=60.0)
    assert session.data_to_send() == request.line
    assert run(session, 60.0 + GONE_S - 0.001) == [(60.0 + PING_INTERVAL_S, PING)]
    assert session.receive_data(locked(101, "1"), 60.0 + GONE_S - 0.001) == [(request, None, None)]


def test_a_held_lock_keeps_the_keepalive_running_after_a_reconnect():
    session = connected(keepalive=True)
    granted_request(session, transaction_timeout=1000)
    reconnect(session, locked(101, "1", expiresIn=1_000_000), now=10.0)
    assert run(session, 10.0 + PING_INTERVAL_S) == [(10.0 + PING_INTERVAL_S, PING)]
