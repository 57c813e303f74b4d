"""The core over one connection after the other: what is said again, what is lost, and who hears of it."""

from __future__ import annotations

import math
import re
from concurrent.futures import Future

import orjson
import pytest

from genie.client.commands import Bye, Extend, Ping, Release, State
from genie.client.session import Core
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
from talk import (
    HELLO,
    PING,
    PONG,
    SECRET,
    ask,
    connected,
    cut,
    error,
    greet,
    held,
    locked,
    pong,
    release,
    released,
    say,
    waiting,
    welcome,
)


class TestGreeting:
    def test_is_all_that_is_said_until_the_server_has_told_what_it_knows(self):
        core = Core(SECRET)
        request = ask(core)
        core.connected()
        assert core.outgoing() == HELLO + PING
        assert core.receive(welcome(False), 0.0) == []
        assert core.outgoing() == b""
        assert core.receive(PONG, 0.0) == []
        assert core.outgoing() == request.line

    def test_has_a_secret_of_its_own_where_none_is_given(self):
        secrets = set()
        for _ in range(2):
            core = Core(session_timeout=0.25)
            core.connected()
            payload = orjson.loads(core.outgoing().splitlines()[0])["payload"]
            assert payload["sessionTimeout"] == 250
            secrets.add(payload["session"])
        assert len(secrets) == 2
        assert min(map(len, secrets)) >= 32

    @pytest.mark.parametrize("session", ["x" * 15, "x" * 129, 16 * ("x",), "\ud800" * 16])
    def test_with_what_is_no_secret(self, session):
        with pytest.raises(ValueError, match=r"session|hello") as caught:
            Core(session)
        assert "xxx" not in str(caught.value), "a secret is not for logs"

    @pytest.mark.parametrize("timeout", [0, -1, math.inf, 2_147_484])
    def test_with_a_session_timeout_that_is_none(self, timeout):
        with pytest.raises(ValueError, match="session_timeout"):
            Core(session_timeout=timeout)

    def test_of_a_second_client_with_the_same_secret_has_other_refs(self):
        assert Core(SECRET).ref() != Core(SECRET).ref()

    def test_says_the_namespace_which_the_server_must_confirm(self):
        core = Core(SECRET, namespace="billing")
        request = ask(core)
        core.connected()
        hello = orjson.loads(core.outgoing().splitlines()[0])["payload"]
        assert (hello["session"], hello["sessionTimeout"], hello["namespace"]) == (SECRET, 10_000, "billing")
        for answer in (welcome(False), say("welcome", protocol=1, resumed=False)):
            assert core.receive(answer + PONG, 0.0) == []
            assert "not 'billing'" in core.broken
            assert not core.up
            assert core.elsewhere is None
            assert core.outgoing() == b"", "nothing is asked for elsewhere"
            core.disconnected("gone", 0.0)
            core.connected()
            core.outgoing()
        core.receive(welcome(False, namespace="billing") + PONG, 0.0)
        assert core.up
        assert core.outgoing() == request.line

    def test_says_what_this_client_speaks_and_is(self):
        core = Core(SECRET)
        core.connected()
        hello = orjson.loads(core.outgoing().splitlines()[0])["payload"]
        assert (hello["protocol"], hello["quiet"]) == (1, True)
        assert re.fullmatch(r"genie-python/\d.*", hello["client"])

    def test_is_not_done_with_a_server_of_another_protocol(self):
        core = Core(SECRET)
        core.connected()
        core.receive(welcome(False, protocol=2) + PONG, 0.0)
        assert "protocol 2" in core.broken
        assert not core.up

    @pytest.mark.parametrize("code", ["unauthorized", "unknown-namespace", "unsupported-protocol"])
    def test_that_is_refused_for_good_fails_those_who_wait(self, code):
        core = Core(SECRET)
        request = ask(core)
        core.connected()
        core.receive(error(code, "no", ref="hello", supported=[7]) + error("unavailable", ref="resume"), 0.0)
        assert core.broken
        assert core.denied is not None
        assert core.denied.code == code
        core.disconnected("gone", 0.0)
        [(call, _, why)] = core.deny(0.0)
        assert call is request
        assert isinstance(why, RequestRejected)
        assert why.code == code
        greet(core)
        assert core.denied is None
        assert core.outgoing() == b"", "it was never sent"

    def test_that_is_refused_for_now_is_tried_elsewhere(self):
        core = Core(SECRET)
        ask(core)
        core.connected()
        core.receive(error("unavailable", "no", ref="hello"), 0.0)
        assert core.broken
        assert core.denied is None
        assert core.deny(0.0) == []

    def test_tells_how_long_to_wait_for_messages(self):
        core = Core(SECRET, patience=100.0)
        core.connected()
        core.receive(welcome(False, pingInterval=7000) + PONG, 0.0)
        ask(core, queue_timeout=1000)
        core.outgoing()
        core.tick(6.9)
        assert core.outgoing() == b""
        core.tick(7.0)
        assert orjson.loads(core.outgoing())["command"] == "ping"

    @pytest.mark.parametrize("leader", ["b:1", None])
    def test_that_is_refused_by_a_node_that_does_not_lead(self, leader):
        core = Core()
        core.connected()
        told = error("unavailable", "not the leader", **({} if leader is None else {"leader": leader}))
        assert core.receive(told * 2, 0.0) == []
        assert "not the leader" in core.broken
        assert core.elsewhere == (leader or "")
        assert not core.up
        core.connected()
        assert (core.broken, core.elsewhere) == ("", None)

    def test_that_is_refused_for_another_reason_names_nobody(self):
        core = Core()
        core.connected()
        core.receive(error("bad-request", "what is hello?"), 0.0)
        assert "what is hello?" in core.broken
        assert core.elsewhere is None

    def test_whose_end_is_refused_is_none(self):
        core = Core(SECRET)
        request = ask(core)
        core.connected()
        core.outgoing()
        assert core.receive(welcome(False) + error("unavailable"), 0.0) == []
        assert core.broken
        assert not core.up
        assert core.outgoing() == b""
        core.disconnected("gone", 0.0)
        greet(core)
        assert core.outgoing() == request.line

    @pytest.mark.parametrize("line", [PONG, locked(1, "1"), released(1, "success", "1")])
    def test_that_is_answered_by_something_else_ends_the_connection(self, line):
        core = Core()
        core.connected()
        core.receive(line, 0.0)
        assert core.broken

    def test_lets_what_a_newer_server_says_pass(self):
        core = Core()
        core.connected()
        core.receive(say("tomorrow") + welcome(False) + say("tomorrow") + PONG, 0.0)
        assert core.up

    def test_that_is_cut_short_changes_nothing(self):
        core = connected()
        lock, request = held(core), waiting(core)
        core.disconnected("gone", 0.0)
        core.connected()
        core.outgoing()
        assert core.receive(welcome(True) + locked(101, "1", expiresIn=5000), 0.0) == []
        assert core.disconnected("gone again", 0.0) == []
        assert greet(core, locked(101, "1", expiresIn=5000)) == []
        assert core.outgoing() == request.line
        assert (lock.state, request.state) == (State.HELD, State.ASKED)


class TestWhatWaits:
    def test_is_repeated_and_goes_on_waiting_where_the_server_knows_it(self):
        core = connected()
        request = waiting(core)
        line = request.line
        assert cut(core) == []
        assert core.outgoing() == line
        assert core.receive(locked(101, "1"), 3.0) == [(request, None, None)]
        assert request.deadline == 13.0

    def test_was_granted_meanwhile(self):
        core = connected()
        request = waiting(core)
        assert cut(core, locked(101, "1", expiresIn=2500), now=4.0) == [(request, None, None)]
        assert (request.state, request.fence, request.deadline) == (State.HELD, 7, 6.5)
        assert core.outgoing() == b""

    def test_was_granted_between_the_resume_and_the_repetition(self):
        core = connected()
        request = waiting(core)
        cut(core)
        answers = locked(101, "1") + locked(101, "1", expiresIn=9_000)
        assert core.receive(answers, 1.0) == [(request, None, None)]
        assert request.deadline == 10.0

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
    def test_ended_meanwhile(self, message, kind, repeated):
        core = connected()
        request = waiting(core)
        outcomes = cut(core, *([] if repeated else [message]))
        if repeated:
            assert core.outgoing() == request.line
            outcomes = core.receive(message, 0.0)
        [(call, _, why)] = outcomes
        assert call is request
        assert type(why) is kind
        assert core.outgoing() == b""
        assert cut(core, message) == [], "it may come once more"

    @pytest.mark.parametrize("sent", [True, False])
    def test_is_sent_again_if_it_did_not_arrive(self, sent):
        core = connected()
        request = ask(core)
        if sent:
            core.outgoing()
        assert cut(core) == []
        assert core.outgoing() == request.line
        assert cut(core) == []
        assert core.outgoing() == request.line
        assert core.receive(locked(101, "1", expiresIn=2500), 1.0) == [(request, None, None)]
        assert request.deadline == 3.5

    def test_is_asked_for_without_a_connection_too(self):
        core = connected()
        core.disconnected("gone", 0.0)
        request = ask(core)
        assert core.outgoing() == b""
        greet(core)
        assert core.outgoing() == request.line

    def test_and_that_a_server_could_not_take_up_is_sent_to_the_next(self):
        core = connected()
        request = ask(core)
        core.outgoing()
        assert core.receive(error("unavailable", ref="1", leader="b:1"), 0.0) == []
        assert core.elsewhere == "b:1"
        assert core.broken
        cut(core)
        assert core.outgoing() == request.line


class TestASessionThatEnded:
    def test_loses_what_was_held_and_gives_it_back(self):
        core = connected()
        lock = held(core)
        [(call, _, why)] = cut(core, resumed=False)
        assert call is lock
        assert type(why) is LockLost
        assert "the session ended" in str(why)
        assert lock.error is why
        assert core.outgoing() == release(101, "2")
        [(_, reason, _)] = core.receive(released(101, "success", "2"), 0.0)
        assert reason == "success"
        assert core.leave(lock, 0.0) is None

    def test_asks_again_for_the_rest_of_the_wait(self):
        core = connected()
        request = waiting(core, now=1.0, queue_timeout=10, transaction="t")
        assert cut(core, resumed=False, now=4.5) == []
        again = core.outgoing()
        assert orjson.loads(again)["payload"] == {
            "resources": ["exclusive:a"],
            "queueTimeout": 6500,
            "transactionTimeout": 10000,
            "transactionName": "t",
            "ref": "1",
        }
        cut(core, resumed=False, now=20.0)
        assert orjson.loads(core.outgoing())["payload"]["queueTimeout"] == 0
        assert core.receive(locked(301, "1"), 20.0) == [(request, None, None)]

    def test_counts_the_wait_of_what_was_not_sent_from_then_on(self):
        core = connected()
        ask(core, queue_timeout=10)
        core.outgoing()
        core.disconnected("gone", 0.0)
        ask(core, queue_timeout=10, now=1.0)
        greet(core, resumed=False, now=4.0)
        lines = [orjson.loads(line)["payload"] for line in core.outgoing().splitlines()]
        assert [(line["ref"], line["queueTimeout"]) for line in lines] == [("1", 6000), ("2", 10000)]

    def test_still_releases_what_was_to_be_released(self):
        core = connected()
        lock = held(core)
        left = core.leave(lock, 0.0)
        cut(core, resumed=False)
        assert core.outgoing() == release(101, "2")
        assert core.receive(error("unknown-id", id=101, ref="2"), 0.0) == [(left, "success", None)]
        assert lock.error is None

    def test_lost_a_lock_that_was_to_be_released_but_could_not(self):
        core = connected()
        lock = held(core)
        core.disconnected("gone", 0.0)
        left = core.leave(lock, 0.0)
        greet(core, resumed=False)
        (lost, _, why), (answered, _, refused) = core.receive(error("unknown-id", id=101, ref="2"), 0.0)
        assert (lost, answered) == (lock, left)
        assert isinstance(why, LockLost)
        assert isinstance(refused, RequestRejected)

    def test_lost_a_lock_that_had_timed_out_before_it_was_released(self):
        core = connected()
        lock = held(core)
        left = core.leave(lock, 0.0)
        cut(core, resumed=False)
        outcomes = core.receive(released(101, "transaction-timeout", "2"), 0.0)
        assert [outcome[0] for outcome in outcomes] == [lock, left]
        assert isinstance(lock.error, TransactionTimeout)

    def test_ended_what_was_cancelled(self):
        core = connected()
        request = waiting(core)
        core.abandon(request, 0.0)
        core.outgoing()
        cut(core, resumed=False)
        assert core.outgoing() == b""
        assert request.state is State.ENDED

    def test_keeps_a_cancelled_request_that_was_granted_from_staying_locked(self):
        core = connected()
        request = waiting(core)
        core.abandon(request, 0.0)
        core.receive(locked(101, "1"), 0.0)
        core.outgoing()
        cut(core, resumed=False)
        assert core.outgoing() == release(101, "2")
        assert core.receive(released(101, "success", "2"), 0.0)[0][1] == "success"


class TestWhatIsHeld:
    def test_stays_so_and_ends_when_the_server_says(self):
        core = connected()
        lock = held(core, transaction_timeout=10)
        assert cut(core, locked(101, "1", expiresIn=20_000), now=5.0) == []
        assert (lock.state, lock.deadline, core.wake) == (State.HELD, 25.0, 10.0)
        assert core.tick(10.0) == []
        assert core.wake == 25.0

    def test_may_end_sooner_than_was_thought(self):
        core = connected()
        held(core, transaction_timeout=10)
        cut(core, locked(101, "1", expiresIn=1000), now=5.0)
        assert core.wake == 6.0
        [(_, _, why)] = core.tick(6.0)
        assert isinstance(why, TransactionTimeout)

    @pytest.mark.parametrize(
        ("reason", "kind"),
        [("transaction-timeout", TransactionTimeout), ("success", LockLost), ("disconnected", Disconnected)],
    )
    @pytest.mark.parametrize("mentioned", [True, False])
    def test_was_lost_meanwhile(self, reason, kind, mentioned):
        core = connected()
        lock = held(core)
        if mentioned:
            outcomes = cut(core, released(101, reason, "1"))
        else:
            assert cut(core) == []
            assert core.outgoing() == release(101, "2")
            outcomes = core.receive(released(101, reason, "2"), 0.0)[:1]
        assert core.outgoing() == b""
        [(call, _, why)] = outcomes
        assert call is lock
        assert type(why) is kind

    def test_and_that_the_server_has_forgotten_is_lost(self):
        core = connected()
        lock = held(core)
        cut(core)
        (call, _, why), _ = core.receive(error("unknown-id", id=101, ref="2"), 0.0)
        assert call is lock
        assert isinstance(why, LockLost)

    def test_and_lost_by_the_clients_clock_while_there_was_no_connection_is_given_back(self):
        core = connected()
        lock = held(core, transaction_timeout=10)
        core.disconnected("gone", 0.0)
        [(call, _, why)] = core.tick(10.0)
        assert call is lock
        assert isinstance(why, TransactionTimeout)
        assert greet(core, locked(101, "1", expiresIn=3000), now=11.0) == []
        assert core.outgoing() == release(101, "2")
        [(answered, _, _)] = core.receive(released(101, "success", "2"), 11.0)
        assert answered is not lock

    def test_and_has_a_watchdog_is_extended_at_once(self):
        core = connected()
        held(core, transaction_timeout=9, watchdog=True)
        core.disconnected("gone", 0.0)
        core.tick(3.0)
        greet(core, locked(101, "1", expiresIn=5000), now=4.0)
        assert core.wake == 4.0
        core.tick(4.0)
        assert core.outgoing() == say("extend", id=101, transactionTimeout=9000, ref="2")

    def test_fails_an_extension_on_its_way_and_no_more(self):
        core = connected()
        lock = held(core)
        extend, ping = Extend(lock.id, 5, lock), Ping()
        core.send(extend, 0.0)
        core.send(ping, 0.0)
        outcomes = core.disconnected("the cable was cut", 0.0)
        assert {outcome[0] for outcome in outcomes} == {extend, ping}
        assert all(isinstance(outcome[2], ConnectionLost) for outcome in outcomes)
        assert all("the cable was cut" in str(outcome[2]) for outcome in outcomes)
        assert lock.state is State.HELD


class TestARelease:
    @pytest.mark.parametrize("sent", [True, False])
    def test_is_sent_again_with_the_same_ref(self, sent):
        core = connected()
        lock = held(core)
        if not sent:
            core.disconnected("gone", 0.0)
        left = core.leave(lock, 0.0)
        if sent:
            assert core.outgoing() == release(101, "2")
            core.disconnected("gone", 0.0)
        assert greet(core, locked(101, "1", expiresIn=5000)) == []
        assert core.outgoing() == release(101, "2")
        assert core.receive(released(101, "success", "2"), 0.0) == [(left, "success", None)]
        assert lock.error is None

    @pytest.mark.parametrize("answer", [released(101, "success", "2"), error("unknown-id", id=101, ref="2")])
    def test_that_was_carried_out_before_the_cut_is_no_loss(self, answer):
        core = connected()
        lock = held(core)
        left = core.leave(lock, 0.0)
        core.outgoing()
        cut(core)
        assert core.outgoing() == release(101, "2")
        assert core.receive(answer, 0.0) == [(left, "success", None)]
        assert (lock.state, lock.error) == (State.ENDED, None)
        assert not core._requests.living

    @pytest.mark.parametrize("resumed", [True, False])
    def test_that_came_too_late_does_not_undo_the_loss(self, resumed):
        core = connected()
        lock = held(core)
        left = core.leave(lock, 0.0)
        late = released(101, "transaction-timeout", "1")
        outcomes = cut(core, *([late] if resumed else []), resumed=resumed)
        outcomes += core.receive(released(101, "transaction-timeout", "2"), 0.0)
        assert [outcome[0] for outcome in outcomes] == [lock, left]
        assert isinstance(lock.error, TransactionTimeout)

    def test_of_a_lock_that_timed_out_and_is_forgotten_since_finds_it_lost_once(self):
        core = connected()
        lock = held(core)
        core.disconnected("gone", 0.0)
        left = core.leave(lock, 0.0)
        [(call, _, why)] = greet(core, released(101, "transaction-timeout", "1"))
        assert call is lock
        assert core.outgoing() == release(101, "2")
        [(call, _, refused)] = core.receive(error("unknown-id", id=101, ref="2"), 0.0)
        assert call is left
        assert isinstance(refused, RequestRejected)
        assert lock.error is why

    def test_of_another_clients_id_that_is_unknown_is_rejected_also_when_it_is_repeated(self):
        core = connected()
        call = Release(5)
        core.send(call, 0.0)
        cut(core)
        [(answered, _, why)] = core.receive(error("unknown-id", id=5, ref="1"), 0.0)
        assert answered is call
        assert isinstance(why, RequestRejected)

    def test_that_a_server_could_not_take_up_is_sent_to_the_next(self):
        core = connected()
        left = core.leave(held(core), 0.0)
        core.outgoing()
        assert core.receive(error("unavailable", id=101, ref="2", leader="b:1"), 0.0) == []
        assert core.broken
        assert core.elsewhere == "b:1"
        cut(core, locked(101, "1", expiresIn=5000))
        assert core.outgoing() == release(101, "2")
        assert core.receive(released(101, "success", "2"), 0.0) == [(left, "success", None)]


CANCEL = b'{"command":"release","payload":{"ref":"1"}}\n'


class TestWhatIsCancelled:
    def test_and_never_was_sent_is_forgotten(self):
        core = connected()
        core.disconnected("gone", 0.0)
        request = ask(core)
        core.abandon(request, 0.0)
        greet(core)
        assert core.outgoing() == b""
        assert request.state is State.ENDED

    def test_without_a_connection_is_released_on_the_next_one(self):
        core = connected()
        request = waiting(core)
        core.disconnected("gone", 0.0)
        core.abandon(request, 0.0)
        greet(core)
        assert core.outgoing() == CANCEL
        core.receive(released(101, "success", "1"), 0.0)
        assert request.state is State.ENDED

    @pytest.mark.parametrize("answer", [released(101, "success", "1"), error("unknown-id", ref="1")])
    def test_before_a_cut_is_released_again(self, answer):
        core = connected()
        request = waiting(core)
        core.abandon(request, 0.0)
        assert core.outgoing() == CANCEL
        assert cut(core) == []
        assert core.outgoing() == CANCEL
        core.receive(answer, 0.0)
        assert (request.state, request.error) == (State.ENDED, None)

    def test_and_was_granted_meanwhile_is_given_back(self):
        core = connected()
        request = waiting(core)
        core.disconnected("gone", 0.0)
        core.abandon(request, 0.0)
        assert greet(core, locked(101, "1", expiresIn=9000)) == []
        assert core.outgoing() == CANCEL
        core.receive(released(101, "success", "1"), 0.0)
        assert (request.state, request.error) == (State.ENDED, None)

    def test_and_has_ended_is_not(self):
        core = connected()
        request = waiting(core)
        core.abandon(request, 0.0)
        core.outgoing()
        cut(core, released(101, "queue-timeout", "1"))
        assert core.outgoing() == b""

    def test_and_is_of_an_earlier_client_with_this_secret_is_released_when_it_is_granted(self):
        core = Core(SECRET)
        assert greet(core, locked(56, "old-2", expiresIn=100), released(57, "success", "old-3")) == []
        assert core.outgoing() == b"", "what that client held stays held"
        core._life = ""
        assert core.receive(locked(55, "old-1"), 0.0) == []
        assert core.outgoing() == release(55, "1")
        assert core.receive(released(55, "success", "1"), 0.0)[0][1] == "success"


class TestPatience:
    @pytest.mark.parametrize(("queue_timeout", "end"), [(0, 5.0), (20, 25.0)])
    def test_ends_when_no_server_comes_back(self, queue_timeout, end):
        core = Core(SECRET, patience=5.0)
        core.trouble = lambda: "no server at b:1"
        request = ask(core, queue_timeout=queue_timeout)
        assert core.wake == end
        assert core.tick(end - 0.001) == []
        assert core.wake == end
        request.waiter = Future()
        [(call, _, why)] = core.tick(end)
        assert call is request
        assert call.waiter is not None, "who waits is told"
        assert isinstance(why, Unavailable)
        assert f"within {end:g} s" in str(why)
        assert "no server at b:1" in str(why)
        core.tick(end + 1)
        assert core.wake == math.inf
        greet(core)
        assert core.outgoing() == b""

    def test_ends_with_a_server_that_does_not_answer(self):
        core = connected()
        request = ask(core, queue_timeout=1)
        core.outgoing()
        [(call, _, why)] = core.tick(11.0)
        assert call is request
        assert "the server does not answer" in str(why)
        assert core.outgoing() == CANCEL

    def test_counts_from_the_last_connection(self):
        core = connected()
        request = waiting(core, queue_timeout=1, now=0.0)
        cut(core, now=8.0)
        assert core.outgoing() == request.line
        assert core.tick(11.0) == []
        assert core.wake == 19.0
        [(call, _, why)] = core.tick(19.0)
        assert call is request
        assert isinstance(why, Unavailable)
        assert core.outgoing() == CANCEL

    def test_has_no_end_where_the_wait_has_none(self):
        core = connected()
        waiting(core, queue_timeout=None)
        assert core.tick(1e9) == []
        assert core.wake == math.inf

    def test_is_not_for_locks_that_are_held(self):
        core = connected()
        held(core, queue_timeout=0, transaction_timeout=100)
        assert core.tick(50.0) == []
        assert core.wake == 100.0


class TestClosing:
    def test_gives_back_what_waits_and_keeps_what_is_held(self):
        core = connected()
        lock, request = held(core), waiting(core)
        outcomes = core.closing(0.0)
        assert [outcome[0] for outcome in outcomes] == [request]
        assert isinstance(outcomes[0][2], ConnectionLost)
        bye = Bye()
        core.send(bye, 0.0)
        assert core.outgoing() == say("release", ref="2") + say("bye", ref="3")
        answers = released(102, "success", "2") + say("bye", ref="3")
        assert core.receive(answers, 0.0)[-1] == (bye, None, None)
        assert core.closed(0.0) == []
        assert lock.state is State.HELD

    def test_gives_back_what_is_granted_at_that_moment(self):
        core = connected()
        request = waiting(core)
        core.closing(0.0)
        assert core.receive(locked(102, "1") + released(102, "success", "1"), 0.0) == [
            (request.release, "success", None)
        ]
        assert request.error is None

    def test_ends_what_is_bound_to_the_session(self):
        core = connected()
        lock = held(core, on_disconnect="release")
        core.closing(0.0)
        bye = Bye()
        core.send(bye, 0.0)
        lost, answer = core.receive(released(101, "disconnected", "1") + say("bye", ref=bye.ref), 0.0)
        assert lost[0] is lock
        assert type(lock.error) is Disconnected
        assert answer == (bye, None, None)
        assert core.closed(0.0) == []

    def test_ends_releases_too(self):
        core = connected()
        left = core.leave(held(core), 0.0)
        [(call, _, why)] = core.closed(0.0)
        assert call is left
        assert isinstance(why, ConnectionLost)


class TestALockThatIsBoundToTheSession:
    def test_is_lost_when_there_was_no_connection_for_the_sessions_timeout(self):
        core = connected()
        lock = held(core, transaction_timeout=1000, on_disconnect="release")
        core.disconnected("gone", 5.0)
        assert core.tick(14.9) == []
        assert lock.held(14.9)
        assert core.wake == 15.0
        assert not lock.held(15.0)
        [(call, _, why)] = core.tick(15.0)
        assert call is lock
        assert type(why) is Disconnected
        assert "session_timeout" in str(why)

    def test_is_given_back_where_the_server_has_kept_it_for_longer(self):
        core = connected()
        held(core, transaction_timeout=1000, on_disconnect="release")
        core.disconnected("gone", 5.0)
        core.tick(15.0)
        greet(core, locked(101, "1", expiresIn=500_000), now=16.0)
        assert core.outgoing() == release(101, "2")

    def test_is_held_on_when_the_session_is_resumed(self):
        core = connected()
        lock = held(core, transaction_timeout=1000, on_disconnect="release")
        core.disconnected("gone", 5.0)
        greet(core, locked(101, "1", expiresIn=500_000), now=14.0)
        assert core.tick(16.0) == []
        assert lock.held(500.0)

    def test_ends_with_the_client(self):
        core = connected()
        lock = held(core, on_disconnect="release")
        core.closing(0.0)
        [(call, _, why)] = core.closed(0.0)
        assert call is lock
        assert type(why) is Disconnected
        assert not lock.held(0.0)

    def test_and_one_that_is_not_outlives_the_session(self):
        core = connected()
        lock = held(core, transaction_timeout=1000)
        core.disconnected("gone", 5.0)
        assert core.tick(15.0) == []
        assert lock.held(999.0)
        assert not lock.held(1000.0)


class TestADetachedLock:
    """Server: the lock is held. This client: a lock of another client."""

    def test_is_not_released_after_a_cut_that_outlasts_its_hold(self):
        core = connected()
        lock = held(core, transaction_timeout=10)
        core.detach(lock, 1.0)
        assert (lock.state, lock.held(1.0)) == (State.DETACHED, False)
        core.disconnected("gone", 2.0)
        assert core.tick(10.0) == []
        assert greet(core, locked(101, "1", expiresIn=100_000), now=11.0) == []
        assert core.tick(200.0) == []
        assert core.outgoing() == b""
        assert lock.error is None

    def test_may_be_detached_while_there_is_no_connection(self):
        core = connected()
        lock = held(core, transaction_timeout=10)
        core.disconnected("gone", 2.0)
        core.detach(lock, 9.9)
        assert core.tick(10.0) == []
        assert greet(core, locked(101, "1", expiresIn=100_000), now=11.0) == []
        assert core.outgoing() == b""

    @pytest.mark.parametrize("resumed", [True, False])
    def test_is_not_released_where_the_server_does_not_mention_it(self, resumed):
        core = connected()
        lock = held(core)
        core.detach(lock, 0.0)
        assert cut(core, resumed=resumed) == []
        assert core.outgoing() == b""
        assert lock.error is None

    @pytest.mark.parametrize("reason", ["success", "transaction-timeout"])
    def test_is_not_reported_as_lost(self, reason):
        core = connected()
        lock = held(core)
        core.detach(lock, 0.0)
        assert core.receive(released(101, reason, "1"), 0.0) == []
        assert (lock.state, lock.error) == (State.DETACHED, None)

    def test_is_not_extended_by_its_watchdog(self):
        core = connected()
        core.detach(held(core, transaction_timeout=9, watchdog=True), 0.0)
        cut(core, locked(101, "1", expiresIn=9000))
        core.tick(3.0)
        assert core.outgoing() == b""
        assert core.wake == math.inf

    @pytest.mark.parametrize(
        "answer",
        [
            say("extended", id=101, transactionTimeout=5000, ref="2"),
            released(101, "success", "2"),
            error("unknown-id", id=101, ref="2"),
        ],
    )
    def test_ignores_the_answer_to_an_extension_that_was_on_its_way(self, answer):
        core = connected()
        lock = held(core)
        extend = Extend(lock.id, 5, lock)
        core.send(extend, 0.0)
        core.outgoing()
        core.detach(lock, 0.0)
        assert [outcome[0] for outcome in core.receive(answer, 1.0)] == [extend]
        assert core.outgoing() == b""
        assert (lock.state, lock.error) == (State.DETACHED, None)

    def test_is_not_released_with_the_client(self):
        core = connected()
        lock = held(core)
        core.detach(lock, 0.0)
        assert core.leave(lock, 0.0) is None
        assert core.closing(0.0) == core.closed(0.0) == []
        assert core.outgoing() == b""

    def test_is_extended_and_released_by_its_id_like_a_lock_of_another_client(self):
        core = connected()
        lock = held(core)
        core.detach(lock, 0.0)
        assert core.held(101) is None
        extend, release_ = Extend(101, 5), Release(101)
        core.send(extend, 0.0)
        core.send(release_, 0.0)
        answers = say("extended", id=101, transactionTimeout=5000, ref="2") + released(101, "success", "3")
        assert core.receive(answers, 0.0) == [(extend, None, None), (release_, "success", None)]
        assert lock.error is None

    def test_is_detached_once(self):
        core = connected()
        lock = held(core, transaction_timeout=10)
        core.detach(lock, 0.0)
        core.detach(lock, 100.0)
        assert lock.state is State.DETACHED

    def test_is_none_that_ends_with_the_session(self):
        core = connected()
        lock = held(core, on_disconnect="release")
        with pytest.raises(ValueError, match="it ends with the session of this client"):
            core.detach(lock, 0.0)
        assert lock.state is State.HELD

    def test_is_none_that_was_lost_before(self):
        core = connected()
        lock = held(core)
        core.receive(released(101, "transaction-timeout", "1"), 0.0)
        with pytest.raises(TransactionTimeout) as caught:
            core.detach(lock, 0.0)
        assert caught.value is not lock.error
        assert lock.state is State.ENDED

    def test_is_none_that_has_outlived_its_hold_by_this_clients_clock(self):
        core = connected()
        lock = held(core, transaction_timeout=10)
        with pytest.raises(TransactionTimeout):
            core.detach(lock, 10.0)
        assert [outcome[0] for outcome in core.tick(10.0)] == [lock]

    @pytest.mark.parametrize("answered", [True, False])
    def test_is_none_that_was_released(self, answered):
        core = connected()
        lock = held(core)
        core.leave(lock, 0.0)
        if answered:
            core.receive(released(101, "success", "2"), 0.0)
        with pytest.raises(LockLost, match="lock 101 was released"):
            core.detach(lock, 0.0)


def test_half_a_line_of_the_old_connection_is_forgotten():
    core = connected()
    core.receive(b'{"command":"po', 0.0)
    cut(core)
    ping = Ping()
    core.send(ping, 1.0)
    assert core.receive(pong(ping), 1.0) == [(ping, None, None)]


def test_what_was_said_to_a_server_that_is_gone_is_not_said_to_the_next():
    core = connected()
    lock = held(core)
    core.send(Extend(lock.id, 5, lock), 0.0)
    core.disconnected("gone", 0.0)
    greet(core, locked(101, "1", expiresIn=5000))
    assert core.outgoing() == b""


def test_a_last_word_on_what_has_ended_long_ago_is_harmless():
    core = connected()
    lock = held(core)
    core.leave(lock, 0.0)
    core.receive(released(101, "success", "2"), 0.0)
    core.outgoing()
    assert cut(core, released(101, "success", "1"), locked(101, "1", expiresIn=1)) == []
    assert core.outgoing() == b""
