"""The wire by hand, for tests of the client's session: what a server says, and a session that has said hello to one."""

from __future__ import annotations

from typing import ClassVar

import orjson

from genie.client import commands
from genie.client.commands import Call, Outcome, Request
from genie.client.session import ClientSession

SECRET = "a-secret-of-the-tests"  # noqa: S105 - it opens nothing
HELLO = commands.make_hello(SECRET, 10.0)
PING = b'{"command":"ping","payload":{"ref":"resume"}}\n'
PONG = b'{"command":"pong","payload":{"ref":"resume"}}\n'


def welcome(resumed: bool, **more: object) -> bytes:
    fields = {"protocol": 1, "server": "genie/1.0", "namespace": "genie", "resumed": resumed, "quiet": True}
    return say("welcome", **fields | more)


def say(command: str, **payload: object) -> bytes:
    return orjson.dumps({"command": command, "payload": payload}) + b"\n"


def queued(id: int, ref: str | None = None) -> bytes:
    return say("queued", id=id, **({} if ref is None else {"ref": ref}))


def locked(id: int, ref: str | None = None, **more: object) -> bytes:
    return say("locked", id=id, fence=7, **({} if ref is None else {"ref": ref}), **more)


def released(id: int, reason: str, ref: str | None, **more: object) -> bytes:
    return say("released", id=id, reason=reason, **({} if ref is None else {"ref": ref}), **more)


def error(code: str, message: str = "no", **more: object) -> bytes:
    return say("error", code=code, message=message, **more)


def release(id: int, ref: str) -> bytes:
    return say("release", id=id, ref=ref)


def pong(call: Call) -> bytes:
    return say("pong", ref=call.ref)


class InOrder(ClientSession):
    """A session for tests of which the refs are not the point: they are neither seen in its lines nor needed in answers.

    An answer without a `ref` gets that of the oldest command of its kind that has no answer yet; an error that of the
    oldest `watch`, or else of the oldest other command.
    """

    ANSWERED_BY: ClassVar[dict[str, str]] = {"pong": "ping", "watching": "watch", "unwatched": "unwatch"}

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.said = b""
        self.unanswered: list[tuple[str, str]] = []

    def data_to_send(self) -> bytes:
        self.read()
        said, self.said = self.said, b""
        return said

    def read(self) -> None:
        for line in super().data_to_send().splitlines(keepends=True):
            message = orjson.loads(line)
            command, ref = message["command"], message["payload"].get("ref", "")
            if command not in ("request", "hello") and ref not in ("", "resume"):
                self.unanswered.append((command, message["payload"].pop("ref")))
                self.said += say(command, **message["payload"])
            else:
                self.said += line

    def receive_data(self, data: bytes, now: float) -> list[Outcome]:
        self.read()
        return super().receive_data(b"".join(map(self.with_ref, data.splitlines(keepends=True))), now)

    def with_ref(self, line: bytes) -> bytes:
        if not line.endswith(b"\n"):
            return line
        message = orjson.loads(line)
        kind, payload = message["command"], message["payload"]
        if "ref" in payload or (kind != "error" and kind not in self.ANSWERED_BY):
            return line
        meant = self.ANSWERED_BY.get(kind, "watch")
        found = [one for one in self.unanswered if one[0] == meant] or (self.unanswered if kind == "error" else [])
        if not found:
            return line
        oldest = found[0]
        self.unanswered.remove(oldest)
        return say(kind, **payload, ref=oldest[1])

    def on_disconnected(self, reason: str, now: float) -> list[Outcome]:
        self.unanswered.clear()
        self.said = b""
        return super().on_disconnected(reason, now)


def connected(kind: type[ClientSession] = ClientSession, *, watching: bool = False) -> ClientSession:
    """A session on its first connection, which bears any silence of the server unless it is `watching`."""
    session = kind(SECRET)
    session._ref_prefix = ""
    if not watching:
        session._keepalive.start = lambda _: None  # type: ignore[method-assign]
    assert greet(session, resumed=False) == []
    assert session.data_to_send() == b""
    return session


def greet(session: ClientSession, *told: bytes, resumed: bool = True, now: float = 0.0) -> list[Outcome]:
    """A new connection on which the server tells this."""
    session.on_connected()
    assert session.data_to_send() == HELLO + PING
    assert not session.up
    outcomes = session.receive_data(welcome(resumed) + b"".join(told), now)
    assert not session.up
    assert session.data_to_send() == b"", "nothing is said before the server has told all"
    outcomes += session.receive_data(PONG, now)
    assert session.up
    assert not session.close_reason
    return outcomes


def cut(session: ClientSession, *told: bytes, resumed: bool = True, now: float = 0.0) -> list[Outcome]:
    """The connection is lost, and made again."""
    assert session.on_disconnected("gone", now) == []
    return greet(session, *told, resumed=resumed, now=now)


def ask(session: ClientSession, *resources: str, now: float = 0.0, **options: object) -> Request:
    request = commands.make_request(session.new_ref(), resources or ("a",), **options)  # type: ignore[arg-type]
    session.send(request, now)
    return request


def waiting(session: ClientSession, *, now: float = 0.0, **options: object) -> Request:
    """A request that was sent; the server sends nothing about it before it is granted or ends."""
    request = ask(session, now=now, **options)
    assert session.data_to_send() == request.line
    return request


def held(session: ClientSession, id: int = 101, *, now: float = 0.0, **options: object) -> Request:
    request = waiting(session, now=now, **options)
    assert session.receive_data(locked(id, request.ref), now) == [(request, None, None)]
    return request
