"""Counted locks and subtrees in the clients: their requests, errors, changes, and the retry of a transaction."""

from __future__ import annotations

import orjson
import pytest

import genie
from genie import Deadlock, QueueTimeout
from genie.client.commands import Request, RequestState, make_any_request, make_request
from genie.client.inspection import parse_inspected
from genie.client.session import ClientSession
from genie.client.transaction import Attempts, TransactionLocks
from genie.client.watches import Change, Watch
from genie.protocol.messages import HeldRow
from support.network.scripted_server import connected_session, encode, locked, released, send_request

POOL = genie.units("licences/cad", 2, of=10)
BOOKS = genie.subtree("accounts/")


def test_the_functions_return_the_wire_form():
    assert POOL == "2/10:licences/cad"
    assert BOOKS == "exclusive:accounts/**"
    assert genie.subtree("accounts/", shared=True) == "shared:accounts/**"
    assert genie.subtree("") == "exclusive:**"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: genie.units("a", 3, of=2), "1 <= K <= N"),
        (lambda: genie.units("a", 0, of=2), "1 <= K <= N"),
        (lambda: genie.units("a", 1, of=1_000_001), "1000000"),
        (lambda: genie.units("a/**", 1, of=2), "units of a subtree"),
        (lambda: genie.units("", 1, of=2), "1 to 512"),
        (lambda: genie.subtree("accounts"), "must end with '/'"),
        (lambda: make_request("1", ["3/2:a"]), "1 <= K <= N"),
        (lambda: make_request("1", ["2/3:a", "2/3:a"]), "4 units of 'a' are requested in total, but at most 3"),
        (lambda: make_request("1", ["1/3:a", "1/4:a"]), "limits of 3 and 4"),
        (lambda: make_request("1", ["1/3:a", "shared:a"]), "in another mode"),
        (lambda: make_request("1", ["a/" * 17 + "**"]), "at most 16 slashes, not 17"),
        (lambda: make_any_request("1", ["a", BOOKS], 1), "can't choose a subtree"),
    ],
)
def test_invalid_locks_are_rejected_before_anything_is_sent(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_request_adds_up_the_units_of_a_name():
    request = make_request("1", [POOL, BOOKS, "3/10:licences/cad", "shared:b"])
    assert request.resources == ("5/10:licences/cad", BOOKS, "shared:b")
    assert orjson.loads(request.line)["payload"]["resources"] == list(request.resources)


def test_units_can_be_chosen():
    session = connected_session()
    request = make_any_request("1", [POOL, "1/1:b", "c"], 2)
    session.requests.send(request, 0.0)
    session.data_to_send()
    session.receive_data(locked(7, "1", resources=["licences/cad", "b"]), 0.0)
    assert request.resources == (POOL, "1/1:b")


def sent(session: ClientSession, *resources: str) -> Request:
    request = send_request(session, *resources)
    assert session.data_to_send() == request.line
    return request


def test_blockers_have_units():
    session = connected_session()
    request = sent(session, POOL)
    row = {"id": 4, "resource": "licences/cad", "mode": "units", "state": "held", "since": 5, "units": 9, "of": 10}
    subtree = {"id": 5, "resource": "licences/**", "mode": "exclusive", "state": "queued", "since": 5}
    [(_, _, error)] = session.receive_data(released(9, "queue-timeout", request.ref, blockers=[row, subtree]), 0.0)
    assert isinstance(error, QueueTimeout)
    first, second = error.blockers
    assert (first.mode, first.units, first.of) == ("units", 9, 10)
    assert (second.resource, second.units, second.of) == ("licences/**", None, None)
    assert str(first) == "4 holds 9/10:licences/cad"
    assert str(second) == "5 waits for exclusive:licences/**"


def test_units_of_the_same_process_cause_no_hint():
    session = connected_session()
    session.receive_data(locked(4, sent(session, "9/10:a").ref), 0.0)
    request = sent(session, "2/10:a")
    row = {"id": 4, "resource": "a", "mode": "units", "state": "held", "since": 5, "units": 9, "of": 10}
    [(_, _, error)] = session.receive_data(released(9, "queue-timeout", request.ref, blockers=[row]), 0.0)
    assert error.hint == ""


def test_the_waits_of_a_deadlock_have_units():
    session = connected_session()
    request = sent(session, POOL)
    waits = [
        {"resource": "licences/cad", "waiter": 9, "holder": 4, "units": 2, "of": 10},
        {"resource": "accounts/**", "waiter": 8, "holder": 3},
    ]
    answer = released(9, "deadlock", request.ref, cycle=["t", "u"], waits=waits)
    [(_, _, error)] = session.receive_data(answer, 0.0)
    assert isinstance(error, Deadlock)
    assert [(step.units, step.of) for step in error.waits] == [(2, 10), (None, None)]
    assert (
        str(error)
        == "request 9 would deadlock: t would wait for 2/10:licences/cad of u, which waits for accounts/** of t"
    )


def test_the_blockers_of_inspect_have_units():
    blocker = {"id": 4, "resource": "a", "mode": "units", "state": "held", "since": 5000, "units": 9, "of": 10}
    row = {"id": 9, "resources": ["2/10:a"], "resourcesTotal": 1, "priority": 0, "since": 6000, "blockers": [blocker]}
    found = parse_inspected({"holders": [], "holdersTotal": 0, "queue": [row], "queueTotal": 1})
    assert found.queue[0].resources == ("2/10:a",)
    assert (found.queue[0].blockers[0].units, found.queue[0].blockers[0].of) == (9, 10)


def test_changes_have_units():
    watch = Watch("")
    watch.apply_snapshot([HeldRow("a", "units", 4, None, 9, 10)], truncated=False)
    watch.apply_unlocked("a", 4)
    assert list(watch.changes) == [
        Change("a", "locked", "units", 4, None, 9, 10),
        Change("a", "unlocked", "units", 4, None, 9, 10),
    ]


@pytest.mark.parametrize(
    ("modes", "conflict"),
    [
        (("units", "units"), False),
        (("units", "exclusive"), True),
        (("shared", "units"), True),
        (("shared", "shared"), False),
        (("shared", "exclusive"), True),
        (("exclusive", "exclusive"), True),
    ],
)
def test_units_conflict_with_the_other_modes(modes, conflict):
    one, other = (Change("a", "locked", mode, id) for id, mode in enumerate(modes))
    assert one.conflicts_with(other) is other.conflicts_with(one) is conflict


def hold(locks: TransactionLocks, *resources: str) -> int:
    """Lock resources, and return the number of requests that the attempt has made."""
    locks.request(resources, "1").state = RequestState.HELD
    return len(locks.requests)


def test_each_lock_of_a_transaction_takes_further_units():
    locks = TransactionLocks("t", {})
    assert [hold(locks, "2/10:a"), hold(locks, "2/10:a")] == [1, 2]
    assert [hold(locks, "exclusive:a"), hold(locks, "2/10:a")] == [3, 3]  # exclusive covers units


def test_a_repeated_attempt_first_locks_all_units_and_then_hands_them_out():
    attempts = Attempts(3)
    for _ in range(2):  # what the first request locks is not asked for twice
        locks = TransactionLocks("t", {})
        if wanted := attempts.wanted_resources():
            hold(locks, *wanted)
            locks.begin_work()
            assert locks.requests[0].resources == ("5/10:a", "exclusive:b")
        requests = [hold(locks, "2/10:a"), hold(locks, "3/10:a", "b")]
        attempts.begin_retry(locks)
    assert requests == [1, 1]
    assert hold(locks, "1/10:a") == 2
    assert attempts.wanted_resources() == ["5/10:a", "exclusive:b"]


@pytest.mark.parametrize(
    ("prefix", "resource", "seen"),
    [
        ("a/b/", "a/b/**", True),
        ("a/b/", "a/**", True),
        ("a/b/", "**", True),
        ("a/b/", "a/b/c", True),
        ("a/b/", "a", False),
        ("a/b/", "a/c/**", False),
        ("a", "a/**", True),
    ],
)
def test_a_watch_follows_the_subtrees_above_and_below_its_prefix(prefix, resource, seen):
    session = connected_session()
    watch = Watch(prefix)
    session.watches.request_next(watch, 0.0)
    session.data_to_send()
    session.receive_data(encode("watching", prefix=prefix, held=[], ref=watch.ref), 0.0)
    session.receive_data(encode("event", state="locked", resource=resource, mode="exclusive", id=4), 0.0)
    assert list(watch.changes) == ([Change(resource, "locked", "exclusive", 4)] if seen else [])
