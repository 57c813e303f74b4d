"""Decoding of commands: what the typed decoder rejects is explained, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.core import Extend, Release, Request, Take
from genie.errors import RequestRejected
from genie.protocol import codec, commands, diagnostics, limits, wire_types
from genie.protocol.commands import Bye, Hello, Inspect, LargeRequest, Namespaced, Ping, ReleaseByRef, Unwatch, Watch
from support.runs.searches import examples

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
    st.sampled_from(
        [1, 2, 0.5, 2**53 + 1, 2**63 - 1, 2**63, 9.3e18, 0, -1, "1", "0", "01", "-1", "1.5", "1\n", "9" * 79]
    ),
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
    "note": SCALARS,
    "traceparent": st.one_of(
        st.sampled_from(
            [
                f"{version}-{trace * 32}-{parent * 16}-01{end}"
                for version in ("00", "ff")
                for trace in "0a"
                for parent in "0f"
                for end in ("", "\n", "-")
            ]
        ),
        SCALARS,
    ),
    "limit": SCALARS,
    "only": st.one_of(st.sampled_from(["holders", "queue", "holder"]), SCALARS),
    "resource": SCALARS,
    "session": st.one_of(st.sampled_from(["x" * 15, "x" * 16]), SCALARS),
    "sessionTimeout": SCALARS,
    "token": SCALARS,
    "protocol": SCALARS,
    "client": SCALARS,
    "quiet": SCALARS,
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
    {
        "command": st.sampled_from(
            ["request", "request", "release", "extend", "watch", "inspect", "ping", "bye", "hello", "fly"]
        )
    },
    optional={"payload": PAYLOAD},
)


@examples(200)
@given(MESSAGE)
def test_exactly_the_rejected_lines_are_explained(message: dict[str, Any]) -> None:
    command, payload = message["command"], message.get("payload")
    if payload is None and command in diagnostics.PAYLOAD_OPTIONAL:
        payload = {}
    explained = (
        command not in diagnostics.FIELD_CHECKS
        or type(payload) is not dict
        or not message.keys() <= {"command", "payload"}
        or diagnostics.payload_error(command, payload) is not None
    )
    rejected = None
    try:
        commands.read(orjson.dumps(message))
    except RequestRejected as error:
        rejected = error
    assert (rejected is not None) == explained
    if rejected is not None:
        assert "$" not in rejected.message, "an error must name the field as on the wire"
        ref = payload.get("ref") if type(payload) is dict else None
        assert rejected.ref == (ref if type(ref) is str and 0 < len(ref) <= limits.MAX_REF else None)
        assert rejected.id is None or command in ("release", "extend")


@examples(100)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_command_or_an_error(line: bytes) -> None:
    code = None
    try:
        commands.read(line)
    except RequestRejected as rejected:
        code = rejected.code
    assert code in {None, "bad-json", "bad-message", "bad-request", "unknown-command"}


@pytest.mark.parametrize("length", range(1, 75))
def test_a_truncated_line_is_rejected(length: int) -> None:
    line = b'{"command":"request","payload":{"resources":["exclusive:a","shared:b"]}}'
    if length < len(line):
        with pytest.raises(RequestRejected):
            commands.read(line[:length])


def test_a_request_decodes_to_its_fields() -> None:
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


def test_omitted_fields_have_defaults() -> None:
    request = commands.read(b'{"command":"request","payload":{"resources":["exclusive:c"],"queueTimeout":null}}')
    assert isinstance(request, Request)
    assert (request.queue_timeout_ms, request.transaction_timeout_ms, request.priority) == (10_000, 10_000, 0)
    assert commands.read(b'{"payload":{"id":7},"command":"release"}') == Release(7)


def test_a_request_with_any_of_decodes_to_its_fields() -> None:
    take = commands.read(
        b'{"command":"request","payload":{"anyOf":["shared:a","exclusive:b"],"weights":[9007199254740993,"50000000000000000000000"],'
        b'"target":9223372036854775807,"transactionName":"T","transactionTimeout":7,"onDisconnect":"release"}}'
    )
    assert isinstance(take, Take)
    assert take.choices == (("a", False), ("b", True))
    assert take.weights == [9007199254740993, 50000000000000000000000]
    assert take.target == 2**63 - 1
    assert not take.as_strings
    request = take.request
    assert (request.transaction, request.transaction_timeout_ms, request.release_on_disconnect) == ("T", 7, True)
    assert request.context.choice_digest == ""


def test_equal_choices_have_equal_digests() -> None:
    def chosen(**payload: Any) -> str | None:
        line = orjson.dumps({"command": "request", "payload": {"ref": "r", "target": 2, **payload}})
        take = commands.read(line)
        assert isinstance(take, Take)
        return take.request.context.choice_digest

    names = ["exclusive:a", "exclusive:b"]
    first = chosen(anyOf=names)
    assert first
    assert first == chosen(anyOf=names)
    others = [chosen(anyOf=names[::-1]), chosen(anyOf=names, target=1), chosen(anyOf=names, weights=[1, 2])]
    assert len({first, *others}) == 4


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (
            {"anyOf": ["exclusive:a"], "resources": ["exclusive:a"], "target": 1},
            "resources and anyOf are mutually exclusive",
        ),
        ({"anyOf": ["exclusive:a"]}, "target is missing"),
        ({"anyOf": ["exclusive:a"], "target": 0}, "target must be an integer from 1 to"),
        ({"anyOf": ["exclusive:a"], "target": True}, "target must be an integer from 1 to"),
        ({"anyOf": ["exclusive:a"], "target": 2**63}, "target must be an integer from 1 to"),
        (
            {"anyOf": ["exclusive:a"], "target": 1, "weights": [1, 2]},
            r"weights must have as many entries as anyOf \(1\), but has 2",
        ),
        ({"anyOf": ["exclusive:a"], "target": 1, "weights": []}, "weights must be a list, with an integer from 1 to"),
        ({"anyOf": ["exclusive:a"], "target": 1, "weights": [0]}, "weights must be a list, with an integer from 1 to"),
        ({"anyOf": ["exclusive:a", "shared:a"], "target": 1}, "each resource once, but names 'a' twice"),
        ({"anyOf": [], "target": 1}, "anyOf must be a list of 1 to 10000"),
        ({"anyOf": ["a"], "target": 1}, "anyOf is invalid: a resource must begin"),
        ({"resources": ["exclusive:a"], "target": 1}, "target requires anyOf"),
        ({"resources": ["exclusive:a"], "weights": [1]}, "weights requires anyOf"),
        ({}, "resources is missing"),
    ],
)
def test_an_invalid_choice_is_explained(payload: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestRejected, match=why):
        commands.read(orjson.dumps({"command": "request", "payload": payload}))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"transactionTimout": 5}, "unknown field 'transactionTimout'; did you mean 'transactionTimeout'?"),
        ({"queuetimeout": 5}, "did you mean 'queueTimeout'?"),
        ({"xyz": None}, "unknown field 'xyz'; known fields: resources, anyOf,"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_known_one(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        commands.read(line("request", resources=["exclusive:a"], ref="r", **fields))
    assert caught.value.code == "bad-request"
    assert caught.value.ref == "r"
    assert why in caught.value.message


def test_an_unknown_field_next_to_the_payload_is_rejected() -> None:
    with pytest.raises(RequestRejected) as caught:
        commands.read(b'{"command":"release","payload":{"id":7,"ref":"x"},"payloads":{}}')
    assert (caught.value.code, caught.value.ref, caught.value.id) == ("bad-message", "x", 7)


def test_every_field_has_a_check_and_every_check_a_field() -> None:
    typed = {
        "request": wire_types.RequestPayload,
        "release": wire_types.ReleasePayload,
        "extend": wire_types.ExtendPayload,
        "hello": wire_types.HelloPayload,
        "bye": wire_types.BarePayload,
        "ping": wire_types.BarePayload,
        "inspect": wire_types.InspectPayload,
        "watch": wire_types.WatchPayload,
        "unwatch": wire_types.WatchPayload,
    }
    assert typed.keys() == diagnostics.FIELD_CHECKS.keys()
    for name, payload in typed.items():
        assert set(payload.__struct_fields__) == set(diagnostics.FIELD_CHECKS[name]), name
        required = {field.name for field in msgspec.structs.fields(payload) if field.required}
        assert required == set(diagnostics.REQUIRED_FIELDS.get(name, ())), name


def test_every_command_carries_its_ref() -> None:
    assert commands.read(line("release", id=7, ref="r")) == Release(7, "r")
    assert commands.read(line("release", ref="r")) == ReleaseByRef("r")
    assert commands.read(line("extend", id=7, transactionTimeout=5, ref="r")) == Extend(7, 5, "r")
    assert commands.read(line("ping", ref="r")) == Ping("r")
    assert commands.read(line("bye", ref="r")) == Bye("r")
    assert commands.read(line("inspect", ref="r")) == Inspect(ref="r")
    assert commands.read(line("watch", prefix="a", ref="r")) == Watch("a", "r")
    assert commands.read(line("unwatch", prefix="a", ref="r")) == Unwatch("a", "r")
    assert commands.read(line("hello", ref="r")) == Hello(ref="r")


@pytest.mark.parametrize("command", sorted(diagnostics.FIELD_CHECKS))
def test_an_error_carries_an_id_only_where_an_id_is_released_or_extended(command: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        commands.read(line(command, id=7, ref="r", nonsense=1))
    assert caught.value.ref == "r"
    assert caught.value.id == (7 if command in ("release", "extend") else None)


def line(command: str, **payload: Any) -> bytes:
    return orjson.dumps({"command": command, "payload": payload})


def test_a_command_may_name_its_namespace() -> None:
    request = commands.read(line("request", resources=["exclusive:a"], ref="r", namespace="billing-2.eu:west_1"))
    assert isinstance(request, Namespaced)
    assert request.namespace == "billing-2.eu:west_1"
    assert isinstance(request.command, Request)
    assert (request.command.exclusive, request.command.ref) == (("a",), "r")
    take = commands.read(line("request", anyOf=["exclusive:a"], target=1, namespace="b"))
    assert isinstance(take, Namespaced)
    assert isinstance(take.command, Take)
    assert commands.read(line("release", id=7, namespace="b")) == Namespaced("b", Release(7))
    assert commands.read(line("watch", prefix="", namespace="b")) == Namespaced("b", Watch(""))
    assert commands.read(line("release", id=7, namespace=None)) == Release(7)
    with pytest.raises(RequestRejected, match="ping: unknown field 'namespace'"):
        commands.read(line("ping", namespace="b"))


def test_hello_names_the_namespace_of_the_connection() -> None:
    assert commands.read(line("hello", namespace="billing")) == Hello(namespace="billing")
    assert commands.read(line("hello")) == Hello(namespace=None)
    hello = commands.read(line("hello", protocol=1, client="mine/2", quiet=True, session="x" * 16, sessionTimeout=5))
    assert hello == Hello("x" * 16, 5, None, 1, "mine/2", quiet=True)


@pytest.mark.parametrize("command", [name for name, known in diagnostics.FIELD_CHECKS.items() if "namespace" in known])
@pytest.mark.parametrize("wrong", ["", "x" * 129, "a b", "a/b", "\u00e4", "a\n", 7, True, ["genie"], {}])
def test_an_invalid_namespace_is_explained(command: str, wrong: object) -> None:
    payload = (
        {"resources": ["exclusive:a"]}
        if command == "request"
        else {
            name: value
            for name, value in (("id", 7), ("transactionTimeout", 1), ("prefix", ""))
            if name in diagnostics.FIELD_CHECKS[command]
        }
    )
    with pytest.raises(RequestRejected) as caught:
        commands.read(line(command, **payload, namespace=wrong))
    assert caught.value.code == "bad-request"
    assert caught.value.message == f"{command}: namespace must be a string of 1 to 128 letters, digits or any of _.:-"


@pytest.mark.parametrize(
    ("sent_line", "expected"),
    [
        (line("hello", namespace="billing"), Hello(namespace="billing")),
        (b'{"command":"\\u0068ello"}', Hello()),
        (line("hello", namespace=7), "bad-request"),
        (line("hello", session="short"), "bad-request"),
        (line("hello", protocol=2), "unsupported-protocol"),
        (b'{"command":"hello","payload":["namespace"]}', "bad-message"),
        (line("request", namespace="billing"), None),
        (line("watch", prefix="hello"), None),
        (b'["hello"]', "bad-message"),
        (b"hello", "bad-json"),
        (b'{"command":"HELLO"}', "unknown-command"),
        (b'{"command":"request","payload":{"resources":["hello"]}}', None),
        (b"\xff", None),
    ],
)
def test_a_hello_is_recognized_valid_or_not(sent_line: bytes, expected: object) -> None:
    hello = commands.read_hello(sent_line)
    assert (hello.code if isinstance(hello, RequestRejected) else hello) == expected


@pytest.mark.parametrize(
    "line",
    [
        b'{"command":"request","command":"release","payload":{"id":7}}',
        b'{"command":"release","payload":{"x":1},"payload":{"id":7}}',
        b'{"command":"release","payload":{"id":"x","id":7}}',
    ],
)
def test_the_last_value_of_a_duplicate_key_counts_even_if_the_first_is_invalid(line: bytes) -> None:
    assert commands.read(line) == Release(7)
    with pytest.raises(RequestRejected, match="unknown field 'x'"):
        commands.read(line.replace(b"}}", b'},"x":2}'))


WIDE = "\U0001f512"


@pytest.mark.parametrize(
    ("fields", "is_large"),
    [
        ({"resources": ["exclusive:a"]}, False),
        (
            {
                "resources": ["exclusive:" + "a" * 128],
                "note": "n" * 128,
                "transactionName": "t" * 128,
                "ref": WIDE * 36,
            },
            False,
        ),
        ({"resources": ["exclusive:é"], "note": "für", "transactionName": "ü", "ref": "r" * 128}, False),
        (
            {"resources": [f"shared:{number}" for number in range(8)], "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"},
            False,
        ),
        ({"resources": [f"shared:{number}" for number in range(9)]}, True),
        ({"resources": ["exclusive:" + "a" * 512]}, True),
        ({"resources": ["exclusive:" + WIDE * 64]}, True),
        ({"resources": ["exclusive:a", "shared:" + WIDE * 64]}, True),
        ({"resources": ["exclusive:a"], "transactionName": WIDE * 64}, True),
        ({"resources": ["exclusive:a"], "note": WIDE * 64}, True),
        ({"resources": ["exclusive:a"], "ref": WIDE * 128}, True),
    ],
)
def test_a_request_is_large_if_it_takes_more_memory_than_usual(fields: dict[str, object], is_large: bool) -> None:
    options = {"queueTimeout": 7, "transactionTimeout": 8, "priority": 9, "onDisconnect": "release"}
    line = orjson.dumps({"command": "request", "payload": fields | options})
    request = commands.read(line)
    assert type(request) is (LargeRequest if is_large else Request)
    plain = request.request if isinstance(request, LargeRequest) else request
    assert type(plain) is Request
    assert [f"exclusive:{name}" for name in plain.exclusive] + [f"shared:{name}" for name in plain.shared] == fields[
        "resources"
    ]
    texts = plain.transaction, plain.context.note, plain.ref, plain.context.traceparent
    assert texts == tuple(fields.get(name) for name in ("transactionName", "note", "ref", "traceparent"))
    numbers = plain.queue_timeout_ms, plain.transaction_timeout_ms, plain.priority, plain.release_on_disconnect
    assert numbers == (7, 8, 9, True)


MANY = limits.MAX_VALUES + 1


@pytest.mark.parametrize(
    "line",
    [
        b'{"command":"request","payload":{"resources":[%b]}}' % b",".join([b"[]"] * MANY),
        b'{"command":"request","payload":{"weights":[%b]}}' % b",".join([b'"1"'] * MANY),
        b'{"command":"request","payload":{"weights":[%b]}}' % b",".join([b"1"] * MANY),
        b'{"command":"ping","payload":{%b}}' % b",".join(b'"%d":0' % number for number in range(MANY)),
        b'{"command":"ping","payload":{"ref":1,%b}}' % b",".join([b'"ref":"\\"a"'] * MANY),
        b'{"hello":%b}' % (b"[" * MANY),
    ],
)
def test_a_line_with_very_many_values_is_not_decoded_as_objects(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics.codec, "loads", lambda _: pytest.fail("decoded"))
    monkeypatch.setattr(commands, "_decode", lambda _: pytest.fail("decoded"))
    with pytest.raises(RequestRejected, match="more than 32768 values"):
        commands.read(line)
    assert diagnostics.hello_token(line) is None
    assert not diagnostics.is_hello(line)


SMALL = b"2.4703282292062327208e-324"


@pytest.mark.parametrize("end", [b"", b',"ref":"%b"' % (b"r" * 100), b',"ref":5'], ids=["valid", "long", "invalid"])
def test_a_long_line_with_very_many_keys_is_not_decoded(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed decoder takes long for each number that is nearly 0, and decodes it again for each repeated key."""
    for name in ("_decode", "_decode_short"):
        monkeypatch.setattr(commands, name, lambda _: pytest.fail("decoded"))
    keys = b",".join([b'"priority" :%b' % SMALL] * (limits.MAX_KEYS + 1))
    line = b'{"command":"request","payload":{"resources":["shared:hello"],%b%b}}' % (keys, end)
    with pytest.raises(RequestRejected, match="more than 1000 keys"):
        commands.read_long(line)
    rejection = commands.read_hello(line)
    assert isinstance(rejection, RequestRejected)
    assert "more than 1000 keys" in rejection.message


@pytest.mark.parametrize("end", [b"", b"x}"], ids=["truncated", "malformed"])
def test_the_numbers_of_a_long_malformed_line_are_not_decoded(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec takes long for each number that is nearly 0."""
    monkeypatch.setattr(codec.msgspec.json, "decode", lambda _: pytest.fail("decoded"))
    line = b'{"command":"hello","payload":{"x":[%b]}%b' % (b",".join([SMALL] * (limits.MAX_VALUES - 100)), end)
    with pytest.raises(RequestRejected, match=r"expected ',' or '}'|unexpected end of data"):
        commands.read_long(line)
    for rejection in commands.read_hello(line), diagnostics.read_envelope(line):
        assert isinstance(rejection, RequestRejected)
        assert rejection.code == "bad-json"


def test_colons_after_quotes_in_texts_are_no_keys() -> None:
    names = [f'shared:{number}":' for number in range(9_000)]
    line = orjson.dumps({"command": "request", "payload": {"anyOf": names, "target": 1}})
    assert isinstance(commands.read_long(line), Take)
    repeated = b'{"command":"ping","payload":{%b}}' % b",".join([b'"ref":"a"'] * (limits.MAX_KEYS + 1))
    assert isinstance(commands.read_long(repeated), Ping), "the line is short"


def test_commas_and_brackets_in_texts_are_no_values() -> None:
    names = [f'exclusive:{number},[{{,,\\"' for number in range(limits.MAX_VALUES // 8)]
    line = orjson.dumps({"command": "request", "payload": {"anyOf": names, "target": 1}})
    assert line.count(b",") > limits.MAX_VALUES / 2
    longest = orjson.dumps(
        {"command": "request", "payload": {"anyOf": [f"shared:{n},,,," for n in range(10_000)], "target": 1}}
    )
    for valid in (line, longest):
        assert isinstance(commands.read(valid), Take)


def test_the_digits_of_weights_are_checked_without_a_pattern_for_each() -> None:
    def rejected(weights: list[Any], target: Any = "1") -> str:
        payload = {
            "anyOf": [f"shared:{number}" for number in range(len(weights))],
            "weights": weights,
            "target": target,
        }
        with pytest.raises(RequestRejected) as rejection:
            commands.read(orjson.dumps({"command": "request", "payload": payload}))
        return rejection.value.message

    for wrong in ("0", "01", "-1", "1.5", "1\n", "", " 1", "1_0", "\u0663", "9" * 79):
        assert "weights must be a list" in rejected(["5", wrong, 3])
        assert "target must be" in rejected(["5"], target=wrong)


@pytest.mark.parametrize(
    "line",
    [
        b'{"command":"ping","payload":{}}}',
        b'{"command":"ping","payload":{}',
        b'{"command":"request","payload":{"resources":["exclusive:a"],}}',
        b'{"command":"release","payload":{"id":01}}',
        b'{"command":"ping","payload":{"ref":"\xff"}}',
        b'{"command":"ping","payload":{"ref":"\\ud800"}}',
        b'{"command":"ping","payload":{"ref":"a\nb"}}',
        b'{"command":"ping","payload":NaN}',
        *(b"[" * depth + b"]" * depth for depth in (17, 254, 255, 600, 1023, 1024, 1025)),
        b"ping",
    ],
)
def test_a_line_that_is_no_json_has_one_error_wherever_it_is_found(line: bytes) -> None:
    """A server that leads decodes the command, and one without a store only its envelope."""
    with pytest.raises(RequestRejected) as found:
        commands.read(line)
    envelope = diagnostics.read_envelope(line)
    assert isinstance(envelope, RequestRejected)
    assert (found.value.code, found.value.message) == (envelope.code, envelope.message)
