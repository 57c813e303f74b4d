"""The client's session on one connection, by literal messages: what is sent, and which call a reply belongs to."""

from __future__ import annotations

import gc
import math

import orjson
import pytest

from genie.client.commands import Bye, Extend, Inspect, Ping, Release, Request, RequestState
from genie.client.requests import MAX_UNKNOWN_GRANTS
from genie.client.session import MAX_LINE_FROM_SERVER, ClientSession
from genie.errors import (
    Blocker,
    CycleStep,
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
    PONG,
    complete_handshake,
    connected_session,
    encode,
    error,
    granted_request,
    locked,
    pong,
    queued,
    release,
    released,
    send_request,
    sent_request,
    welcome,
)


def test_a_request_is_sent_in_milliseconds_and_granted():
    session = connected_session()
    request = send_request(
        session,
        "a",
        "shared:b",
        transaction="t",
        queue_timeout=0.25,
        transaction_timeout=0.0015,
        priority=5,
        on_disconnect="release",
        note="billing@host-7",
    )
    assert session.data_to_send() == (
        b'{"command":"request","payload":{"resources":["exclusive:a","shared:b"],"queueTimeout":250,'
        b'"transactionTimeout":1.5,"priority":5,"onDisconnect":"release","ref":"1","transactionName":"t",'
        b'"note":"billing@host-7"}}\n'
    )
    assert session.data_to_send() == b""
    assert session.receive_data(b'{"command":"locked","payload":{"id":101,"fence":7,"ref":"1"}}\n', 0.0001) == [
        (request, None, None)
    ]
    assert (request.id, request.fence, request.expires_at, request.state) == (101, 7, 0.0015, RequestState.HELD)


def test_a_server_without_quiet_mode_sends_queued_first():
    session = connected_session()
    request = send_request(session, queue_timeout=10)
    assert session.receive_data(queued(101, "1"), 0.5) == []
    assert (request.id, request.state, request.response_deadline) == (101, RequestState.WAITING, 11.0)
    assert session.receive_data(locked(101, "1"), 1.0) == [(request, None, None)]


def test_messages_may_be_split_and_joined():
    session = connected_session()
    first, second = send_request(session), send_request(session)
    data = (
        b'{"command":"locked","payload":{"id":102,"fence":8,"ref":"2"}}\r\n'
        b'{"command":"locked","payload":{"id":101,"fence":9,"ref":"1"}}\n'
    )
    outcomes = [outcome for byte in data for outcome in session.receive_data(bytes([byte]), 0.0)]
    assert outcomes == [(second, None, None), (first, None, None)]


def test_a_queue_timeout_has_the_blockers():
    session = connected_session()
    request = send_request(session)
    [(call, _, error)] = session.receive_data(
        b'{"command":"released","payload":{"id":101,"reason":"queue-timeout","ref":"1","waited":1500,"blockersTotal":12,'
        b'"blockers":[{"id":90,"transactionName":"t","note":"n","traceparent":"00-a","resource":"a","mode":"exclusive","state":"held","since":5}]}}\n',
        0.0,
    )
    assert call is request
    assert isinstance(error, QueueTimeout)
    assert (error.id, error.waited, error.blockers_total) == (101, 1.5, 12)
    assert error.blockers == (Blocker(90, "a", "exclusive", "held", 0.005, "t", "n", "00-a"),)
    assert "90 of 't' (n) holds exclusive:a" in str(error)
    assert request.state is RequestState.ENDED


def test_a_deadlock_names_its_cycle():
    session = connected_session()
    send_request(session)
    waits = [
        {"resource": "a", "waiter": 101, "holder": 90, "note": "n", "traceparent": "00-a"},
        {"resource": "b", "waiter": 90, "holder": 80},
    ]
    [(_, _, error)] = session.receive_data(released(101, "deadlock", "1", cycle=["t1", "t2"], waits=waits), 0.0)
    assert isinstance(error, Deadlock)
    assert (error.cycle, error.waits) == (("t1", "t2"), (CycleStep("a", 101, 90, "n", "00-a"), CycleStep("b", 90, 80)))


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("transaction-timeout", TransactionTimeout),
        ("disconnected", Disconnected),
        ("success", LockLost),
        ("of-tomorrow", LockLost),
    ],
)
def test_an_unsolicited_released_means_that_the_lock_is_lost(reason, kind):
    session = connected_session()
    request = granted_request(session)
    [(call, _, error)] = session.receive_data(released(101, reason, "1"), 0.0)
    assert call is request
    assert type(error) is kind
    assert request.error is error
    assert session.requests.release(request, 0.0) is None
    assert session.requests.find_held(101) is None


@pytest.mark.parametrize("reason", ["success", "disconnected", "of-tomorrow"])
def test_a_waiting_request_ended_by_another_client_is_a_lock_error(reason):
    session = connected_session()
    send_request(session)
    [(_, _, error)] = session.receive_data(released(101, reason, "1"), 0.0)
    assert type(error) is LockError
    assert error.id == 101


class TestRefs:
    def test_all_commands_share_one_counter(self):
        session = connected_session()
        lock = granted_request(session)
        session.send(Ping(), 0.0)
        session.requests.release(lock, 0.0)
        session.send(Inspect(), 0.0)
        send_request(session)
        refs = [orjson.loads(line)["payload"]["ref"] for line in session.data_to_send().splitlines()]
        assert refs == ["2", "3", "4", "5"]

    def test_replies_may_arrive_in_any_order(self):
        session = connected_session()
        first, second, inspect, release_, extend = Ping(), Ping(), Inspect(), Release(55), Extend(56, 5)
        for call in (first, second, inspect, release_, extend):
            session.send(call, 0.0)
        answers = (
            encode("extended", id=56, transactionTimeout=5000, ref=extend.ref)
            + pong(second)
            + released(55, "success", release_.ref)
            + encode("inspected", holders=[], ref=inspect.ref)
            + pong(first)
        )
        outcomes = session.receive_data(answers, 0.0)
        assert [outcome[0] for outcome in outcomes] == [extend, second, release_, inspect, first]

    @pytest.mark.parametrize(
        "message",
        [
            encode("pong", ref="77"),
            encode("pong"),
            encode("inspected", ref="77"),
            encode("extended", id=5, transactionTimeout=1, ref="77"),
            released(5, "success", "77"),
            released(5, "success", None),
            error("bad-request", ref="77"),
            encode("watching", prefix="", held=[], ref="77"),
            encode("bye", ref="77"),
        ],
    )
    def test_replies_with_an_unknown_ref_are_ignored(self, message):
        session = connected_session()
        ping, request = Ping(), send_request(session)
        session.send(ping, 0.0)
        assert session.receive_data(message, 0.0) == []
        assert not session.handshake.close_reason
        assert session.receive_data(pong(ping) + locked(101, request.ref), 0.0) == [
            (ping, None, None),
            (request, None, None),
        ]

    def test_replies_of_another_kind_are_ignored(self):
        session = connected_session()
        ping = Ping()
        session.send(ping, 0.0)
        assert session.receive_data(encode("inspected", holders=[], ref=ping.ref), 0.0) == []
        assert session.receive_data(pong(ping), 0.0) == [(ping, None, None)]

    def test_the_id_of_another_clients_request_does_not_match(self):
        session = connected_session()
        mine, stranger = send_request(session), Release(55)
        session.send(stranger, 0.0)
        assert session.receive_data(released(55, "success", stranger.ref), 0.0) == [(stranger, "success", None)]
        assert mine.state is RequestState.WAITING


class TestRelease:
    def test_leaves_nothing_to_the_garbage_collector(self):
        session = connected_session()

        def lock_and_release() -> None:
            session.requests.release(granted_request(session), 0.0)
            session.data_to_send()
            session.receive_data(released(101, "success", "2"), 0.0)

        gc.collect()
        lock_and_release()
        assert gc.collect() == 0

    def test_it_has_one_outcome(self):
        session = connected_session()
        request = granted_request(session)
        call = session.requests.release(request, 0.0)
        assert session.data_to_send() == b'{"command":"release","payload":{"id":101,"ref":"2"}}\n'
        assert session.requests.release(request, 0.0) is None
        assert session.receive_data(released(101, "success", "2"), 0.0) == [(call, "success", None)]
        assert request.error is None
        assert request.state is RequestState.ENDED

    def test_a_lock_that_times_out_while_it_is_released(self):
        session = connected_session()
        request = granted_request(session)
        release_ = session.requests.release(request, 0.0)
        [(call, _, error)] = session.receive_data(released(101, "transaction-timeout", "1"), 0.0)
        assert call is request
        assert isinstance(error, TransactionTimeout)
        assert session.receive_data(released(101, "transaction-timeout", "2"), 0.0) == [
            (release_, "transaction-timeout", None)
        ]

    def test_the_reply_reveals_that_the_lock_had_ended(self):
        session = connected_session()
        request = granted_request(session)
        release_ = session.requests.release(request, 0.0)
        lost, answer = session.receive_data(released(101, "transaction-timeout", "2"), 0.0)
        assert lost[0] is request
        assert isinstance(lost[2], TransactionTimeout)
        assert answer == (release_, "transaction-timeout", None)

    def test_by_id_of_an_own_lock_ends_it(self):
        session = connected_session()
        request = granted_request(session)
        release_ = Release(101)
        session.send(release_, 0.0)
        assert not request.is_held(0.0), "the server may grant it to another client before the answer arrives"
        lost, answer = session.receive_data(released(101, "success", release_.ref), 0.0)
        assert lost[0] is request
        assert type(lost[2]) is LockLost
        assert answer == (release_, "success", None)

    @pytest.mark.parametrize("inspected", [encode("inspected", queueTotal=1, ref="2"), error("unauthorized", ref="2")])
    def test_by_id_of_an_own_waiting_request_ends_it(self, inspected):
        session = connected_session()
        request, release_ = sent_request(session), Release(101)
        session.send(release_, 0.0)
        query = b'{"command":"inspect","payload":{"id":101,"only":"queue","ref":"2"}}\n'
        assert session.data_to_send() == query + release(101, "3")
        answers = inspected + released(101, "success", "3")
        assert session.receive_data(answers, 0.0)[-1] == (release_, "success", None)
        assert session.data_to_send() == request.line, "it is not known whether that was this request: the server tells"
        [(call, _, why)] = session.receive_data(released(101, "success", request.ref), 0.0)
        assert call is request
        assert type(why) is LockError

    def test_by_id_of_a_request_that_did_not_wait_sends_nothing_again(self):
        session = connected_session()
        sent_request(session)
        release_ = Release(55)
        session.send(release_, 0.0)
        session.data_to_send()
        session.receive_data(encode("inspected", queueTotal=0, ref="2"), 0.0)
        assert session.receive_data(released(55, "success", "3"), 0.0) == [(release_, "success", None)]
        assert session.data_to_send() == b""

    def test_by_ids_that_are_sent_together_sends_the_requests_again_once(self):
        session = connected_session()
        request = sent_request(session)
        for id in (101, 102):
            session.send(Release(id), 0.0)
        session.data_to_send()
        session.receive_data(released(101, "success", "3"), 0.0)
        session.receive_data(released(102, "success", "5"), 0.0)
        assert session.data_to_send() == request.line

    def test_of_a_lock_that_was_not_requested_sends_nothing_again(self):
        session = connected_session()
        sent_request(session)
        session.receive_data(locked(55, "other"), 0.0)
        assert session.data_to_send() == release(55, "2")
        session.receive_data(released(55, "success", "2"), 0.0)
        assert session.data_to_send() == b""

    def test_of_an_unknown_id_is_rejected(self):
        session = connected_session()
        release_ = Release(5)
        session.send(release_, 0.0)
        [(call, _, why)] = session.receive_data(error("unknown-id", id=5, ref="1"), 0.0)
        assert call is release_
        assert isinstance(why, RequestRejected)
        assert (why.code, why.message, why.id) == ("unknown-id", "no", 5)

    def test_of_a_lock_unknown_to_the_server_reports_it_as_lost(self):
        session = connected_session()
        request = granted_request(session)
        release_ = session.requests.release(request, 0.0)
        lost, answer = session.receive_data(error("unknown-id", id=101, ref="2"), 0.0)
        assert (lost[0], answer[0]) == (request, release_)
        assert isinstance(request.error, LockLost)

    def test_without_permission_leaves_the_lock_held(self):
        session = connected_session()
        request = granted_request(session)
        release_ = session.requests.release(request, 0.0)
        [(call, _, why)] = session.receive_data(error("unauthorized", id=101, ref="2"), 0.0)
        assert call is release_
        assert isinstance(why, RequestRejected)
        assert request.state is RequestState.HELD
        assert session.requests.release(request, 0.0) is not None


def extend(id: int, ref: str, timeout_ms: int = 10_000) -> bytes:
    return encode("extend", id=id, transactionTimeout=timeout_ms, ref=ref)


def extended(id: int, ref: str, timeout_ms: int = 10_000) -> bytes:
    return encode("extended", id=id, transactionTimeout=timeout_ms, ref=ref)


def waiting_grant(session: ClientSession, **options: object) -> Request:
    """Return a request that was granted after 50 s, with the `ref` 1. Its extension, with the `ref` 2, has no answer yet."""
    request = sent_request(session, transaction_timeout=10, queue_timeout=60, **options)
    assert session.receive_data(locked(101, "1"), 50.0) == []
    assert session.data_to_send() == extend(101, "2")
    return request


class TestGrant:
    """`locked` may arrive long after the grant, so the timeout counts from when the client sent a command."""

    def test_the_timeout_counts_from_the_time_of_the_request(self):
        session = connected_session()
        lock = sent_request(session, transaction_timeout=10)
        assert session.receive_data(locked(101, "1"), 2.5) == [(lock, None, None)]
        assert (lock.expires_at, session.data_to_send()) == (10.0, b"")

    def test_after_a_long_wait_the_lock_counts_as_held_when_it_is_extended(self):
        session = connected_session()
        lock = sent_request(session, transaction_timeout=10, queue_timeout=60)
        assert session.receive_data(locked(101, "1"), 50.0) == []
        assert (lock.state, session.data_to_send()) == (RequestState.WAITING, extend(101, "2"))
        assert session.receive_data(extended(101, "2"), 51.0)[0] == (lock, None, None)
        assert (lock.state, lock.id, lock.fence, lock.expires_at) == (RequestState.HELD, 101, 7, 60.0)

    def test_an_extension_that_is_answered_too_late_is_repeated(self):
        session = connected_session()
        lock = waiting_grant(session)
        [(call, _, _)] = session.receive_data(extended(101, "2"), 60.0)
        assert call is not lock
        assert session.data_to_send() == extend(101, "3")
        assert session.receive_data(extended(101, "3"), 61.0)[0] == (lock, None, None)
        assert lock.expires_at == 70.0

    def test_the_watchdog_counts_from_the_extension(self):
        session = connected_session()
        lock = waiting_grant(session, watchdog=True)
        session.receive_data(extended(101, "2"), 51.0)
        session.on_timer(53.0)
        assert session.data_to_send() == b""
        session.on_timer(53.4)
        assert session.data_to_send() == extend(101, "3")
        assert lock.state is RequestState.HELD

    @pytest.mark.parametrize(
        "answer", [released(101, "transaction-timeout", "2", held=10_000), error("unknown-id", ref="2", id=101)]
    )
    def test_a_lock_that_ended_before_its_grant_arrived_is_not_returned(self, answer):
        session = connected_session()
        lock = waiting_grant(session)
        (call, _, why), *_ = session.receive_data(answer, 51.0)
        assert call is lock
        assert isinstance(why, LockLost)
        assert lock.state is RequestState.ENDED
        assert session.data_to_send() == b""

    def test_a_rejected_extension_fails_the_request_and_releases_the_lock(self):
        session = connected_session()
        lock = waiting_grant(session)
        [(call, _, why)] = session.receive_data(error("unauthorized", ref="2"), 51.0)
        assert call is lock
        assert isinstance(why, RequestRejected)
        assert session.data_to_send() == release(101, "3")

    def test_cancelled_while_it_is_extended(self):
        session = connected_session()
        lock = waiting_grant(session)
        call = session.requests.release(lock, 50.5)
        assert session.data_to_send() == release(101, "3")
        session.receive_data(extended(101, "2"), 51.0)
        assert session.receive_data(released(101, "success", "3"), 51.0) == [(call, "success", None)]

    def test_released_by_its_id_while_it_is_extended(self):
        session = connected_session()
        lock = waiting_grant(session)
        answers = released(101, "success", "1") + released(101, "success", "2")
        (call, _, why), _ = session.receive_data(answers, 51.0)
        assert call is lock
        assert "a release of its id" in str(why)

    def test_the_answer_to_a_repeated_request_counts_from_the_first_sending(self):
        """The request is repeated after the release of an unknown id, which may be that of the request."""
        session = connected_session()
        lock = sent_request(session, transaction_timeout=10)
        session.send(Release(55), 1.0)
        session.receive_data(released(55, "success", "2"), 2.0)
        session.data_to_send()
        told = locked(101, "1", expiresIn=9_900)
        assert session.receive_data(told, 2.0) == [(lock, None, None)]
        assert lock.expires_at == 9.9

    def test_the_answer_to_a_repeated_request_does_not_change_a_held_lock(self):
        session = connected_session()
        lock = waiting_grant(session)
        session.receive_data(extended(101, "2"), 51.0)
        assert session.receive_data(locked(101, "1", expiresIn=9_900), 51.0) == []
        assert lock.expires_at == 60.0


class TestReconnectDuringTheExtensionOfAGrant:
    @pytest.mark.parametrize(("remaining_ms", "is_extended"), [(9_000, False), (5_000, True), (100, True)])
    def test_the_lock_is_listed(self, remaining_ms, is_extended):
        session = connected_session()
        lock = waiting_grant(session)
        session.on_disconnected("gone")
        session.on_connected(51.0)
        session.data_to_send()
        told = welcome(True) + locked(101, "1", expiresIn=remaining_ms)
        outcomes = session.receive_data(told, 52.0) + session.receive_data(PONG, 52.0)
        if is_extended:
            assert (outcomes, session.data_to_send()) == ([], extend(101, "3"))
            outcomes = session.receive_data(extended(101, "3"), 53.0)[:1]
        assert outcomes == [(lock, None, None)]
        assert session.data_to_send() == b""
        assert (lock.state, lock.expires_at) == (RequestState.HELD, 62.0 if is_extended else 60.0)

    def test_a_late_locked_during_the_resumption_counts_from_hello(self):
        session = connected_session()
        lock = sent_request(session, transaction_timeout=10, queue_timeout=60)
        session.on_disconnected("gone")
        session.on_connected(50.0)
        session.data_to_send()
        assert session.receive_data(welcome(True) + locked(101, "1"), 51.0) == [(lock, None, None)]
        assert lock.expires_at == 60.0

    def test_a_lock_that_is_not_listed_is_requested_again_under_another_id(self):
        session = connected_session()
        lock = waiting_grant(session)
        session.on_disconnected("gone")
        complete_handshake(session, now=51.0)
        assert session.data_to_send() == lock.line
        assert (lock.id, lock.fence) == (0, 0)
        session.requests.release(lock, 52.0)
        assert session.data_to_send() == encode("release", ref="1")

    def test_after_the_end_of_the_session_the_lock_is_released_and_requested_again(self):
        session = connected_session()
        lock = waiting_grant(session)
        session.on_disconnected("gone")
        complete_handshake(session, resumed=False, now=51.0)
        assert session.data_to_send() == release(101, "3") + lock.line
        assert session.receive_data(released(101, "success", "3") + locked(102, "1"), 51.5)[-1] == (lock, None, None)
        assert (lock.id, lock.expires_at) == (102, 61.0)

    def test_after_unavailable_the_lock_is_extended_at_the_next_server(self):
        session = connected_session()
        lock = waiting_grant(session)
        session.receive_data(error("unavailable", ref="2"), 51.0)
        assert session.handshake.close_reason
        session.on_disconnected("gone")
        complete_handshake(session, locked(101, "1", expiresIn=5_000), now=52.0)
        assert session.data_to_send() == extend(101, "3")
        assert session.receive_data(extended(101, "3"), 53.0)[0] == (lock, None, None)


class TestExtend:
    def test_the_expiry_counts_from_the_time_of_sending(self):
        session = connected_session()
        request = granted_request(session, transaction_timeout=10)
        extend = Extend(request.id, 30, request)
        session.send(extend, 4.0)
        assert (
            session.data_to_send()
            == b'{"command":"extend","payload":{"id":101,"transactionTimeout":30000,"ref":"2"}}\n'
        )
        answer = encode("extended", id=101, transactionTimeout=30000, ref="2")
        assert session.receive_data(answer, 5.0) == [(extend, None, None)]
        assert (request.expires_at, request.transaction_timeout) == (34.0, 30)

    def test_of_a_lock_that_timed_out_raises_lock_lost(self):
        session = connected_session()
        request = granted_request(session)
        extend = Extend(request.id, 30, request)
        session.send(extend, 0.0)
        [(call, _, _)] = session.receive_data(released(101, "transaction-timeout", "1", held=5), 0.0)
        assert call is request
        [(call, _, error)] = session.receive_data(released(101, "transaction-timeout", "2"), 0.0)
        assert call is extend
        assert isinstance(error, TransactionTimeout)

    def test_of_a_lock_unknown_to_the_server_raises_lock_lost(self):
        session = connected_session()
        request = granted_request(session)
        extend = Extend(request.id, 30, request)
        session.send(extend, 0.0)
        outcomes = session.receive_data(error("unknown-id", id=101, ref="2"), 0.0)
        assert [outcome[0] for outcome in outcomes] == [request, extend]
        assert all(isinstance(outcome[2], LockLost) for outcome in outcomes)


class TestExtendById:
    def test_of_another_clients_lock_succeeds(self):
        session = connected_session()
        extend = Extend(55, 30)
        session.send(extend, 0.0)
        assert (
            session.data_to_send() == b'{"command":"extend","payload":{"id":55,"transactionTimeout":30000,"ref":"1"}}\n'
        )
        assert session.receive_data(encode("extended", id=55, transactionTimeout=30000, ref="1"), 0.0) == [
            (extend, None, None)
        ]

    @pytest.mark.parametrize(("reason", "kind"), [("success", LockLost), ("transaction-timeout", TransactionTimeout)])
    def test_of_an_ended_lock_raises_lock_lost(self, reason, kind):
        session = connected_session()
        extend = Extend(55, 30)
        session.send(extend, 0.0)
        [(call, _, error)] = session.receive_data(released(55, reason, "1"), 0.0)
        assert call is extend
        assert type(error) is kind
        assert "by its holder" not in str(error)

    def test_of_an_unknown_id_is_rejected(self):
        session = connected_session()
        extend = Extend(55, 30)
        session.send(extend, 0.0)
        [(call, _, why)] = session.receive_data(error("unknown-id", id=55, ref="1"), 0.0)
        assert call is extend
        assert isinstance(why, RequestRejected)

    def test_of_an_own_lock_updates_its_expiry(self):
        session = connected_session()
        request = granted_request(session, transaction_timeout=10)
        assert session.requests.find_held(101) is request
        session.requests.release(request, 0.0)
        assert session.requests.find_held(101) is None
        assert session.requests.find_held(102) is None


class TestAbandon:
    def test_before_the_id_is_known_cancels_by_ref(self):
        session = connected_session()
        request = send_request(session)
        session.data_to_send()
        session.abandon(request, 0.0)
        assert session.data_to_send() == b'{"command":"release","payload":{"ref":"1"}}\n'
        session.receive_data(released(101, "success", "1"), 0.0)
        assert request.state is RequestState.ENDED

    def test_that_crosses_the_grant_releases_the_lock(self):
        session = connected_session()
        request = send_request(session)
        session.abandon(request, 0.0)
        assert session.receive_data(locked(101, "1"), 0.0) == []
        session.receive_data(released(101, "success", "1"), 0.0)
        assert (request.state, request.error) == (RequestState.ENDED, None)

    def test_that_crosses_the_end_ignores_the_second_reply(self):
        session = connected_session()
        request = send_request(session)
        session.abandon(request, 0.0)
        session.receive_data(released(101, "queue-timeout", "1", waited=5), 0.0)
        assert request.state is RequestState.ENDED
        assert session.receive_data(released(101, "queue-timeout", "1"), 0.0) == []
        assert not session.handshake.close_reason

    def test_of_a_rejected_request_ignores_the_second_error(self):
        session = connected_session()
        request = send_request(session)
        session.abandon(request, 0.0)
        outcomes = session.receive_data(error("too-many", ref="1") + error("unknown-id", ref="1"), 0.0)
        assert all(call.future is None for call, _, _ in outcomes)
        assert request.state is RequestState.ENDED
        assert not session.handshake.close_reason

    def test_after_the_grant_releases_by_id(self):
        session = connected_session()
        session.abandon(granted_request(session), 0.0)
        assert session.data_to_send() == release(101, "2")

    def test_of_a_ping_does_not_affect_other_calls(self):
        session = connected_session()
        first, second = Ping(), Ping()
        session.send(first, 0.0)
        session.send(second, 0.0)
        session.abandon(first, 0.0)
        assert session.receive_data(pong(first), 0.0)[0][0] is first
        assert session.receive_data(pong(second), 0.0)[0][0] is second


class TestErrorReplies:
    def test_belong_to_the_command_with_their_ref(self):
        session = connected_session()
        first, second, ping = send_request(session), send_request(session), Ping()
        session.send(ping, 0.0)
        [(call, _, why)] = session.receive_data(error("too-many", ref="2"), 0.0)
        assert call is second
        assert isinstance(why, RequestRejected)
        assert second.state is RequestState.ENDED
        [(call, _, why)] = session.receive_data(error("bad-request", ref=ping.ref), 0.0)
        assert call is ping
        assert first.state is RequestState.WAITING

    def test_of_inspect_with_an_id_do_not_affect_the_release_of_that_id(self):
        session = connected_session()
        inspect, release_ = Inspect(id=5), Release(5)
        session.send(inspect, 0.0)
        session.send(release_, 0.0)
        assert session.receive_data(error("bad-request", ref=inspect.ref), 0.0)[0][0] is inspect
        assert session.receive_data(released(5, "success", release_.ref), 0.0) == [(release_, "success", None)]

    def test_unavailable_fails_a_ping(self):
        session = connected_session()
        ping = Ping()
        session.send(ping, 0.0)
        [(call, _, why)] = session.receive_data(error("unavailable", "no store", ref=ping.ref), 0.0)
        assert call is ping
        assert isinstance(why, Unavailable)
        assert session.handshake.close_reason

    def test_without_a_ref_close_the_connection(self):
        session = connected_session()
        send_request(session)
        session.receive_data(error("line-too-long", "too long"), 0.0)
        assert "line-too-long" in session.handshake.close_reason

    @pytest.mark.parametrize(
        "line",
        [
            b"[]",
            b"{",
            b"\xff",
            b'{"command":[]}',
            b'{"command":"queued","payload":{}}',
            b'{"command":"queued","payload":{"id":9007199254740992,"ref":"1"}}',
            b'{"command":"locked","payload":{"id":-9007199254740992,"fence":1,"ref":"1"}}',
        ],
    )
    def test_an_invalid_line_closes_the_connection_after_the_valid_ones(self, line):
        session = connected_session()
        ping = Ping()
        session.send(ping, 0.0)
        assert session.receive_data(pong(ping) + line + b"\n", 0.0) == [(ping, None, None)]
        assert session.handshake.close_reason

    @pytest.mark.parametrize(
        "fields",
        [
            b'"reason":"insufficient","free":"1e9","locked":"1"',
            b'"reason":"insufficient","free":"%s","locked":"1"' % (b"9" * 4301),
            b'"reason":"queue-timeout","blockers":[{"id":1,"resource":"a","mode":"shared","state":"held","since":%s}]'
            % (b"9" * 400),
        ],
    )
    def test_a_request_whose_end_has_invalid_numbers_waits_for_the_next_connection(self, fields):
        session = connected_session()
        request = sent_request(session)
        ended = b'{"command":"released","payload":{"id":1,"ref":"%s",%s}}\n' % (request.ref.encode(), fields)
        assert session.receive_data(ended, 0.0) == []
        assert "invalid message" in session.handshake.close_reason
        assert request.state is RequestState.WAITING

    def test_an_inspection_with_an_invalid_ref_is_ignored(self):
        session = connected_session()
        ping = Ping()
        session.send(ping, 0.0)
        answer = b'{"command":"inspected","payload":{"ref":[]}}\n'
        assert session.receive_data(answer + pong(ping), 0.0) == [(ping, None, None)]

    def test_unknown_messages_of_a_newer_server_are_ignored(self):
        session = connected_session()
        ping = Ping()
        session.send(ping, 0.0)
        data = b'{"command":"tomorrow","payload":{"x":1}}\n{"command":"pong","payload":{"x":1,"ref":"1"}}\n'
        assert session.receive_data(data, 0.0) == [(ping, None, None)]


def test_inspect_returns_plain_data():
    session = connected_session()
    inspect = Inspect(resource="a:b", transaction="t", id=5, limit=3, only="queue")
    session.send(inspect, 0.0)
    assert session.data_to_send() == (
        b'{"command":"inspect","payload":{"resource":"a:b","transactionName":"t","id":5,"limit":3,"only":"queue","ref":"1"}}\n'
    )
    answer = b'{"command":"inspected","payload":{"holders":[],"ref":"1"}}\n'
    assert session.receive_data(answer, 0.0) == [(inspect, {"holders": []}, None)]


def test_bye_has_an_outcome():
    session = connected_session()
    bye = Bye()
    session.send(bye, 0.0)
    assert session.data_to_send() == b'{"command":"bye","payload":{"ref":"1"}}\n'
    assert session.receive_data(encode("bye", ref="1"), 0.0) == [(bye, None, None)]


class TestTimers:
    def test_released_after_the_local_expiry_is_ignored(self):
        session = connected_session()
        granted_request(session, transaction_timeout=10)
        session.on_timer(10.0)
        assert session.data_to_send() == b"", "it ends at the server as it does here"
        assert session.receive_data(released(101, "transaction-timeout", "1"), 10.0) == []
        assert not session.handshake.close_reason

    def test_a_lock_extended_after_the_local_expiry_is_released(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        extend = Extend(lock.id, 10, lock)
        session.send(extend, 9.9)
        session.data_to_send()
        session.on_timer(10.0)
        answer = encode("extended", id=101, transactionTimeout=10000, ref=extend.ref)
        assert session.receive_data(answer, 10.1) == [(extend, None, None)]
        assert session.data_to_send() == release(101, "3")

    def test_a_lock_that_is_shortened_expires_early_although_no_answer_arrives(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=60)
        session.send(Extend(lock.id, 0.5, lock), 10.0)
        session.data_to_send()
        assert session.next_timer == 10.5
        assert lock.is_held(10.4)
        [(call, _, error)] = session.on_timer(10.5)
        assert call is lock
        assert isinstance(error, TransactionTimeout)
        assert session.data_to_send() == release(101, "3"), "the server may not have executed the extension"

    def test_the_answer_to_an_earlier_extension_does_not_prolong_a_lock_that_is_shortened(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=60)
        longer, shorter = Extend(lock.id, 90, lock), Extend(lock.id, 5, lock)
        session.send(longer, 10.0)
        session.send(shorter, 10.0)
        session.receive_data(encode("extended", id=101, transactionTimeout=90_000, ref=longer.ref), 10.1)
        assert lock.expires_at == 15.0
        session.receive_data(encode("extended", id=101, transactionTimeout=5000, ref=shorter.ref), 10.1)
        assert lock.expires_at == 15.0

    @pytest.mark.parametrize("timeouts", [[90, 65], [90, 65, 90], [90, 80, 65, 70]])
    def test_an_answer_does_not_prolong_a_lock_beyond_extensions_without_an_answer(self, timeouts):
        """The server may execute them, and the connection may end before their answers."""
        session = connected_session()
        lock = granted_request(session, transaction_timeout=60)
        extensions = [Extend(lock.id, timeout, lock) for timeout in timeouts]
        for extension in extensions:
            session.send(extension, 10.0)
        assert lock.expires_at == 60.0
        session.receive_data(encode("extended", id=101, transactionTimeout=90_000, ref=extensions[0].ref), 10.1)
        assert lock.expires_at == 75.0
        session.on_disconnected("gone")
        assert not lock.is_held(75.0)

    def test_a_lock_that_is_shortened_can_be_extended_again(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=60)
        shorter, longer = Extend(lock.id, 5, lock), Extend(lock.id, 90, lock)
        session.send(shorter, 10.0)
        session.send(longer, 11.0)
        session.receive_data(encode("extended", id=101, transactionTimeout=5000, ref=shorter.ref), 11.1)
        session.receive_data(encode("extended", id=101, transactionTimeout=90_000, ref=longer.ref), 11.2)
        assert lock.expires_at == 101.0

    def test_a_lock_expires_on_the_clients_clock(self):
        session = connected_session()
        lock = granted_request(session, now=2.0, transaction_timeout=10)
        assert session.on_timer(11.9) == []
        assert session.next_timer == 12.0
        [(call, _, error)] = session.on_timer(12.0)
        assert call is lock
        assert isinstance(error, TransactionTimeout)

    def test_a_lock_that_is_being_released_does_not_expire(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=10)
        call = session.requests.release(lock, 9.9)
        assert session.on_timer(10.0) == []
        assert session.receive_data(released(101, "success", "2"), 10.1) == [(call, "success", None)]

    def test_the_watchdog_extends_after_each_third_of_the_timeout(self):
        session = connected_session()
        lock = granted_request(session, transaction_timeout=9, watchdog=True)
        assert session.next_timer == 3.0
        assert session.on_timer(3.0) == []
        assert session.data_to_send() == encode("extend", id=101, transactionTimeout=9000, ref="2")
        session.receive_data(encode("extended", id=101, transactionTimeout=9000, ref="2"), 3.1)
        assert lock.expires_at == 12.0
        session.on_timer(6.0)
        assert session.data_to_send() == encode("extend", id=101, transactionTimeout=9000, ref="3")

    def test_a_lock_without_watchdog_is_not_extended(self):
        session = connected_session()
        granted_request(session, transaction_timeout=9)
        assert session.next_timer == 9.0
        session.on_timer(8.9)
        assert session.data_to_send() == b""

    def test_without_locks_there_is_no_timer(self):
        session = connected_session()
        session.requests.release(granted_request(session), 0.0)
        session.receive_data(released(101, "success", "2"), 0.0)
        session.on_timer(20.0)
        assert session.next_timer == math.inf


# -- a server that sends too much ---------------------------------------------------------------------------


def test_the_client_accepts_lines_of_2_mib_and_no_longer_ones():
    assert MAX_LINE_FROM_SERVER == 2 << 20
    session = connected_session()
    assert session.receive_data(b"[" * MAX_LINE_FROM_SERVER, 0.0) == []
    assert session.handshake.close_reason == ""
    session.receive_data(b"[[", 0.0)
    assert session.handshake.close_reason == f"the server sent a line of more than {2 << 20} bytes"


def unknown_grants(first: int, count: int) -> bytes:
    return b"".join(locked(id_, "unknown") for id_ in range(first, first + count))


def test_a_server_that_sends_many_unknown_grants_and_answers_no_release_is_left():
    session = connected_session()
    session.receive_data(unknown_grants(1, MAX_UNKNOWN_GRANTS), 0.0)
    assert session.data_to_send().count(b"\n") == MAX_UNKNOWN_GRANTS
    assert session.handshake.close_reason == ""
    session.receive_data(unknown_grants(100_000, 5_000), 0.0)
    assert (
        session.handshake.close_reason
        == f"the server sent more than {MAX_UNKNOWN_GRANTS} locks that were not requested"
    )
    assert session.data_to_send() == b""
    for _ in range(3):  # the releases are repeated, and no others are added
        session.on_disconnected("closed")
        complete_handshake(session)
        assert session.data_to_send().count(b'"release"') == MAX_UNKNOWN_GRANTS
        session.receive_data(unknown_grants(200_000, 5_000), 0.0)
        assert session.handshake.close_reason
    assert len(session.requests._unknown_grants) == len(session.calls.pending) == MAX_UNKNOWN_GRANTS


def test_unknown_grants_are_released_without_end_if_the_server_answers():
    session = connected_session()
    for first in range(1, 50_000, 500):
        session.receive_data(unknown_grants(first, 500), 0.0)
        commands = [orjson.loads(line)["payload"] for line in session.data_to_send().splitlines()]
        assert len(commands) == 500
        session.receive_data(b"".join(released(each["id"], "success", each["ref"]) for each in commands), 0.0)
    assert session.handshake.close_reason == ""
    assert len(session.requests._unknown_grants) <= MAX_UNKNOWN_GRANTS
