"""What must be true of any bytes, for each reader of the protocol. AssertionError (or anything else) where it isn't.

Each property is called with bytes, and returns a word for what it saw, so that it can be counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from genie import core
from genie.client import config
from genie.core import Extend, Reason, Release, Request, State, Take
from genie.errors import RequestRejected
from genie.protocol import codec, commands, diagnostics, messages, replies, resources
from genie.protocol import framing as framing_module
from genie.protocol.commands import Hello, Inspect, Namespaced, Unwatch, Watch
from genie.protocol.framing import SPLIT_BYTES, LineReader, LineTooLong

CODES = {"bad-json", "bad-message", "bad-request", "unknown-command"}


# -- framing ----------------------------------------------------------------------------------------------


def framing(data: bytes) -> str:
    """A stream gives the same lines however it is cut, and the limit is kept."""
    chance, stream = Random(data[:3]), data[3:]
    sizes = [len(line) for line in stream.split(b"\n")]
    limit = max(1, chance.choice((chance.randrange(1, 40), chance.choice(sizes) + chance.randrange(-2, 2))))
    expected, ends = by_the_rule(stream, limit)
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
            assert len(lines.partial) <= limit + 1, "more than one line is kept"
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
    """A command within its bounds, or RequestRejected with the `ref` and the `id` of the line.

    What decides (the typed decoder) and what explains (`fields`) are different code: they must agree.
    """
    try:
        read = commands.read(line)
    except RequestRejected as rejected:
        _explained(line, rejected)
        return f"command refused {rejected.code}"
    message = json.loads(line)
    payload = message.get("payload") or {}
    assert message.keys() <= {"command", "payload"}
    assert diagnostics.payload_error(message["command"], payload) is None, "taken, though it is explained as wrong"
    _as_said(read, {name: value for name, value in payload.items() if value is not None})
    within_bounds(read)
    return f"command {type(read).__name__}"


def _explained(line: bytes, rejected: RequestRejected) -> None:
    assert rejected.code in CODES, rejected.code
    assert rejected.ref is None or 0 < len(rejected.ref) <= 128
    assert rejected.id is None or abs(rejected.id) < 2**53
    json.loads(replies.error(rejected))
    if rejected.code != "bad-request":
        return
    message = codec.loads(line)
    name, payload = message["command"], message.get("payload") or {}
    wrong = diagnostics.payload_error(name, payload)
    assert wrong is not None, f"refused as {rejected.message}, and nothing explains it"
    assert rejected.message == f"{name}: {wrong}"
    ref, id_ = payload.get("ref"), payload.get("id")
    if type(ref) is str and 0 < len(ref) <= 128:
        assert rejected.ref == ref
    if name in ("release", "extend") and type(id_) is int and abs(id_) < 2**53:
        assert rejected.id == id_
    assert rejected.id is None or name in ("release", "extend")


def _as_said(read: Any, payload: dict[str, Any]) -> None:
    """Whether a command is what its payload says."""
    if isinstance(read, Namespaced):
        assert read.namespace == payload["namespace"]
        read = read.command
    ref = read.request.ref if isinstance(read, Take) else read.ref
    assert ref == payload.get("ref")
    if isinstance(read, (Release, Extend, Inspect)):
        assert read.id == payload.get("id")
    if isinstance(read, Take):
        assert [f"{'exclusive' if alone else 'shared'}:{name}" for name, alone in read.choices] == payload["anyOf"]
        assert list(read.weights) == [int(weight) for weight in payload.get("weights") or [1] * len(read.choices)]
        amounts = [*(payload.get("weights") or []), payload["target"]]
        assert not any(type(amount) is str and amount.startswith("0") for amount in amounts)
        assert (read.target, read.as_strings) == (int(payload["target"]), type(payload["target"]) is str)
    request = read.request if isinstance(read, Take) else read
    if isinstance(request, Request):
        assert (request.transaction, request.note) == (payload.get("transactionName"), payload.get("note"))
        assert request.transaction_timeout_ms == payload.get("transactionTimeout", 10_000)
        assert request.release_on_disconnect == (payload.get("onDisconnect") == "release")
    if isinstance(read, Request):
        assert request.queue_timeout_ms == payload.get("queueTimeout", 10_000)
        assert request.priority == payload.get("priority", 0)
        assert {f"shared:{name}" for name in read.shared} <= set(payload["resources"])
        assert {f"exclusive:{name}" for name in read.exclusive} <= set(payload["resources"])
    if isinstance(read, Hello):
        assert (read.session, read.client) == (payload.get("session"), payload.get("client"))
        assert (read.quiet, read.protocol) == (payload.get("quiet", False), payload.get("protocol", 1))


def within_bounds(read: Any) -> None:
    """The limits of protocol.md, said again."""
    if isinstance(read, Namespaced):
        _namespace(read.namespace)
        assert not isinstance(read.command, (Hello, Namespaced))
        within_bounds(read.command)
    elif isinstance(read, Take):
        names = [name for name, _ in read.choices]
        assert 0 < len(names) == len(set(names)) == len(read.weights) <= 10_000
        assert all(type(weight) is int and 0 < weight < 10**78 for weight in [*read.weights, read.target])
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
        assert type(read.protocol) is int
        assert type(read.quiet) is bool
        _text(read.client, 128)
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
    _text(request.note, 256)
    _names([] if request.transaction is None else [request.transaction])


def _namespace(name: str) -> None:
    assert 0 < len(name) <= 128
    assert all(char.isascii() and (char.isalnum() or char in "_.:-") for char in name)


def _names(names: list[str]) -> None:
    for name in names:
        _text(name, 512)


def _text(text: str | None, most: int) -> None:
    if text is not None:
        assert 0 < len(text) <= most
        assert not any(char < " " or "\x7f" <= char <= "\x9f" or "\ud800" <= char <= "\udfff" for char in text)


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
    now, kind = request.since + chance.choice((0.0, 0.1, 2147483647.25)), chance.randrange(9)
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
        free, as_strings = chance.choice((0, 1, 2**63 * 9999, 10**78)), chance.random() < 0.5
        refused = core.Insufficient(request, Reason.INSUFFICIENT, free, 10**70, as_strings)
        line = replies.released(refused, now, "the answer's")
        if as_strings:
            payload = json.loads(line)["payload"]
            assert (payload["free"], payload["locked"], payload.get("ref")) == (str(free), str(10**70), ref)
            return "reply Released"
        read = _read(line)
        assert (read.payload.free, type(read.payload.free), read.payload.ref) == (free, int, ref)
    elif kind == 4:
        rejected = RequestRejected("bad-request", text, ref=ref, id=request.id)
        read = _read(replies.error(rejected))
        assert (read.payload.message, read.payload.ref, read.payload.id) == (text, ref, request.id)
    elif kind == 5:
        read = _read(replies.event(request, text, exclusive=True, state="locked"))
        assert (read.payload.resource, read.payload.transactionName) == (text, transaction)
    elif kind == 6:
        read = _read(replies.watching(text, [replies.watching_row(request, text, exclusive=False)], False, ref))
        assert (read.payload.prefix, read.payload.held[0].resource) == (text, text)
    elif kind == 7:
        line = replies.welcome("1.0", text, resumed=True, quiet=chance.random() < 0.5, ref=ref)
        read = _read(line)
        payload = json.loads(line)["payload"]
        assert (payload["protocol"], payload["namespace"], payload.get("ref")) == (1, text, ref)
    else:
        timeout = chance.choice((1.0, 0.5, 2147483647.0, 1e9 / 3))
        read = _read(replies.extended(core.Extended(request, timeout), ref))
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
        found = config.parse_addresses(text, 7077)
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
        spelled = resources.parse_resource_arg(text)
    except ValueError:
        return "resource refused"
    _names([resources.parse_resource(spelled)[1]])
    return "resource"


PROPERTIES: tuple[Callable[[bytes], str], ...] = (
    *(command, command, command, command, framing, framing, message, message, reply, address, resource),
)
"""Taken by the first byte of an input; the ones that matter most are here several times."""


def check(data: bytes) -> str:
    """One input: the first byte says which property, the rest is for it."""
    return PROPERTIES[(data[0] if data else 0) % len(PROPERTIES)](data[1:])
