"""anyOf requests: their line, the chosen resources, and the error if the free ones do not suffice."""

from __future__ import annotations

import math
from concurrent.futures import Future

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.client.commands import LockInfo, Request, RequestState, make_any_request
from genie.client.session import ClientSession
from genie.errors import Insufficient, LockError, RequestRejected, Unavailable
from genie.protocol import commands
from support.network.scripted_server import SECRET, connected_session, error, locked, reconnect, released

MAX_WEIGHT = 2**63 - 1


def choose(session: ClientSession, *resources: str, target: int = 1, **options: object) -> Request:
    request = make_any_request(session.calls.new_ref(), resources or ("a", "shared:b", "c"), target, **options)  # type: ignore[arg-type]
    session.requests.send(request, 0.0)
    return request


def pending_request(session: ClientSession, **options: object) -> Request:
    request = choose(session, **options)
    assert session.data_to_send() == request.line
    return request


def test_the_request_line():
    session = connected_session()
    choose(session, "a", "shared:b", target=4, weights=[1, 4], transaction="t", transaction_timeout=0.25)
    assert session.data_to_send() == (
        b'{"command":"request","payload":{"anyOf":["exclusive:a","shared:b"],"weights":[1,4],"target":4,'
        b'"transactionTimeout":250,"transactionName":"t","ref":"1"}}\n'
    )
    choose(session, "a", target=1)
    assert session.data_to_send() == (
        b'{"command":"request","payload":{"anyOf":["exclusive:a"],"target":1,"transactionTimeout":10000,"ref":"2"}}\n'
    )


def test_the_lock_has_the_resources_that_the_server_chose_in_the_requested_order():
    session = connected_session()
    request = pending_request(session)
    assert session.receive_data(locked(101, "1", resources=["c", "b"]), 0.0) == [(request, None, None)]
    assert request.state is RequestState.HELD
    assert LockInfo(request).resources == ("shared:b", "exclusive:c")


def test_insufficient_has_the_free_and_the_locked_sum():
    session = connected_session()
    request = pending_request(session)
    [(call, _, caught)] = session.receive_data(released(101, "insufficient", ref="1", free=1, locked=2), 0.0)
    assert (call, request.state) == (request, RequestState.ENDED)
    assert isinstance(caught, Insufficient)
    assert (caught.id, caught.free, caught.locked) == (101, 1, 2)


def test_large_sums_are_exact():
    session = connected_session()
    request = pending_request(session, weights=[MAX_WEIGHT, MAX_WEIGHT - 2, 2**53 + 1], target=MAX_WEIGHT)
    payload = orjson.loads(request.line)["payload"]
    assert (payload["weights"], payload["target"]) == ([MAX_WEIGHT, MAX_WEIGHT - 2, 2**53 + 1], MAX_WEIGHT)
    [(_, _, caught)] = session.receive_data(
        b'{"command":"released","payload":{"id":101,"ref":"1","reason":"insufficient","free":%d,"locked":%d}}\n'
        % (MAX_WEIGHT - 1, 10_000 * MAX_WEIGHT - 1),
        0.0,
    )
    assert isinstance(caught, Insufficient)
    assert (caught.free, caught.locked) == (MAX_WEIGHT - 1, 10_000 * MAX_WEIGHT - 1)
    assert type(caught.locked) is int


@pytest.mark.parametrize(
    ("weights", "target"), [([MAX_WEIGHT + 1, 5], 3), ([2, 5], MAX_WEIGHT + 1), (None, 10**78 - 1)]
)
def test_weights_beyond_the_integer_limit_are_sent_as_strings(weights, target):
    session = connected_session()
    request = pending_request(session, weights=weights and [*weights, 1], target=target)
    payload = orjson.loads(request.line)["payload"]
    assert payload.get("weights") == (weights and [str(weight) for weight in [*weights, 1]])
    assert payload["target"] == str(target)
    assert isinstance(commands.read(request.line.rstrip(b"\n")), commands.Take)
    [(_, _, caught)] = session.receive_data(released(101, "insufficient", "1", free="7", locked="1" + "0" * 30), 0.0)
    assert isinstance(caught, Insufficient)
    assert (caught.free, caught.locked) == (7, 10**30)


def test_insufficient_without_sums_is_a_plain_lock_error():
    session = connected_session()
    pending_request(session)
    [(_, _, caught)] = session.receive_data(released(101, "insufficient", "1"), 0.0)
    assert type(caught) is LockError


class TestReconnect:
    def test_the_same_line_is_sent_again(self):
        session = connected_session()
        request = pending_request(session)
        line = request.line
        assert reconnect(session) == []
        assert session.data_to_send() == line
        assert session.receive_data(locked(101, "1", resources=["a"]), 0.0) == [(request, None, None)]
        assert request.resources == ("exclusive:a",)

    def test_the_resumption_has_the_chosen_resources(self):
        session = connected_session()
        request = pending_request(session)
        told = locked(101, "1", resources=["b"], expiresIn=9000)
        assert reconnect(session, told, now=2.0) == [(request, None, None)]
        assert (request.resources, request.expires_at) == (("shared:b",), 11.0)
        assert session.data_to_send() == b""
        assert reconnect(session, told, now=3.0) == []
        assert request.resources == ("shared:b",)

    def test_the_resumption_can_reject_it_as_insufficient(self):
        session = connected_session()
        request = pending_request(session)
        [(call, _, caught)] = reconnect(session, released(101, "insufficient", ref="1", free=0, locked=3))
        assert call is request
        assert isinstance(caught, Insufficient)

    def test_a_server_without_the_session_gets_the_same_line(self):
        session = connected_session()
        request = pending_request(session)
        line = request.line
        assert reconnect(session, resumed=False, now=0.5) == []
        assert session.data_to_send() == line
        assert b"queueTimeout" not in line


def test_a_cancelled_call_releases_the_chosen_resources():
    session = connected_session()
    request = pending_request(session)
    request.future = Future()
    session.abandon(request, 0.0)
    assert session.data_to_send() == b'{"command":"release","payload":{"ref":"1"}}\n'
    assert session.receive_data(locked(101, "1", resources=["a"]), 0.0) == []
    session.receive_data(released(101, "success", "1"), 0.0)
    assert (request.state, request.error) == (RequestState.ENDED, None)


def test_a_silent_server_is_not_waited_for_beyond_the_response_timeout():
    session = connected_session()
    request = pending_request(session)
    assert session.on_timer(0.9) == []
    [(call, _, caught)] = session.on_timer(1.0)
    assert call is request
    assert isinstance(caught, Unavailable)


def test_an_error_reply_fails_only_that_request():
    session = connected_session()
    request = pending_request(session)
    [(call, _, caught)] = session.receive_data(error("bad-request", "target", ref="1"), 0.0)
    assert call is request
    assert isinstance(caught, RequestRejected)


@pytest.mark.parametrize(
    ("arguments", "options", "what"),
    [
        (([], 1), {}, "1 to 10000"),
        ((["a"] * 10_001, 1), {}, "1 to 10000"),
        ((["a", "exclusive:a"], 1), {}, "each name once, not 'a' twice"),
        ((["a", "shared:a"], 1), {}, "each name once, not 'a' twice"),
        ((["exclsive:a"], 1), {}, "not a mode"),
        ((["a"], 0), {}, "target"),
        ((["a"], -1), {}, "target"),
        ((["a"], True), {}, "target"),
        ((["a"], math.nan), {}, "target"),
        ((["a"], math.inf), {}, "target"),
        ((["a"], 10**78), {}, "target"),
        ((["a"], 1.5), {}, "target must be a positive integer"),
        ((["a"], "1"), {}, "target"),
        ((["a", "b"], 1), {"weights": [1]}, "weights"),
        ((["a"], 1), {"weights": []}, "weights"),
        ((["a"], 1), {"weights": [0]}, "a weight"),
        ((["a"], 1), {"weights": [10**78]}, "a weight"),
        ((["a"], 1), {"weights": [0.5]}, "a weight"),
        ((["a"], 1), {"weights": ["1"]}, "a weight"),
        ((["a"], 1), {"transaction": ""}, "transaction"),
        ((["a"], 1), {"transaction_timeout": 0}, "transaction_timeout"),
        ((["a"], 1), {"on_disconnect": ""}, "on_disconnect"),
        ((["a"], 1), {"note": ""}, "note"),
    ],
)
def test_wrong_arguments_are_rejected_before_anything_is_sent(arguments, options, what):
    with pytest.raises(ValueError, match=what):
        make_any_request("1", *arguments, **options)


@pytest.mark.parametrize("resources", ["token/1", [1]])
def test_resources_must_be_a_list(resources):
    with pytest.raises(TypeError):
        make_any_request("1", resources, 1)


def test_a_too_long_line_is_rejected_locally():
    with pytest.raises(RequestRejected, match="line-too-long"):
        make_any_request("1", [f"{number:05}" + "x" * 100 for number in range(10_000)], 1)


def test_the_maximum_number_of_resources():
    session = ClientSession(SECRET)
    request = choose(session, *[f"token/{number:05}" for number in range(10_000)], weights=[MAX_WEIGHT] * 10_000)
    assert len(request.line) < 1 << 20


weights_of_the_wire = st.one_of(st.integers(1, MAX_WEIGHT), st.integers(1, 10**78 - 1))


@given(
    names=st.lists(
        st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20), min_size=1, unique=True
    ),
    data=st.data(),
    target=weights_of_the_wire,
    transaction=st.none() | st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20),
)
def test_requests_accepted_by_the_client_are_accepted_by_the_server(names, data, target, transaction):
    weights = data.draw(st.none() | st.lists(weights_of_the_wire, min_size=len(names), max_size=len(names)))
    request = make_any_request(
        "1", [f"shared:{name}" for name in names], target, weights=weights, transaction=transaction
    )
    read = commands.read(request.line.rstrip(b"\n"))
    assert isinstance(read, commands.Take)
    assert (read.request.ref, read.request.transaction, read.target) == ("1", transaction, target)
    assert [name for name, _ in read.choices] == names
    assert list(read.weights) == (weights or [1] * len(names))
