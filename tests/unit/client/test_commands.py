from __future__ import annotations

import asyncio
import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.client import aio, commands, sync
from genie.client.commands import Extend, Inspect, Release, Request, to_milliseconds
from genie.client.config import ClientOptions
from genie.errors import RequestRejected
from genie.protocol import commands as wire_commands


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"queue_timeout": -0.001}, "queue_timeout"),
        ({"queue_timeout": math.nan}, "queue_timeout"),
        ({"queue_timeout": math.inf}, "queue_timeout"),
        ({"queue_timeout": 2_147_483.648}, "queue_timeout"),
        ({"transaction_timeout": 0}, "transaction_timeout"),
        ({"transaction_timeout": 0.0009}, "transaction_timeout"),
        ({"priority": math.nan}, "priority"),
        ({"priority": 2**31 + 1}, "priority"),
        ({"transaction": ""}, "transaction"),
        ({"transaction": "a\nb"}, "transaction"),
        ({"on_disconnect": "forget"}, 'on_disconnect must be "keep" or "release", not \'forget\''),
        ({"on_disconnect": True}, "on_disconnect"),
        ({"note": ""}, "note must have 1 to 256 characters"),
        ({"note": "x" * 257}, "note must have 1 to 256 characters"),
        ({"note": "a\nb"}, "no control characters"),
    ],
)
def test_wrong_arguments_are_rejected_before_anything_is_sent(options, what):
    with pytest.raises(ValueError, match=what):
        commands.make_request("1", ["a"], **options)


@pytest.mark.parametrize("resources", [[], ["a"] * 1025, ["exclsive:a"], ["a", ""], ["x" * 513], ["\ud800"]])
def test_resources_that_the_server_would_reject(resources):
    with pytest.raises(ValueError, match=r"resource|surrogate"):
        commands.make_request("1", resources)


@pytest.mark.parametrize(
    ("named", "locked"),
    [
        (["d", "d"], ("exclusive:d",)),
        (["shared:d", "shared:d"], ("shared:d",)),
        (["shared:d", "exclusive:d"], ("exclusive:d",)),
        (["d", "shared:d"], ("exclusive:d",)),
        (["shared:b", "a", "shared:a", "b"], ("exclusive:b", "exclusive:a")),
        (["shared:x:y", "exclusive:x:y", "y"], ("exclusive:x:y", "exclusive:y")),
    ],
)
def test_a_duplicate_resource_is_locked_once_in_the_stronger_mode(named, locked):
    request = commands.make_request("1", named)
    assert request.resources == locked
    assert orjson.loads(request.line)["payload"]["resources"] == list(locked)


def test_no_queue_timeout_is_the_longest_timeout_on_the_wire():
    request = commands.make_request("1", ["a"], queue_timeout=None)
    assert request.queue_timeout == math.inf
    assert orjson.loads(request.line)["payload"]["queueTimeout"] == 2_147_483_647
    request.first_sent_at = 0.0
    request.reencode(1_000.0)
    assert request.queue_timeout == math.inf
    assert orjson.loads(request.line)["payload"]["queueTimeout"] == 2_147_483_647


def test_the_error_for_an_infinite_queue_timeout_suggests_none():
    with pytest.raises(
        ValueError, match=r"queue_timeout must be 0 to 2147483\.647 seconds, or None for no limit, not inf"
    ):
        commands.make_request("1", ["a"], queue_timeout=math.inf)


def test_on_disconnect_is_sent_only_if_it_is_not_the_default():
    assert (
        orjson.loads(commands.make_request("1", ["a"], on_disconnect="release").line)["payload"]["onDisconnect"]
        == "release"
    )
    assert "onDisconnect" not in orjson.loads(commands.make_request("1", ["a"]).line)["payload"]


@pytest.mark.parametrize(("id_", "seconds", "what"), [(True, 1, "id"), ("1", 1, "id"), (5, 0, "an extension")])
def test_extend_checks_its_arguments(id_, seconds, what):
    with pytest.raises(ValueError, match=what):
        Extend(id_, seconds)


def test_a_list_of_resources_instead_of_arguments_is_an_error():
    with pytest.raises(TypeError, match="pass each resource as its own argument"):
        commands.make_request("1", [["a", "b"]])  # type: ignore[list-item]


def test_a_too_long_line_is_rejected_locally():
    with pytest.raises(RequestRejected, match="line-too-long"):
        commands.make_request("1", [f"{number:04}" + "é" * 508 for number in range(1024)])


@pytest.mark.parametrize("id_", [2**53, -(2**53), True, 1.0, "1"])
def test_an_impossible_id(id_):
    with pytest.raises(ValueError, match="id"):
        Release(id_)


@pytest.mark.parametrize("limit", [0, 10_001, True, 1.5])
def test_a_limit_out_of_range(limit):
    with pytest.raises(ValueError, match="limit"):
        Inspect(limit=limit)


@given(st.floats(min_value=0.001, max_value=2_147_483.647))
def test_seconds_become_milliseconds_to_the_microsecond(seconds):
    ms = to_milliseconds(seconds, "it", min_ms=1)
    assert abs(ms - seconds * 1000) <= 0.0006
    assert isinstance(ms, int) == (ms == int(ms))


@pytest.mark.filterwarnings("ignore:.* is in seconds:UserWarning")
@given(
    names=st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20), min_size=1),
    queue_timeout=st.floats(0, 2_147_483),
    transaction_timeout=st.floats(0.001, 2_147_483),
    priority=st.one_of(st.integers(-(2**31), 2**31), st.floats(-(2**31), 2**31)),
    transaction=st.none() | st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=20),
)
def test_requests_accepted_by_the_client_are_accepted_by_the_server(
    names, queue_timeout, transaction_timeout, priority, transaction
):
    request = commands.make_request(
        "1",
        [f"exclusive:{name}" for name in names],
        queue_timeout=queue_timeout,
        transaction_timeout=transaction_timeout,
        priority=priority,
        transaction=transaction,
    )
    read = wire_commands.read(request.line.rstrip(b"\n"))
    if isinstance(read, wire_commands.LargeRequest):
        read = read.request
    assert isinstance(read, wire_commands.Request)
    assert (read.ref, read.transaction, read.priority) == ("1", transaction, priority)
    assert set(read.exclusive) == set(names)
    assert orjson.loads(request.line)["payload"]["resources"] == list(request.resources)


def test_inspect_rejects_an_unknown_kind_of_rows():
    with pytest.raises(ValueError, match='only must be "holders" or "queue"'):
        Inspect(only="waiters")  # type: ignore[arg-type]


OPTIONS = {
    "transaction": "t",
    "queue_timeout": 1.0,
    "transaction_timeout": 2.0,
    "priority": 3,
    "watchdog": True,
    "on_disconnect": "release",
    "note": "n",
}


@pytest.mark.parametrize("module", [aio, sync])
@pytest.mark.parametrize("name", ["lock", "acquire", "try_acquire"])
async def test_each_option_of_a_lock_reaches_its_request(module, name, monkeypatch):
    def acquire(_: object, request: Request) -> object:
        return asyncio.sleep(0, request) if module is aio else request

    monkeypatch.setattr(module, "acquire", acquire)
    options = {key: value for key, value in OPTIONS.items() if (name, key) != ("try_acquire", "queue_timeout")}
    made = getattr(module.connect(), name)("a", **options)
    request = made._request if name == "lock" else await made if module is aio else made
    expected = commands.make_request(
        request.ref, ["a"], **{**OPTIONS, "queue_timeout": 0 if name == "try_acquire" else 1.0}
    )
    assert request.line == expected.line
    compared = ("queue_timeout", "transaction_timeout", "transaction", "watchdog", "bound_to_session")
    assert [getattr(request, key) for key in compared] == [getattr(expected, key) for key in compared]


@pytest.mark.parametrize("module", [aio, sync])
def test_each_option_of_a_client_reaches_its_options(module, monkeypatch):
    values = {
        "connect_timeout": 1.0,
        "response_timeout": 2.0,
        "session": "s" * 20,
        "session_timeout": 3.0,
        "token": "t",
        "namespace": "names",
        "note": "n",
        "lazy": True,
    }
    monkeypatch.setattr(module, "Client", lambda _, options: options)
    assert module.connect(**values) == ClientOptions(**values)
