"""What must be true of any bytes, for each reader of the protocol. AssertionError (or anything else) where it isn't.

Each property is called with bytes, and returns a word for what it saw, so that it can be counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields as fields_of
from random import Random
from typing import Any

import msgspec

from genie import core
from genie.client import reach
from genie.core import Extend, Reason, Release, Request, State, Take
from genie.errors import RequestRejected
from genie.protocol import commands, messages, replies, resources
from genie.protocol import framing as framing_module
from genie.protocol.commands import Hello, Inspect, Unwatch, Watch, Within
from genie.protocol.framing import SPLIT_BYTES, Lines, LineTooLong

CODES = {"bad-json", "bad-message", "bad-request", "unknown-command"}
_FIELDS = [field.name for field in fields_of(Request) if field.init]


# -- framing ----------------------------------------------------------------------------------------------


def framing(data: bytes) -> str:
    """A stream gives the same lines however it is cut, and the limit is kept."""
    chance, stream = Random(data[:3]), data[3:]
    sizes = [len(line) for line in stream.split(b"\n")]
    limit = max(1, chance.choice((chance.randrange(1, 40), chance.choice(sizes) + chance.randrange(-2, 2))))
    expected, ends = by_the_rule(stream, limit)
    for step, split_bytes in ((len(stream) + 1, SPLIT_BYTES), (len(stream) + 1, 5), (1, SPLIT_BYTES), (0, 3)):
        framing_module.SPLIT_BYTES = split_bytes
        lines, got, ended, place = Lines(limit), [], False, 0
        while place < len(stream) and not ended:
            size = step or chance.randrange(1, 2 * limit + 3)
            try:
                got += lines.feed(stream[place : place + size])
            except LineTooLong as too_long:
                got += too_long.lines
                ended = True
            assert len(lines._rest) <= limit + 1, "more than one line is kept"
            place += size
        framing_module.SPLIT_BYTES = SPLIT_BYTES
        assert (got, ended) == (expected, ends), f"cut by {step}: {got} {ended}, not {expected} {ends}"
    return "framing too long" if ends else "framing"


def by_the_rule(stream: bytes, limit: int) -> tuple[list[bytes], bool]:
    """The lines of a stream, and whether one that is too long ends it."""
    lines: list[bytes] = []
    *whole, rest = stream.split(b"\n")
    for line in whole:
        if len(line.removesuffix(b"\r")) > limit:
            return lines, True
        lines.append(line)
    return lines, len(rest) > limit + 1


# -- commands ---------------------------------------------------------------------------------------------


def command(line: bytes) -> str:
    """A command within its bounds or RequestRejected; and the fast way takes nothing that the slow one would refuse."""
    slow, refused = None, None
    try:
        slow = commands._slowly(line)
    except RequestRejected as rejected:
        refused = rejected
        assert rejected.code in CODES, rejected.code
        assert rejected.ref is None or 0 < len(rejected.ref) <= 128
        assert rejected.id is None or abs(rejected.id) < 2**53
        json.loads(replies.error(rejected))
    try:
        payload = commands._decode(line).payload
        fast = Release(payload.id) if type(payload) is commands._Release else commands._request(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        fast = None
    if fast is not None:
        assert refused is None, f"the fast way takes what the slow one refuses: {refused}"
        assert seen(fast) == seen(slow), f"the fast way reads {seen(fast)}, the slow one {seen(slow)}"
    try:
        read = commands.read(line)
    except RequestRejected as rejected:
        assert refused is not None, f"refused, though right by the rule: {rejected}"
        assert str(rejected) == str(refused)
        return f"command refused {rejected.code}"
    assert refused is None, f"taken, though wrong by the rule: {refused}"
    assert seen(read) == seen(slow)
    within_bounds(read)
    return f"command {type(read).__name__}{' fast' if fast is not None else ''}"


def seen(value: Any) -> Any:
    """A command in a form that can be compared, with the kinds of its weights."""
    if isinstance(value, Within):
        return value.namespace, seen(value.command)
    if isinstance(value, Take):
        kinds = [type(weight) for weight in [*value.weights, value.target]]
        return seen(value.request), value.choices, list(value.weights), value.target, kinds
    if isinstance(value, Request):
        return {name: getattr(value, name) for name in _FIELDS}
    return value


def within_bounds(read: Any) -> None:
    """The limits of protocol.md, said again."""
    if isinstance(read, Within):
        _namespace(read.namespace)
        assert not isinstance(read.command, (Hello, Within))
        within_bounds(read.command)
    elif isinstance(read, Take):
        names = [name for name, _ in read.choices]
        assert 0 < len(names) == len(set(names)) == len(read.weights) <= 10_000
        assert all(type(weight) in (int, float) and 0 < weight <= 2**63 - 1 for weight in [*read.weights, read.target])
        _names(names)
        _request(read.request)
    elif isinstance(read, Request):
        names = [*read.shared, *read.exclusive]
        assert 0 < len(names) == len(set(names)) <= 1024
        _names(names)
        _request(read)
    elif isinstance(read, (Release, Extend)):
        assert type(read.id) is int
        assert abs(read.id) < 2**53
        assert isinstance(read, Release) or 1 <= read.transaction_timeout_ms <= 2**31 - 1
    elif isinstance(read, Hello):
        assert read.session is None or 16 <= len(read.session) <= 128
        assert 1 <= read.session_timeout_ms <= 2**31 - 1
        _namespace("a" if read.namespace is None else read.namespace)
    elif isinstance(read, Inspect):
        _names([name for name in (read.resource, read.transaction) if name is not None])
        assert read.id is None or (type(read.id) is int and abs(read.id) < 2**53)
        assert type(read.limit) is int
        assert 1 <= read.limit <= 1000
    elif isinstance(read, (Watch, Unwatch)):
        _names([read.prefix] if read.prefix else [])


def _request(request: Request) -> None:
    assert 0 <= request.queue_timeout_ms <= 2**31 - 1
    assert 1 <= request.transaction_timeout_ms <= 2**31 - 1
    assert abs(request.priority) <= 2**31
    assert request.ref is None or 0 < len(request.ref) <= 128
    assert type(request.release_on_disconnect) is bool
    _names([] if request.transaction is None else [request.transaction])


def _namespace(name: str) -> None:
    assert 0 < len(name) <= 128
    assert all(char.isascii() and (char.isalnum() or char in "_.:-") for char in name)


def _names(names: list[str]) -> None:
    for name in names:
        assert 0 < len(name) <= 512
        assert not any(char < " " or "\x7f" <= char <= "\x9f" or "\ud800" <= char <= "\udfff" for char in name)


# -- messages ---------------------------------------------------------------------------------------------


def message(line: bytes) -> str:
    """A client reads a message, skips one that it does not know, or says ValueError: nothing else."""
    try:
        read = messages.read(line)
    except ValueError:
        return "message refused"
    if read is None:
        assert isinstance(json.loads(line)["command"], str)
        return "message unknown"
    return f"message {type(read).__name__}"


def reply(data: bytes) -> str:
    """What the server says is one line of strict JSON, and the client reads the same from it."""
    chance, request = Random(data), Request(("a",), ("b", "c"))
    text = data.decode(errors="ignore")
    ref, transaction = text[:128] or None, text[1:512] or None
    request.id, request.fence, request.ref = chance.randrange(2**53), chance.randrange(1, 2**53), ref
    request.shared, request.transaction, request.owner = (text[:512],), transaction, transaction or request.id
    request.since = chance.choice((0.0, 1.5, 1e9 / 3))
    request.since_unix_ms, request.deadline, request.state = 1.79e12, 2**31, State.HELD
    now, kind = request.since + chance.choice((0.0, 0.1, 2147483647.25)), chance.randrange(8)
    read: Any
    if kind == 0:
        read = _read(replies.queued(request))
        assert (read.payload.id, read.payload.ref) == (request.id, ref)
    elif kind == 1:
        read = _read(replies.locked(request))
        assert (read.payload.id, read.payload.fence, read.payload.ref) == (request.id, request.fence, ref)
    elif kind == 2:
        read = _read(replies.ended(request.id, chance.choice(list(Reason)), ref))
        assert (read.payload.id, read.payload.ref) == (request.id, ref)
    elif kind == 3:
        free = chance.choice((0, 2**63 * 9999, 1e-300, 2.0**63, 0.1 + 0.2))
        read = _read(replies.released(core.Refused(request, Reason.INSUFFICIENT, free, 0.5), now))
        assert (read.payload.free, type(read.payload.free), read.payload.ref) == (free, type(free), ref)
    elif kind == 4:
        rejected = RequestRejected("bad-request", text, ref=ref, id=request.id)
        read = _read(replies.error(rejected))
        assert (read.payload.message, read.payload.ref, read.payload.id) == (text, ref, request.id)
    elif kind == 5:
        read = _read(replies.event(request, text, exclusive=True, state="locked"))
        assert (read.payload.resource, read.payload.transactionName) == (text, transaction)
    elif kind == 6:
        read = _read(replies.watching(text, [replies.held(request, text, exclusive=False)], truncated=False))
        assert (read.payload.prefix, read.payload.held[0].resource) == (text, text)
    else:
        timeout = chance.choice((1.0, 0.5, 2147483647.0, 1e9 / 3))
        read = _read(replies.extended(core.Extended(request, timeout)))
        assert abs(read.payload.transactionTimeout - timeout) <= 0.001
    return f"reply {type(read).__name__}"


def _read(line: bytes) -> messages.Message:
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1, line
    assert set(json.loads(line, parse_constant=_none)) == {"command", "payload"}
    read = messages.read(line[:-1])
    assert read is not None, line
    return read


def _none(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


# -- what people write ------------------------------------------------------------------------------------


def address(data: bytes) -> str:
    """Addresses that can be said again, or ValueError."""
    text = data.decode(errors="replace")
    try:
        found = reach.addresses(text, 7077)
    except ValueError:
        return "address refused"
    for host, port, _ in found:
        assert 0 < port < 1 << 16
        assert host
    return "address"


def resource(data: bytes) -> str:
    """What people write is a resource that the server takes, or ValueError."""
    text = data.decode(errors="replace")
    try:
        spelled = resources.from_people(text)
    except ValueError:
        return "resource refused"
    _names([resources.parse(spelled)[1]])
    return "resource"


PROPERTIES: tuple[Callable[[bytes], str], ...] = (
    *(command, command, command, command, framing, framing, message, message, reply, address, resource),
)
"""Taken by the first byte of an input; the ones that matter most are here several times."""


def check(data: bytes) -> str:
    """One input: the first byte says which property, the rest is for it."""
    return PROPERTIES[(data[0] if data else 0) % len(PROPERTIES)](data[1:])
