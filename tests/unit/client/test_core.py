"""The core by literal bytes: what goes out, what comes in, and who hears of it."""

from __future__ import annotations

import math

import pytest

from genie.client.calls import Extend, Inspect, Ping, Release, State
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
from talk import ask, connected, held, released


def test_a_request_goes_out_in_milliseconds_and_is_granted():
    core = connected()
    request = ask(core, "a", "shared:b", transaction="t", queue_timeout=0.25, transaction_timeout=0.0015, priority=5)
    assert core.outgoing() == (
        b'{"command":"request","payload":{"resources":["exclusive:a","shared:b"],"queueTimeout":250,'
        b'"transactionTimeout":1.5,"transactionName":"t","priority":5,"ref":"1"}}\n'
    )
    assert core.outgoing() == b""
    assert core.receive(b'{"command":"queued","payload":{"id":101,"ref":"1"}}\n', 1.0) == []
    assert core.receive(b'{"command":"locked","payload":{"id":101,"fence":7,"ref":"1"}}\n', 2.0) == [
        (request, None, None)
    ]
    assert (request.id, request.fence, request.deadline, request.state) == (101, 7, 2.0015, State.HELD)


def test_a_message_may_come_in_pieces_and_several_at_once():
    core = connected()
    first, second = ask(core), ask(core)
    data = (
        b'{"command":"queued","payload":{"id":101,"ref":"1"}}\n{"command":"queued","payload":{"id":102,"ref":"2"}}\r\n'
        b'{"command":"locked","payload":{"id":102,"fence":8,"ref":"2"}}\n'
        b'{"command":"locked","payload":{"id":101,"fence":9,"ref":"1"}}\n'
    )
    outcomes = [outcome for byte in data for outcome in core.receive(bytes([byte]), 0.0)]
    assert outcomes == [(second, None, None), (first, None, None)]


def test_the_ref_of_a_released_is_not_taken_for_ones_own():
    core = connected()
    mine = ask(core)
    stranger = Release(55)
    core.send(stranger, 0.0)
    outcomes = core.receive(b'{"command":"released","payload":{"id":55,"reason":"success","ref":"1"}}\n', 0.0)
    assert outcomes == [(stranger, "success", None)]
    assert mine.state is State.ASKED


def test_a_queue_timeout_says_who_was_in_the_way():
    core = connected()
    request = ask(core)
    [(call, _, error)] = core.receive(
        b'{"command":"queued","payload":{"id":101,"ref":"1"}}\n'
        b'{"command":"released","payload":{"id":101,"reason":"queue-timeout","ref":"1","waited":1500,"blockersTotal":12,'
        b'"blockers":[{"id":90,"transactionName":"t","resource":"a","mode":"exclusive","state":"held","since":5}]}}\n',
        0.0,
    )
    assert call is request
    assert isinstance(error, QueueTimeout)
    assert (error.id, error.waited, error.blockers_total) == (101, 1.5, 12)
    assert error.blockers == (Blocker(90, "a", "exclusive", "held", 0.005, "t"),)
    assert request.state is State.ENDED


def test_a_deadlock_names_its_cycle():
    core = connected()
    ask(core)
    [(_, _, error)] = core.receive(
        b'{"command":"queued","payload":{"id":101,"ref":"1"}}\n'
        b'{"command":"released","payload":{"id":101,"reason":"deadlock","cycle":["t1","t2"],'
        b'"waits":[{"resource":"a","waiter":101,"holder":90}]}}\n',
        0.0,
    )
    assert isinstance(error, Deadlock)
    assert (error.cycle, error.waits) == (("t1", "t2"), (CycleStep("a", 101, 90),))


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("transaction-timeout", TransactionTimeout),
        ("disconnected", Disconnected),
        ("success", LockLost),
        ("of-tomorrow", LockLost),
    ],
)
def test_a_held_lock_that_is_released_unasked_is_lost(reason, kind):
    core = connected()
    request = held(core)
    [(call, _, error)] = core.receive(released(101, reason), 0.0)
    assert call is request
    assert type(error) is kind
    assert request.error is error
    assert core.leave(request, 0.0) is None


@pytest.mark.parametrize("reason", ["success", "disconnected", "of-tomorrow"])
def test_a_waiting_request_that_somebody_ends_is_a_lock_error(reason):
    core = connected()
    ask(core)
    [(_, _, error)] = core.receive(
        b'{"command":"queued","payload":{"id":101,"ref":"1"}}\n' + released(101, reason), 0.0
    )
    assert type(error) is LockError
    assert error.id == 101


class TestRelease:
    def test_is_answered_once(self):
        core = connected()
        request = held(core)
        release = core.leave(request, 0.0)
        assert core.outgoing() == b'{"command":"release","payload":{"id":101}}\n'
        assert core.leave(request, 0.0) is None
        assert core.receive(released(101, "success"), 0.0) == [(release, "success", None)]
        assert request.error is None

    def test_of_a_lock_that_timed_out_at_that_moment_is_answered_by_the_second_released(self):
        core = connected()
        request = held(core)
        release = core.leave(request, 0.0)
        [(call, _, error)] = core.receive(released(101, "transaction-timeout"), 0.0)
        assert call is request
        assert isinstance(error, TransactionTimeout)
        assert core.receive(released(101, "transaction-timeout"), 0.0) == [(release, "transaction-timeout", None)]

    def test_after_somebody_elses_takes_the_first_and_does_not_stumble_over_the_second(self):
        core = connected()
        release = core.leave(held(core), 0.0)
        assert core.receive(released(101, "success") * 2, 0.0) == [(release, "success", None)]
        assert not core.broken

    def test_by_id_of_ones_own_lock_answers_and_loses_it(self):
        core = connected()
        request = held(core)
        release = Release(101)
        core.send(release, 0.0)
        lost, answer = core.receive(released(101, "success"), 0.0)
        assert lost[0] is request
        assert type(lost[2]) is LockLost
        assert answer == (release, "success", None)

    def test_of_an_unknown_id_is_rejected(self):
        core = connected()
        release = Release(5)
        core.send(release, 0.0)
        [(call, _, error)] = core.receive(
            b'{"command":"error","payload":{"code":"unknown-id","message":"no","id":5}}\n', 0.0
        )
        assert call is release
        assert isinstance(error, RequestRejected)
        assert (error.code, error.message, error.id) == ("unknown-id", "no", 5)

    def test_of_a_lock_that_the_server_has_forgotten_finds_it_lost(self):
        core = connected()
        request = held(core)
        release = core.leave(request, 0.0)
        lost, answer = core.receive(
            b'{"command":"error","payload":{"code":"unknown-id","message":"no","id":101}}\n', 0.0
        )
        assert (lost[0], answer[0]) == (request, release)
        assert isinstance(request.error, LockLost)


class TestExtend:
    def test_counts_from_when_it_was_sent(self):
        core = connected()
        request = held(core, transaction_timeout=10)
        extend = Extend(request.id, 30, request)
        core.send(extend, 4.0)
        assert core.outgoing() == b'{"command":"extend","payload":{"id":101,"transactionTimeout":30000}}\n'
        answer = b'{"command":"extended","payload":{"id":101,"transactionTimeout":30000}}\n'
        assert core.receive(answer, 5.0) == [(extend, None, None)]
        assert (request.deadline, request.hold) == (34.0, 30)

    def test_of_a_lock_that_timed_out_is_answered_by_the_second_released(self):
        core = connected()
        request = held(core)
        extend = Extend(request.id, 30, request)
        core.send(extend, 0.0)
        [(call, _, _)] = core.receive(released(101, "transaction-timeout"), 0.0)
        assert call is request
        [(call, _, error)] = core.receive(released(101, "transaction-timeout"), 0.0)
        assert call is extend
        assert isinstance(error, TransactionTimeout)

    def test_before_a_release_and_somebody_elses_release_before_both(self):
        core = connected()
        request = held(core)
        extend = Extend(request.id, 30, request)
        core.send(extend, 0.0)
        release = core.leave(request, 0.0)
        outcomes = core.receive(released(101, "success") * 3, 0.0)
        assert [outcome[0] for outcome in outcomes] == [extend, release]
        assert isinstance(outcomes[0][2], LockLost)
        assert outcomes[1][1] == "success"

    def test_of_a_lock_that_the_server_has_forgotten_is_lost(self):
        core = connected()
        request = held(core)
        extend = Extend(request.id, 30, request)
        core.send(extend, 0.0)
        outcomes = core.receive(b'{"command":"error","payload":{"code":"unknown-id","message":"no","id":101}}\n', 0.0)
        assert [outcome[0] for outcome in outcomes] == [request, extend]
        assert all(isinstance(outcome[2], LockLost) for outcome in outcomes)


class TestExtendById:
    def test_of_another_clients_lock_is_answered(self):
        core = connected()
        extend = Extend(55, 30)
        core.send(extend, 0.0)
        assert core.outgoing() == b'{"command":"extend","payload":{"id":55,"transactionTimeout":30000}}\n'
        answer = b'{"command":"extended","payload":{"id":55,"transactionTimeout":30000}}\n'
        assert core.receive(answer, 0.0) == [(extend, None, None)]

    @pytest.mark.parametrize(("reason", "kind"), [("success", LockLost), ("transaction-timeout", TransactionTimeout)])
    def test_of_what_has_ended_is_lost(self, reason, kind):
        core = connected()
        extend = Extend(55, 30)
        core.send(extend, 0.0)
        [(call, _, error)] = core.receive(released(55, reason), 0.0)
        assert call is extend
        assert type(error) is kind
        assert "by its holder" not in str(error)

    def test_of_an_unknown_id_is_rejected(self):
        core = connected()
        extend = Extend(55, 30)
        core.send(extend, 0.0)
        [(call, _, error)] = core.receive(
            b'{"command":"error","payload":{"code":"unknown-id","message":"no","id":55}}\n', 0.0
        )
        assert call is extend
        assert isinstance(error, RequestRejected)

    def test_of_ones_own_lock_counts(self):
        core = connected()
        request = held(core, transaction_timeout=10)
        assert core.held(101) is request
        core.leave(request, 0.0)
        assert core.held(101) is None
        assert core.held(102) is None


class TestAbandon:
    def test_before_the_id_is_known_releases_when_it_comes(self):
        core = connected()
        request = ask(core)
        core.outgoing()
        core.abandon(request, 0.0)
        assert core.outgoing() == b""
        assert core.owes
        granted = (
            b'{"command":"queued","payload":{"id":101,"ref":"1"}}\n'
            b'{"command":"locked","payload":{"id":101,"fence":7,"ref":"1"}}\n'
        )
        assert core.receive(granted, 0.0) == []
        assert core.outgoing() == b'{"command":"release","payload":{"id":101}}\n'
        assert core.owes
        core.receive(released(101, "success"), 0.0)
        assert not core.owes

    def test_while_it_waits_releases_at_once(self):
        core = connected()
        request = ask(core)
        core.outgoing()
        core.receive(b'{"command":"queued","payload":{"id":101,"ref":"1"}}\n', 0.0)
        core.abandon(request, 0.0)
        assert core.outgoing() == b'{"command":"release","payload":{"id":101}}\n'
        assert core.receive(released(101, "queue-timeout") * 2, 0.0)[0][0] is not request

    def test_after_the_grant_releases_at_once(self):
        core = connected()
        core.abandon(held(core), 0.0)
        assert core.outgoing() == b'{"command":"release","payload":{"id":101}}\n'

    def test_of_a_ping_leaves_its_place_in_the_order(self):
        core = connected()
        first, second = Ping(), Ping()
        core.send(first, 0.0)
        core.send(second, 0.0)
        core.abandon(first, 0.0)
        assert core.receive(b'{"command":"pong","payload":{}}\n', 0.0)[0][0] is first
        assert core.receive(b'{"command":"pong","payload":{}}\n', 0.0)[0][0] is second


class TestErrors:
    def test_with_a_ref_mean_that_request(self):
        core = connected()
        ask(core)
        second = ask(core)
        [(call, _, error)] = core.receive(
            b'{"command":"error","payload":{"code":"too-many","message":"full","ref":"2"}}\n', 0.0
        )
        assert call is second
        assert isinstance(error, RequestRejected)
        assert second.state is State.ENDED

    def test_without_ref_and_id_mean_the_oldest_ping_or_inspection(self):
        core = connected()
        ask(core)
        ping, inspect = Ping(), Inspect(resource="a")
        core.send(ping, 0.0)
        core.send(inspect, 0.0)
        error = b'{"command":"error","payload":{"code":"unavailable","message":"no store"}}\n'
        [(first, _, why)] = core.receive(error, 0.0)
        [(second, _, _)] = core.receive(error, 0.0)
        assert (first, second) == (ping, inspect)
        assert isinstance(why, Unavailable)

    def test_with_an_id_mean_the_older_of_an_inspection_and_a_release(self):
        core = connected()
        inspect, release, other = Inspect(id=5), Release(5), Inspect(id=6)
        for call in (inspect, release, other):
            core.send(call, 0.0)
        error = b'{"command":"error","payload":{"code":"bad-request","message":"no","id":5}}\n'
        assert core.receive(error, 0.0)[0][0] is inspect
        assert core.receive(error, 0.0)[0][0] is release
        assert core.receive(error, 0.0) == []

    def test_that_mean_nobody_in_particular_end_the_connection(self):
        core = connected()
        ask(core)
        core.receive(b'{"command":"error","payload":{"code":"line-too-long","message":"too long"}}\n', 0.0)
        assert "line-too-long" in core.broken

    @pytest.mark.parametrize("line", [b"[]", b"{", b"\xff", b'{"command":[]}', b'{"command":"queued","payload":{}}'])
    def test_what_is_no_message_ends_the_connection_but_what_came_before_counts(self, line):
        core = connected()
        ping = Ping()
        core.send(ping, 0.0)
        outcomes = core.receive(b'{"command":"pong","payload":{}}\n' + line + b"\n", 0.0)
        assert outcomes == [(ping, None, None)]
        assert core.broken

    def test_an_answer_that_nobody_asked_for_ends_the_connection(self):
        core = connected()
        core.send(Inspect(), 0.0)
        core.receive(b'{"command":"pong","payload":{}}\n', 0.0)
        assert core.broken

    def test_what_a_newer_server_says_is_skipped(self):
        core = connected()
        ping = Ping()
        core.send(ping, 0.0)
        data = b'{"command":"tomorrow","payload":{"x":1}}\n{"command":"pong","payload":{"x":1}}\n'
        assert core.receive(data, 0.0) == [(ping, None, None)]


def test_an_inspection_is_answered_with_plain_data():
    core = connected()
    inspect = Inspect(resource="a:b", transaction="t", id=5, limit=3, only="queue")
    core.send(inspect, 0.0)
    assert core.outgoing() == (
        b'{"command":"inspect","payload":{"resource":"a:b","transactionName":"t","id":5,"limit":3,"only":"queue"}}\n'
    )
    answer = b'{"command":"inspected","payload":{"holders":[]}}\n'
    assert core.receive(answer, 0.0) == [(inspect, {"holders": []}, None)]


class TestTime:
    def test_the_servers_word_behind_it_changes_nothing(self):
        core = connected()
        held(core, transaction_timeout=10)
        core.tick(10.0)
        assert core.outgoing() == b"", "it ends at the server as it does here"
        assert core.receive(released(101, "transaction-timeout"), 10.0) == []
        assert not core.broken

    def test_an_extension_that_comes_too_late_is_taken_back(self):
        core = connected()
        lock = held(core, transaction_timeout=10)
        extend = Extend(lock.id, 10, lock)
        core.send(extend, 9.9)
        core.outgoing()
        core.tick(10.0)
        answer = b'{"command":"extended","payload":{"id":101,"transactionTimeout":10000}}\n'
        assert core.receive(answer, 10.1) == [(extend, None, None)]
        assert core.outgoing() == b'{"command":"release","payload":{"id":101}}\n'

    def test_a_hold_ends_by_the_clients_own_clock(self):
        core = connected()
        lock = held(core, now=2.0, transaction_timeout=10)
        assert core.tick(11.9) == []
        assert core.wake == 12.0
        [(call, _, error)] = core.tick(12.0)
        assert call is lock
        assert isinstance(error, TransactionTimeout)

    def test_a_lock_that_is_being_released_is_not_timed(self):
        core = connected()
        lock = held(core, transaction_timeout=10)
        release = core.leave(lock, 9.9)
        assert core.tick(10.0) == []
        assert core.receive(released(101, "success"), 10.1) == [(release, "success", None)]

    def test_the_watchdog_extends_at_each_third(self):
        core = connected()
        lock = held(core, transaction_timeout=9, watchdog=True)
        assert core.wake == 3.0
        assert core.tick(3.0) == []
        extension = b'{"command":"extend","payload":{"id":101,"transactionTimeout":9000}}\n'
        assert core.outgoing() == extension
        core.receive(b'{"command":"extended","payload":{"id":101,"transactionTimeout":9000}}\n', 3.1)
        assert lock.deadline == 12.0
        core.tick(6.0)
        assert core.outgoing() == extension

    def test_a_lock_without_watchdog_is_not_extended(self):
        core = connected()
        held(core, transaction_timeout=9)
        assert core.wake == 9.0
        core.tick(8.9)
        assert core.outgoing() == b""

    def test_there_is_nothing_to_wake_for_when_nothing_is_held(self):
        core = connected()
        core.leave(held(core), 0.0)
        core.receive(released(101, "success"), 0.0)
        core.tick(20.0)
        assert core.wake == math.inf
