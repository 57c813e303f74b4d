"""The fast way of reading a command takes nothing that the rule would refuse, and takes it for the same."""

from __future__ import annotations

import re
from dataclasses import fields as fields_of
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genie.core import Release, Request
from genie.errors import RequestRejected
from genie.protocol import commands, fields

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
FIELDS = {
    "resources": st.one_of(st.lists(RESOURCE, max_size=4), SCALARS),
    "queueTimeout": st.one_of(st.sampled_from([0, 0.5, -0.1, 2147483647, 2147483648, 10]), SCALARS),
    "transactionTimeout": st.one_of(st.sampled_from([0, 0.5, 1, 2147483647, 2147483647.5]), SCALARS),
    "transactionName": SCALARS,
    "priority": st.one_of(st.sampled_from([2**31, -(2**31), 2**31 + 1, 0.25]), SCALARS),
    "ref": SCALARS,
    "onDisconnect": SCALARS,
    "id": SCALARS,
    "other": SCALARS,
}
PAYLOAD = st.one_of(
    st.fixed_dictionaries(
        {"resources": st.lists(RESOURCE, min_size=1, max_size=4)},
        optional={name: values for name, values in FIELDS.items() if name != "resources"},
    ),
    st.fixed_dictionaries({}, optional=FIELDS),
    SCALARS,
)
MESSAGE = st.fixed_dictionaries(
    {"command": st.sampled_from(["request", "request", "release", "ping", "fly"])},
    optional={"payload": PAYLOAD, "more": SCALARS},
)


def slowly(line: bytes) -> Any:
    command, known = fields.read(line)
    return commands._COMMANDS[command](known)


def seen(value: Any) -> Any:
    if isinstance(value, Request):
        return {name: getattr(value, name, None) for name in (field.name for field in fields_of(Request))}
    return value


@settings(max_examples=2_000, deadline=None)
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


@settings(max_examples=500, deadline=None)
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


def test_every_field_has_a_rule_and_every_rule_a_field() -> None:
    assert set(commands._Request.__struct_fields__) == set(fields.COMMANDS["request"])
    assert set(commands._COMMANDS) == set(fields.COMMANDS) == set(fields.REQUIRED)
