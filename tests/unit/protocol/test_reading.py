"""The fast way of reading a command takes nothing that the rule would refuse, and takes it for the same."""

from __future__ import annotations

import re
from dataclasses import fields as fields_of
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.core import Release, Request, Take
from genie.errors import RequestRejected
from genie.protocol import commands, fields
from genie.protocol.commands import Hello, Ping, Watch, Within
from searches import examples

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "keep", "release", "a", "T\n", "x" * 129, "x" * 513, "shared:a", "exclusive:b"]),
)
RESOURCE = st.one_of(
    st.text(max_size=4).map("exclusive:".__add__),
    st.text(max_size=4).map("shared:".__add__),
    st.sampled_from(["a", "", "exclusive:", "Exclusive:a", "shared:a:b", "exclusive:\x7f", "exclusive:\u00a0"]),
)
WEIGHT = st.one_of(
    st.sampled_from([1, 2, 0.5, 2**53 + 1, 2**63 - 1, 2**63, 2.0**63, 2.0**63 - 1024, 9.3e18, 0, -1, 1e-300]),
    st.integers(1, 9),
)
CHOICE = st.lists(RESOURCE, min_size=1, max_size=4)
FIELDS = {
    "resources": st.one_of(st.lists(RESOURCE, max_size=4), SCALARS),
    "queueTimeout": st.one_of(st.sampled_from([0, 0.5, -0.1, 2147483647, 2147483648, 10]), SCALARS),
    "transactionTimeout": st.one_of(st.sampled_from([0, 0.5, 1, 2147483647, 2147483647.5]), SCALARS),
    "transactionName": SCALARS,
    "priority": st.one_of(st.sampled_from([2**31, -(2**31), 2**31 + 1, 0.25]), SCALARS),
    "ref": SCALARS,
    "onDisconnect": SCALARS,
    "anyOf": st.one_of(st.lists(RESOURCE, max_size=4), SCALARS),
    "weights": st.one_of(st.lists(WEIGHT, max_size=4), SCALARS),
    "target": st.one_of(WEIGHT, SCALARS),
    "prefix": SCALARS,
    "id": SCALARS,
    "namespace": st.one_of(st.sampled_from(["genie", "a.b:c-d_E", "x" * 128, "x y", "\u00e4", "genie\n"]), SCALARS),
    "other": SCALARS,
}
PAYLOAD = st.one_of(
    st.fixed_dictionaries(
        {"resources": st.lists(RESOURCE, min_size=1, max_size=4)},
        optional={name: values for name, values in FIELDS.items() if name != "resources"},
    ),
    st.fixed_dictionaries(
        {"anyOf": CHOICE, "target": WEIGHT},
        optional={name: values for name, values in FIELDS.items() if name not in ("anyOf", "target", "resources")},
    ),
    st.fixed_dictionaries({}, optional=FIELDS),
    SCALARS,
)
MESSAGE = st.fixed_dictionaries(
    {"command": st.sampled_from(["request", "request", "release", "watch", "ping", "fly"])},
    optional={"payload": PAYLOAD, "more": SCALARS},
)


def slowly(line: bytes) -> Any:
    return commands._slowly(line)


def seen(value: Any) -> Any:
    if isinstance(value, Take):
        kinds = [type(weight) for weight in [*value.weights, value.target]]
        return seen(value.request), value.choices, list(value.weights), value.target, kinds
    if isinstance(value, Within):
        return value.namespace, seen(value.command)
    if isinstance(value, Request):
        return {name: getattr(value, name, None) for name in (field.name for field in fields_of(Request))}
    return value


@examples(200)
@given(MESSAGE)
def test_both_ways_agree(message: dict[str, Any]) -> None:
    line = orjson.dumps(message)
    try:
        expected = seen(slowly(line))
    except RequestRejected as rejected:
        with pytest.raises(RequestRejected, match=re.escape(str(rejected))):
            commands.read(line)
    else:
        assert seen(commands.read(line)) == expected


@examples(100)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_command_or_an_error(line: bytes) -> None:
    code = None
    try:
        commands.read(line)
    except RequestRejected as rejected:
        code = rejected.code
    assert code in {None, "bad-json", "bad-message", "bad-request", "unknown-command"}


@pytest.mark.parametrize("garbled", range(1, 75))
def test_a_good_line_cut_anywhere_is_no_good_line(garbled: int) -> None:
    line = b'{"command":"request","payload":{"resources":["exclusive:a","shared:b"]}}'
    if garbled < len(line):
        with pytest.raises(RequestRejected):
            commands.read(line[:garbled])


def test_what_a_request_says() -> None:
    request = commands.read(
        b'{"command":"request","payload":{"resources":["shared:a:b","exclusive:c","shared:c","exclusive:d"],'
        b'"queueTimeout":0,"transactionTimeout":5.5,"transactionName":"T","priority":-2,"ref":"r",'
        b'"onDisconnect":"release"}}'
    )
    assert isinstance(request, Request)
    assert (request.shared, request.exclusive) == (("a:b",), ("c", "d"))
    assert (request.queue_timeout_ms, request.transaction_timeout_ms) == (0, 5.5)
    assert (request.transaction, request.priority, request.ref) == ("T", -2, "r")
    assert request.release_on_disconnect


def test_defaults() -> None:
    request = commands.read(b'{"command":"request","payload":{"resources":["exclusive:c"],"queueTimeout":null}}')
    assert isinstance(request, Request)
    assert (request.queue_timeout_ms, request.transaction_timeout_ms, request.priority) == (10_000, 10_000, 0)
    assert commands.read(b'{"payload":{"id":7},"command":"release"}') == Release(7)


def test_what_a_choice_says() -> None:
    take = commands.read(
        b'{"command":"request","payload":{"anyOf":["shared:a","exclusive:b"],"weights":[9007199254740993,0.5],'
        b'"target":9223372036854775807,"transactionName":"T","transactionTimeout":7,"onDisconnect":"release"}}'
    )
    assert isinstance(take, Take)
    assert take.choices == (("a", False), ("b", True))
    assert take.weights == [9007199254740993, 0.5]
    assert take.target == 2**63 - 1
    assert type(take.target) is int
    request = take.request
    assert (request.transaction, request.transaction_timeout_ms, request.release_on_disconnect) == ("T", 7, True)
    assert request.chosen == ""


def test_the_same_choice_is_known_again() -> None:
    def chosen(**payload: Any) -> str | None:
        line = orjson.dumps({"command": "request", "payload": {"ref": "r", "target": 2, **payload}})
        take = commands.read(line)
        assert isinstance(take, Take)
        return take.request.chosen

    names = ["exclusive:a", "exclusive:b"]
    first = chosen(anyOf=names)
    assert first
    assert first == chosen(anyOf=names)
    others = [chosen(anyOf=names[::-1]), chosen(anyOf=names, target=1), chosen(anyOf=names, weights=[1, 2])]
    assert len({first, *others}) == 4


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"anyOf": ["exclusive:a"], "resources": ["exclusive:a"], "target": 1}, "resources and anyOf exclude"),
        ({"anyOf": ["exclusive:a"]}, "target is missing"),
        ({"anyOf": ["exclusive:a"], "target": 0}, "target must be a number above 0"),
        ({"anyOf": ["exclusive:a"], "target": True}, "target must be a number above 0"),
        ({"anyOf": ["exclusive:a"], "target": 2**63}, "target must be a number above 0, at most"),
        ({"anyOf": ["exclusive:a"], "target": 1, "weights": [1, 2]}, "weights must be as many as anyOf: 1, not 2"),
        ({"anyOf": ["exclusive:a"], "target": 1, "weights": []}, "weights must be a list of numbers above 0"),
        ({"anyOf": ["exclusive:a"], "target": 1, "weights": [0]}, "weights must be a list of numbers above 0"),
        ({"anyOf": ["exclusive:a", "shared:a"], "target": 1}, "each resource once, and names 'a' twice"),
        ({"anyOf": [], "target": 1}, "anyOf must be a list of 1 to 10000"),
        ({"anyOf": ["a"], "target": 1}, "anyOf is not right: a resource must begin"),
        ({"resources": ["exclusive:a"], "target": 1}, "target goes with anyOf"),
        ({"resources": ["exclusive:a"], "weights": [1]}, "weights goes with anyOf"),
        ({}, "resources is missing"),
    ],
)
def test_what_is_wrong_with_a_choice(payload: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestRejected, match=why):
        commands.read(orjson.dumps({"command": "request", "payload": payload}))


def test_every_field_has_a_rule_and_every_rule_a_field() -> None:
    assert {*commands._Request.__struct_fields__, "namespace"} == set(fields.COMMANDS["request"])
    assert set(commands._COMMANDS) == set(fields.COMMANDS) == set(fields.REQUIRED)


def line(command: str, **payload: Any) -> bytes:
    return orjson.dumps({"command": command, "payload": payload})


def test_a_command_may_say_its_namespace() -> None:
    request = commands.read(line("request", resources=["exclusive:a"], ref="r", namespace="billing-2.eu:west_1"))
    assert isinstance(request, Within)
    assert request.namespace == "billing-2.eu:west_1"
    assert isinstance(request.command, Request)
    assert (request.command.exclusive, request.command.ref) == (("a",), "r")
    take = commands.read(line("request", anyOf=["exclusive:a"], target=1, namespace="b"))
    assert isinstance(take, Within)
    assert isinstance(take.command, Take)
    assert commands.read(line("release", id=7, namespace="b")) == Within("b", Release(7))
    assert commands.read(line("watch", prefix="", namespace="b")) == Within("b", Watch(""))
    assert commands.read(line("release", id=7, namespace=None)) == Release(7)
    assert commands.read(line("ping", namespace=7)) == Ping()


def test_hello_says_what_the_connection_is_for() -> None:
    assert commands.read(line("hello", namespace="billing")) == Hello(namespace="billing")
    assert commands.read(line("hello")) == Hello(namespace=None)


@pytest.mark.parametrize("command", [name for name, known in fields.COMMANDS.items() if "namespace" in known])
@pytest.mark.parametrize("wrong", ["", "x" * 129, "a b", "a/b", "\u00e4", "a\n", 7, True, ["genie"], {}])
def test_what_is_no_namespace_is_named(command: str, wrong: object) -> None:
    payload = (
        {"resources": ["exclusive:a"]} if command == "request" else {"id": 7, "transactionTimeout": 1, "prefix": ""}
    )
    with pytest.raises(RequestRejected) as caught:
        commands.read(line(command, **payload, namespace=wrong))
    assert caught.value.code == "bad-request"
    assert caught.value.message == f"{command}: namespace must be a string of 1 to 128 letters, digits or any of _.:-"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (line("hello", namespace="billing"), "billing"),
        (line("hello", namespace="billing", session="short", sessionTimeout="long"), "billing"),
        (line("hello"), ""),
        (line("hello", namespace=None), ""),
        (line("hello", namespace="a b"), None),
        (line("hello", namespace=7), None),
        (line("request", namespace="billing"), None),
        (b'{"command":"hello","payload":["namespace"]}', ""),
        (b'["hello"]', None),
        (b"hello", None),
        (b"\xff", None),
    ],
)
def test_the_namespace_that_a_hello_says_whatever_else_is_wrong(said: bytes, expected: str | None) -> None:
    assert fields.hello_namespace(said) == expected
