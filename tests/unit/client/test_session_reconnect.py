"""The client's session across connections: what is sent again, which locks are lost, and which calls fail."""

from __future__ import annotations

import math
import re
from concurrent.futures import Future

import orjson
import pytest

from genie.client.commands import Bye, Extend, Inspect, Ping, Release, RequestState
from genie.client.session import ClientSession
from genie.errors import (
    ConnectionLost,
    Deadlock,
    Disconnected,
    LockError,
    LockLost,
    QueueTimeout,
    RequestRejected,
    TransactionTimeout,
    Unavailable,
)
from support.network.scripted_server import (
    HELLO,
    PING,
    PONG,
    SECRET,
    complete_handshake,
    connected_session,
    encode,
    error,
    granted_request,
    locked,
    pong,
    queued,
    reconnect,
    release,
    released,
    send_request,
    sent_request,
    welcome,
)


def pings_until(session: ClientSession, until: float) -> list[Ping]:
    """Call the timers of a session until a time, and return the pings that it sends."""
    before = list(session.calls.pending.values())
    while session.next_timer <= until:
        assert session.on_timer(session.next_timer) == []
    return [call for call in session.calls.pending.values() if isinstance(call, Ping) and call not in before]


class TestHandshake:
    def test_nothing_else_is_sent_before_the_resumption_has_ended(self):
        session = ClientSession(SECRET)
        request = send_request(session)
        session.on_connected(0.0)
        assert session.data_to_send() == HELLO + PING
        assert session.receive_data(welcome(False), 0.0) == []
        assert session.data_to_send() == b""
        assert session.receive_data(PONG, 0.0) == []
        assert session.data_to_send() == request.line

    def test_the_default_secret_is_random(self):
        secrets = set()
        for _ in range(2):
            session = ClientSession(session_timeout=0.25)
            session.on_connected(0.0)
            payload = orjson.loads(session.data_to_send().splitlines()[0])["payload"]
            assert payload["sessionTimeout"] == 250
            secrets.add(payload["session"])
        assert len(secrets) == 2
        assert min(map(len, secrets)) >= 32

    @pytest.mark.parametrize("session", ["x" * 15, "x" * 129, 16 * ("x",), "\ud800" * 16])
    def test_an_invalid_secret(self, session):
        with pytest.raises(ValueError, match=r"session|hello") as caught:
            ClientSession(session)
        assert "xxx" not in str(caught.value), "a secret is not for logs"

    @pytest.mark.parametrize("timeout", [0, -1, math.inf, 2_147_484])
    def test_an_invalid_session_timeout(self, timeout):
        with pytest.raises(ValueError, match="session_timeout"):
            ClientSession(session_timeout=timeout)

    def test_a_second_client_with_the_same_secret_uses_other_refs(self):
        assert ClientSession(SECRET).calls.new_ref() != ClientSession(SECRET).calls.new_ref()

    def test_a_renewed_session_has_another_secret_or_other_refs(self):
        """Like a copy of the session in a forked process."""
        session, with_secret = ClientSession(), ClientSession(SECRET)
        hello, ref = session.on_connected(0.0) or session.data_to_send(), with_secret.calls.new_ref()
        session.renew_identity()
        with_secret.renew_identity()
        assert (session.on_connected(0.0) or session.data_to_send()) != hello
        assert with_secret.calls.new_ref().rpartition("-")[0] != ref.rpartition("-")[0]
        assert SECRET.encode() in (with_secret.on_connected(0.0) or with_secret.data_to_send())

    def test_the_server_must_confirm_the_namespace(self):
        session = ClientSession(SECRET, namespace="billing")
        request = send_request(session)
        session.on_connected(0.0)
        hello = orjson.loads(session.data_to_send().splitlines()[0])["payload"]
        assert (hello["session"], hello["sessionTimeout"], hello["namespace"]) == (SECRET, 10_000, "billing")
        for answer in (welcome(False), encode("welcome", protocol=1, resumed=False)):
            assert session.receive_data(answer + PONG, 0.0) == []
            assert "not 'billing'" in session.handshake.close_reason
            assert not session.up
            assert session.handshake.redirect is None
            assert session.data_to_send() == b"", "nothing is asked for elsewhere"
            session.on_disconnected("gone")
            session.on_connected(0.0)
            session.data_to_send()
        session.receive_data(welcome(False, namespace="billing") + PONG, 0.0)
        assert session.up
        assert session.data_to_send() == request.line

    def test_hello_has_the_protocol_and_the_client_version(self):
        session = ClientSession(SECRET)
        session.on_connected(0.0)
        hello = orjson.loads(session.data_to_send().splitlines()[0])["payload"]
        assert (hello["protocol"], hello["quiet"]) == (1, True)
        assert re.fullmatch(r"genie-python/\d.*", hello["client"])

    def test_a_server_of_another_protocol_version_is_rejected(self):
        session = ClientSession(SECRET)
        session.on_connected(0.0)
        session.receive_data(welcome(False, protocol=2) + PONG, 0.0)
        assert "protocol 2" in session.handshake.close_reason
        assert not session.up

    @pytest.mark.parametrize("code", ["unauthorized", "unknown-namespace", "unsupported-protocol"])
    def test_a_final_rejection_fails_waiting_calls(self, code):
        session = ClientSession(SECRET)
        request = send_request(session)
        session.on_connected(0.0)
        session.receive_data(error(code, "no", ref="hello", supported=[7]) + error("unavailable", ref="resume"), 0.0)
        assert session.handshake.close_reason
        assert session.handshake.rejection is None, "another server may accept the client"
        session.handshake.on_round_failed([session.handshake.final_error])
        assert session.handshake.rejection is not None
        assert session.handshake.rejection.code == code
        session.on_disconnected("gone")
        [(call, _, why)] = session.fail_callers(0.0)
        assert call is request
        assert isinstance(why, RequestRejected)
        assert why.code == code
        complete_handshake(session)
        assert session.handshake.rejection is None
        assert session.data_to_send() == b"", "it was never sent"

    def test_a_temporary_rejection_does_not_fail_waiting_calls(self):
        session = ClientSession(SECRET)
        send_request(session)
        session.on_connected(0.0)
        session.receive_data(error("unavailable", "no", ref="hello"), 0.0)
        assert session.handshake.close_reason
        assert session.handshake.rejection is None
        assert session.fail_callers(0.0) == []

    def test_welcome_sets_the_ping_interval(self):
        session = ClientSession(SECRET)
        session.on_connected(0.0)
        session.receive_data(welcome(False, pingInterval=4000) + PONG, 0.0)
        send_request(session, queue_timeout=1000)
        session.data_to_send()
        session.on_timer(3.9)
        assert session.data_to_send() == b""
        session.on_timer(4.0)
        assert orjson.loads(session.data_to_send())["command"] == "ping"

    @pytest.mark.parametrize("leader", ["b:1", None])
    def test_a_follower_redirects_to_the_leader(self, leader):
        session = ClientSession()
        session.on_connected(0.0)
        told = error("unavailable", "not the leader", **({} if leader is None else {"leader": leader}))
        assert session.receive_data(told * 2, 0.0) == []
        assert "not the leader" in session.handshake.close_reason
        assert session.handshake.redirect == (leader or "")
        assert not session.up
        session.on_connected(0.0)
        assert (session.handshake.close_reason, session.handshake.redirect) == ("", None)

    def test_other_error_replies_do_not_redirect(self):
        session = ClientSession()
        session.on_connected(0.0)
        session.receive_data(error("bad-request", "what is hello?"), 0.0)
        assert "what is hello?" in session.handshake.close_reason
        assert session.handshake.redirect is None

    def test_unavailable_during_the_resumption_closes_the_connection(self):
        session = ClientSession(SECRET)
        request = send_request(session)
        session.on_connected(0.0)
        session.data_to_send()
        assert session.receive_data(welcome(False) + error("unavailable"), 0.0) == []
        assert session.handshake.close_reason
        assert not session.up
        assert session.data_to_send() == b""
        session.on_disconnected("gone")
        complete_handshake(session)
        assert session.data_to_send() == request.line

    @pytest.mark.parametrize("line", [PONG, locked(1, "1"), released(1, "success", "1")])
    def test_any_other_reply_to_hello_closes_the_connection(self, line):
        session = ClientSession()
        session.on_connected(0.0)
        session.receive_data(line, 0.0)
        assert session.handshake.close_reason

    def test_unknown_messages_of_a_newer_server_are_ignored(self):
        session = ClientSession()
        session.on_connected(0.0)
        session.receive_data(encode("tomorrow") + welcome(False) + encode("tomorrow") + PONG, 0.0)
        assert session.up

    def test_a_disconnect_during_the_resumption_changes_nothing(self):
        session = connected_session()
        lock, request = granted_request(session), sent_request(session)
        session.on_disconnected("gone")
        session.on_connected(0.0)
        session.data_to_send()
        assert session.receive_data(welcome(True) + locked(101, "1", expiresIn=5000), 0.0) == []
        assert session.on_disconnected("gone again") == []
        assert complete_handshake(session, locked(101, "1", expiresIn=5000)) == []
        assert session.data_to_send() == request.line
        assert (lock.state, request.state) == (RequestState.HELD, RequestState.WAITING)


class TestWaitingRequest:
    def test_is_sent_again_after_a_resumption(self):
        session = connected_session()
        request = sent_request(session)
        line = request.line
        assert reconnect(session) == []
        assert session.data_to_send() == line
        assert session.receive_data(locked(101, "1"), 1.0) == [(request, None, None)]
        assert request.expires_at == 10.0

    def test_was_granted_while_disconnected(self):
        session = connected_session()
        request = sent_request(session)
        assert reconnect(session, locked(101, "1", expiresIn=9500), now=4.0) == [(request, None, None)]
        assert (request.state, request.fence, request.expires_at) == (RequestState.HELD, 7, 13.5)
        assert session.data_to_send() == b""

    def test_was_granted_between_the_resumption_and_the_retry(self):
        session = connected_session()
        request = sent_request(session)
        reconnect(session)
        answers = locked(101, "1") + locked(101, "1", expiresIn=9_000)
        assert session.receive_data(answers, 1.0) == [(request, None, None)]
        assert request.expires_at == 10.0

    @pytest.mark.parametrize(
        ("message", "kind"),
        [
            (released(101, "queue-timeout", "1", waited=5), QueueTimeout),
            (released(101, "deadlock", "1", cycle=["a", "b"]), Deadlock),
            (released(101, "success", "1"), LockError),
            (released(101, "transaction-timeout", "1", held=5), TransactionTimeout),
        ],
    )
    @pytest.mark.parametrize("repeated", [True, False])
    def test_ended_while_disconnected(self, message, kind, repeated):
        session = connected_session()
        request = sent_request(session)
        outcomes = reconnect(session, *([] if repeated else [message]))
        if repeated:
            assert session.data_to_send() == request.line
            outcomes = session.receive_data(message, 0.0)
        [(call, _, why)] = outcomes
        assert call is request
        assert type(why) is kind
        assert session.data_to_send() == b""
        assert reconnect(session, message) == [], "it may come once more"

    @pytest.mark.parametrize("sent", [True, False])
    def test_is_sent_again_if_the_server_does_not_know_it(self, sent):
        session = connected_session()
        request = send_request(session)
        if sent:
            session.data_to_send()
        assert reconnect(session) == []
        assert session.data_to_send() == request.line
        assert reconnect(session) == []
        assert session.data_to_send() == request.line
        assert session.receive_data(locked(101, "1", expiresIn=9500), 1.0) == [(request, None, None)]
        assert request.expires_at == 9.5

    def test_is_queued_while_disconnected(self):
        session = connected_session()
        session.on_disconnected("gone")
        request = send_request(session)
        assert session.data_to_send() == b""
        complete_handshake(session)
        assert session.data_to_send() == request.line

    def test_rejected_as_unavailable_is_sent_to_the_next_server(self):
        session = connected_session()
        request = send_request(session)
        session.data_to_send()
        assert session.receive_data(error("unavailable", ref="1", leader="b:1"), 0.0) == []
        assert session.handshake.redirect == "b:1"
        assert session.handshake.close_reason
        reconnect(session)
        assert session.data_to_send() == request.line


class TestEndedSession:
    def test_held_locks_are_lost_and_released_by_id(self):
        session = connected_session()
        lock = granted_request(session)
        [(call, _, why)] = reconnect(session, resumed=False)
        assert call is lock
        assert type(why) is LockLost
        assert "the session ended" in str(why)
        assert lock.error is why
        assert session.data_to_send() == release(101, "2")
        [(_, reason, _)] = session.receive_data(released(101, "success", "2"), 0.0)
        assert reason == "success"
        assert session.requests.release(lock, 0.0) is None

    def test_waiting_requests_are_reissued_with_the_rest_of_their_queue_timeout(self):
        session = connected_session()
        request = sent_request(session, now=1.0, queue_timeout=10, transaction="t")
        assert reconnect(session, resumed=False, now=4.5) == []
        again = session.data_to_send()
        assert orjson.loads(again)["payload"] == {
            "resources": ["exclusive:a"],
            "queueTimeout": 6500,
            "transactionTimeout": 10000,
            "transactionName": "t",
            "ref": "1",
        }
        reconnect(session, resumed=False, now=20.0)
        assert orjson.loads(session.data_to_send())["payload"]["queueTimeout"] == 0
        assert session.receive_data(locked(301, "1"), 20.0) == [(request, None, None)]

    def test_the_queue_timeout_starts_when_a_request_is_first_sent(self):
        session = connected_session()
        send_request(session, queue_timeout=10)
        session.data_to_send()
        session.on_disconnected("gone")
        send_request(session, queue_timeout=10, now=1.0)
        complete_handshake(session, resumed=False, now=4.0)
        lines = [orjson.loads(line)["payload"] for line in session.data_to_send().splitlines()]
        assert [(line["ref"], line["queueTimeout"]) for line in lines] == [("1", 6000), ("2", 10000)]

    def test_a_pending_release_is_sent_by_id(self):
        session = connected_session()
        lock = granted_request(session)
        left = session.requests.release(lock, 0.0)
        reconnect(session, resumed=False)
        assert session.data_to_send() == release(101, "2")
        assert session.receive_data(error("unknown-id", id=101, ref="2"), 0.0) == [(left, "success", None)]
        assert lock.error is None

    def test_a_release_that_was_never_sent_finds_the_lock_lost(self):
        session = connected_session()
        lock = granted_request(session)
        session.on_disconnected("gone")
        left = session.requests.release(lock, 0.0)
        complete_handshake(session, resumed=False)
        (lost, _, why), (answered, _, refused) = session.receive_data(error("unknown-id", id=101, ref="2"), 0.0)
        assert (lost, answered) == (lock, left)
        assert isinstance(why, LockLost)
        assert isinstance(refused, RequestRejected)

    def test_a_lock_that_timed_out_before_its_release_is_lost(self):
        session = connected_session()
        lock = granted_request(session)
        left = session.requests.release(lock, 0.0)
        reconnect(session, resumed=False)
        outcomes = session.receive_data(released(101, "transaction-timeout", "2"), 0.0)
        assert [outcome[0] for outcome in outcomes] == [lock, left]
        assert isinstance(lock.error, TransactionTimeout)

    def test_a_cancelled_request_has_ended(self):
        session = connected_session()
        request = sent_request(session)
        session.abandon(request, 0.0)
        session.data_to_send()
        reconnect(session, resumed=False)
        assert session.data_to_send() == b""
        assert request.state is RequestState.ENDED

    def test_a_cancelled_request_that_was_granted_is_released_by_id(self):
        session = connected_session()
        request = sent_request(session)
        session.abandon(request, 0.0)
        session.receive_data(locked(101, "1"), 0.0)
        session.data_to_send()
        reconnect(session, resumed=False)
        assert session.data_to_send() == release(101, "2")
        assert session.receive_data(released(101, "success", "2"), 0.0)[0][1] == "success"


class TestHeldLock:
    def test_stays_held_with_the_remaining_time_of_the_server(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        assert reconnect(session, locked(101, "1", expiresIn=20_000), now=5.0) == []
        assert (lock.state, lock.expires_at, session.next_timer) == (RequestState.HELD, 25.0, 10.0)
        assert session.on_timer(10.0) == []
        assert session.next_timer == 25.0

    def test_the_remaining_time_counts_from_hello(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        session.on_disconnected("gone")
        session.on_connected(5.0)
        session.receive_data(welcome(True) + locked(101, "1", expiresIn=20_000), 7.0)
        assert (lock.state, lock.expires_at) == (RequestState.HELD, 25.0)

    def test_may_expire_earlier_than_before_the_reconnect(self):
        session = connected_session()
        granted_request(session, transaction_timeout=10)
        reconnect(session, locked(101, "1", expiresIn=1000), now=5.0)
        assert session.next_timer == 6.0
        [(_, _, why)] = session.on_timer(6.0)
        assert isinstance(why, TransactionTimeout)

    @pytest.mark.parametrize(
        ("reason", "kind"),
        [("transaction-timeout", TransactionTimeout), ("success", LockLost), ("disconnected", Disconnected)],
    )
    def test_was_lost_while_disconnected(self, reason, kind):
        session = connected_session()
        lock = granted_request(session)
        [(call, _, why)] = reconnect(session, released(101, reason, "1"))
        assert session.data_to_send() == b""
        assert call is lock
        assert type(why) is kind

    @pytest.mark.parametrize("answer", [released(101, "success", "2"), error("unknown-id", id=101, ref="2")])
    def test_that_the_server_does_not_report_is_lost_before_it_is_released(self, answer):
        """The server may hold it without a session: then the release lets another client lock the resource."""
        session = connected_session()
        lock = granted_request(session)
        [(call, _, why)] = reconnect(session)
        assert call is lock
        assert isinstance(why, LockLost)
        assert session.data_to_send() == release(101, "2")
        assert [call for call, _, _ in session.receive_data(answer, 0.0)] != [lock]

    def test_that_expired_locally_while_disconnected_is_released(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        session.on_disconnected("gone")
        [(call, _, why)] = session.on_timer(10.0)
        assert call is lock
        assert isinstance(why, TransactionTimeout)
        assert complete_handshake(session, locked(101, "1", expiresIn=3000), now=11.0) == []
        assert session.data_to_send() == release(101, "2")
        [(answered, _, _)] = session.receive_data(released(101, "success", "2"), 11.0)
        assert answered is not lock

    def test_with_a_watchdog_is_extended_after_the_reconnect(self):
        session = connected_session()
        granted_request(session, transaction_timeout=9, watchdog=True)
        session.on_disconnected("gone")
        session.on_timer(3.0)
        complete_handshake(session, locked(101, "1", expiresIn=5000), now=4.0)
        assert session.next_timer == 4.0
        session.on_timer(4.0)
        assert session.data_to_send() == encode("extend", id=101, transactionTimeout=9000, ref="2")

    def test_a_pending_extension_fails_and_the_lock_stays_held(self):
        session = connected_session()
        lock = granted_request(session)
        extend, ping = Extend(lock.id, 5, lock), Ping()
        session.send(extend, 0.0)
        session.send(ping, 0.0)
        outcomes = session.on_disconnected("the cable was cut")
        assert {outcome[0] for outcome in outcomes} == {extend, ping}
        assert all(isinstance(outcome[2], ConnectionLost) for outcome in outcomes)
        assert all("the cable was cut" in str(outcome[2]) for outcome in outcomes)
        assert lock.state is RequestState.HELD


class TestRelease:
    @pytest.mark.parametrize("sent", [True, False])
    def test_is_sent_again_with_the_same_ref_after_a_reconnect(self, sent):
        session = connected_session()
        lock = granted_request(session)
        if not sent:
            session.on_disconnected("gone")
        left = session.requests.release(lock, 0.0)
        if sent:
            assert session.data_to_send() == release(101, "2")
            session.on_disconnected("gone")
        assert complete_handshake(session, locked(101, "1", expiresIn=5000)) == []
        assert session.data_to_send() == release(101, "2")
        assert session.receive_data(released(101, "success", "2"), 0.0) == [(left, "success", None)]
        assert lock.error is None

    @pytest.mark.parametrize("answer", [released(101, "success", "2"), error("unknown-id", id=101, ref="2")])
    def test_executed_before_the_disconnect_is_a_success(self, answer):
        session = connected_session()
        lock = granted_request(session)
        left = session.requests.release(lock, 0.0)
        session.data_to_send()
        reconnect(session)
        assert session.data_to_send() == release(101, "2")
        assert session.receive_data(answer, 0.0) == [(left, "success", None)]
        assert (lock.state, lock.error) == (RequestState.ENDED, None)
        assert not session.requests.live.by_ref

    @pytest.mark.parametrize("resumed", [True, False])
    def test_executed_after_the_lock_timed_out_reports_the_loss(self, resumed):
        session = connected_session()
        lock = granted_request(session)
        left = session.requests.release(lock, 0.0)
        late = released(101, "transaction-timeout", "1")
        outcomes = reconnect(session, *([late] if resumed else []), resumed=resumed)
        outcomes += session.receive_data(released(101, "transaction-timeout", "2"), 0.0)
        assert [outcome[0] for outcome in outcomes] == [lock, left]
        assert isinstance(lock.error, TransactionTimeout)

    def test_of_a_lock_that_timed_out_and_is_unknown_since_reports_the_loss_once(self):
        session = connected_session()
        lock = granted_request(session)
        session.on_disconnected("gone")
        left = session.requests.release(lock, 0.0)
        [(call, _, why)] = complete_handshake(session, released(101, "transaction-timeout", "1"))
        assert call is lock
        assert session.data_to_send() == release(101, "2")
        [(call, _, refused)] = session.receive_data(error("unknown-id", id=101, ref="2"), 0.0)
        assert call is left
        assert isinstance(refused, RequestRejected)
        assert lock.error is why

    def test_by_id_is_sent_before_the_waiting_requests_which_are_sent_again_once(self):
        session = connected_session()
        request, call = sent_request(session), Release(101)
        session.send(call, 0.0)
        session.on_disconnected("gone")
        complete_handshake(session)
        assert session.data_to_send() == release(101, "3") + request.line
        assert session.receive_data(released(101, "success", "3"), 0.0) == [(call, "success", None)]
        assert session.data_to_send() == b""

    def test_of_lost_locks_does_not_repeat_the_waiting_requests(self):
        session = connected_session()
        locks = [granted_request(session, id) for id in (101, 102)]
        request = sent_request(session)
        reconnect(session, resumed=False)
        assert session.data_to_send() == release(101, "4") + release(102, "5") + request.line
        session.receive_data(released(101, "success", "4") + released(102, "success", "5"), 0.0)
        assert session.data_to_send() == b""
        assert all(lock.error is not None for lock in locks)

    def test_of_an_unknown_id_of_another_client_is_rejected_even_after_a_retry(self):
        session = connected_session()
        call = Release(5)
        session.send(call, 0.0)
        reconnect(session)
        [(answered, _, why)] = session.receive_data(error("unknown-id", id=5, ref="1"), 0.0)
        assert answered is call
        assert isinstance(why, RequestRejected)

    def test_rejected_as_unavailable_is_sent_to_the_next_server(self):
        session = connected_session()
        left = session.requests.release(granted_request(session), 0.0)
        session.data_to_send()
        assert session.receive_data(error("unavailable", id=101, ref="2", leader="b:1"), 0.0) == []
        assert session.handshake.close_reason
        assert session.handshake.redirect == "b:1"
        reconnect(session, locked(101, "1", expiresIn=5000))
        assert session.data_to_send() == release(101, "2")
        assert session.receive_data(released(101, "success", "2"), 0.0) == [(left, "success", None)]


CANCEL = b'{"command":"release","payload":{"ref":"1"}}\n'


class TestCancelledRequest:
    def test_that_was_never_sent_is_dropped(self):
        session = connected_session()
        session.on_disconnected("gone")
        request = send_request(session)
        session.abandon(request, 0.0)
        complete_handshake(session)
        assert session.data_to_send() == b""
        assert request.state is RequestState.ENDED

    def test_while_disconnected_is_released_on_the_next_connection(self):
        session = connected_session()
        request = sent_request(session)
        session.on_disconnected("gone")
        session.abandon(request, 0.0)
        complete_handshake(session)
        assert session.data_to_send() == CANCEL
        session.receive_data(released(101, "success", "1"), 0.0)
        assert request.state is RequestState.ENDED

    @pytest.mark.parametrize("answer", [released(101, "success", "1"), error("unknown-id", ref="1")])
    def test_before_a_disconnect_is_released_again(self, answer):
        session = connected_session()
        request = sent_request(session)
        session.abandon(request, 0.0)
        assert session.data_to_send() == CANCEL
        assert reconnect(session) == []
        assert session.data_to_send() == CANCEL
        session.receive_data(answer, 0.0)
        assert (request.state, request.error) == (RequestState.ENDED, None)

    def test_that_was_granted_while_disconnected_is_released(self):
        session = connected_session()
        request = sent_request(session)
        session.on_disconnected("gone")
        session.abandon(request, 0.0)
        assert complete_handshake(session, locked(101, "1", expiresIn=9000)) == []
        assert session.data_to_send() == CANCEL
        session.receive_data(released(101, "success", "1"), 0.0)
        assert (request.state, request.error) == (RequestState.ENDED, None)

    def test_that_ended_while_disconnected_is_not_released(self):
        session = connected_session()
        request = sent_request(session)
        session.abandon(request, 0.0)
        session.data_to_send()
        reconnect(session, released(101, "queue-timeout", "1"))
        assert session.data_to_send() == b""

    def test_of_an_earlier_client_with_this_secret_is_released_when_granted(self):
        session = ClientSession(SECRET)
        assert complete_handshake(session, locked(56, "old-2", expiresIn=100), released(57, "success", "old-3")) == []
        assert session.data_to_send() == b"", "what that client held stays held"
        session.calls.ref_prefix = ""
        assert session.receive_data(locked(55, "old-1"), 0.0) == []
        assert session.data_to_send() == release(55, "1")
        assert session.receive_data(released(55, "success", "1"), 0.0)[0][1] == "success"


class TestResponseTimeout:
    @pytest.mark.parametrize(("queue_timeout", "end"), [(0, 5.0), (20, 25.0)])
    def test_while_disconnected(self, queue_timeout, end):
        session = ClientSession(SECRET, response_timeout=5.0, explain_unavailable=lambda: "no server at b:1")
        request = send_request(session, queue_timeout=queue_timeout)
        assert session.next_timer == end
        assert session.on_timer(end - 0.001) == []
        assert session.next_timer == end
        request.future = Future()
        [(call, _, why)] = session.on_timer(end)
        assert call is request
        assert call.future is not None, "who waits is told"
        assert isinstance(why, Unavailable)
        assert f"within {end:g} s" in str(why)
        assert "no server at b:1" in str(why)
        session.on_timer(end + 1)
        assert session.next_timer == math.inf
        complete_handshake(session)
        assert session.data_to_send() == b""

    def test_with_a_silent_server(self):
        session = connected_session()
        request = send_request(session, queue_timeout=1)
        session.data_to_send()
        assert session.on_timer(1.9) == []
        [(call, _, why)] = session.on_timer(2.0)
        assert call is request
        assert "the server does not answer" in str(why)
        assert session.data_to_send() == CANCEL

    def test_is_not_restarted_by_a_connection_or_by_queued(self):
        session = connected_session()
        request = sent_request(session, queue_timeout=1, now=0.0)
        reconnect(session, now=1.5)
        assert session.data_to_send() == request.line
        session.receive_data(queued(101, "1"), 1.6)
        assert session.on_timer(1.9) == []
        assert session.next_timer == 2.0
        [(call, _, why)] = session.on_timer(2.0)
        assert call is request
        assert isinstance(why, Unavailable)
        assert orjson.loads(session.data_to_send())["payload"]["id"] == 101

    def test_without_a_queue_timeout_is_infinite(self):
        session = connected_session()
        sent_request(session, queue_timeout=None)
        assert session.on_timer(1e9) == []
        assert session.next_timer == math.inf

    def test_does_not_apply_to_held_locks(self):
        session = connected_session()
        granted_request(session, queue_timeout=0, transaction_timeout=100)
        assert session.on_timer(50.0) == []
        assert session.next_timer == 100.0


class TestDeferredCalls:
    """Calls other than requests, while there is no connection."""

    def test_are_sent_on_the_next_connection(self):
        session = connected_session()
        session.on_disconnected("gone")
        ping, extend = Ping(), Extend(101, 5.0)
        session.send(ping, 1.0)
        session.send(extend, 1.0)
        complete_handshake(session, now=2.0)
        assert [orjson.loads(line)["command"] for line in session.data_to_send().splitlines()] == ["ping", "extend"]
        assert extend.sent_at == 2.0

    def test_are_not_sent_once_their_caller_has_given_up(self):
        session = connected_session()
        session.on_disconnected("gone")
        ping = Ping()
        session.send(ping, 1.0)
        session.abandon(ping, 2.0)
        complete_handshake(session, now=3.0)
        assert session.data_to_send() == b""

    def test_are_not_compared_with_each_other_when_their_callers_give_up(self):
        class CountedPing(Ping):
            comparisons = 0
            __hash__ = Ping.__hash__

            def __eq__(self, other: object) -> bool:
                CountedPing.comparisons += 1
                return self is other

        session = connected_session()
        session.on_disconnected("gone")
        pings = [CountedPing() for _ in range(100)]
        for ping in pings:
            session.send(ping, 1.0)
        for ping in reversed(pings):
            session.abandon(ping, 2.0)
        assert CountedPing.comparisons < len(pings)
        assert not session.calls.deferred

    def test_fail_when_the_client_is_closed_or_rejected(self):
        session = ClientSession(SECRET)
        ping, inspect = Ping(), Inspect()
        inspect.future = Future()
        session.send(inspect, 1.0)
        session.handshake.on_round_failed([RequestRejected("unauthorized", "no")])
        [(call, _, why)] = session.fail_callers(2.0)
        assert (call, type(why)) == (inspect, RequestRejected)
        session.send(ping, 3.0)
        [(call, _, why)] = session.finish_close()
        assert (call, type(why)) == (ping, ConnectionLost)

    def test_an_extension_of_a_lock_that_was_lost_meanwhile_is_not_sent(self):
        session = connected_session()
        request = granted_request(session, transaction_timeout=5)
        session.on_disconnected("gone")
        extend = Extend(request.id, 5.0, request)
        session.send(extend, 1.0)
        session.on_timer(5.0)
        session.data_to_send()
        session.on_connected(6.0)
        outcomes = session.receive_data(welcome(True) + PONG, 6.0)
        assert [(call, type(why)) for call, _, why in outcomes] == [(extend, TransactionTimeout)]
        assert b'"extend"' not in session.data_to_send()


class TestClose:
    def test_cancels_waiting_requests_and_keeps_held_locks(self):
        session = connected_session()
        lock, request = granted_request(session), sent_request(session)
        outcomes = session.begin_close(0.0)
        assert [outcome[0] for outcome in outcomes] == [request]
        assert isinstance(outcomes[0][2], ConnectionLost)
        bye = Bye()
        session.send(bye, 0.0)
        assert session.data_to_send() == encode("release", ref="2") + encode("bye", ref="3")
        answers = released(102, "success", "2") + encode("bye", ref="3")
        assert session.receive_data(answers, 0.0)[-1] == (bye, None, None)
        assert session.finish_close() == []
        assert lock.state is RequestState.HELD

    def test_releases_a_lock_granted_during_the_close(self):
        session = connected_session()
        request = sent_request(session)
        session.begin_close(0.0)
        assert session.receive_data(locked(102, "1") + released(102, "success", "1"), 0.0) == [
            (request.release, "success", None)
        ]
        assert request.error is None

    def test_ends_locks_bound_to_the_session_before_the_server_does(self):
        session = connected_session()
        lock = granted_request(session, on_disconnect="release")
        [(lost, _, _)] = session.begin_close(0.0)
        assert lost is lock
        bye = Bye()
        session.send(bye, 0.0)
        answers = session.receive_data(released(101, "disconnected", "1") + encode("bye", ref=bye.ref), 0.0)
        assert answers == [(bye, None, None)]
        assert session.finish_close() == []

    def test_fails_pending_releases(self):
        session = connected_session()
        left = session.requests.release(granted_request(session), 0.0)
        [(call, _, why)] = session.finish_close()
        assert call is left
        assert isinstance(why, ConnectionLost)


class TestLockBoundToTheSession:
    """The session is a lease: each answer renews it, from the sending of the command that was answered."""

    @pytest.mark.parametrize("disconnected", [False, True], ids=["half-open", "disconnected"])
    def test_is_lost_a_session_timeout_after_the_last_answered_command(self, disconnected):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=1000, on_disconnect="release")
        answered = pings_until(session, 4.0)[-1]
        session.receive_data(pong(answered), 5.0)
        if disconnected:
            session.on_disconnected("gone")
        pings_until(session, 13.9)
        assert lock.is_held(13.9)
        assert not lock.is_held(14.0)
        [(call, _, why)] = session.on_timer(14.0)
        assert call is lock
        assert type(why) is Disconnected
        assert "session_timeout" in str(why)

    @pytest.mark.parametrize("disconnected", [False, True], ids=["half-open", "disconnected"])
    def test_that_is_lost_is_released_in_case_the_server_still_holds_it(self, disconnected):
        session = connected_session()
        granted_request(session, transaction_timeout=1000, on_disconnect="release")
        if disconnected:
            session.on_disconnected("gone")
        pings_until(session, 9.9)
        session.data_to_send()
        session.on_timer(10.0)
        if disconnected:
            complete_handshake(session, locked(101, "1", expiresIn=500_000), now=16.0)
        assert b'"command":"release","payload":{"id":101' in session.data_to_send()

    def test_stays_held_when_the_session_is_resumed(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=1000, on_disconnect="release")
        session.on_disconnected("gone")
        complete_handshake(session, locked(101, "1", expiresIn=500_000), now=9.0)
        assert session.on_timer(16.0) == []
        assert lock.is_held(18.9)
        assert not lock.is_held(19.0)

    def test_is_not_kept_by_unsolicited_messages(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=1000, on_disconnect="release")
        other = sent_request(session)
        session.receive_data(locked(102, other.ref), 9.0)
        assert not lock.is_held(10.0)

    def test_is_kept_by_the_answers_to_extensions(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=1000, on_disconnect="release")
        extend = Extend(lock.id, 1000, lock)
        session.send(extend, 6.0)
        session.receive_data(encode("extended", id=lock.id, ref=extend.ref, transactionTimeout=1_000_000), 7.0)
        assert lock.is_held(15.9)
        assert not lock.is_held(16.0)

    @pytest.mark.parametrize(("session_timeout", "interval"), [(30.0, 2.0), (10.0, 2.0), (3.0, 1.0), (0.3, 0.1)])
    def test_is_renewed_by_pings_also_while_messages_arrive(self, session_timeout, interval):
        session = ClientSession(SECRET, session_timeout)
        session.on_connected(0.0)
        session.receive_data(welcome(False) + PONG, 0.0)
        session.data_to_send()
        granted_request(session, transaction_timeout=1000, on_disconnect="release")
        session.data_to_send()
        now = 0.0
        for n in range(1, 4):
            now = n * interval
            session.receive_data(encode("unknown"), now - interval / 2)
            [ping] = pings_until(session, now)
            assert ping.sent_at == pytest.approx(now)
            session.receive_data(pong(ping), now + interval / 4)
        assert session.requests.lease.ends_at == pytest.approx(now + session_timeout)

    def test_is_extended_before_it_counts_as_held_if_the_lease_has_nearly_ended(self):
        session = connected_session()
        lock = sent_request(session, queue_timeout=None, transaction_timeout=1000, on_disconnect="release")
        session.data_to_send()
        assert session.receive_data(locked(101, lock.ref), 6.0) == []
        assert b'"command":"extend","payload":{"id":101' in session.data_to_send()
        [extend] = [call for call in session.calls.pending.values() if isinstance(call, Extend)]
        [(call, _, why), _] = session.receive_data(
            encode("extended", id=101, ref=extend.ref, transactionTimeout=1_000_000), 7.0
        )
        assert (call, why) == (lock, None)
        assert not lock.is_held(16.0)

    def test_no_pings_are_sent_for_locks_that_are_not_bound_to_it(self):
        session = connected_session()
        bound = granted_request(session, on_disconnect="release")
        session.requests.release(bound, 0.0)
        session.data_to_send()
        granted_request(session, transaction_timeout=1000)
        assert pings_until(session, 100.0) == []
        assert session.requests.lease.next_timer == math.inf

    def test_is_lost_when_the_client_is_closed(self):
        session = connected_session()
        lock = granted_request(session, on_disconnect="release")
        [(call, _, why)] = session.begin_close(0.0)
        assert call is lock
        assert type(why) is Disconnected
        assert not lock.is_held(0.0)

    def test_an_unbound_lock_outlives_the_session(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=1000)
        session.on_disconnected("gone")
        assert session.on_timer(15.0) == []
        assert lock.is_held(999.0)
        assert not lock.is_held(1000.0)


class TestDetachedLock:
    """Server: the lock is held. This client: a lock of another client."""

    def test_is_not_released_after_a_disconnect_longer_than_its_timeout(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        session.requests.detach(lock, 1.0)
        assert (lock.state, lock.is_held(1.0)) == (RequestState.DETACHED, False)
        session.on_disconnected("gone")
        assert session.on_timer(10.0) == []
        assert complete_handshake(session, locked(101, "1", expiresIn=100_000), now=11.0) == []
        assert session.on_timer(200.0) == []
        assert session.data_to_send() == b""
        assert lock.error is None

    def test_may_be_detached_while_disconnected(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        session.on_disconnected("gone")
        session.requests.detach(lock, 9.9)
        assert session.on_timer(10.0) == []
        assert complete_handshake(session, locked(101, "1", expiresIn=100_000), now=11.0) == []
        assert session.data_to_send() == b""

    @pytest.mark.parametrize("resumed", [True, False])
    def test_is_not_released_if_the_resumption_does_not_mention_it(self, resumed):
        session = connected_session()
        lock = granted_request(session)
        session.requests.detach(lock, 0.0)
        assert reconnect(session, resumed=resumed) == []
        assert session.data_to_send() == b""
        assert lock.error is None

    @pytest.mark.parametrize("reason", ["success", "transaction-timeout"])
    def test_is_not_reported_as_lost(self, reason):
        session = connected_session()
        lock = granted_request(session)
        session.requests.detach(lock, 0.0)
        assert session.receive_data(released(101, reason, "1"), 0.0) == []
        assert (lock.state, lock.error) == (RequestState.DETACHED, None)

    def test_is_not_extended_by_its_watchdog(self):
        session = connected_session()
        session.requests.detach(granted_request(session, transaction_timeout=9, watchdog=True), 0.0)
        reconnect(session, locked(101, "1", expiresIn=9000))
        session.on_timer(3.0)
        assert session.data_to_send() == b""
        assert session.next_timer == math.inf

    @pytest.mark.parametrize(
        "answer",
        [
            encode("extended", id=101, transactionTimeout=5000, ref="2"),
            released(101, "success", "2"),
            error("unknown-id", id=101, ref="2"),
        ],
    )
    def test_ignores_the_reply_to_a_pending_extension(self, answer):
        session = connected_session()
        lock = granted_request(session)
        extend = Extend(lock.id, 5, lock)
        session.send(extend, 0.0)
        session.data_to_send()
        session.requests.detach(lock, 0.0)
        assert [outcome[0] for outcome in session.receive_data(answer, 1.0)] == [extend]
        assert session.data_to_send() == b""
        assert (lock.state, lock.error) == (RequestState.DETACHED, None)

    def test_is_not_released_when_the_client_is_closed(self):
        session = connected_session()
        lock = granted_request(session)
        session.requests.detach(lock, 0.0)
        assert session.requests.release(lock, 0.0) is None
        assert session.begin_close(0.0) == session.finish_close() == []
        assert session.data_to_send() == b""

    def test_can_be_extended_and_released_by_its_id(self):
        session = connected_session()
        lock = granted_request(session)
        session.requests.detach(lock, 0.0)
        assert session.requests.find_held(101) is None
        extend, release_ = Extend(101, 5), Release(101)
        session.send(extend, 0.0)
        session.send(release_, 0.0)
        answers = encode("extended", id=101, transactionTimeout=5000, ref="2") + released(101, "success", "3")
        assert session.receive_data(answers, 0.0) == [(extend, None, None), (release_, "success", None)]
        assert lock.error is None

    def test_a_second_detach_does_nothing(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        session.requests.detach(lock, 0.0)
        session.requests.detach(lock, 100.0)
        assert lock.state is RequestState.DETACHED

    def test_a_lock_bound_to_the_session_can_not_be_detached(self):
        session = connected_session()
        lock = granted_request(session, on_disconnect="release")
        with pytest.raises(ValueError, match="it ends with the session of this client"):
            session.requests.detach(lock, 0.0)
        assert lock.state is RequestState.HELD

    def test_a_lost_lock_can_not_be_detached(self):
        session = connected_session()
        lock = granted_request(session)
        session.receive_data(released(101, "transaction-timeout", "1"), 0.0)
        with pytest.raises(TransactionTimeout) as caught:
            session.requests.detach(lock, 0.0)
        assert caught.value is not lock.error
        assert lock.state is RequestState.ENDED

    def test_a_locally_expired_lock_can_not_be_detached(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        with pytest.raises(TransactionTimeout):
            session.requests.detach(lock, 10.0)
        assert [outcome[0] for outcome in session.on_timer(10.0)] == [lock]

    @pytest.mark.parametrize("answered", [True, False])
    def test_a_released_lock_can_not_be_detached(self, answered):
        session = connected_session()
        lock = granted_request(session)
        session.requests.release(lock, 0.0)
        if answered:
            session.receive_data(released(101, "success", "2"), 0.0)
        with pytest.raises(LockLost, match="lock 101 was released"):
            session.requests.detach(lock, 0.0)


def test_an_incomplete_line_of_the_old_connection_is_dropped():
    session = connected_session()
    session.receive_data(b'{"command":"po', 0.0)
    reconnect(session)
    ping = Ping()
    session.send(ping, 1.0)
    assert session.receive_data(pong(ping), 1.0) == [(ping, None, None)]


def test_unsent_commands_of_the_old_connection_are_dropped():
    session = connected_session()
    lock = granted_request(session)
    session.send(Extend(lock.id, 5, lock), 0.0)
    session.on_disconnected("gone")
    complete_handshake(session, locked(101, "1", expiresIn=5000))
    assert session.data_to_send() == b""


def test_a_retained_reply_for_an_ended_request_is_ignored():
    session = connected_session()
    lock = granted_request(session)
    session.requests.release(lock, 0.0)
    session.receive_data(released(101, "success", "2"), 0.0)
    session.data_to_send()
    assert reconnect(session, released(101, "success", "1"), locked(101, "1", expiresIn=1)) == []
    assert session.data_to_send() == b""
