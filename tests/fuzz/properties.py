"""Properties of the parsers of the protocol that must hold for any input; an exception means a defect.

Each property is called with bytes, and returns a description of the result, which is counted as coverage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from genie import core
from genie.client import config
from genie.core import Extend, Reason, Release, Request, State, Take
from genie.errors import RequestRejected
from genie.lock_modes import S, U, UnitCount, X, lock_text
from genie.protocol import codec, commands, diagnostics, messages, replies, resources
from genie.protocol import framing as framing_module
from genie.protocol.commands import Hello, Inspect, LargeRequest, Namespaced, Unwatch, Watch, without_namespace
from genie.protocol.framing import SPLIT_BYTES, LineReader, LineTooLong

CODES = {"bad-json", "bad-message", "bad-request", "unknown-command"}


# -- framing ----------------------------------------------------------------------------------------------


def framing(data: bytes) -> str:
    """`LineReader` returns the same lines however the stream is split, and enforces its limit."""
    chance, stream = Random(data[:3]), data[3:]
    sizes = [len(line) for line in stream.split(b"\n")]
    limit = max(1, chance.choice((chance.randrange(1, 40), chance.choice(sizes) + chance.randrange(-2, 2))))
    expected, ends = expected_lines(stream, limit)
    for step, split_bytes in ((len(stream) + 1, SPLIT_BYTES), (len(stream) + 1, 5), (1, SPLIT_BYTES), (0, 3)):
        framing_module.SPLIT_BYTES = split_bytes
        lines, got, ended, place = LineReader(limit), [], False, 0
        while place < len(stream) and not ended:
            size = step or chance.randrange(1, 2 * limit + 3)
            try:
                got += lines.feed(stream[place : place + size])
            except LineTooLong as too_long:
                got += too_long.lines
                ended = True
            assert len(lines.partial) <= limit + 1, "more than one line is buffered"
            place += size
        framing_module.SPLIT_BYTES = SPLIT_BYTES
        assert (got, ended) == (expected, ends), f"cut by {step}: {got} {ended}, not {expected} {ends}"
    return "framing too long" if ends else "framing"


def expected_lines(stream: bytes, limit: int) -> tuple[list[bytes], bool]:
    """Return the lines of a stream up to the first that is too long, and whether there is one."""
    lines: list[bytes] = []
    *whole, rest = stream.split(b"\n")
    for line in whole:
        if len(line.removesuffix(b"\r")) > limit:
            return lines, True
        lines.append(line)
    return lines, len(rest) > limit + 1


# -- commands ---------------------------------------------------------------------------------------------


def command(line: bytes) -> str:
    """`commands.read` returns a command within its limits, or raises RequestRejected with the line's `ref` and `id`.

    The typed decoder, which decides, and `diagnostics`, which explains rejections, are different code and must agree.
    """
    try:
        decoded = commands.read(line)
    except RequestRejected as rejected:
        _check_rejection(line, rejected)
        return f"command rejected {rejected.code}"
    message = json.loads(line)
    payload = message.get("payload") or {}
    assert message.keys() <= {"command", "payload"}
    assert diagnostics.payload_error(message["command"], payload) is None, "accepted, though diagnostics reject it"
    _check_fields(decoded, {name: value for name, value in payload.items() if value is not None})
    check_limits(decoded)
    return f"command {type(decoded).__name__}"


def _check_rejection(line: bytes, rejected: RequestRejected) -> None:
    assert rejected.code in CODES, rejected.code
    assert rejected.ref is None or 0 < len(rejected.ref) <= 128
    assert rejected.id is None or abs(rejected.id) < 2**53
    json.loads(replies.error(rejected))
    if rejected.code != "bad-request":
        return
    message = codec.loads(line)
    name, payload = message["command"], message.get("payload") or {}
    wrong = diagnostics.payload_error(name, payload)
    assert wrong is not None, f"rejected as {rejected.message}, but diagnostics find no error"
    assert rejected.message == f"{name}: {wrong}"
    ref, id_ = payload.get("ref"), payload.get("id")
    if type(ref) is str and 0 < len(ref) <= 128:
        assert rejected.ref == ref
    if name in ("release", "extend") and type(id_) is int and abs(id_) < 2**53:
        assert rejected.id == id_
    assert rejected.id is None or name in ("release", "extend")


def _check_fields(decoded: Any, payload: dict[str, Any]) -> None:
    """Check that a command has the values of its payload."""
    if isinstance(decoded, Namespaced):
        assert decoded.namespace == payload["namespace"]
    decoded = without_namespace(decoded)
    ref = decoded.request.ref if isinstance(decoded, Take) else decoded.ref
    assert ref == payload.get("ref")
    if isinstance(decoded, (Release, Extend, Inspect)):
        assert decoded.id == payload.get("id")
    if isinstance(decoded, Take):
        choices = [lock_text(name, mode, decoded.units.get(name)) for name, mode in decoded.choices]
        assert [_without_zeros(choice) for choice in payload["anyOf"]] == choices
        assert list(decoded.weights) == [int(weight) for weight in payload.get("weights") or [1] * len(decoded.choices)]
        amounts = [*(payload.get("weights") or []), payload["target"]]
        assert not any(type(amount) is str and amount.startswith("0") for amount in amounts)
        assert (decoded.target, decoded.as_strings) == (int(payload["target"]), type(payload["target"]) is str)
    request = decoded.request if isinstance(decoded, Take) else decoded
    if isinstance(request, Request):
        assert (request.transaction, request.context.note) == (payload.get("transactionName"), payload.get("note"))
        assert request.context.traceparent == payload.get("traceparent")
        assert request.transaction_timeout_ms == payload.get("transactionTimeout", 10_000)
        assert request.release_on_disconnect == (payload.get("onDisconnect") == "release")
    if isinstance(decoded, Request):
        assert request.queue_timeout_ms == payload.get("queueTimeout", 10_000)
        assert request.priority == payload.get("priority", 0)
        assert {f"shared:{name}" for name in decoded.shared} <= set(payload["resources"])
        assert {f"exclusive:{name}" for name in decoded.exclusive} <= set(payload["resources"])
        for name, (units, limit) in decoded.units.items():
            found = [re.fullmatch(r"([0-9]+)/([0-9]+):(.*)", each, re.DOTALL) for each in payload["resources"]]
            asked = [each for each in found if each is not None and each[3] == name]
            assert (sum(int(each[1]) for each in asked), {int(each[2]) for each in asked}) == (units, {limit})
    if isinstance(decoded, Hello):
        assert (decoded.session, decoded.client) == (payload.get("session"), payload.get("client"))
        assert (decoded.quiet, decoded.protocol) == (payload.get("quiet", False), payload.get("protocol", 1))


def _without_zeros(resource: str) -> str:
    """Return a resource, with units as the server writes them."""
    return re.sub(r"^0*([0-9]+)/0*([0-9]+):", r"\1/\2:", resource)


def check_limits(decoded: Any) -> None:
    """Check the limits of protocol.md, which are repeated here."""
    if isinstance(decoded, Namespaced):
        _namespace(decoded.namespace)
        assert not isinstance(decoded.command, (Hello, Namespaced))
        check_limits(decoded.command)
    elif isinstance(decoded, LargeRequest):
        check_limits(decoded.request)
    elif isinstance(decoded, Take):
        names = [name for name, _ in decoded.choices]
        assert 0 < len(names) == len(set(names)) == len(decoded.weights) <= 10_000
        assert all(type(weight) is int and 0 < weight < 10**78 for weight in [*decoded.weights, decoded.target])
        assert not any(name == "**" or name.endswith("/**") for name in names)
        assert decoded.units.keys() == {name for name, mode in decoded.choices if mode == U}
        _names(names)
        _units(decoded.units)
        _request(decoded.request)
    elif isinstance(decoded, Request):
        names = [*decoded.shared, *decoded.exclusive, *decoded.units]
        assert 0 < len(names) == len(set(names)) <= 1024
        _names(names)
        _units(decoded.units)
        _request(decoded)
    elif isinstance(decoded, (Release, Extend)):
        assert type(decoded.id) is int
        assert abs(decoded.id) < 2**53
        assert isinstance(decoded, Release) or 1 <= decoded.transaction_timeout_ms <= 2**31 - 1
    elif isinstance(decoded, Hello):
        assert decoded.session is None or 16 <= len(decoded.session) <= 128
        assert 1 <= decoded.session_timeout_ms <= 2**31 - 1
        assert type(decoded.protocol) is int
        assert type(decoded.quiet) is bool
        _text(decoded.client, 128)
        _namespace("a" if decoded.namespace is None else decoded.namespace)
    elif isinstance(decoded, Inspect):
        _names([name for name in (decoded.resource, decoded.transaction) if name is not None])
        assert decoded.id is None or (type(decoded.id) is int and abs(decoded.id) < 2**53)
        assert type(decoded.limit) is int
        assert 1 <= decoded.limit <= 1000
    elif isinstance(decoded, (Watch, Unwatch)):
        _names([decoded.prefix] if decoded.prefix else [])


def _request(request: Request) -> None:
    assert 0 <= request.queue_timeout_ms <= 2**31 - 1
    assert 1 <= request.transaction_timeout_ms <= 2**31 - 1
    assert abs(request.priority) <= 2**31
    assert request.ref is None or 0 < len(request.ref) <= 128
    assert type(request.release_on_disconnect) is bool
    _text(request.context.note, 256)
    _names([] if request.transaction is None else [request.transaction])


def _units(counts: Mapping[str, UnitCount]) -> None:
    for name, (units, limit) in counts.items():
        assert 1 <= units <= limit <= 1_000_000
        assert name != "**"
        assert not name.endswith("/**")


def _namespace(name: str) -> None:
    assert 0 < len(name) <= 128
    assert all(char.isascii() and (char.isalnum() or char in "_.:-") for char in name)


def _names(names: list[str]) -> None:
    for name in names:
        _text(name, 512)


def _text(text: str | None, max_length: int) -> None:
    if text is not None:
        assert 0 < len(text) <= max_length
        assert not any(char < " " or "\x7f" <= char <= "\x9f" or "\ud800" <= char <= "\udfff" for char in text)


# -- messages ---------------------------------------------------------------------------------------------


def message(line: bytes) -> str:
    """A client decodes a message, skips an unknown one, or raises ValueError."""
    try:
        decoded = messages.read(line)
    except ValueError:
        return "message rejected"
    if decoded is None:
        assert isinstance(json.loads(line)["command"], str)
        return "message unknown"
    return f"message {type(decoded).__name__}"


def reply(data: bytes) -> str:
    """A reply of the server is one line of strict JSON, and the client decodes the same values from it."""
    chance, request = Random(data), Request(("a",), ("b", "c"))
    text = data.decode(errors="ignore")
    ref, transaction = text[:128] or None, text[1:512] or None
    request.id, request.fence, request.ref = chance.randrange(2**53), chance.randrange(1, 2**53), ref
    request.shared, request.transaction, request.owner = (text[:512],), transaction, transaction or request.id
    request.since = chance.choice((0.0, 1.5, 1e9 / 3))
    request.since_unix_ms, request.deadline, request.state = 1.79e12, 2**31, State.HELD
    now, kind = request.since + chance.choice((0.0, 0.1, 2147483647.25)), chance.randrange(9)
    decoded: Any
    if kind == 0:
        decoded = _read(replies.queued(request))
        assert (decoded.payload.id, decoded.payload.ref) == (request.id, ref)
    elif kind == 1:
        decoded = _read(replies.locked(request))
        assert (decoded.payload.id, decoded.payload.fence, decoded.payload.ref) == (request.id, request.fence, ref)
    elif kind == 2:
        decoded = _read(replies.ended(request.id, chance.choice(list(Reason)), ref))
        assert (decoded.payload.id, decoded.payload.ref) == (request.id, ref)
    elif kind == 3:
        free, as_strings = chance.choice((0, 1, 2**63 * 9999, 10**78)), chance.random() < 0.5
        insufficient = core.Insufficient(request, Reason.INSUFFICIENT, free, 10**70, as_strings)
        line = replies.released(insufficient, now, "the answer's")
        if as_strings:
            payload = json.loads(line)["payload"]
            assert (payload["free"], payload["locked"], payload.get("ref")) == (str(free), str(10**70), ref)
            return "reply Released"
        decoded = _read(line)
        assert (decoded.payload.free, type(decoded.payload.free), decoded.payload.ref) == (free, int, ref)
    elif kind == 4:
        rejected = RequestRejected("bad-request", text, ref=ref, id=request.id)
        decoded = _read(replies.error(rejected))
        assert (decoded.payload.message, decoded.payload.ref, decoded.payload.id) == (text, ref, request.id)
    elif kind == 5:
        decoded = _read(replies.event(request, text, X, state="locked"))
        assert (decoded.payload.resource, decoded.payload.transactionName) == (text, transaction)
    elif kind == 6:
        decoded = _read(replies.watching(text, [replies.watching_row(request, text, S)], False, ref))
        assert (decoded.payload.prefix, decoded.payload.held[0].resource) == (text, text)
    elif kind == 7:
        line = replies.welcome("1.0", text, resumed=True, quiet=chance.random() < 0.5, ref=ref)
        decoded = _read(line)
        payload = json.loads(line)["payload"]
        assert (payload["protocol"], payload["namespace"], payload.get("ref")) == (1, text, ref)
    else:
        timeout = chance.choice((1.0, 0.5, 2147483647.0, 1e9 / 3))
        decoded = _read(replies.extended(core.Extended(request, timeout), ref))
        assert abs(decoded.payload.transactionTimeout - timeout) <= 0.001
    return f"reply {type(decoded).__name__}"


def _read(line: bytes) -> messages.Message:
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1, line
    assert set(json.loads(line, parse_constant=_reject_constant)) == {"command", "payload"}
    decoded = messages.read(line[:-1])
    assert decoded is not None, line
    return decoded


def _reject_constant(constant: str) -> None:
    raise AssertionError(f"{constant} is not valid JSON")


# -- addresses and resources in settings and arguments ---------------------------------------------------


def address(data: bytes) -> str:
    """`parse_addresses` returns valid addresses, or raises ValueError."""
    text = data.decode(errors="replace")
    try:
        found = config.parse_addresses(text, 7077)
    except ValueError:
        return "address rejected"
    for host, port, _ in found:
        assert 0 < port < 1 << 16
        assert host
    return "address"


def resource(data: bytes) -> str:
    """`parse_resource_arg` returns a resource that the server accepts, or raises ValueError."""
    text = data.decode(errors="replace")
    try:
        spelled = resources.parse_resource_arg(text)
    except ValueError:
        return "resource rejected"
    _names([resources.parse_resource(spelled)[1]])
    return "resource"


PROPERTIES: tuple[Callable[[bytes], str], ...] = (
    *(command, command, command, command, framing, framing, message, message, reply, address, resource),
)
"""The first byte of an input selects one; the most important ones are listed several times."""


def check(data: bytes) -> str:
    """Check one input: the first byte selects the property, the rest is its input."""
    return PROPERTIES[(data[0] if data else 0) % len(PROPERTIES)](data[1:])
