"""The wire by hand, for tests of the client's core: what a server says, and a core that has said hello to one."""

from __future__ import annotations

import orjson

from genie.client import calls
from genie.client.calls import Request
from genie.client.core import Core
from genie.client.session import Outcome

SECRET = "a-secret-of-the-tests"  # noqa: S105 - it opens nothing
HELLO = b'{"command":"hello","payload":{"session":"a-secret-of-the-tests","sessionTimeout":10000}}\n'
PING = b'{"command":"ping","payload":{}}\n'
PONG = b'{"command":"pong","payload":{}}\n'


def welcome(resumed: bool) -> bytes:
    return say("welcome", version="1.0", namespace="genie", resumed=resumed)


def say(command: str, **payload: object) -> bytes:
    return orjson.dumps({"command": command, "payload": payload}) + b"\n"


def queued(id: int, ref: str | None = None) -> bytes:
    return say("queued", id=id, **({} if ref is None else {"ref": ref}))


def locked(id: int, ref: str | None = None, **more: object) -> bytes:
    return say("locked", id=id, fence=7, **({} if ref is None else {"ref": ref}), **more)


def released(id: int, reason: str, **more: object) -> bytes:
    return say("released", id=id, reason=reason, **more)


def error(code: str, message: str = "no", **more: object) -> bytes:
    return say("error", code=code, message=message, **more)


def release(id: int) -> bytes:
    return say("release", id=id)


def connected(*, watching: bool = False) -> Core:
    """A core on its first connection, which bears any silence of the server unless it is `watching`."""
    core = Core(SECRET)
    core._life = ""
    if not watching:
        core._silence.watch = lambda _: None  # type: ignore[method-assign]
    assert greet(core, resumed=False) == []
    assert core.outgoing() == b""
    return core


def greet(core: Core, *told: bytes, resumed: bool = True, now: float = 0.0) -> list[Outcome]:
    """A new connection on which the server tells this."""
    core.connected()
    assert core.outgoing() == HELLO + PING
    assert not core.up
    outcomes = core.receive(welcome(resumed) + b"".join(told), now)
    assert not core.up
    assert core.outgoing() == b"", "nothing is said before the server has told all"
    outcomes += core.receive(PONG, now)
    assert core.up
    assert not core.broken
    return outcomes


def cut(core: Core, *told: bytes, resumed: bool = True, now: float = 0.0) -> list[Outcome]:
    """The connection is lost, and made again."""
    assert core.disconnected("gone", now) == []
    return greet(core, *told, resumed=resumed, now=now)


def ask(core: Core, *resources: str, now: float = 0.0, **options: object) -> Request:
    request = calls.request(core.ref(), resources or ("a",), **options)  # type: ignore[arg-type]
    core.send(request, now)
    return request


def waiting(core: Core, id: int = 101, now: float = 0.0, **options: object) -> Request:
    """A request that the server has queued."""
    request = ask(core, now=now, **options)
    assert core.outgoing() == request.line
    assert core.receive(queued(id, request.ref), now) == []
    return request


def held(core: Core, id: int = 101, now: float = 0.0, **options: object) -> Request:
    request = waiting(core, id, now, **options)
    assert core.receive(locked(id, request.ref), now) == [(request, None, None)]
    return request
