"""Messages of a server, and connected sessions, for tests of the client's session without a server."""

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
    return encode("welcome", **fields | more)


def encode(command: str, **payload: object) -> bytes:
    return orjson.dumps({"command": command, "payload": payload}) + b"\n"


def queued(id: int, ref: str | None = None) -> bytes:
    return encode("queued", id=id, **({} if ref is None else {"ref": ref}))


def locked(id: int, ref: str | None = None, **more: object) -> bytes:
    return encode("locked", id=id, fence=7, **({} if ref is None else {"ref": ref}), **more)


def released(id: int, reason: str, ref: str | None, **more: object) -> bytes:
    return encode("released", id=id, reason=reason, **({} if ref is None else {"ref": ref}), **more)


def error(code: str, message: str = "no", **more: object) -> bytes:
    return encode("error", code=code, message=message, **more)


def release(id: int, ref: str) -> bytes:
    return encode("release", id=id, ref=ref)


def pong(call: Call) -> bytes:
    return encode("pong", ref=call.ref)


class RefIgnoringSession(ClientSession):
    """A session that hides the refs of commands and replies, for tests that are not about refs.

    The refs are removed from sent lines. A reply without a `ref` gets that of the oldest unanswered command of its kind,
    an error that of the oldest `watch`, or else of the oldest other command.
    """

    COMMAND_OF_REPLY: ClassVar[dict[str, str]] = {"pong": "ping", "watching": "watch", "unwatched": "unwatch"}

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.output = b""
        self.unanswered: list[tuple[str, str]] = []

    def data_to_send(self) -> bytes:
        self.read_output()
        output, self.output = self.output, b""
        return output

    def read_output(self) -> None:
        for line in super().data_to_send().splitlines(keepends=True):
            message = orjson.loads(line)
            command, ref = message["command"], message["payload"].get("ref", "")
            if command not in ("request", "hello") and ref not in ("", "resume"):
                self.unanswered.append((command, message["payload"].pop("ref")))
                self.output += encode(command, **message["payload"])
            else:
                self.output += line

    def receive_data(self, data: bytes, now: float) -> list[Outcome]:
        self.read_output()
        return super().receive_data(b"".join(map(self.add_ref, data.splitlines(keepends=True))), now)

    def add_ref(self, line: bytes) -> bytes:
        if not line.endswith(b"\n"):
            return line
        message = orjson.loads(line)
        kind, payload = message["command"], message["payload"]
        if "ref" in payload or (kind != "error" and kind not in self.COMMAND_OF_REPLY):
            return line
        command = self.COMMAND_OF_REPLY.get(kind, "watch")
        matches = [entry for entry in self.unanswered if entry[0] == command] or (
            self.unanswered if kind == "error" else []
        )
        if not matches:
            return line
        oldest = matches[0]
        self.unanswered.remove(oldest)
        return encode(kind, **payload, ref=oldest[1])

    def on_disconnected(self, reason: str) -> list[Outcome]:
        self.unanswered.clear()
        self.output = b""
        return super().on_disconnected(reason)


def connected_session(kind: type[ClientSession] = ClientSession, *, keepalive: bool = False) -> ClientSession:
    """Return a session on its first connection, with or without a keepalive."""
    session = kind(SECRET)
    session.calls.ref_prefix = ""
    if not keepalive:
        session.calls.keepalive.start = lambda _: None  # type: ignore[method-assign]
    assert complete_handshake(session, resumed=False) == []
    assert session.data_to_send() == b""
    return session


def complete_handshake(
    session: ClientSession, *resumption: bytes, resumed: bool = True, now: float = 0.0
) -> list[Outcome]:
    """Open a new connection, and let the server send these messages during the resumption."""
    session.on_connected(now)
    assert session.data_to_send() == HELLO + PING
    assert not session.up
    outcomes = session.receive_data(welcome(resumed) + b"".join(resumption), now)
    assert not session.up
    assert session.data_to_send() == b"", "nothing is sent during the resumption"
    outcomes += session.receive_data(PONG, now)
    assert session.up
    assert not session.handshake.close_reason
    return outcomes


def reconnect(session: ClientSession, *resumption: bytes, resumed: bool = True, now: float = 0.0) -> list[Outcome]:
    """Lose the connection, and open a new one."""
    assert session.on_disconnected("gone") == []
    return complete_handshake(session, *resumption, resumed=resumed, now=now)


def send_request(session: ClientSession, *resources: str, now: float = 0.0, **options: object) -> Request:
    request = commands.make_request(session.calls.new_ref(), resources or ("a",), **options)  # type: ignore[arg-type]
    session.requests.send(request, now)
    return request


def sent_request(session: ClientSession, *, now: float = 0.0, **options: object) -> Request:
    """Return a request that was sent, and to which the server has not replied."""
    request = send_request(session, now=now, **options)
    assert session.data_to_send() == request.line
    return request


def granted_request(session: ClientSession, id: int = 101, *, now: float = 0.0, **options: object) -> Request:
    request = sent_request(session, now=now, **options)
    assert session.receive_data(locked(id, request.ref), now) == [(request, None, None)]
    return request
